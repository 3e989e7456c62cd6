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
from tests.unit.waiting import waiting

TOPOLOGY = Topology("p")
UNDELIVERABLE = TOPOLOGY.module_queues.undeliverable.exchange.name
FRAME = 131_072


def told(outgoing: Outgoing) -> dict[str, Any]:
    headers: dict[str, Any] = outgoing.message.headers.to_headers()
    return headers


def properties_of(message: WaitingMessage) -> dict[str, Any]:
    properties = message.amqp().properties
    return {name: value for name, value in properties.items() if value is not None}


def outgoing(exchange: str = "x", routing_key: str = "k", **options: Any) -> Outgoing:
    return Outgoing(exchange, routing_key, waiting(amqp.Message(b"body", **options)))


@pytest.mark.parametrize(
    ("exchange", "routing_key"),
    [("x" * 255, "k"), ("x", "k" * 255), ("x", "é" * 127 + "k"), ("x", "\ud800" * 85)],
)
def test_a_name_has_at_most_255_bytes(exchange: str, routing_key: str) -> None:
    assert encoded(outgoing(exchange, routing_key), FRAME)
    what = "exchange" if len(exchange) > 1 else "routing key"
    longer = (f"{exchange}x", "k") if len(exchange) > 1 else ("x", f"{routing_key}k")
    with pytest.raises(UnprocessableMessage, match=f"the {what} .* has more than 255 bytes"):
        encoded(outgoing(*longer), FRAME)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"priority": "high"}, "a header or property cannot be written"),
        ({"application_headers": {"what": object()}}, "a header or property cannot be written"),
        ({"application_headers": {"long": "x" * 130_000}}, "its headers and properties take 130"),
        # The broker would close the channel at these.
        *(
            ({"expiration": value}, "its expiration is")
            for value in ("", "soon", "-1", "1.5", "4294967296", "\u0663", 5, b"5")
        ),
    ],
)
def test_what_amqp_cannot_carry_is_known_before_it_is_sent(options: Any, reason: str) -> None:
    with pytest.raises(UnprocessableMessage) as caught:
        encoded(outgoing(**options), FRAME)
    assert caught.value.reason.startswith(reason)
    assert len(caught.value.reason) < 500
    explained = to_undeliverable(UNDELIVERABLE, outgoing(**options), caught.value.reason)
    assert encoded(without_headers(UNDELIVERABLE, explained), FRAME)


@pytest.mark.parametrize("value", ["0", "4294967295"])
def test_an_expiration_in_milliseconds_is_written(value: str) -> None:
    properties = encoded(outgoing(expiration=value), FRAME).message().properties
    assert (properties["expiration"], properties["delivery_mode"]) == (value, 2)


def test_headers_and_properties_fill_a_frame_but_for_two_kilobytes() -> None:
    large = outgoing(application_headers={"h": "v" * 500})
    size = len(encoded(large, FRAME).properties)
    assert encoded(large, size + 2048)
    with pytest.raises(UnprocessableMessage, match=f"take {size} bytes, a frame has {size + 2047}"):
        encoded(large, size + 2047)


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


def test_headers_that_no_frame_can_hold_are_left_away() -> None:
    message = amqp.Message(b"body", application_headers={"long": "x" * 200_000}, priority=3)
    explained = to_undeliverable(UNDELIVERABLE, Outgoing("", "q", waiting(message)), "why")
    left = without_headers(UNDELIVERABLE, explained)
    assert (left.exchange, left.routing_key, left.message.body) == ("p.undeliverable", "", b"body")
    assert properties_of(left.message) == {
        "application_headers": {header_names.REASON: "why"},
        "delivery_mode": 2,
    }
