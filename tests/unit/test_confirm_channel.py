"""Which of the messages that were sent the broker has settled."""

from __future__ import annotations

from typing import Any

import amqp
import pytest
from amqp.exceptions import AMQPError

from celery_rabbitdelay.exceptions import MessageNacked, MessageReturned
from celery_rabbitdelay.publishing.confirm_channel import Unconfirmed
from celery_rabbitdelay.publishing.publication import Publication
from celery_rabbitdelay.publishing.wire import Content


def publication(key: str, body: str | bytes = "x", **properties: Any) -> Publication:
    sent = Publication(Content.of(amqp.Message(body, **properties)), lambda: ("exchange", key))
    sent.exchange, sent.routing_key = sent.address()
    return sent


@pytest.fixture
def settled() -> list[Publication]:
    """The publications that are settled, in the order in which that was reported."""
    return []


@pytest.fixture
def unconfirmed(settled: list[Publication]) -> Unconfirmed:
    return Unconfirmed(settled.append)


def send(unconfirmed: Unconfirmed, *keys: str) -> list[Publication]:
    sent = [publication(key) for key in keys]
    for each in sent:
        unconfirmed.add(each)
    return sent


def test_an_ack_settles_one_message(unconfirmed: Unconfirmed, settled: list[Publication]) -> None:
    first, second, third = send(unconfirmed, "a", "b", "c")
    unconfirmed.ack(2, multiple=False)
    assert settled == [second]
    assert second.error is None
    assert unconfirmed.all() == [first, third]
    assert unconfirmed.first() is first


def test_an_ack_settles_all_up_to_it(unconfirmed: Unconfirmed, settled: list[Publication]) -> None:
    sent = send(unconfirmed, "a", "b", "c", "d")
    unconfirmed.ack(3, multiple=True)
    assert (settled, unconfirmed.all()) == (sent[:3], sent[3:])


def test_a_nack_of_several_fails_each(unconfirmed: Unconfirmed, settled: list[Publication]) -> None:
    sent = send(unconfirmed, "a", "b", "c")
    unconfirmed.nack(2, multiple=True)
    assert settled == sent[:2]
    assert [isinstance(each.error, MessageNacked) for each in sent] == [True, True, False]
    assert sent[1].error is not None
    assert sent[1].error.routing_key == "b"


def test_a_return_belongs_to_the_message_with_its_key(unconfirmed: Unconfirmed) -> None:
    first, second, third = send(unconfirmed, "a", "b", "b")
    unconfirmed.returned(AMQPError("NO_ROUTE"), "exchange", "b", amqp.Message("x"))
    unconfirmed.returned(AMQPError("NO_ROUTE"), "exchange", "b", amqp.Message("x"))
    unconfirmed.ack(3, multiple=True)
    assert first.error is None
    assert isinstance(second.error, MessageReturned)
    assert isinstance(third.error, MessageReturned)


def test_a_return_belongs_to_the_message_with_its_content(unconfirmed: Unconfirmed) -> None:
    bodies: list[str | bytes] = ["x", "x", b"y"]
    sent = [
        publication("a", body, application_headers={"id": number}, reply_to=None)
        for number, body in enumerate(bodies)
    ]
    for each in sent:
        unconfirmed.add(each)
    # As py-amqp reads it: without what was None, and the body as bytes or as text.
    back = amqp.Message(b"x", application_headers={"id": 1}, content_encoding="utf-8")
    unconfirmed.returned(AMQPError("NO_ROUTE"), "exchange", "a", back)
    unconfirmed.returned(AMQPError("NO_ROUTE"), "exchange", "a", amqp.Message("y"))
    assert [each.error is None for each in sent] == [False, False, True]


def test_each_is_reported_once(unconfirmed: Unconfirmed, settled: list[Publication]) -> None:
    sent = send(unconfirmed, "a", "b", "c")
    unconfirmed.ack(1, multiple=False)
    unconfirmed.nack(3, multiple=True)
    unconfirmed.ack(3, multiple=True)
    assert (settled, [each.error is None for each in settled]) == (sent, [True, False, False])
    assert len(unconfirmed) == 0
    assert unconfirmed.first() is None


def test_a_second_answer_is_ignored(unconfirmed: Unconfirmed, settled: list[Publication]) -> None:
    (sent,) = send(unconfirmed, "a")
    unconfirmed.ack(1, multiple=False)
    unconfirmed.nack(1, multiple=False)
    unconfirmed.ack(7, multiple=False)
    assert sent.error is None
    assert settled == [sent]


def test_a_late_answer_is_ignored(unconfirmed: Unconfirmed, settled: list[Publication]) -> None:
    first, second, third = send(unconfirmed, "a", "b", "c")
    unconfirmed.forget([first, third])
    unconfirmed.ack(3, multiple=True)
    assert settled == [second]
