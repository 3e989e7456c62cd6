"""``adopt``: what waits elsewhere goes into the levels, keeps its due time, and runs once."""

import random
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import celery
import pytest
from kombu import Connection, Queue
from kombu.transport import native_delayed_delivery

from celery_rabbitdelay.operations import conversion
from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.testing.servers import PATIENCE
from tests.kernel.integration.notes import Notes
from tests.kernel.integration.shop import named
from tests.kernel.integration.worker import Worker, answer

TASKS = 50

#: Seconds: most of what waits is adopted before it is due.
DELAYS = (10.0, 15.0)


def waiting(connection: Connection, names: list[str]) -> int:
    counts = queue_counts(connection, [Queue(name) for name in names])
    return sum(each.messages for each in counts.values() if each)


@pytest.fixture
def plain(shop: Any) -> Iterator[Any]:
    """Plain Celery with the shop's queues, as before this package was installed."""
    app = celery.Celery("plain", broker=shop.conf.broker_url, set_as_current=False)
    app.conf.update(
        task_queues=shop.conf.task_queues,
        task_default_queue=shop.conf.task_default_queue,
        broker_native_delayed_delivery_queue_type="quorum",
        broker_transport_options={"confirm_publish": True},
    )
    yield app
    app.close()


@pytest.fixture
def native_chain(connection: Connection, plain: Any) -> Iterator[list[str]]:
    """Celery's native delayed delivery, as its workers lay it out; deleted with the test."""
    native_delayed_delivery.declare_native_delayed_delivery_exchanges_and_queues(
        connection, "quorum"
    )
    for queue in plain.conf.task_queues:
        queue(connection.default_channel).declare()
        native_delayed_delivery.bind_queue_to_native_delayed_delivery_exchange(connection, queue)
    yield conversion.native_queues()
    with connection.clone() as own:
        channel: Any = own.default_channel
        for level in range(28):
            channel.queue_delete(native_delayed_delivery.level_name(level))
            channel.exchange_delete(native_delayed_delivery.level_name(level))
        channel.exchange_delete("celery_delayed_delivery")


def test_tasks_in_celerys_native_delayed_delivery_run_on_time_and_once(
    configuration: dict[str, Any],
    connection: Connection,
    shop: Any,
    noted: Notes,
    plain: Any,
    native_chain: list[str],
) -> None:
    due, queue = {}, named(shop, "topic.reports")
    with Worker(configuration):
        for _ in range(TASKS):
            delay, task_id = random.uniform(*DELAYS), str(uuid4())
            # Below, and in the whole seconds, which is what the chain waits.
            due[task_id] = time.time() + delay
            options = {"countdown": delay, "task_id": task_id, "queue": queue}
            plain.send_task("note", (task_id,), {"key": noted.key}, **options)
        assert waiting(connection, native_chain) > 0
        moved = answer(configuration, "adopt", "moved")
        # On a slow machine, some have come due by then.
        assert 0 < moved["moved"] <= TASKS
        assert (moved["left"], moved["copies"]) == ({}, 0)
        seen = noted.wait(TASKS, timeout=PATIENCE)
    assert len(seen) == TASKS
    assert {each["given"][0] for each in seen} == due.keys()
    for each in seen:
        assert each["exchange"] == named(shop, "topic")
        assert each["routing_key"] == "topic.reports"
        # Celery writes its eta in microseconds, after the time was read here.
        assert each["at"] >= due[each["given"][0]] - 0.001
