"""The producer that Celery publishes one delayed task with."""

from __future__ import annotations

from typing import Any

import pytest
from kombu import Connection
from kombu.exceptions import OperationalError

from celery_rabbitdelay import Celery
from celery_rabbitdelay.app.sending import task_producer
from celery_rabbitdelay.app.sending.task_producer import MIN_TIMEOUT, DelayedTaskProducer
from celery_rabbitdelay.kombu import DelayedProducer, Destination, Due, Publisher, Topology
from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.publishing.producer import Delayed
from celery_rabbitdelay.publishing.publication import PublishPolicy
from tests.unit.clock import Clock


class Failing(DelayedTaskProducer):
    """Keeps how long publishing may take, and fails after 8 s. A fake: there is no broker."""

    timeout_given: float

    def publish_message(
        self, delayed: Delayed, due: Due, policy: PublishPolicy, declare: Any = ()
    ) -> None:
        """Publish nothing."""
        self.timeout_given = policy.timeout
        self._waited += 8.0
        raise OperationalError("no broker")


@pytest.mark.parametrize(
    ("given", "waited", "timeouts"),
    [
        # Celery 5.7 sends a callback again; all attempts share one timeout.
        (None, 0.0, [30, 22, 14, 6, MIN_TIMEOUT]),
        (None, 12.5, [17.5, 9.5]),
        (5, 2.0, [3, MIN_TIMEOUT]),
        (5, 60.0, [MIN_TIMEOUT]),
    ],
)
def test_the_wait_for_a_publisher_and_former_attempts_count(
    monkeypatch: pytest.MonkeyPatch, given: Any, waited: float, timeouts: list[float]
) -> None:
    monkeypatch.setattr(task_producer, "time", Clock())
    app = Celery("shop", set_as_current=False)
    producer = Failing(Publisher(Connection("amqp://")), app, Due.after(60), waited=waited)
    found = []
    for _ in timeouts:
        with pytest.raises(OperationalError):
            producer.publish("body", exchange="", routing_key="celery", confirm_timeout=given)
        found.append(producer.timeout_given)
    assert found == pytest.approx(timeouts)


@pytest.mark.parametrize(
    ("queue_type", "priority", "waits_with", "kept"),
    [
        ("quorum", 9, 4, 9),
        ("quorum", 4, 4, None),
        ("quorum", None, None, None),
        ("classic", 9, 9, None),
    ],
)
def test_what_an_exchange_routes_waits_in_quorum_levels_with_a_priority_of_four_at_most(
    queue_type: Any, priority: int | None, waits_with: int | None, kept: int | None
) -> None:
    topology = Topology(queue_type=queue_type)
    publisher = Publisher(Connection("amqp://"))
    producer = DelayedProducer(publisher, topology, modules=["distribution"])
    nowhere = Destination(None, "news", "paper")
    delayed = producer.delayed_message("body", nowhere, Due.after(60), priority=priority)
    properties = delayed.message.amqp().properties
    assert properties["priority"] == waits_with
    assert properties["application_headers"].get(headers.PRIORITY) == kept
