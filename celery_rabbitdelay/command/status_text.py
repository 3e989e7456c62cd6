"""The status as text: a line for each level, and its digits as bars."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from celery_rabbitdelay.levels.delay_text import written
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.generations import migrate_remedy
from celery_rabbitdelay.operations.status import Reasons, Status
from celery_rabbitdelay.worker.status import ARRIVALS

#: How many missing queues the text names; ``--json`` names all of them.
MAX_MISSING_NAMED: Final = 5

#: How many reasons the text names.
MAX_REASONS_NAMED: Final = 20

#: Characters of a level's bars, one for each digit; more digits share them.
MAX_BARS: Final = 60

#: Characters of the bar of one digit.
BAR_LENGTH: Final = 40

#: Bars from empty to full, and where the terminal does not know these characters.
BLOCKS, ASCII_BLOCKS = "·▁▂▃▄▅▆▇█", ".-=#"


def status_lines(
    topology: Topology,
    status: Status,
    *,
    blocks: str = "",
    with_digits: bool = False,
    rates: Mapping[str, float] | None = None,
) -> Iterator[str]:
    """Yield the lines of a status.

    Args:
        topology: The topology.
        status: The status.
        blocks: The characters of the bars, from empty to full; empty for none.
        with_digits: Whether to list each digit that is not empty.
        rates: What :func:`.changes` tells; None if there is only one look.
    """
    backlog = status.backlog
    digit_queues = f"{len(topology.digit_queues)} digit queues"
    yield f"{topology.name_prefix}: {topology.layout.name}, {digit_queues}"
    for level in topology.layout.levels:
        digits = backlog.digits[level.name]
        line = f"  {level.name:16} {backlog.levels[level.name]:10,} waiting"
        line += _rate(level.name, rates)
        yield f"{line}  {bars(list(digits.values()), blocks)}" if blocks else line
        if with_digits:
            most = max(digits.values(), default=0)
            for digit, messages in digits.items():
                if messages:
                    bar = "#" * max(round(messages / most * BAR_LENGTH), 1)
                    yield f"    {level.queue_name(digit):14} {messages:10,} {bar}"
    for name, counts in backlog.others.items():
        consumers = f", {counts.consumers} consumers" if counts.consumers else ""
        yield f"  {name:16} {counts.messages:10,} waiting{consumers}{_rate(name, rates)}"
    if backlog.missing:
        names = list(backlog.missing[:MAX_MISSING_NAMED])
        if len(backlog.missing) > MAX_MISSING_NAMED:
            names.append("...")
        yield f"  {len(backlog.missing)} queues are missing: {', '.join(names)}"
    for number, messages in status.former_generations.items():
        yield f"generation {number}, a former one: {messages:,} waiting; {migrate_remedy(number)}"
    yield from _next_due_lines(status)
    if rates is not None:
        yield f"delayed tasks that workers received: {rates[ARRIVALS]:,.1f}/s"
    if status.reasons is not None:
        yield from _reason_lines(status.reasons)
    yield from _worker_lines(status.workers)


def bars(counts: Sequence[int], blocks: str) -> str:
    """Return a character for each count, as high as the count is beside the largest one.

    Args:
        counts: The counts; more than :data:`MAX_BARS` are added up in groups.
        blocks: The characters from empty to full.
    """
    together = math.ceil(len(counts) / MAX_BARS)
    sums = [sum(counts[first : first + together]) for first in range(0, len(counts), together)]
    most, highest = max(sums, default=0), len(blocks) - 1
    return "".join(blocks[math.ceil(each / most * highest) if each else 0] for each in sums)


def _rate(name: str, rates: Mapping[str, float] | None) -> str:
    return "" if rates is None else f" {rates.get(name, 0.0):+10,.1f}/s"


def _next_due_lines(status: Status) -> Iterator[str]:
    tracked, within_ms, registry_error = status.next_due
    if registry_error is not None:
        yield f"next due: the registry cannot be asked: {registry_error}"
    if tracked is not None:
        left_ms = max(round((tracked - datetime.now(UTC)).total_seconds()), 0) * 1000
        local = tracked.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        yield f"next due: {local}, in {written(left_ms)}, of the tracked tasks"
    if within_ms is not None:
        yield f"next due: within {written(within_ms)}, by what waits in the levels"


def _reason_lines(reasons: Reasons) -> Iterator[str]:
    yield f"undeliverable, {reasons.read:,} messages read:"
    for reason, messages in list(reasons.counts.items())[:MAX_REASONS_NAMED]:
        yield f"  {messages:10,} {reason}"
    if len(reasons.counts) > MAX_REASONS_NAMED:
        yield f"  and {len(reasons.counts) - MAX_REASONS_NAMED:,} other reasons; see --json"


def _worker_lines(workers: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    if not workers:
        yield "no worker has answered"
    for worker, modules in sorted(workers.items()):
        if "error" in modules:
            yield f"{worker}: cannot answer: {modules['error']}"
            continue
        yield worker if modules.keys() - {ARRIVALS} else f"{worker}: serves no module"
        for name, counts in modules.items():
            if name == ARRIVALS:
                yield (
                    f"  {name:16} {counts['received']:10,} delayed ones received, at most "
                    f"{counts['latest']:,.1f} s late in the last ten minutes"
                )
                continue
            yield (
                f"  {name:16} {counts['received']:10,} received "
                f"({counts['received_per_second']:,}/s), {counts['published']:,} published "
                f"({counts['published_per_second']:,}/s), "
                f"{counts.get('redelivered', 0):,} put back, "
                f"{counts['undeliverable']:,} undeliverable"
            )
