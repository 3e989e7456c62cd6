"""A broker or a worker that dies without warning takes no delayed task with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection

from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.testing import RabbitMQServer
from tests.integration.arrivals import count
from tests.integration.notes import Notes
from tests.integration.shop import named
from tests.integration.worker import Worker

#: Seconds; long enough for the tasks to be published and the victim to be killed before any is due.
DELAY = 10


@pytest.mark.parametrize("kills_the_broker", [False, True])
def test_all_tasks_run_once_and_none_early_after_a_kill_while_they_waited(
    make_shop: Callable[..., Any],
    configuration: dict[str, Any],
    private_rabbitmq: RabbitMQServer,
    kills_the_broker: bool,
) -> None:
    settings: dict[str, Any] = {
        "broker_url": private_rabbitmq.url,
        "rabbitdelay_layout": [("seconds", 60, 1), ("ms", 10, 0.1)],
        "task_acks_late": True,
    }
    shop = make_shop(**settings)
    notes = Notes(shop)
    not_before = {}
    with Worker({**configuration, **settings}) as worker:
        for number in range(500):
            not_before[number] = time.time() + DELAY
            shop.tasks["note"].apply_async((number,), {"key": notes.key}, delay=DELAY)
        victim = private_rabbitmq if kills_the_broker else worker
        victim.kill()
        assert notes() == []
        victim.start()
        runs = notes.wait(len(not_before), timeout=120)
    assert sorted(run["given"][0] for run in runs) == sorted(not_before)
    for run in runs:
        # The instants are rounded down to milliseconds.
        assert run["at"] >= not_before[run["given"][0]] - 0.001
        assert run["at"] * 1000 >= run["headers"][header_names.DUE]
    with Connection(private_rabbitmq.url) as connection:
        assert count(connection, named(shop, "default")) == 0
    notes.forget()
