"""Each pool runs delayed tasks, publishes their retries itself, and puts early tasks back."""

import re
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import celery
import pytest
from kombu import Connection

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.testing import wait_for
from tests.kernel.integration.arrivals import count
from tests.kernel.integration.shop import PATIENCE
from tests.kernel.integration.worker import Worker

LATE = {"task_acks_late": True, "worker_prefetch_multiplier": 1}

TASKS = 20

#: Tasks with an ``eta`` that plain Celery sends.
EARLY = 50


@pytest.mark.parametrize(
    ("pool", "size", "settings"),
    # Late where tasks run in other processes, in the worker's own one, and in greenlets.
    [
        ("prefork", 4, LATE),
        ("threads", 10, {}),
        ("solo", 1, LATE),
        ("gevent", 10, LATE),
        ("eventlet", 10, {}),
    ],
)
def test_each_task_runs_once_and_not_early_and_plain_celery_s_wait_in_the_levels(
    make_shop: Any,
    configuration: Any,
    connection: Connection,
    prefix: str,
    pool: str,
    size: int,
    settings: dict[str, Any],
) -> None:
    # However slow a machine is, all early tasks are seen waiting for a minute.
    here: dict[str, Any] = {"rabbitdelay_layout": [("seconds", 60, 1), ("ms", 10, 0.1)], **settings}
    shop = make_shop(**here)
    retry, key = shop.tasks["retry-together"], f"{prefix}-group"
    # Sent before a worker runs, so that all are due together, however slow the machine is.
    together = datetime.now(UTC) + timedelta(seconds=1)
    results = [retry.apply_async(([], key, size), eta=together) for _ in range(TASKS)]
    with (
        Worker({**configuration, **here}, None, "-P", pool, "-c", str(size)) as worker,
        celery.Celery("plain", broker=shop.conf.broker_url, set_as_current=False) as plain,
    ):
        # More than the worker fetches at once, which is four for each task that it runs.
        for _ in range(EARLY):
            plain.send_task("look", countdown=59, exchange=f"{prefix}.direct", routing_key="second")
        for result in results:
            first, second = result.get(timeout=PATIENCE)
            assert (first["retries"], second["retries"]) == (0, 1)
            assert first["at"] >= together.timestamp()
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
        wait_for(lambda: sum(count(connection, each) for each in queues) == EARLY, "early tasks")
        assert not count(connection, f"{prefix}.second") + count(connection, f"{prefix}.default")
        assert Counter(_outcomes(worker)) == expected
    shop.backend.client.delete(key)


def _outcomes(worker: Worker) -> list[tuple[str, str]]:
    return re.findall(r"Task retry-together\[(\S+?)\] (received|retry:|succeeded)", worker.log)
