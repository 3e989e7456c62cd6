"""Messages that their destination, the levels or ``undeliverable`` refuse."""

from __future__ import annotations

from typing import Any

import amqp
import pytest

from celery_rabbitdelay.exceptions import LaterVersion, PublishError, UnprocessableMessage
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.modules.deliveries import Received
from celery_rabbitdelay.modules.forwarding import Outgoing, encoded
from celery_rabbitdelay.publishing.message import headers_of
from celery_rabbitdelay.publishing.publication import Publication
from celery_rabbitdelay.publishing.wire import REJECT, Content
from tests.unit.consumer_model import (
    FRAME_MAX,
    NACKED,
    NO_EXCHANGE,
    REFUSED,
    RETURNED,
    TIMED_OUT,
    TIMEOUT,
    Consumer,
    for_exchange,
    for_levels,
    for_queue,
    for_undeliverable,
    headers,
    is_tried_again,
    is_undeliverable,
    pending,
    reason,
)
from tests.unit.waiting import waiting


@pytest.fixture
def consumer(monkeypatch: pytest.MonkeyPatch) -> Consumer:
    return Consumer(monkeypatch)


def test_a_message_goes_to_its_destination_and_is_tried_there_once(consumer: Consumer) -> None:
    consumer.clock.now = 5.0
    outgoing = for_exchange(mine=1)
    publication = consumer.publish(outgoing)
    assert publication.address() == ("office", "paper")
    assert publication.content == Content.of(outgoing.message.amqp())
    assert publication.deadline == 5.0 + TIMEOUT
    assert publication.single_attempt
    assert pending(publication) == 1
    consumer.confirm(publication)
    assert (pending(publication), consumer.counts) == (0, (1, 0, 0))


def test_a_message_that_has_to_wait_for_its_destination_is_held_until_that_has_room(
    consumer: Consumer,
) -> None:
    others = [consumer.publish(for_queue("full")) for _ in range(30)]
    received, outgoing = Received(amqp.Message(b"envelope"), iter(())), for_queue("full")
    assert consumer.attempts.first(received, outgoing, 0.0) is None
    assert (received.held, received.waits_for) == (outgoing, "the queue 'full'")
    assert received.pending == 1
    consumer.confirm(others[0])
    assert consumer.attempts.first(received, outgoing, 0.0) is not None
    assert (received.held, received.waits_for, received.pending) == (None, None, 2)


def test_a_refused_message_goes_back_and_its_attempts_are_counted(consumer: Consumer) -> None:
    publication = consumer.publish(for_exchange(mine=1))
    consumer.clock.now = 5.0
    later = consumer.answer(publication, NACKED)
    assert is_tried_again(later)
    assert (headers(later)[header_names.ATTEMPTS], headers(later)["mine"]) == (1, 1)
    assert (headers(later)[header_names.EXCHANGE], later.content.body) == ("office", b"body")
    # The levels have as long as the destination had, and are tried until they take it.
    assert later.deadline == 5.0 + TIMEOUT
    assert not later.single_attempt
    # The received message is acknowledged once the levels have it.
    assert pending(later) == 1
    consumer.confirm(later)
    assert (pending(later), consumer.counts) == (0, (1, 1, 0))

    again = consumer.publish(for_exchange(**headers(later)))
    assert headers(consumer.answer(again, NACKED))[header_names.ATTEMPTS] == 2


@pytest.mark.parametrize(
    ("outgoing", "error", "why"),
    [
        (for_exchange(), NACKED, "the broker nacked it: its queue is full"),
        (for_exchange(), TIMED_OUT, "the broker did not confirm it in time"),
        (for_exchange(), RETURNED, "the exchange 'office' has no queue for the key 'paper'"),
        (for_queue(), RETURNED, "there has no queue for the key 'letters'"),
        (for_exchange(), NO_EXCHANGE, "there is no exchange 'office'"),
    ],
)
def test_it_says_why(consumer: Consumer, outgoing: Outgoing, error: PublishError, why: str) -> None:
    later = consumer.answer(consumer.publish(outgoing), error)
    assert is_tried_again(later)
    assert reason(later).startswith(why)


def test_what_was_tried_long_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = Consumer(monkeypatch, seconds=60)
    failed_before: dict[str, Any] = {
        header_names.ATTEMPTS: 6,
        header_names.FAILED_SINCE: 1_000_000_000_000,
        header_names.FIRST_REASON: "it was full",
    }
    last = consumer.answer(consumer.publish(for_exchange(**failed_before)), NACKED)
    assert is_undeliverable(last)
    assert headers(last)[header_names.EXCHANGE] == "office"
    assert reason(last).startswith("the broker nacked it")
    assert "(7 attempts since 2001-09-09" in reason(last)
    assert "the first time: it was full)" in reason(last)
    assert pending(last) == 1
    consumer.confirm(last)
    assert consumer.counts == (1, 0, 1)
    assert "distribution: a message is undeliverable: the broker nacked it" in caplog.text


