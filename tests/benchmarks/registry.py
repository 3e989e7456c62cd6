# ruff: noqa: T201  # a program at the terminal prints
"""The costs of the registry: arrivals in a worker, sends with keys, an open job, listing.

``python -m tests.benchmarks.registry`` starts private servers. With and without the registry are
measured in turn, in the same run, on the same broker. Tasks that are due wait in their queue before
the worker is started; what is measured begins when the first has left it.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final
from uuid import uuid4

from kombu import Connection

from celery_rabbitdelay import Row
from celery_rabbitdelay.kombu import declare
from celery_rabbitdelay.registry.index import Filter
from celery_rabbitdelay.registry.pauses import MAX_MS
from celery_rabbitdelay.registry.registry import Registration, Registry
from celery_rabbitdelay.testing import RabbitMQServer, RedisServer, Server, wait_for
from tests.benchmarks import measure
from tests.benchmarks.measure import Target
from tests.benchmarks.waiting import cpu
from tests.integration.arrivals import count
from tests.integration.shop import make_app
from tests.integration.worker import Worker
from tests.private_broker import private_broker

ROUNDS: Final = 5
PATIENCE: Final = 300.0

#: Arrivals a second with the registry, as a part of those without; and rows of ``send_many``.
ARRIVALS: Final = 0.85
SENDS: Final = 0.7

#: What ``send_many`` sends: whether the rows have keys, and whether they are tracked.
PLAIN: Final = "plain"
SENT: Final = {
    PLAIN: (False, False),
    "with keys": (True, False),
    "tracked": (False, True),
    "tracked, with keys": (True, True),
}

#: How many tasks a worker takes ahead, for each of its processes.
PREFETCH: Final = (4, 100)

#: Registrations in one call, while the index is filled.
CHUNK: Final = 1000


class Bench:
    """Two applications on one broker: with a registry and without."""

    def __init__(self, broker: RabbitMQServer, redis: RedisServer, registry: RedisServer) -> None:
        self._url = broker.url
        self._prefix = f"bench-{uuid4().hex[:8]}"
        base = {
            "prefix": self._prefix,
            "broker_url": broker.url,
            "result_backend": redis.url,
            "task_ignore_result": True,
            "rabbitdelay_prefix": self._prefix,
        }
        self.settings: dict[str, dict[str, Any]] = {
            "without": base,
            "with": {**base, "rabbitdelay_registry_url": registry.url},
        }
        self.apps: dict[str, Any] = {name: make_app(each) for name, each in self.settings.items()}
        with Connection(broker.url) as connection:
            declare(connection, self.apps["without"].rabbitdelay.topology)

    def arrivals(self, name: str, tasks: int, *options: str) -> float:
        """Return how many delayed tasks a second a worker takes and runs."""
        app = self.apps[name]
        queue = app.conf.task_default_queue
        rows = (Row(delay=0.01) for _ in range(tasks))
        app.rabbitdelay.send_many(app.tasks["at"], rows, envelopes=False)
        with Connection(self._url) as connection:
            wait_for(lambda: count(connection, queue) >= tasks, "the tasks", PATIENCE)
            with Worker(self.settings[name], None, *options):
                waiting = count(connection, queue)
                wait_for(lambda: count(connection, queue) < waiting, "the first", PATIENCE, 0.005)
                began, first = time.monotonic(), count(connection, queue)
                wait_for(lambda: count(connection, queue) == 0, "the last", PATIENCE, 0.02)
                return first / (time.monotonic() - began)

    def sends(self, keys: bool, track: bool, rows: int) -> float:
        """Return how many rows a second ``send_many`` sends."""
        app = self.apps["with"]
        salt = uuid4().hex
        given: Iterator[Row] = (
            Row(delay=86_400, key=f"{salt}:{number}" if keys else None) for number in range(rows)
        )
        began = time.monotonic()
        app.rabbitdelay.send_many(app.tasks["at"], given, envelopes=False, track=track)
        return rows / (time.monotonic() - began)

    def waiting_for_a_job(self, tasks: int, servers: Sequence[Server]) -> float:
        """Return the seconds of processor time that due tasks of an open job take to ask once.

        Args:
            tasks: How many.
            servers: The servers whose time counts, beside the worker's.
        """
        app, job = self.apps["with"], f"job-{uuid4().hex}"
        queue = app.conf.task_default_queue
        app.rabbitdelay.open_job(job, expires=3600)
        late = datetime.now(UTC) - timedelta(hours=1)
        rows = (Row(eta=late) for _ in range(tasks))
        with Connection(self._url) as connection:
            app.rabbitdelay.send_many(app.tasks["at"], rows, job=job, envelopes=False)
            wait_for(lambda: count(connection, queue) >= tasks, "the tasks", PATIENCE)
            before = sum(cpu(server.pid) for server in servers)
            with Worker(self.settings["with"], None, "--prefetch-multiplier=100") as worker:
                start = cpu(worker.pid)
                wait_for(lambda: count(connection, queue) == 0, "the last", PATIENCE, 0.1)
                spent = cpu(worker.pid) - start
            after = sum(cpu(server.pid) for server in servers)
        app.rabbitdelay.abort_job(job)
        return spent + after - before


def listing(app: Any, tasks: int) -> None:
    """Fill the index, and read all of it."""
    registry: Registry = app.rabbitdelay.registry
    start_ms = (int(time.time()) + 86_400) * 1000
    before = used(registry)
    began = time.monotonic()
    for first in range(0, tasks, CHUNK):
        registry.register(
            [
                Registration(str(uuid4()), "copy", start_ms + number, name="many")
                for number in range(first, min(first + CHUNK, tasks))
            ]
        )
    seconds = time.monotonic() - began
    size = (used(registry) - before) / tasks
    print(f"registered {tasks:,}: {tasks / seconds:,.0f} a second, {size:,.0f} bytes each")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    found = sum(1 for _ in registry.index.pending(Filter(task="many")))
    seconds = time.monotonic() - began
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    print(f"listed {found:,}: {found / seconds:,.0f} a second, {grown / 1024:,.1f} MB more memory")
    began = time.monotonic()
    counted = registry.index.count(Filter(task="many"))
    print(f"counted {counted:,} in {(time.monotonic() - began) * 1000:,.1f} ms")


def used(registry: Registry) -> int:
    """Return the bytes that Redis uses."""
    (found,) = registry.store.commands(lambda pipe: pipe.info("memory"))
    return int(found["used_memory"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--arrivals", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--waiting", type=int, default=31_536, help="due tasks of an open job")
    parser.add_argument("--listed", type=int, default=1_000_000)
    options = parser.parse_args()
    with private_broker() as broker, RedisServer() as redis, RedisServer() as registry:
        bench = Bench(broker, redis, registry)
        measures: dict[str, Callable[[], float]] = {
            arriving(name, prefetch): partial(
                bench.arrivals, name, options.arrivals, f"--prefetch-multiplier={prefetch}"
            )
            for name in bench.apps
            for prefetch in PREFETCH
        }
        for what, (keys, track) in SENT.items():
            measures[sending(what)] = partial(bench.sends, keys, track, options.rows)
        rates = measure.in_turn(measures, options.rounds)
        measure.show("The registry", "tasks/s", rates)
        once = bench.waiting_for_a_job(options.waiting, (broker, registry))
        print(
            f"{options.waiting:,} due tasks of an open job: {once:.1f} s of processor time to ask "
            f"once, {once / (MAX_MS / 1000):.1%} of a core at the longest pause"
        )
        listing(bench.apps["with"], options.listed)
    of = measure.medians(rates)
    targets = [
        Target(
            f"{arriving('with', prefetch)}, as a part of those without",
            of[arriving("with", prefetch)] / of[arriving("without", prefetch)],
            ARRIVALS,
        )
        for prefetch in PREFETCH
    ]
    targets += [
        Target(
            f"send_many {what}, as a part of plain", of[sending(what)] / of[sending(PLAIN)], SENDS
        )
        for what in SENT
        if what != PLAIN
    ]
    return int(not all(each["met"] for each in measure.judge(targets)))


def arriving(name: str, prefetch: int) -> str:
    return f"arrivals, {name} registry, prefetch {prefetch}"


def sending(what: str) -> str:
    return f"rows of send_many, {what}"


if __name__ == "__main__":
    sys.exit(main())
