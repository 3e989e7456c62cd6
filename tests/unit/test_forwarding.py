"""The messages that a module publishes: what they keep, what they lose, what AMQP cannot carry."""

from __future__ import annotations

from typing import Any

import amqp
import pytest

from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.forwarding import (
    Outgoing,
    encoded,
    to_undeliverable,
    without_headers,
)
from celery_rabbitdelay.publishing.message import WaitingMessage
from celery_rabbitdelay.publishing.wire import Content
from tests.unit.waiting import said, waiting

TOPOLOGY = Topology("p")
UNDELIVERABLE = TOPOLOGY.module_queues.undeliverable.exchange.name


def told(outgoing: Outgoing) -> dict[str, Any]:
    headers: dict[str, Any] = outgoing.message.headers.to_headers()
    return headers


def properties_of(message: WaitingMessage) -> dict[str, Any]:
    properties = message.amqp().properties
    return {name: value for name, value in properties.items() if value is not None}


def test_properties_that_only_its_author_may_set_are_dropped_and_each_is_persistent() -> None:
    given = amqp.Message(b"", user_id="guest", cluster_id="c", app_id="shop", delivery_mode=1)
    expected = {"application_headers": {}, "app_id": "shop", "delivery_mode": 2}
    assert properties_of(waiting(given)) == expected


def test_a_property_is_replaced_or_removed() -> None:
    made = waiting(amqp.Message(b"body", priority=9, expiration="60", content_type="text/plain"))
    properties = properties_of(made.having(priority=4, expiration=None))
    assert properties == {
        "application_headers": {},
        "content_type": "text/plain",
        "priority": 4,
        "delivery_mode": 2,
    }
    assert made.properties["priority"] == 9


@pytest.mark.parametrize(
    ("exchange", "routing_key"), [("x" * 255, "k"), ("x", "k" * 255), ("x", "é" * 127 + "k")]
)
def test_names_and_keys_of_255_bytes_are_the_longest(exchange: str, routing_key: str) -> None:
    message = amqp.Message(b"body")
    content = Content.of(waiting(message).amqp())
    assert encoded(Outgoing(exchange, routing_key, waiting(message)), 131_072) == content
    if len(exchange) == 255:
        what, longer = "exchange", Outgoing(f"{exchange}x", routing_key, waiting(message))
    else:
        what, longer = "routing key", Outgoing(exchange, f"{routing_key}k", waiting(message))
    with pytest.raises(UnprocessableMessage, match=f"the {what} .* has more than 255 bytes"):
        encoded(longer, 131_072)


def test_a_key_that_cannot_be_encoded_is_refused_only_if_it_is_too_long() -> None:
    message = amqp.Message(b"")
    assert encoded(Outgoing("x", "\ud800", waiting(message)), 131_072)
    with pytest.raises(UnprocessableMessage, match="more than 255 bytes"):
        encoded(Outgoing("x", "\ud800" * 86, waiting(message)), 131_072)


def test_headers_and_properties_fill_a_frame_but_for_two_kilobytes() -> None:
    outgoing = Outgoing(
        "x", "k", waiting(amqp.Message(b"b" * 10_000, application_headers={"h": "v" * 500}))
    )
    size = len(encoded(outgoing, 131_072).properties)
    assert 500 < size < 600
    assert encoded(outgoing, size + 2048)
    with pytest.raises(UnprocessableMessage, match=f"take {size} bytes, a frame has {size + 2047}"):
        encoded(outgoing, size + 2047)


def test_a_message_is_undeliverable_with_its_destination_and_the_reason() -> None:
    message = amqp.Message(b"body", application_headers={"mine": 1, "x-death": []}, expiration="60")
    refused = to_undeliverable(
        UNDELIVERABLE, Outgoing("office", "paper", waiting(message)), "it is full"
    )
    assert (refused.exchange, refused.routing_key) == ("p.undeliverable", "paper")
    assert refused.message.body == b"body"
    assert told(refused) == {
        "mine": 1,
        header_names.EXCHANGE: "office",
        header_names.ROUTING_KEY: "paper",
        header_names.EXPIRATION: "60",
        header_names.REASON: "it is full",
    }
    # With it, the message would vanish from undeliverable as well.
    assert "expiration" not in properties_of(refused.message)


def test_where_an_undeliverable_message_was_meant_to_go_at_first_stays() -> None:
    first = {
        header_names.EXCHANGE: "first",
        header_names.ROUTING_KEY: "key",
        header_names.EXPIRATION: "99",
        header_names.REASON: "an older one",
    }
    message = amqp.Message(b"", application_headers=first, expiration="1")
    refused = to_undeliverable(
        UNDELIVERABLE, Outgoing("second", "other", waiting(message)), "a newer one"
    )
    assert told(refused) == {**first, header_names.REASON: "a newer one"}


def test_without_an_expiration_an_undeliverable_message_says_nothing_about_it() -> None:
    refused = to_undeliverable(UNDELIVERABLE, Outgoing("", "q", waiting(amqp.Message(b""))), "why")
    assert header_names.EXPIRATION not in told(refused)


def test_headers_that_no_frame_can_hold_are_left_away() -> None:
    message = amqp.Message(b"body", application_headers={"long": "x" * 200_000}, priority=3)
    explained = to_undeliverable(UNDELIVERABLE, Outgoing("", "q", waiting(message)), "why")
    left = without_headers(UNDELIVERABLE, explained)
    assert (left.exchange, left.routing_key, left.message.body) == ("p.undeliverable", "", b"body")
    assert properties_of(left.message) == {
        "application_headers": {header_names.REASON: "why"},
        "delivery_mode": 2,
    }


@pytest.mark.parametrize(
    ("value", "kept"), [(2, 2), (0, None), (-1, None), (True, None), ("2", None), ([2], None)]
)
def test_the_count_of_redriving_stays_until_the_destination(value: Any, kept: Any) -> None:
    received = said({header_names.REDRIVEN: value})
    given = Outgoing("", "q", waiting(amqp.Message(b"", application_headers={})))
    made = to_undeliverable(UNDELIVERABLE, given, "full", received.redriven)
    for each in (made, without_headers(UNDELIVERABLE, made)):
        assert told(each).get(header_names.REDRIVEN) == kept


@pytest.mark.parametrize("value", ["0", "5", "4294967295"])
def test_an_expiration_in_milliseconds_is_written(value: str) -> None:
    message = amqp.Message(b"x", expiration=value)
    properties = encoded(Outgoing("", "q", waiting(message)), 131_072).message().properties
    assert properties["expiration"] == value


@pytest.mark.parametrize("value", ["", "soon", "-1", "1.5", "4294967296", "\u0663", 5, b"5"])
def test_an_expiration_at_which_the_broker_would_close_the_channel_is_refused(value: Any) -> None:
    message = amqp.Message(b"x", expiration=value)
    with pytest.raises(UnprocessableMessage, match="not a number of milliseconds"):
        encoded(Outgoing("", "q", waiting(message)), 131_072)
