"""Which of the messages that were sent the broker has settled."""

from __future__ import annotations

from typing import Any

import amqp
from amqp.exceptions import AMQPError
from hypothesis import given
from hypothesis import strategies as st

from celery_rabbitdelay.exceptions import MessageNacked
from celery_rabbitdelay.publishing.confirm_channel import Unconfirmed
from celery_rabbitdelay.publishing.publication import Publication
from celery_rabbitdelay.publishing.wire import Content


def publication(key: str, body: str | bytes = "x", **properties: Any) -> Publication:
    sent = Publication(Content.of(amqp.Message(body, **properties)), lambda: ("exchange", key))
    sent.exchange, sent.routing_key = sent.address()
    return sent


def publications(*keys: str) -> list[Publication]:
    return [publication(key) for key in keys]


def unconfirmed(sent: list[Publication]) -> tuple[Unconfirmed, list[Publication]]:
    """Those that were sent, and, in the order in which it is reported, those that are settled."""
    settled: list[Publication] = []
    found = Unconfirmed(settled.append)
    found.update(enumerate(sent, 1))
    return found, settled


#: Whether the broker has taken a message, its tag, and whether all before it are meant too.
answers = st.tuples(st.booleans(), st.integers(1, 7), st.booleans())


@given(st.lists(answers, max_size=8), st.sets(st.integers(0, 4)))
def test_each_answer_settles_what_it_means_once(
    given_answers: list[tuple[bool, int, bool]], forgotten: set[int]
) -> None:
    sent = publications(*"abcde")
    waiting, settled = unconfirmed(sent)
    waiting.forget([sent[number] for number in forgotten])
    left = [number for number in range(5) if number not in forgotten]
    for is_ack, tag, multiple in given_answers:
        meant = [n for n in left if (n < tag if multiple else n == tag - 1)]
        left = [n for n in left if n not in meant]
        before = len(settled)
        waiting.settle(tag, multiple, is_nack=not is_ack)
        assert settled[before:] == [sent[number] for number in meant]
        for each in settled[before:]:
            if is_ack:
                assert each.error is None
            else:
                assert isinstance(each.error, MessageNacked)
                assert each.error.routing_key == each.routing_key
        assert waiting.all() == [sent[number] for number in left]
        assert len(waiting) == len(left)


def test_a_return_belongs_to_the_message_with_its_content() -> None:
    bodies: list[str | bytes] = ["x", "x", b"y"]
    sent = [
        publication("a", body, application_headers={"id": number}, reply_to=None)
        for number, body in enumerate(bodies)
    ]
    waiting, _ = unconfirmed(sent)
    # As py-amqp reads it: without what was None, and the body as bytes or as text.
    back = amqp.Message(b"x", application_headers={"id": 1}, content_encoding="utf-8")
    waiting.returned(AMQPError("NO_ROUTE"), "exchange", "a", back)
    waiting.returned(AMQPError("NO_ROUTE"), "exchange", "a", amqp.Message("y"))
    assert [each.error is None for each in sent] == [False, False, True]
    # No other one has its key.
    waiting.returned(AMQPError("NO_ROUTE"), "exchange", "b", amqp.Message(b"y"))
    assert sent[2].error is None
