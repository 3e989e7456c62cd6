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
    with_headers,
    without_headers,
)
from celery_rabbitdelay.publishing.wire import Content

TOPOLOGY = Topology("p")
UNDELIVERABLE = TOPOLOGY.module_queues.undeliverable.exchange.name


def told(outgoing: Outgoing) -> dict[str, Any]:
    headers: dict[str, Any] = outgoing.message.properties["application_headers"]
    return headers


def properties_of(message: amqp.Message) -> dict[str, Any]:
    return {name: value for name, value in message.properties.items() if value is not None}


def test_a_message_keeps_its_body_and_its_properties_and_has_other_headers() -> None:
    given = amqp.Message(
        b"body", application_headers={"old": 1}, content_type="text/plain", priority=3
    )
    headers = {"new": 2}
    made = with_headers(given, headers)
    assert made.body == b"body"
    assert properties_of(made) == {
        "application_headers": {"new": 2},
        "content_type": "text/plain",
        "priority": 3,
        "delivery_mode": 2,
    }
    made.properties["application_headers"]["more"] = 3
    assert headers == {"new": 2}


def test_every_message_is_persistent_even_if_it_was_not() -> None:
    assert with_headers(amqp.Message(b"", delivery_mode=1), {}).properties["delivery_mode"] == 2


def test_properties_that_only_its_author_may_set_are_dropped() -> None:
    given = amqp.Message(b"", user_id="guest", cluster_id="c", app_id="shop")
    assert properties_of(with_headers(given, {})) == {
        "application_headers": {},
        "app_id": "shop",
        "delivery_mode": 2,
    }


def test_a_property_is_replaced_or_removed() -> None:
    given = amqp.Message(b"", priority=9, expiration="60")
    made = with_headers(given, {}, priority=4, expiration=None)
    assert properties_of(made)["priority"] == 4
    assert "expiration" not in properties_of(made)


@pytest.mark.parametrize(
    ("exchange", "routing_key"), [("x" * 255, "k"), ("x", "k" * 255), ("x", "é" * 127 + "k")]
)
def test_names_and_keys_of_255_bytes_are_written_and_longer_ones_are_refused(
    exchange: str, routing_key: str
) -> None:
    message = amqp.Message(b"body")
    assert encoded(Outgoing(exchange, routing_key, message), 131_072) == Content.of(message)
    if len(exchange) == 255:
        what, longer = "exchange", Outgoing(f"{exchange}x", routing_key, message)
    else:
        what, longer = "routing key", Outgoing(exchange, f"{routing_key}k", message)
    with pytest.raises(UnprocessableMessage, match=f"the {what} .* has more than 255 bytes"):
        encoded(longer, 131_072)


def test_a_key_that_cannot_be_encoded_is_refused_only_if_it_is_too_long() -> None:
    message = amqp.Message(b"")
    assert encoded(Outgoing("x", "\ud800", message), 131_072)
    with pytest.raises(UnprocessableMessage, match="more than 255 bytes"):
        encoded(Outgoing("x", "\ud800" * 86, message), 131_072)


def test_headers_and_properties_fill_a_frame_but_for_two_kilobytes() -> None:
    outgoing = Outgoing("x", "k", amqp.Message(b"b" * 10_000, application_headers={"h": "v" * 500}))
    size = len(encoded(outgoing, 131_072).properties)
    assert 500 < size < 600
    assert encoded(outgoing, size + 2048)
    with pytest.raises(UnprocessableMessage, match=f"take {size} bytes, a frame has {size + 2047}"):
        encoded(outgoing, size + 2047)


def test_a_message_is_undeliverable_with_its_destination_and_the_reason() -> None:
    message = amqp.Message(b"body", application_headers={"mine": 1, "x-death": []}, expiration="60")
    refused = to_undeliverable(UNDELIVERABLE, Outgoing("office", "paper", message), "it is full")
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
    refused = to_undeliverable(UNDELIVERABLE, Outgoing("second", "other", message), "a newer one")
    assert told(refused) == {**first, header_names.REASON: "a newer one"}


def test_without_an_expiration_an_undeliverable_message_says_nothing_about_it() -> None:
    refused = to_undeliverable(UNDELIVERABLE, Outgoing("", "q", amqp.Message(b"")), "why")
    assert header_names.EXPIRATION not in told(refused)


def test_headers_that_no_frame_can_hold_are_left_away() -> None:
    message = amqp.Message(b"body", application_headers={"long": "x" * 200_000}, priority=3)
    left = without_headers(UNDELIVERABLE, message, "why")
    assert (left.exchange, left.routing_key) == ("p.undeliverable", "")
    assert left.message.body == b"body"
    assert properties_of(left.message) == {
        "application_headers": {header_names.REASON: "why"},
        "delivery_mode": 2,
    }


@pytest.mark.parametrize(
    ("value", "kept"), [(2, 2), (0, None), (-1, None), (True, None), ("2", None), ([2], None)]
)
def test_the_count_of_redriving_stays_until_the_destination(value: Any, kept: Any) -> None:
    received = {header_names.REDRIVEN: value}
    given = Outgoing("", "q", amqp.Message(b"", application_headers={}))
    for made in (
        to_undeliverable(UNDELIVERABLE, given, "full", received),
        without_headers(UNDELIVERABLE, given.message, "too long", received),
    ):
        assert told(made).get(header_names.REDRIVEN) == kept


@pytest.mark.parametrize("value", ["0", "5", "4294967295"])
def test_an_expiration_in_milliseconds_is_written(value: str) -> None:
    message = amqp.Message(b"x", expiration=value)
    assert encoded(Outgoing("", "q", message), 131_072).message().properties == {
        "expiration": value
    }


@pytest.mark.parametrize("value", ["", "soon", "-1", "1.5", "4294967296", "\u0663", 5, b"5"])
def test_an_expiration_at_which_the_broker_would_close_the_channel_is_refused(value: Any) -> None:
    message = amqp.Message(b"x", expiration=value)
    with pytest.raises(UnprocessableMessage, match="not a number of milliseconds"):
        encoded(Outgoing("", "q", message), 131_072)
