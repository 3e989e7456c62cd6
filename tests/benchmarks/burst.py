# ruff: noqa: T201  # a program at the terminal prints
"""How long it takes until the last of 20,000 tasks has started that are all due at one instant.

``python -m tests.benchmarks.burst`` starts a private broker. All tasks are sent with ``send_many``
and the same ``eta``, and are confirmed before it; then the time from the eta on is measured twice:

- ``reached``: until the last message has reached the queue of the tasks, which nobody consumes.
  That is what the levels answer for, and with envelopes distribution, which a worker serves that
  consumes from another queue.
- ``started``: until the last task has started in a Celery worker (prefork, two processes, 64
  messages prefetched for each), whose task does nothing but note its start. With envelopes that
  worker serves distribution too.

Each with and without envelopes, with one shard and with four. Their peer is ``Celery alone``: the
same worker, from the first start of a task to the last, with all tasks in its queue before; it is
measured beside each case.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import Any, Final, NamedTuple
from uuid import uuid4

from kombu import Connection

from celery_rabbitdelay.app.rows import Row
from celery_rabbitdelay.publishing.declaration import delete
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.benchmarks.measure import bars, private_broker, save, show, version_of
from tests.benchmarks.starts import Worker, make_app
from tests.benchmarks.waiting import count

PATIENCE: Final = 300.0
INTERVAL: Final = 0.02
OPTIONS: Final = ("-c", "2", "--prefetch-multiplier", "64")
PEER: Final = "Celery alone, from a full queue"


class Case(NamedTuple):
    """How the tasks are sent, and to which levels."""

    envelopes: bool
    shards: int

    def __str__(self) -> str:
        shards = f"{self.shards} shard{'s' if self.shards > 1 else ''}"
        return f"{'envelopes' if self.envelopes else 'plain'}, {shards}"


CASES: Final = tuple(Case(envelopes, shards) for envelopes in (False, True) for shards in (1, 4))


class Bench:
    """One case on a broker, under names of its own."""

    def __init__(self, broker: RabbitMQServer, case: Case, tasks: int, lead: float) -> None:
        self.broker = broker
        self.case = case
        self.tasks = tasks
        self.lead = lead
        self.queue = f"burst-{uuid4().hex[:8]}"
        self.settings = {"rabbitdelay_prefix": self.queue, "rabbitdelay_shards": case.shards}
        self.app: Any = make_app(broker.url, self.queue, self.settings)
        self.connection = Connection(broker.url)
        self.app.rabbitdelay.declare(self.connection)

    def send(self) -> float:
        """Send all tasks for one instant; return it, in seconds since 1970."""
        due = datetime.now(UTC) + timedelta(seconds=self.lead)
        due_ms = int(due.timestamp() * 1000)
        rows = (Row((due_ms,), eta=due) for _ in range(self.tasks))
        report = self.app.rabbitdelay.send_many("note", rows, envelopes=self.case.envelopes)
        assert report.confirmed == self.tasks
        assert time.time() < due.timestamp(), "they came due before they were in: more --lead"
        return due.timestamp()

    def messages(self) -> int:
        """How many messages are ready in the queue of the tasks."""
        return count(self.connection, [self.queue])

    @contextmanager
    def worker(self, queue: str) -> Iterator[Worker]:
        """A worker of the application, which consumes from ``queue``."""
        modules = f"--rabbitdelay-modules={'distribution' if self.case.envelopes else ''}"
        settings = {**self.settings, "worker_prefetch_multiplier": 64}
        with Worker(self.broker, queue, settings, *OPTIONS, modules) as worker:
            yield worker

    def reached(self) -> float:
        """Seconds from due until the last message has reached the queue of the tasks."""
        with self.worker(f"{self.queue}-other"):
            due = self.send()
            wait_for(lambda: self.messages() == self.tasks, "messages", PATIENCE, INTERVAL)
            return time.time() - due

    def alone(self) -> float:
        """Seconds from the first start of a task to the last; what reached the queue is there."""
        with self.worker(self.queue) as worker:
            return self._starts(worker)[1]

    def started(self) -> float:
        """Seconds from due until the last task has started."""
        with self.worker(self.queue) as worker:
            due = self.send()
            first, between = self._starts(worker)
            early = sum(start.at_ms < start.due_ms for start in worker.starts())
            assert not early, f"{early} tasks started early"
            return first + between - due

    def _starts(self, worker: Worker) -> tuple[float, float]:
        """When the first task started, and the seconds from then to the last."""
        wait_for(lambda: worker.count() >= self.tasks, "the last start", PATIENCE, 0.1)
        at = [start.at_ms / 1000 for start in worker.starts()]
        assert len(at) == self.tasks, f"{len(at)} starts of {self.tasks} tasks"
        return min(at), max(at) - min(at)

    def close(self) -> None:
        """Delete everything."""
        delete(self.connection, self.app.rabbitdelay.topology, force=True)
        channel: Any = self.connection.default_channel
        channel.queue_delete(self.queue)
        channel.queue_delete(f"{self.queue}-other")
        self.connection.release()
        self.app.close()


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.burst")
    parser.add_argument("--tasks", type=int, default=20_000)
    parser.add_argument("--lead", type=float, default=10.0, help="seconds to send them in (10)")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    reached: dict[str, list[float]] = defaultdict(list)
    started: dict[str, list[float]] = defaultdict(list)
    alone: dict[str, list[float]] = defaultdict(list)
    with private_broker() as broker:
        for number in range(options.rounds):
            for case in CASES:
                bench = Bench(broker, case, options.tasks, options.lead)
                reached[str(case)].append(bench.reached())
                # What has just reached the queue is what Celery alone has before it.
                alone[str(case)].append(bench.alone())
                started[str(case)].append(bench.started())
                bench.close()
                print(
                    f"  round {number + 1}, {case}: reached {reached[str(case)][-1]:.1f} s, "
                    f"Celery alone {alone[str(case)][-1]:.1f} s, "
                    f"started {started[str(case)][-1]:.1f} s",
                    flush=True,
                )
        show(f"the last of {options.tasks:,} has reached its queue", "s", reached, str(CASES[0]))
        # Beside each case Celery alone was measured anew, a moment before.
        pairs = {
            name: [own / peer for own, peer in zip(seen, alone[name], strict=True)]
            for name, seen in started.items()
        }
        print(f"\nthe last of {options.tasks:,} has started (s)")
        for name, seen in started.items():
            print(
                f"  {name:24} median {median(seen):8.1f}  from {min(seen):8.1f} to "
                f"{max(seen):8.1f}  {median(pairs[name]):6.2f} x {PEER} "
                f"({median(alone[name]):.1f})"
            )
        figures = {PEER: [each for seen in alone.values() for each in seen], **started}
        save(
            "burst",
            broker,
            {"tasks": options.tasks, "reached_s": reached, "started_s": started, "alone_s": alone},
        )
        footnote = f"RabbitMQ {version_of(broker)}, quorum queues; prefork, 2 processes"
    drawn = {f"{name}: reached": seen for name, seen in reached.items()}
    drawn |= {f"{name}: started" if name != PEER else name: seen for name, seen in figures.items()}
    bars("burst", f"{options.tasks:,} tasks due at one instant", "s from due", drawn, footnote)
    return 0


if __name__ == "__main__":
    sys.exit(main())
