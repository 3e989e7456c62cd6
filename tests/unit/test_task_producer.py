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


class Recording(DelayedTaskProducer):
    """Keeps how long publishing may take. A fake: it publishes nothing, as there is no broker.

    It fails as often as told; each failure takes some seconds.
    """

    failures = 0
    timeout_given: float

    def publish_message(
        self, delayed: Delayed, due: Due, policy: PublishPolicy, declare: Any = ()
    ) -> None:
        """Publish nothing."""
        self.timeout_given = policy.timeout
        if self.failures:
            self.failures -= 1
            self._waited += 8.0
            raise OperationalError("no broker")


@pytest.mark.parametrize(
    ("setting", "given", "waited", "left"),
    [
        (30, None, 0.0, 30),
        (30, None, 12.5, 17.5),
        (30, 5, 2.0, 3),
        (30, 5, 4.99, MIN_TIMEOUT),
        (30, 5, 60.0, MIN_TIMEOUT),
    ],
)
def test_the_wait_for_a_publisher_counts(
    setting: float, given: Any, waited: float, left: float
) -> None:
    app = Celery("shop", set_as_current=False)
    app.conf.rabbitdelay_confirm_timeout = setting
    publisher = Publisher(Connection("amqp://"))
    due = Due.after(60)
    producer = Recording(publisher, app, due, waited=waited)
    producer.publish("body", exchange="", routing_key="celery", confirm_timeout=given)
    assert producer.timeout_given == pytest.approx(left)


def test_a_callback_that_celery_sends_again_has_one_timeout_for_all_attempts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(task_producer, "time", Clock())
    app = Celery("shop", set_as_current=False)
    publisher = Publisher(Connection("amqp://"))
    producer = Recording(publisher, app, Due.after(60))
    producer.failures = 4
    timeouts = []
    for _ in range(4):
        with pytest.raises(OperationalError):
            producer.publish("body", exchange="", routing_key="celery")
        timeouts.append(producer.timeout_given)
    assert timeouts == pytest.approx([30, 22, 14, 6])


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
