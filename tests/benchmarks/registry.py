# ruff: noqa: T201  # a program at the terminal prints
"""What the registry costs: arrivals in a worker, sends with keys, bytes in Redis, listing.

``python -m tests.benchmarks.registry`` starts private servers. With and without the registry are
measured in turn, in the same run, on the same broker. Tasks that are due wait in their queue before
the worker is started; what is measured begins when the first has left it.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import Any, Final
from uuid import uuid4

from kombu import Connection

from celery_rabbitdelay import Row, RowsNotConfirmed
from celery_rabbitdelay.kombu import declare
from celery_rabbitdelay.registry.decision import Arrival, new_copy
from celery_rabbitdelay.registry.index import Filter
from celery_rabbitdelay.registry.registry import MAX_JOB_PAUSE_MS, Registration, Registry
from celery_rabbitdelay.testing import RabbitMQServer, RedisServer, Server, wait_for
from tests.benchmarks.measure import Target, judge, private_broker
from tests.benchmarks.waiting import cpu
from tests.integration.arrivals import count
from tests.integration.shop import make_app
from tests.integration.worker import Worker

ROUNDS: Final = 5
PATIENCE: Final = 300.0

#: Arrivals a second with the registry, as a part of those without; and rows of ``send_many``.
ARRIVALS: Final = 0.85
SENDS: Final = 0.7

#: What ``send_many`` sends: whether the rows have keys, and whether they are tracked.
SENT: Final = {
    "plain": (False, False),
    "with keys": (True, False),
    "tracked": (False, True),
    "tracked, with keys": (True, True),
}

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

    def job(self, tasks: int, commits: bool) -> tuple[int, int]:
        """Abort a job half-way through sending it, or commit it; return what ran, and how often.

        Returns:
            How many different tasks ran, and how many runs there were.
        """
        app = self.apps["with"]
        job, note = f"job-{uuid4().hex}", f"noted-{uuid4().hex}"
        app.rabbitdelay.open_job(job, expires=3600)

        def rows() -> Iterator[Row]:
            for number in range(tasks):
                if number == tasks // 2 and not commits:
                    app.rabbitdelay.abort_job(job)
                yield Row(args=(number,), kwargs={"key": note}, delay=5)

        with Worker(self.settings["with"], None, "--prefetch-multiplier=100"):
            with suppress(RowsNotConfirmed):
                app.rabbitdelay.send_many(app.tasks["note"], rows(), job=job)
            if commits:
                app.rabbitdelay.commit_job(job)
            app.tasks["note"].apply_async(("barrier",), {"key": note}, delay=20)
            redis = app.backend.client
            expected = (tasks if commits else 0) + 1
            wait_for(lambda: redis.llen(note) >= expected, "the job and a later task", 900, 1.0)
        ran = [json.loads(each)["given"][0] for each in redis.lrange(note, 0, -1)]
        ran.remove("barrier")
        return len(set(ran)), len(ran)


def show(rates: Mapping[str, list[float]]) -> dict[str, float]:
    """Print the medians; return them."""
    medians = {name: median(values) for name, values in rates.items()}
    for name, values in rates.items():
        print(
            f"{name:45} median {medians[name]:10,.0f}  from {min(values):10,.0f} "
            f"to {max(values):10,.0f}"
        )
    return medians


def sizes(app: Any) -> None:
    """Print the bytes of each kind of record."""
    registry: Registry = app.rabbitdelay.registry
    task_id, due_ms = str(uuid4()), (int(time.time()) + 86_400) * 1000
    names = registry.names

    def of(*keys: str) -> int:
        found = registry.store.commands(lambda pipe: [pipe.memory_usage(key) for key in keys])
        return sum(size or 0 for size in found)

    registry.cancel([task_id])
    print(f"a tombstone: {of(names.task(task_id))} bytes")
    task_id = str(uuid4())
    key = f"order:{task_id}"
    registry.register([Registration(task_id, new_copy(), due_ms, key=key)])
    print(f"a task under a key: {of(names.task(task_id), names.key(key))} bytes")
    task_id = str(uuid4())
    registry.register([Registration(task_id, new_copy(), due_ms, name="at")])
    print(f"a tracked task without its message: {of(names.task(task_id))} bytes, beside indexes")
    result = app.tasks["at"].apply_async((4711,), delay=86_400, track=True)
    print(f"a tracked task: {of(names.task(result.id))} bytes, beside indexes")
    copy = registry.store.commands(lambda pipe: pipe.hget(names.task(result.id), "copy"))[0]
    registry.decide([Arrival(result.id, due_ms, copy=copy)])
    print(f"the same after it has run: {of(names.task(result.id))} bytes")
    task_id = str(uuid4())
    registry.decide([Arrival(task_id, due_ms, once="celery", mark=new_copy())])
    print(f"a task that has run once: {of(names.task(task_id))} bytes")
    registry.jobs.open(task_id, 60_000)
    print(f"a job: {of(names.job(task_id))} bytes")


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
    parser.add_argument("--job", type=int, default=100_000, help="tasks of a job")
    parser.add_argument("--waiting", type=int, default=31_536, help="due tasks of an open job")
    parser.add_argument("--listed", type=int, default=1_000_000)
    options = parser.parse_args()
    with private_broker() as broker, RedisServer() as redis, RedisServer() as registry:
        bench = Bench(broker, redis, registry)
        rates: dict[str, list[float]] = {}
        for number in range(options.rounds):
            print(f"round {number + 1}", flush=True)
            for name in bench.apps:
                for prefetch in (4, 100):
                    words = f"arrivals a second, {name} registry, prefetch {prefetch}"
                    rate = bench.arrivals(
                        name, options.arrivals, f"--prefetch-multiplier={prefetch}"
                    )
                    rates.setdefault(words, []).append(rate)
            for what, (keys, track) in SENT.items():
                words = f"send_many rows a second, {what}"
                rates.setdefault(words, []).append(bench.sends(keys, track, options.rows))
        medians = show(rates)
        for commits in (False, True):
            different, runs = bench.job(options.job, commits)
            what = "committed" if commits else "aborted half-way"
            print(f"a job of {options.job:,}, {what}: {different:,} tasks ran, {runs:,} runs")
        once = bench.waiting_for_a_job(options.waiting, (broker, registry))
        print(
            f"{options.waiting:,} due tasks of an open job: {once:.1f} s of processor time to ask "
            f"once, {once / (MAX_JOB_PAUSE_MS / 1000):.1%} of a core at the longest pause"
        )
        sizes(bench.apps["with"])
        listing(bench.apps["with"], options.listed)
        targets = [
            Target(
                f"arrivals with the registry, prefetch {prefetch}, as a part of those without",
                medians[f"arrivals a second, with registry, prefetch {prefetch}"]
                / medians[f"arrivals a second, without registry, prefetch {prefetch}"],
                ARRIVALS,
            )
            for prefetch in (4, 100)
        ]
        plain = medians["send_many rows a second, plain"]
        targets += [
            Target(
                f"send_many {what}, as a part of plain",
                medians[f"send_many rows a second, {what}"] / plain,
                SENDS,
            )
            for what in list(SENT)[1:]
        ]
        met = judge(targets)
    return int(not all(each["met"] for each in met))


if __name__ == "__main__":
    sys.exit(main())
