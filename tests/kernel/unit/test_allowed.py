"""Which destinations check-in may publish to."""

from typing import Any

import pytest
from kombu import Exchange, Queue, binding

from celery_rabbitdelay import Celery
from celery_rabbitdelay.app.destinations import checkin_destinations
from celery_rabbitdelay.modules.limits import AllowedDestinations

QUEUES = (
    Queue("letters"),
    Queue("news", Exchange("papers", type="topic"), "#"),
    Queue("mixed", bindings=[binding(Exchange("left"), "a"), binding(Exchange("right"), "b")]),
)


NAMED = AllowedDestinations.of_queues(QUEUES)
MATCHING = AllowedDestinations.matching(["letters", "invoices.?"])


@pytest.mark.parametrize(
    ("allowed", "exchange", "routing_key", "expected"),
    [
        (NAMED, "", "letters", True),
        (NAMED, "", "papers", False),
        (NAMED, "papers", "anything", True),
        (NAMED, "left", "", True),
        (NAMED, "letters", "letters", False),
        (MATCHING, "", "letters", True),
        (MATCHING, "letters", "else", True),
        (MATCHING, "", "invoices.2", True),
        (MATCHING, "", "Letters", False),
        (MATCHING, "else", "letters", False),
        (AllowedDestinations.matching([]), "", "letters", False),
    ],
)
def test_queues_exchanges_and_patterns_are_allowed(
    allowed: AllowedDestinations, exchange: str, routing_key: str, expected: bool
) -> None:
    assert allowed.includes(exchange, routing_key) is expected


def test_queues_that_the_application_sends_to_later_are_not_allowed(app: Celery) -> None:
    app.conf.task_queues = QUEUES
    app.amqp.queues["by-the-way"]
    allowed = checkin_destinations(app)
    app.amqp.queues["later"]
    assert allowed.includes("", "letters")
    assert not any(allowed.includes("", name) for name in ("by-the-way", "later"))


@pytest.mark.parametrize(
    ("settings", "reached"),
    [
        ({"task_default_queue": "orders"}, "orders"),
        ({"task_queues": QUEUES, "rabbitdelay_checkin_allowed": ["invoices"]}, "invoices"),
    ],
)
def test_the_default_queue_is_allowed_or_what_the_setting_names(
    app: Celery, settings: dict[str, Any], reached: str
) -> None:
    app.conf.update(settings)
    allowed = checkin_destinations(app)
    assert [allowed.includes("", name) for name in (reached, "letters")] == [True, False]
