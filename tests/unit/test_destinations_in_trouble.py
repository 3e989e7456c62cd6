"""Destinations that are missing, full or silent: what is for them does not hold up the others."""

from __future__ import annotations

from typing import Any

import pytest

from celery_rabbitdelay.exceptions import PublishError
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.publishing.publication import Publication
from tests.unit import consumer_model
from tests.unit.consumer_model import Consumer

#: How many messages a destination may have in flight that has not answered yet.
ROOM = 30


@pytest.fixture
def consumer(monkeypatch: pytest.MonkeyPatch) -> Consumer:
    return Consumer(monkeypatch)


def fill(consumer: Consumer, queue: str = "letters") -> list[Publication]:
    """Publish as many messages as a queue may have, and return them."""
    publications = [consumer.publish(consumer_model.for_queue(queue)) for _ in range(ROOM)]
    assert not any(map(consumer_model.is_tried_again, publications))
    assert consumer.has_to_wait(consumer_model.for_queue(queue))
    return publications


def test_a_missing_exchange_means_another_attempt_and_no_channel_error(consumer: Consumer) -> None:
    later = consumer.publish(consumer_model.for_exchange("gone"))
    assert consumer_model.is_tried_again(later)
    assert consumer_model.reason(later) == "there is no exchange 'gone'"
    assert consumer_model.headers(later)[header_names.EXCHANGE] == "gone"
    assert (consumer_model.pending(later), consumer.counts) == (1, (0, 1, 0))
    assert not consumer_model.is_tried_again(consumer.publish(consumer_model.for_exchange()))
    assert not consumer_model.is_tried_again(consumer.publish(consumer_model.for_queue()))
    assert consumer.asked == ["gone", "office"]


def test_of_messages_for_a_vanished_exchange_one_closes_the_channel(consumer: Consumer) -> None:
    publication = consumer.publish(consumer_model.for_exchange())
    consumer.exchanges.clear()
    consumer.answer(publication, consumer_model.NO_EXCHANGE)
    assert consumer_model.is_tried_again(consumer.publish(consumer_model.for_exchange()))
    assert consumer.asked == ["office"]


def test_a_message_waits_while_its_destination_owes_many_answers(consumer: Consumer) -> None:
    first, *_ = fill(consumer)
    assert not consumer.has_to_wait(consumer_model.for_queue("other"))
    assert not consumer.has_to_wait(consumer_model.for_exchange())
    consumer.confirm(first)
    assert not consumer.has_to_wait(consumer_model.for_queue())


def test_a_queue_and_an_exchange_of_one_name_do_not_wait_for_each_other(consumer: Consumer) -> None:
    fill(consumer, "office")
    assert not consumer.has_to_wait(consumer_model.for_exchange("office"))


@pytest.mark.parametrize("make", [consumer_model.for_levels, consumer_model.for_undeliverable])
def test_none_waits_for_levels_or_undeliverable(consumer: Consumer, make: Any) -> None:
    for _ in range(2 * ROOM):
        assert not consumer.has_to_wait(make())


def test_nothing_waits_for_a_full_destination_once_that_is_silent(consumer: Consumer) -> None:
    first, *_ = fill(consumer)
    consumer.clock.now = consumer.silent_for = 1.0
    later = consumer.publish(consumer_model.for_queue())
    assert consumer_model.is_tried_again(later)
    assert consumer_model.reason(later) == "the queue 'letters' does not answer, or too slowly"
    assert not consumer_model.is_tried_again(consumer.publish(consumer_model.for_queue("other")))
    consumer.silent_for = 0.0
    consumer.confirm(first)
    assert not consumer_model.is_tried_again(consumer.publish(consumer_model.for_queue()))


@pytest.mark.parametrize(
    ("error", "told", "what"),
    [
        (
            consumer_model.NACKED,
            "distribution: the queue 'letters' does not take a message, which waits in the levels",
            "messages that a destination does not take",
        ),
        (
            consumer_model.REFUSED,
            "distribution: a message is undeliverable: the broker does not take it: too large",
            "undeliverable messages",
        ),
    ],
)
def test_trouble_is_logged_once_a_minute(
    consumer: Consumer,
    caplog: pytest.LogCaptureFixture,
    error: PublishError,
    told: str,
    what: str,
) -> None:
    for now in (0.0, 59.9, 60.0):
        consumer.clock.now = now
        consumer.answer(consumer.publish(consumer_model.for_queue()), error)
    more = f"distribution: {what}: 1 more within 60 s, without a warning each"
    first, between, again = caplog.messages
    assert (first.startswith(told), between, again) == (True, more, first)
    consumer.answer(consumer.publish(consumer_model.for_exchange("office")), consumer_model.NACKED)
    assert "the exchange 'office' does not take a message" in caplog.text
