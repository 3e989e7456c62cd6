# ruff: noqa: T201  # a program at the terminal prints
"""What schedules cost: ten thousand that wait, and an occurrence beside a delayed task.

``python -m tests.benchmarks.schedules`` starts private servers. Occurrences and plain delayed tasks
are due before a worker is started, so that it takes them as fast as it can.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from statistics import median
from typing import Any, Final
from uuid import uuid4

from kombu import Connection

from celery_rabbitdelay import Row
from celery_rabbitdelay.testing import RedisServer, wait_for
from tests.benchmarks import measure
from tests.benchmarks.registry import used
from tests.integration.arrivals import count
from tests.integration.shop import make_app
from tests.integration.worker import Worker
from tests.private_broker import private_broker

PATIENCE: Final = 600.0
DAY: Final = timedelta(days=1)


class Bench:
    """An application with a registry.

    Args:
        broker_url: The URL of RabbitMQ.
        redis_url: The URL of Redis.
    """

    def __init__(self, broker_url: str, redis_url: str) -> None:
        prefix = f"bench-{uuid4().hex[:8]}"
        self._settings: dict[str, Any] = {
            "prefix": prefix,
            "broker_url": broker_url,
            "result_backend": redis_url,
            "task_ignore_result": True,
            "rabbitdelay_prefix": prefix,
            "rabbitdelay_registry_url": redis_url,
            "rabbitdelay_registry_options": {"socket_timeout": 20},
        }
        self.app: Any = make_app(self._settings)

    def put(self, number: int, start: datetime, **options: Any) -> None:
        """Put schedules that are due daily from an instant on."""
        salt = uuid4().hex
        for each in range(number):
            self.app.rabbitdelay.schedules.put(f"{salt}:{each}", "at", DAY, start=start, **options)

    def ready_after(self) -> float:
        """Return the seconds that a worker takes to start."""
        began = time.monotonic()
        with Worker(self._settings):
            return time.monotonic() - began

    def send(self, number: int, at: datetime) -> None:
        """Send delayed tasks that are due at an instant."""
        rows = (Row(eta=at, key=uuid4().hex) for _ in range(number))
        self.app.rabbitdelay.send_many("at", rows, envelopes=False)

    def rate(self, tasks: int, send: Callable[[int, datetime], object]) -> float:
        """Return how many tasks a second a worker takes that are due when it starts."""
        queue = self.app.conf.task_default_queue
        send(tasks, datetime.now(UTC) + timedelta(seconds=10 + tasks / 100))
        with Connection(self._settings["broker_url"]) as connection:
            wait_for(lambda: count(connection, queue) >= tasks, "the tasks", PATIENCE)
            with Worker(self._settings, None, "--prefetch-multiplier=100"):
                waiting = count(connection, queue)
                wait_for(lambda: count(connection, queue) < waiting, "the first", PATIENCE, 0.005)
                began, first = time.monotonic(), count(connection, queue)
                wait_for(lambda: count(connection, queue) == 0, "the last", PATIENCE, 0.02)
                return first / (time.monotonic() - began)


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.schedules")
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--tasks", type=int, default=5000, help="due at once")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with private_broker() as broker, RedisServer() as redis:
        print(f"RabbitMQ {measure.version_of(broker)}")
        bench, other = Bench(broker.url, redis.url), Bench(broker.url, redis.url)
        contestants: dict[str, Callable[[int, datetime], object]] = {
            "delayed tasks, with a key each": other.send,
            "occurrences": partial(other.put, overlap="allow"),
            "occurrences, overlap skip": other.put,
        }
        rates: dict[str, list[float]] = {what: [] for what in contestants}
        for _ in range(options.rounds):
            for what, send in contestants.items():
                rates[what].append(other.rate(options.tasks, send))
        for what, found in rates.items():
            rounds = ", ".join(f"{each:,.0f}" for each in found)
            print(f"{what}: {median(found):,.0f} a second ({rounds})")
        alone = bench.ready_after()
        registry = bench.app.rabbitdelay.registry
        before, began = used(registry), time.monotonic()
        bench.put(options.schedules, datetime.now(UTC) + 400 * DAY)
        taken = time.monotonic() - began
        print(
            f"{options.schedules:,} schedules: {options.schedules / taken:,.0f} put a second, "
            f"{(used(registry) - before) / options.schedules:,.0f} bytes of Redis each; a worker "
            f"is ready after {bench.ready_after():.1f} s, without them after {alone:.1f} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
