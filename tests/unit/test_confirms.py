"""Which of the messages sent the broker has settled."""

from __future__ import annotations

from typing import Any

import amqp
from amqp.exceptions import AMQPError

from celery_rabbitdelay.exceptions import MessageNacked, MessageReturned
from celery_rabbitdelay.publishing.confirm_channel import Sent, SentMessages
from celery_rabbitdelay.publishing.wire import Content


def content(body: str | bytes, **properties: Any) -> Content:
    return Content.of(amqp.Message(body, **properties))


def send(messages: SentMessages, *keys: str) -> list[Sent]:
    sent = [Sent("exchange", key, content("x")) for key in keys]
    for each in sent:
        messages.add(each)
    return sent


def test_an_ack_settles_its_message_only() -> None:
    messages = SentMessages()
    first, second, third = send(messages, "a", "b", "c")
    messages.ack(2, multiple=False)
    assert [sent.settled for sent in (first, second, third)] == [False, True, False]
    assert second.error is None


def test_an_ack_of_several_settles_all_up_to_it() -> None:
    messages = SentMessages()
    sent = send(messages, "a", "b", "c", "d")
    messages.ack(3, multiple=True)
    assert [each.settled for each in sent] == [True, True, True, False]


def test_a_nack_of_several_is_an_error_of_each() -> None:
    messages = SentMessages()
    sent = send(messages, "a", "b", "c")
    messages.nack(2, multiple=True)
    assert [isinstance(each.error, MessageNacked) for each in sent] == [True, True, False]
    assert sent[1].error is not None
    assert sent[1].error.routing_key == "b"


def test_a_return_belongs_to_the_message_with_its_key() -> None:
    messages = SentMessages()
    first, second, third = send(messages, "a", "b", "b")
    messages.returned(AMQPError("NO_ROUTE"), "exchange", "b", amqp.Message("x"))
    messages.returned(AMQPError("NO_ROUTE"), "exchange", "b", amqp.Message("x"))
    messages.ack(3, multiple=True)
    assert first.error is None
    assert isinstance(second.error, MessageReturned)
    assert isinstance(third.error, MessageReturned)


def test_a_return_belongs_to_the_message_with_its_content() -> None:
    messages = SentMessages()
    bodies: list[str | bytes] = ["x", "x", b"y"]
    sent = [
        Sent("exchange", "a", content(body, application_headers={"id": number}, reply_to=None))
        for number, body in enumerate(bodies)
    ]
    for each in sent:
        messages.add(each)
    # As py-amqp reads it: without what was None, and the body as bytes or as text.
    back = amqp.Message(b"x", application_headers={"id": 1}, content_encoding="utf-8")
    messages.returned(AMQPError("NO_ROUTE"), "exchange", "a", back)
    messages.returned(AMQPError("NO_ROUTE"), "exchange", "a", amqp.Message("y"))
    assert [each.error is None for each in sent] == [False, False, True]


def test_whoever_waits_for_a_message_is_told_once_with_its_error() -> None:
    messages = SentMessages()
    told: list[Sent] = []
    sent = [Sent("exchange", key, content("x"), told.append) for key in "abc"]
    for each in sent:
        messages.add(each)
    messages.ack(1, multiple=False)
    messages.nack(3, multiple=True)
    messages.ack(3, multiple=True)
    assert told == sent
    assert [each.error is None for each in told] == [True, False, False]
    assert len(messages) == 0


def test_a_word_about_a_message_that_is_settled_already_changes_nothing() -> None:
    messages = SentMessages()
    (sent,) = send(messages, "a")
    messages.ack(1, multiple=False)
    messages.nack(1, multiple=False)
    messages.ack(7, multiple=False)
    assert sent.error is None
