"""``celery rabbitdelay status``: waiting messages, the next due time, the workers' modules.

With a registry, the command also shows the next due time of tracked tasks, the pauses and the open
jobs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import click
from kombu import Connection

from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.app.seams import additions_of
from celery_rabbitdelay.command import shared
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import duration_text
from celery_rabbitdelay.levels.topology import PROBE, Topology
from celery_rabbitdelay.operations.management import Json
from celery_rabbitdelay.operations.verify import blocked, lines_of
from celery_rabbitdelay.operations.workers import ARRIVALS, status_of_workers
from celery_rabbitdelay.publishing.declaration import Backlog, backlog_of, unserved_modules


class Status(NamedTuple):
    """A snapshot of a topology.

    Attributes:
        taken_at: When the snapshot was taken, in seconds of :func:`time.monotonic`.
        backlog: The number of messages in every queue.
        workers: The workers' answers, keyed by worker name.
        due_within_ms: The upper bound of the milliseconds until the next message comes due,
            computed from the depths of the queues; None if nothing waits. The message may come due
            much earlier: a queue does not show how long its first message has waited.
        is_blocked: Whether the broker blocks publishers; the workers are then not asked for
            their status.
    """

    taken_at: float
    backlog: Backlog
    workers: Mapping[str, Json]
    due_within_ms: int | None = None
    is_blocked: bool = False


def status_of(delays: RabbitDelay, connection: Connection, timeout: float = 1.0) -> Status:
    """Take a snapshot of an application's topology, without declaring or changing anything.

    Args:
        delays: The application's delays.
        connection: The broker that tasks are sent to.
        timeout: Seconds to wait for the workers' answers; with 0, the workers are not asked.

    Raises:
        kombu.exceptions.OperationalError: The broker cannot be reached.
        amqp.exceptions.AMQPError: The broker refuses to answer.
    """
    topology = delays.topology
    backlog = backlog_of(connection, topology)
    taken_at = time.monotonic()
    is_blocked, workers = delays.is_blocked(), {}
    if timeout and not is_blocked:  # a blocked broker accepts no questions to the workers
        workers = status_of_workers(delays.app, connection, timeout)
    return Status(taken_at, backlog, workers, due_within(topology, backlog), is_blocked)


def due_within(topology: Topology, backlog: Backlog) -> int | None:
    """Return an upper bound of the milliseconds until the next message comes due, or None.

    A message in a digit's queue waits at most for that digit, and then for the largest digits of
    all lower levels.
    """
    return min((within_ms for within_ms, _ in _bounds(topology, backlog)), default=None)


def due_at_least(topology: Topology, backlog: Backlog, within_ms: int) -> int:
    """Return the minimum number of messages that come due within a time in milliseconds.

    Counts the messages whose longest possible remaining delay is within that time. Messages of
    other queues may also come due in this time: a queue does not show how long its messages have
    waited.
    """
    return sum(messages for bound, messages in _bounds(topology, backlog) if bound <= within_ms)


def _bounds(topology: Topology, backlog: Backlog) -> Iterator[tuple[int, int]]:
    """Yield the longest remaining delay, in milliseconds, and the depth of all non-empty queues."""
    layout = topology.layout
    for level in layout.levels:
        for digit, messages in backlog.digits[level.name].items():
            if messages:
                yield (digit + 1) * level.place_ms - layout.tick_ms, messages
    meditating = backlog.others.get("meditation")
    if meditating is not None and meditating.messages:
        loop = topology.module_queues.meditation.queue_arguments or {}
        yield loop["x-message-ttl"] + layout.capacity_ms, meditating.messages


def rates_between(before: Status, after: Status) -> dict[str, float]:
    """Return the growth per second of every level and module queue, from two snapshots.

    The key :data:`.ARRIVALS` has the delayed tasks that workers received per second; workers that
    did not answer both times are left out.
    """
    seconds = max(after.taken_at - before.taken_at, 1e-9)
    depths, later_depths = map(_depths, (before, after))
    grown = {name: later_depths[name] - depths[name] for name in later_depths.keys() & depths}
    arrived = 0
    for worker in before.workers.keys() & after.workers:
        earlier, later = (each.workers[worker].get(ARRIVALS) for each in (before, after))
        if earlier and later:
            # A worker that has restarted counts from 0.
            arrived += max(later["received"] - earlier["received"], 0)
    return {name: count / seconds for name, count in {**grown, ARRIVALS: arrived}.items()}


def _depths(status: Status) -> dict[str, int]:
    """Return the messages in each level and module queue."""
    others = {name: counts.messages for name, counts in status.backlog.others.items()}
    return {**status.backlog.levels, **others}


@shared.command()
@click.option(
    "-t",
    "--timeout",
    default=1.0,
    show_default=True,
    type=shared.seconds_type,
    help="Seconds to wait for the workers' answers.",
)
@click.option("--digits", "with_digits", is_flag=True, help="List all digits that are not empty.")
def status(timeout: float, with_digits: bool) -> None:
    """Show how many messages wait in every level, and the statistics of the workers' modules."""
    delays = shared.delays()
    with shared.broker() as connection:
        found = status_of(delays, connection, timeout)
        added = {name: each for one in additions_of(delays) for name, each in one.status().items()}
    shared.answer(_as_json(found, added), status_lines(delays.topology, found, added, with_digits))
    is_served = not unserved_modules(found.backlog.others)
    if found.backlog.missing or found.is_blocked or not is_served:
        raise SystemExit(shared.FAILED)


