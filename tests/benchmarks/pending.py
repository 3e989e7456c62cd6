# ruff: noqa: T201  # a program at the terminal prints
"""What the broker needs for tasks that wait: memory, disk, and bytes of messages, for each task.

``python -m tests.benchmarks.pending`` starts a private broker for each contestant, so that none has
what another has left:

- ``plain``: ``send_many`` without envelopes, due at random within a week.
- ``enveloped``: the same, with ``tolerance=60``: what is due within the same minute can share a
  message. 100,000 tasks in the 10,080 minutes of a week are ten a message, a million a hundred.
- ``celery eta``: fewer tasks, which a plain Celery worker holds for their eta; the queue is a
  classic one. What is printed is for each task, as if it went on so. The worker's memory is
  measured as well, as :mod:`tests.benchmarks.worker_memory` does.

Memory is ``erlang:memory(total)`` after every process has collected its garbage, and the resident
memory of the node's processes; disk is what the files of the node's data take, counted in blocks.
Both are differences to the same node with everything declared and nothing in it. They are taken
after the node was made to write its log of the quorum queues into their segments, as it does by
itself every 512 MB or so: before, ``fresh``, everything stands in memory and in the log as well.
A node's memory varies by some megabytes from one moment to the next, which is tens of bytes for
each of 100,000 tasks: a figure of that size, or below zero, says no more than that it is small.

``message_bytes`` is RabbitMQ's figure. On 3.10.8 it is the bodies alone; Celery has most of a task
in headers, which stand in the body of an envelope: the figure counts them for it, and not for
plain.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from kombu import Connection

from celery_rabbitdelay.app.rows import Row
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.benchmarks.measure import bars, private_broker, save
from tests.benchmarks.memory import measure, settle
from tests.benchmarks.memory_app import make_app as make_eta_app
from tests.benchmarks.memory_app import queue_name
from tests.benchmarks.starts import make_app
from tests.benchmarks.worker_memory import Messages, Worker, send

PATIENCE: Final = 300.0
WEEK: Final = 7 * 86_400.0
TOLERANCE: Final = timedelta(seconds=60)
BLOCK: Final = 512

#: No task of the peer is due before it is measured.
COUNTDOWN: Final = 86_400
ETA: Final = "celery eta"

#: What enveloped is to need at most, as a part of plain.
TARGET: Final = 1 / 10
TARGETS: Final = ("disk", "memory", "memory, fresh")

#: Has the node begin a new log, so that the old one is written to segments; 3.10 to 4.3 know it.
ROLL_OVER: Final = (
    "#{names := #{wal := Wal}} = ra_system:fetch(quorum_queues), ra_log_wal:force_roll_over(Wal)."
)
COLLECT: Final = "[garbage_collect(P) || P <- processes()], erlang:memory(total)."

#: What queues of both types tell of themselves; ``list_queues`` of 3.10 knows no bytes of quorum
#: queues.
FIGURES: Final = (
    "{lists:sum([element(4, Row) || Row <- ets:tab2list(queue_coarse_metrics)]),"
    " lists:sum([proplists:get_value(message_bytes, element(2, Row), 0)"
    " || Row <- ets:tab2list(queue_metrics)])}."
)

#: A node stands still when so many states in a row have the same files, and memory that differs by
#: less than a megabyte, or these bytes for each task.
STILL: Final = 4
SPREAD: Final = 20

#: Tasks that wait, or are done, before the first state is taken: what the first ones need besides
#: is not a task's.
WARM_UP: Final = 1000


class State(NamedTuple):
    """What a node needs, in bytes."""

    memory: int
    rss: int
    disk: int

    @classmethod
    def of(cls, broker: RabbitMQServer) -> State:
        memory = int(broker.ctl("eval", COLLECT))
        return cls(memory, measure(broker.pid)["rss"], used(broker.folder / "data"))

    def each(self, before: State, tasks: int, kind: str) -> dict[str, float]:
        """Bytes that each task has added."""
        return {
            f"{name}{kind}": (getattr(self, name) - getattr(before, name)) / tasks
            for name in self._fields
        }


def used(folder: Path) -> int:
    """The bytes that the files of a folder take on disk."""
    total = 0
    # The node removes what it has written elsewhere; os.walk passes over folders that are gone.
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):
                total += (Path(root) / name).lstat().st_blocks * BLOCK
    return total


def settled(broker: RabbitMQServer, tasks: int) -> State:
    """Have the node write its log into segments; return what it needs when that stands still."""
    broker.ctl("eval", ROLL_OVER)
    seen: list[State] = []

    def stands_still() -> bool:
        seen.append(State.of(broker))
        memory = [state.memory for state in seen[-STILL:]]
        disk = {state.disk for state in seen[-STILL:]}
        spread = max(1_000_000, SPREAD * tasks)
        is_level = len(memory) == STILL and max(memory) - min(memory) < spread
        return is_level and len(disk) == 1

    wait_for(stands_still, "a node that stands still", PATIENCE, interval=1.0)
    return seen[-1]


def listed(broker: RabbitMQServer) -> tuple[int, int]:
    """The messages in all queues, and the bytes of their bodies; up to five seconds late."""
    words = broker.ctl("eval", FIGURES).strip().strip("{}").split(",")
    return int(words[0]), int(words[1])


def levels(envelopes: bool, tasks: int) -> dict[str, float]:
    """Measure tasks that wait in the levels."""
    with private_broker() as broker, Connection(broker.url) as connection:
        app: Any = make_app(broker.url, "pending", {})
        app.rabbitdelay.declare(connection)
        warm_up = [Row((0,), delay=random.uniform(3600, WEEK)) for _ in range(WARM_UP)]
        app.rabbitdelay.send_many("note", warm_up, envelopes=False)
        wait_for(lambda: listed(broker)[0] == WARM_UP, "the first messages", 60.0, interval=1.0)
        before, bytes_before = settled(broker, tasks), listed(broker)[1]
        rows = (Row((each,), delay=random.uniform(3600, WEEK)) for each in range(tasks))
        tolerance = TOLERANCE if envelopes else 0
        report = app.rabbitdelay.send_many("note", rows, envelopes=envelopes, tolerance=tolerance)
        app.close()
        expected = report.messages + WARM_UP
        wait_for(lambda: listed(broker)[0] == expected, "all messages", 60.0, interval=1.0)
        fresh, after = State.of(broker), settled(broker, tasks)
        return {
            **after.each(before, tasks, ""),
            **fresh.each(before, tasks, ", fresh"),
            "message_bytes": (listed(broker)[1] - bytes_before) / tasks,
            "tasks a message": tasks / report.messages,
            "sent/s": report.rate,
        }


def held(tasks: int) -> dict[str, float]:
    """Measure tasks that a plain Celery worker holds for their eta."""
    with private_broker() as broker, Worker(ETA, broker) as worker:
        app, queue = make_eta_app(ETA, broker.url), queue_name(ETA)
        send(app, WARM_UP, None)
        wait_for(
            lambda: worker.log.count("succeeded in") == WARM_UP, "the first tasks", PATIENCE, 0.5
        )
        before, worker_before = settled(broker, tasks), settle(worker.pid)
        began = time.monotonic()
        send(app, tasks, COUNTDOWN)
        seconds = time.monotonic() - began
        app.close()
        wait_for(
            lambda: Messages(broker).of[queue] == (0, tasks), "the worker", PATIENCE, interval=1.0
        )
        fresh, after, worker_after = State.of(broker), settled(broker, tasks), settle(worker.pid)
        classic = sum(map(int, broker.ctl("list_queues", "message_bytes").split()))
        return {
            **after.each(before, tasks, ""),
            **fresh.each(before, tasks, ", fresh"),
            "message_bytes": classic / tasks,
            "tasks a message": 1.0,
            "sent/s": tasks / seconds,
            "worker's rss": (worker_after["rss"].median - worker_before["rss"].median) / tasks,
        }


def verdict(figures: dict[str, dict[str, list[float]]], kind: str) -> str:
    """Whether enveloped needs little enough beside plain, in words."""
    ours, peer = (median(figures[name][kind]) for name in ("enveloped", "plain"))
    if min(ours, peer) <= 0:
        return f"target, {kind}: {ours:.0f} and plain {peer:.0f} bytes, too little to compare"
    words = "met" if ours <= TARGET * peer else "NOT met"
    return f"target, {kind}: {ours / peer:.3f} of plain's, target {TARGET:.2f}: {words}"


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.pending")
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--million", action="store_true", help="the same as --tasks 1000000")
    parser.add_argument("--eta-tasks", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args(arguments)
    tasks = 1_000_000 if options.million else options.tasks
    contestants: dict[str, Callable[[], dict[str, float]]] = {
        "plain": lambda: levels(False, tasks),
        "enveloped": lambda: levels(True, tasks),
        ETA: lambda: held(options.eta_tasks),
    }
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(options.rounds):
        for name, contestant in contestants.items():
            for kind, figure in contestant().items():
                figures[name][kind].append(figure)
            print(f"  round {number + 1}, {name}: measured", flush=True)
    print(f"\nbytes a task, {tasks:,} tasks ({options.eta_tasks:,} of {ETA}): median, spread")
    for name, kinds in figures.items():
        for kind, seen in kinds.items():
            print(
                f"  {name:12} {kind:16} {median(seen):12,.1f}   "
                f"{min(seen):,.1f} to {max(seen):,.1f}"
            )
    told = [verdict(figures, kind) for kind in TARGETS]
    print(*told, sep="\n")
    with private_broker() as broker:
        save(
            "pending",
            broker,
            {
                "tasks": tasks,
                "eta_tasks": options.eta_tasks,
                "bytes_a_task": figures,
                "verdicts": told,
            },
        )
    drawn = {
        f"{name}: {kind}": kinds[kind]
        for name, kinds in figures.items()
        for kind in ("memory", "disk", "message_bytes", "worker's rss")
        if kind in kinds
    }
    footnote = f"{tasks:,} tasks within a week; {options.eta_tasks:,} held by a worker"
    bars("pending", "What a task that waits takes", "bytes a task", drawn, footnote)
    return 0


if __name__ == "__main__":
    sys.exit(main())
