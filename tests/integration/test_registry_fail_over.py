"""A fail-over behind sentinels, in the middle of what workers ask."""

from __future__ import annotations

from collections import Counter
from typing import Any
from uuid import uuid4

import pytest

from celery_rabbitdelay import Outcome
from celery_rabbitdelay.testing import wait_for
from tests.integration.conftest import small_configuration
from tests.integration.notes import Notes
from tests.integration.shop import PATIENCE, make_app, named
from tests.integration.worker import Worker
from tests.redis_servers import SentinelSetup

#: Tasks, due over some seconds; every third one is cancelled.
TASKS = 60
SPREAD = 0.2

#: Seconds until the first is due.
LEAD = 3.0


@pytest.mark.timeout(300)
def test_a_fail_over_while_tasks_arrive_loses_none_and_runs_no_cancelled_one(
    broker_url: str, redis_url: str
) -> None:
    with SentinelSetup() as servers:
        settings: dict[str, Any] = {
            **small_configuration(broker_url, redis_url, f"test-{uuid4().hex[:8]}"),
            "rabbitdelay_registry_url": servers.url,
            "rabbitdelay_registry_options": {"master_name": servers.master_name},
        }
        shop: Any = make_app(settings)
        with Worker(settings, [named(shop, "default")]) as worker:
            noted = Notes(shop)
            results = [
                shop.tasks["note"].apply_async(
                    [number], {"key": noted.key}, delay=LEAD + number * SPREAD, track=True
                )
                for number in range(TASKS)
            ]
            for result in results[::3]:
                assert shop.rabbitdelay.cancel(result) is Outcome.DONE
            servers.wait_until_copied()
            wait_for(lambda: len(set(noted())) >= 5, "the first tasks", PATIENCE)
            servers.master.kill()
            expected = {number for number in range(TASKS) if number % 3}
            wait_for(lambda: expected <= {*noted()}, "all tasks", 120)
            # Nothing that was cancelled ran, and nothing twice.
            assert Counter(noted()) == Counter(expected)
            assert "The registry answers again" in worker.log
        shop.close()
