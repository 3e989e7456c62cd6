# ruff: noqa: T201  # a program at the terminal prints
"""How fast a million waiting messages go to other levels, and how late those are that come due.

``python -m tests.benchmarks.migration`` starts a private broker. ``send_many`` sends the tasks, one
message each: most are due in weeks, and one of twenty comes due while they are migrated to another
prefix. A process of its own notes when these arrive. Their peer is ``send_many`` itself, in the
same run: a migration receives and acknowledges each message besides.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.synchronize import Event
from queue import Empty
from statistics import quantiles
from typing import Any, Final

from kombu import Connection, Consumer, Queue

from celery_rabbitdelay import Celery, Row
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.operations.moving.destinations import Destinations, Place
from celery_rabbitdelay.operations.moving.migration import migration, waiting
from tests.benchmarks.measure import Target, judge, private_broker, save, version_of

QUEUE: Final = "migrated"

#: Seconds that a task is due after, of those that come due only in weeks.
FAR: Final = (5 * 86_400.0, 60 * 86_400.0)

#: One of so many tasks comes due while they are migrated.
NEAR_EVERY: Final = 20

#: Seconds after their due time in which the near ones have come, unless they are lost.
LATEST: Final = 30.0

#: How many tasks a second are sent, and migrated, at least: says when the near ones are due.
SENDS, MOVES = 5_000, 2_500


def make_app(url: str, prefix: str) -> Any:
    """Return an application whose levels have a prefix."""
    app = Celery("migration", broker=url, set_as_current=False)
    arguments = {"x-queue-type": "quorum"}
    app.conf.update(
        task_default_queue=QUEUE,
        task_queues=[Queue(QUEUE, queue_arguments=arguments)],
        rabbitdelay_prefix=prefix,
    )

    @app.task(name="note", ignore_result=True, shared=False)
    def noted(number: int) -> None: ...

    return app


def rows(tasks: int) -> Iterator[Row]:
    """Yield tasks, one of twenty of which is due while they are migrated."""
    lead, length = tasks / SENDS, tasks / MOVES
    for number in range(tasks):
        near = number % NEAR_EVERY == 0
        delay = lead + random.uniform(0, length) if near else random.uniform(*FAR)
        yield Row((number,), delay=delay)


def note(url: str, expected: int, stop: Event, results: Any) -> None:
    """Consume from the queue until that many tasks have come; send when each was due and arrived.

    Args:
        url: The broker.
        expected: How many tasks come.
        stop: Ends it before that.
        results: The queue for what it sends.
    """
    seen: list[tuple[float, float, str]] = []
    ids = set[str]()

    def on_message(body: Any, message: Any) -> None:
        now, headers = time.time(), message.headers
        seen.append((headers[header_names.DUE] / 1000, now, headers["id"]))
        ids.add(headers["id"])

    with Connection(url) as connection:
        channel: Any = connection.default_channel
        queue = Queue(QUEUE, no_declare=True)
        with Consumer(channel, [queue], callbacks=[on_message], no_ack=True):
            while len(ids) < expected and not stop.is_set():
                with suppress(TimeoutError):
                    connection.drain_events(timeout=0.2)
    results.put(seen)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.migration")
    parser.add_argument("--tasks", type=int, default=1_000_000)
    options = parser.parse_args(arguments)
    with private_broker() as broker:
        old, new = make_app(broker.url, "old"), make_app(broker.url, "new")
        with Connection(broker.url) as connection:
            connection.default_channel  # noqa: B018 - opened, so that the broker is known to answer
            old.amqp.queues[QUEUE](connection.default_channel).declare()
        stop = multiprocessing.Event()
        results: Any = multiprocessing.Queue()
        expected = len(range(0, options.tasks, NEAR_EVERY))
        consumer = multiprocessing.Process(target=note, args=(broker.url, expected, stop, results))
        consumer.start()
        began = time.monotonic()
        report = old.rabbitdelay.send_many("note", rows(options.tasks), envelopes=False)
        sent_in = time.monotonic() - began
        print(f"sent {report.confirmed:,} in {sent_in:.0f} s", flush=True)
        source = Place(Connection(broker.url), old.rabbitdelay.topology)
        target = Place(Connection(broker.url), new.rabbitdelay.topology)
        destinations = Destinations(target, new.amqp.queues)
        began_at = time.time()
        moved = migration(source, target, destinations, timeout=120).move()
        ended_at = time.time()
        print(f"moved {moved.moved:,} in {moved.seconds:.0f} s", flush=True)
        # All near ones have come due by then; those that are lost would never come.
        last_due = began_at + (1 / SENDS + 1 / MOVES) * options.tasks
        try:
            seen = results.get(timeout=max(0.0, last_due - time.time()) + LATEST)
        except Empty:
            stop.set()
            seen = results.get()
        consumer.join()
        left = waiting(target)
        arrived = {task_id for *_, task_id in seen}
        late = [at - due for due, at, _ in seen if began_at <= due <= ended_at]
        percentiles = quantiles(late, n=100)
        print(
            f"{moved.moved / moved.seconds:,.0f} messages/s migrated, "
            f"{report.confirmed / sent_in:,.0f}/s sent; {moved.copies} copies, left: {moved.left}\n"
            f"{len(late):,} came due meanwhile: late p50 {percentiles[49] * 1000:.0f} ms, p99 "
            f"{percentiles[98] * 1000:.0f} ms, max {max(late):.1f} s, earliest {min(late):.3f} s\n"
            f"{len(arrived):,} arrived, {len(seen) - len(arrived)} twice; "
            f"{sum(left.values()):,} wait"
        )
        rate = (moved.moved / moved.seconds) / (report.confirmed / sent_in)
        lost = options.tasks - len(arrived) - sum(left.values())
        targets = judge(
            [
                Target("tasks that are lost", lost, 0, at_most=True),
                Target("tasks that were early", sum(each < -0.001 for each in late), 0, True),
                Target("rate, as a part of send_many", rate, 0.2),
            ]
        )
        save(
            "migration",
            broker,
            {
                "tasks": options.tasks,
                "version": version_of(broker),
                "migrated_per_s": moved.moved / moved.seconds,
                "sent_per_s": report.confirmed / sent_in,
                "late_s": {"p50": percentiles[49], "p99": percentiles[98], "max": max(late)},
                "targets": targets,
            },
        )
        destinations.close()
        old.close()
        new.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
