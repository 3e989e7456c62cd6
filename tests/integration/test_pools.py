"""Every pool of Celery's runs delayed tasks, and publishes their retries itself."""

from __future__ import annotations

import re
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kombu import Connection

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.testing import wait_for
from tests.integration.arrivals import count
from tests.integration.shop import PATIENCE
from tests.integration.worker import Worker

#: How many tasks each pool is to run side by side.
POOLS = {"prefork": 4, "threads": 10, "solo": 1, "gevent": 10, "eventlet": 10}

LATE = "late, one at a time"

ACKNOWLEDGING: dict[str, dict[str, Any]] = {
    "early": {},
    LATE: {"task_acks_late": True, "worker_prefetch_multiplier": 1},
}

TASKS = 20


@pytest.mark.parametrize(
    ("pool", "acknowledging"),
    # Late, where tasks run in other processes, in the worker's own one, and in greenlets.
    [
        *((pool, "early") for pool in POOLS),
        *((pool, LATE) for pool in ("prefork", "solo", "gevent")),
    ],
)
def test_tasks_that_are_due_together_and_retry_together_each_run_once_and_not_early(
    shop: Any,
    configuration: dict[str, Any],
    connection: Connection,
    prefix: str,
    pool: str,
    acknowledging: str,
) -> None:
    settings = {**configuration, **ACKNOWLEDGING[acknowledging]}
    options = ("-P", pool, "-c", str(POOLS[pool]), "--without-mingle")
    with Worker(settings, None, *options) as worker:
        assert f"concurrency: {POOLS[pool]} ({pool.rstrip('s')}" in worker.log
        results: list[Any] = []
        due: dict[str, float] = {}
        for seconds in (1.0, 8.0, 30.0):
            together = datetime.now(UTC) + timedelta(seconds=seconds)
            for _ in range(TASKS):
                given: Any = ([], f"{prefix}-group", POOLS[pool])
                results.append(shop.tasks["retry-together"].apply_async(given, eta=together))
                due[results[-1].id] = together.timestamp()
            # Once more, with more time, where the machine has not sent them before they were due.
            if time.time() < together.timestamp():
                break
        assert time.time() < together.timestamp(), "not even 30 s are enough"
        for result in results:
            first, second = result.get(timeout=PATIENCE)
            assert (first["retries"], second["retries"]) == (0, 1)
            assert first["at"] >= due[result.id]
            assert second["at"] >= first["at"] + 0.5
            # The retry has waited in RabbitMQ: the worker's own process has published it there.
            assert second["at"] * 1000 >= second["headers"][headers.DUE] > first["at"] * 1000

        expected = Counter(
            (result.id, outcome)
            for result in results
            for outcome in ("received", "received", "retry:", "succeeded")
        )
        # The log lags behind the results.
        wait_for(lambda: len(_outcomes(worker)) >= expected.total(), "the last line of the log")
        queues = [queue.name for queue in shop.rabbitdelay.topology.digit_queues]
        assert not sum(count(connection, name) for name in [*queues, f"{prefix}.default"])
        assert Counter(_outcomes(worker)) == expected
    shop.backend.client.delete(f"{prefix}-group")


def _outcomes(worker: Worker) -> list[tuple[str, str]]:
    return re.findall(r"Task retry-together\[(\S+?)\] (received|retry:|succeeded)", worker.log)
