"""How much memory and processor time a process and its children have taken."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from celery_rabbitdelay.testing import wait_for

#: What is measured, in bytes, summed over the processes. RSS counts what they share once for each
#: of them, PSS once in all, unique not at all.
KINDS: Final = ("rss", "pss", "unique")

#: How many times one state is measured.
COUNT: Final = 15

#: Seconds between two of them.
INTERVAL: Final = 0.4

#: Bytes by which so many samples in a row may differ where the memory has settled.
SETTLED: Final = 256 * 1024


class Samples(NamedTuple):
    """Several measurements of one kind of memory in one state, in bytes."""

    median: float
    lowest: int
    highest: int

    @property
    def spread(self) -> int:
        """What two measurements of the same state differ by at most: noise."""
        return self.highest - self.lowest


def process_tree(pid: int) -> list[int]:
    """Return a process's id and those of all that descend from it."""
    return [pid, *(below for child in _children(pid) for below in process_tree(child))]


def _children(pid: int) -> Iterator[int]:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        yield from map(int, (thread / "children").read_text().split())


def cpu(pid: int) -> float:
    """Return the seconds of processor time of a process and its descendants, by proc(5)."""
    ticks = 0
    for process in process_tree(pid):
        after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(after_name[11]) + int(after_name[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(pid: int) -> dict[str, int]:
    """Return the memory of a process and its descendants, by :data:`KINDS`."""
    total = dict.fromkeys(KINDS, 0)
    for process in process_tree(pid):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
        found = {name.rstrip(":"): int(size) * 1024 for name, size, _ in map(str.split, lines)}
        total["rss"] += found["Rss"]
        total["pss"] += found["Pss"]
        total["unique"] += found["Private_Clean"] + found["Private_Dirty"]
    return total


def settle(
    pid: int, timeout: float = 120.0, take: Callable[[int], dict[str, int]] = measure
) -> dict[str, Samples]:
    """Wait until the memory of a process stops changing; return the samples that say so.

    Raises:
        TimeoutError: It went on changing for ``timeout`` seconds.
    """
    samples: list[dict[str, int]] = []
    next_at = time.monotonic()

    def settled() -> bool:
        nonlocal next_at
        if time.monotonic() < next_at:
            return False
        next_at = time.monotonic() + INTERVAL
        samples.append(take(pid))
        del samples[:-COUNT]
        unique = [sample["unique"] for sample in samples]
        return len(samples) == COUNT and max(unique) - min(unique) <= SETTLED

    wait_for(settled, "a worker whose memory does not change", timeout, interval=INTERVAL / 4)
    by_kind = {kind: [sample[kind] for sample in samples] for kind in KINDS}
    return {
        kind: Samples(statistics.median(values), min(values), max(values))
        for kind, values in by_kind.items()
    }
