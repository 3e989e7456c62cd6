"""Which destinations check-in may publish to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kombu import Exchange, Queue, binding

from celery_rabbitdelay import Celery
from celery_rabbitdelay.app.destinations import checkin_destinations
from celery_rabbitdelay.modules.allowed import AllowedDestinations

QUEUES = (
    Queue("letters"),
    Queue("news", Exchange("papers", type="topic"), "#"),
    Queue("mixed", bindings=[binding(Exchange("left"), "a"), binding(Exchange("right"), "b")]),
)


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("shop", broker="amqp://", set_as_current=False)
    yield app
    app.close()


@pytest.mark.parametrize(
    ("exchange", "routing_key", "expected"),
    [
        ("", "letters", True),
        ("", "news", True),
        ("", "papers", False),
        ("", "else", False),
        ("", "", False),
        ("papers", "anything", True),
        ("left", "", True),
        ("right", "", True),
        ("letters", "letters", False),
        ("amq.topic", "letters", False),
    ],
)
def test_queues_and_exchanges_are_allowed(exchange: str, routing_key: str, expected: bool) -> None:
    assert AllowedDestinations.of_queues(QUEUES).includes(exchange, routing_key) is expected


@pytest.mark.parametrize(
    ("exchange", "routing_key", "expected"),
    [
        ("", "letters", True),
        ("letters", "else", True),
        ("", "invoices.2", True),
        ("invoices.2", "", True),
        ("", "invoices", False),
        ("", "Letters", False),
        ("else", "letters", False),
    ],
)
def test_patterns_allow_names(exchange: str, routing_key: str, expected: bool) -> None:
    allowed = AllowedDestinations.matching(["letters", "invoices.?"])
    assert allowed.includes(exchange, routing_key) is expected


def test_an_empty_list_allows_nothing() -> None:
    assert not AllowedDestinations.matching([]).includes("", "letters")


def test_queues_that_the_application_sends_to_later_are_not_allowed(app: Celery) -> None:
    app.conf.task_queues = QUEUES
    app.amqp.queues["by-the-way"]
    allowed = checkin_destinations(app)
    app.amqp.queues["later"]
    assert allowed.includes("", "letters")
    assert allowed.includes("papers", "")
    for name in ("by-the-way", "later"):
        assert not allowed.includes("", name)
        assert not allowed.includes(name, "")


def test_without_task_queues_the_default_queue_is_allowed(app: Celery) -> None:
    app.conf.task_default_queue = "orders"
    allowed = checkin_destinations(app)
    assert allowed.queues == {"orders"}
    assert allowed.includes("", "orders")


def test_the_setting_takes_the_place_of_the_queues(app: Celery) -> None:
    app.conf.update(task_queues=QUEUES, rabbitdelay_checkin_allowed=["news"])
    allowed = checkin_destinations(app)
    assert allowed.includes("", "news")
    assert not allowed.includes("", "letters")