@pytest.mark.parametrize(
    ("outgoing", "error", "why"),
    [
        (for_exchange(), REFUSED, "the broker does not take it: too large"),
        (for_levels(), REFUSED, "the broker does not take it: too large"),
        (for_levels(), RETURNED, "the exchange 'rabbitdelay.seconds.x1' has no queue for the key"),
    ],
)
def test_what_is_never_taken_is_undeliverable_at_once(
    consumer: Consumer, outgoing: Outgoing, error: PublishError, why: str
) -> None:
    given_up = consumer.answer(consumer.publish(outgoing), error)
    assert is_undeliverable(given_up)
    assert reason(given_up).startswith(why)
    # It is acknowledged once undeliverable has it, which is tried until then.
    again = consumer.answer(consumer.answer(given_up, NACKED), TIMED_OUT)
    assert is_undeliverable(again)
    assert again.content is given_up.content
    assert (pending(again), consumer.counts) == (1, (0, 0, 0))
    consumer.confirm(again)
    assert (pending(again), consumer.counts) == (0, (1, 0, 1))


@pytest.mark.parametrize("outgoing", [for_exchange(no_amqp_type=object()), for_exchange("x" * 256)])
def test_what_amqp_cannot_carry_is_undeliverable_and_the_broker_is_not_asked(
    consumer: Consumer, outgoing: Outgoing
) -> None:
    given_up = consumer.publish(outgoing)
    assert is_undeliverable(given_up)
    assert reason(given_up).startswith(("a header or property cannot be written", "the exchange"))
    assert consumer.asked == []


@pytest.mark.parametrize("error", [NACKED, TIMED_OUT])
def test_the_levels_are_tried_until_they_take_it(consumer: Consumer, error: PublishError) -> None:
    publication = consumer.publish(for_levels())
    keys = [publication.address()[1] for _ in range(2)]
    consumer.clock.now = TIMEOUT
    again = consumer.answer(publication, error)
    keys.append(again.address()[1])
    assert [key.split(".")[6] for key in keys] == ["8", "7", "6"]
    assert again.content is publication.content
    assert (again.deadline, pending(again), again.single_attempt) == (2 * TIMEOUT, 1, False)


def test_without_room_for_our_headers_it_is_undeliverable(monkeypatch: pytest.MonkeyPatch) -> None:
    outgoing = for_exchange(long="x" * 500)
    size = len(encoded(outgoing, FRAME_MAX).properties)
    consumer = Consumer(monkeypatch, frame_max=size + 2048)
    given_up = consumer.answer(consumer.publish(outgoing), NACKED)
    assert is_undeliverable(given_up)
    assert headers(given_up).keys() == {header_names.REASON}
    assert reason(given_up).startswith("the broker nacked it")
    assert "its headers and properties take" in reason(given_up)
    consumer.confirm(given_up)
    assert consumer.counts == (1, 0, 1)


def test_what_undeliverable_never_takes_loses_its_headers_and_is_rejected(
    consumer: Consumer, caplog: pytest.LogCaptureFixture
) -> None:
    told = {header_names.REASON: "why", "CC": "no list"}
    publication = consumer.publish(
        Outgoing(
            "rabbitdelay.undeliverable", "k", waiting(amqp.Message(b"x", application_headers=told))
        )
    )
    bare = consumer.answer(publication, REFUSED)
    assert bare.address() == ("rabbitdelay.undeliverable", "")
    received = bare.context.received
    assert headers_of(bare.content.message()).keys() == {header_names.REASON}
    assert headers_of(bare.content.message())[header_names.REASON] == (
        "why; its headers are left out: the broker does not take it: too large"
    )
    bare.error = REFUSED
    assert consumer.attempts.settled(bare) is None
    assert received.settlement == REJECT
    assert "distribution: a message is rejected, so that the broker puts it into" in caplog.text
    assert not pending(bare)
    assert consumer.attempts.bytes_in_flight == 0


def refused(consumer: Consumer, error: Exception) -> Publication:
    """What is published of a message that the module cannot read."""
    message: Any = amqp.Message(b"body", application_headers={"mine": 1})
    message.delivery_info = {"exchange": "rabbitdelay.delivery", "routing_key": "key"}
    received = Received(message, iter([for_queue()]))
    publication = consumer.attempts.refuse(received, error)
    assert next(received.outgoing, None) is None
    assert publication.content.body == b"body"
    assert headers(publication)["mine"] == 1
    return publication


@pytest.mark.parametrize(
    ("error", "why"),
    [(UnprocessableMessage("no envelope"), "no envelope"), (KeyError("x"), "KeyError('x')")],
)
def test_what_cannot_be_read_is_undeliverable_as_it_came(
    consumer: Consumer, error: Exception, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    given_up = refused(consumer, error)
    assert is_undeliverable(given_up)
    assert reason(given_up) == why
    is_unexpected = isinstance(error, KeyError)
    assert ("distribution: a message cannot be read" in caplog.text) == is_unexpected


def test_what_a_later_version_can_read_waits_for_it(
    consumer: Consumer, caplog: pytest.LogCaptureFixture
) -> None:
    later = refused(consumer, LaterVersion("it is of version 9"))
    assert is_tried_again(later)
    assert headers(later)[header_names.ATTEMPTS] == 1
    assert "it is of version 9" in caplog.text
    consumer.confirm(later)
    assert consumer.counts == (1, 1, 0)


@pytest.mark.parametrize("error", [RETURNED, NO_EXCHANGE])
def test_without_undeliverable_a_module_restarts(consumer: Consumer, error: PublishError) -> None:
    publication = consumer.publish(for_undeliverable())
    publication.error = error
    with pytest.raises(type(error)) as caught:
        consumer.attempts.settled(publication)
    assert caught.value is error