def _as_json(found: Status, added: Mapping[str, object]) -> dict[str, object]:
    others = {name: counts._asdict() for name, counts in found.backlog.others.items()}
    return {
        **found.backlog._asdict(),
        "others": others,
        "next_due": {
            "tracked": added.get("next_due"),
            "within_ms": found.due_within_ms,
            "registry_error": added.get("error"),
        },
        "paused": added.get("paused", ()),
        "open_jobs": added.get("open_jobs", ()),
        "publishers_blocked": found.is_blocked,
        "workers": found.workers,
    }


def status_lines(
    topology: Topology, status: Status, added: Mapping[str, Any], with_digits: bool = False
) -> Iterator[str]:
    """Yield the lines of a status, optionally with all digits that are not empty.

    Args:
        topology: The topology.
        status: The status.
        added: The additions' parts; see :meth:`.Addition.status`.
        with_digits: Whether to list the digits.
    """
    if status.is_blocked:
        yield from lines_of(blocked())
    backlog = status.backlog
    digit_queues = f"{len(topology.digit_queues)} digit queues"
    yield f"{topology.prefix}: {topology.layout.name}, {digit_queues}"
    for level in topology.layout.levels:
        yield f"  {level.name:16} {backlog.levels[level.name]:10,} waiting"
        for digit, messages in backlog.digits[level.name].items():
            if with_digits and messages:
                yield f"    {level.queue_name(digit):14} {messages:10,}"
    for name, counts in backlog.others.items():
        shows = counts.consumers or name in unserved_modules(backlog.others)
        consumers = f", {counts.consumers or 'no'} consumers" if shows else ""
        yield f"  {name:16} {counts.messages:10,} waiting{consumers}"
    if backlog.missing:
        yield f"  {len(backlog.missing)} queues are missing: {shared.first_of(backlog.missing)}"
    if "error" in added:
        yield f"next due: unknown, the registry does not answer: {added['error']}"
    yield from (shared.paused_line(**each) for each in added.get("paused", ()))
    if jobs := added.get("open_jobs"):
        yield f"open jobs: {shared.first_of(jobs)}"
    if (next_due := added.get("next_due")) is not None:
        left_ms = max(round((next_due - wall_clock.now()).total_seconds()), 0) * 1000
        local = shared.local(next_due)
        yield f"next due: {local}, in {duration_text(left_ms)} (tracked tasks)"
    if status.due_within_ms is not None:
        yield f"next due: within {duration_text(status.due_within_ms)} (computed from queue depths)"
    if not status.workers and not status.is_blocked:
        yield "no worker has answered"
    for worker, modules in sorted(status.workers.items()):
        yield from _worker_lines(worker, modules)


def _worker_lines(worker: str, modules: Json) -> Iterator[str]:
    if "error" in modules:
        yield f"{worker}: cannot answer: {modules['error']}"
        return
    yield worker if modules.keys() - {ARRIVALS} else f"{worker}: serves no modules"
    for name, counts in modules.items():
        if name != PROBE:
            values = (f"{round(value, 1):,} {key}" for key, value in counts.items())
            yield f"  {name:16} {', '.join(values)}"
        elif late := counts["late"].values():  # empty in workers that send no probes
            yield (
                f"  {name:16} {len(late):,} levels and routes, {min(late):+,.1f} to "
                f"{max(late):+,.1f} s late; {sum(counts['missing'].values()):,} missing"
            )
