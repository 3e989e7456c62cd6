"""What check-in makes of messages, also of hostile ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import amqp
import pytest

from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.levels.layout import custom
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.checkin import CheckIn
from celery_rabbitdelay.modules.envelope import CONTENT_TYPE
from celery_rabbitdelay.modules.forwarding import Outgoing, bare, undeliverable, written

TOPOLOGY = Topology("t", custom([("seconds", 10, 1)]))
NOW = 1_000_000


def message(exchange: str = "t.checkin", key: str = "q", **options: Any) -> amqp.Message:
    made = amqp.Message(b"body", **options)
    made.delivery_info = {"exchange": exchange, "routing_key": key}
    return made


@pytest.fixture
def receive(monkeypatch: pytest.MonkeyPatch) -> Callable[[amqp.Message], Outgoing]:
    monkeypatch.setattr("time.time_ns", lambda: NOW * 1_000_000)
    module = CheckIn(TOPOLOGY, lambda exchange, key: not key.startswith("secret"))

    def receive(received: amqp.Message) -> Outgoing:
        (outgoing,) = module.receive(received)
        return outgoing

    return receive


@pytest.mark.parametrize("delay", [3000, "3000", 2999.5])
def test_a_delay_is_a_number_or_looks_like_one(receive: Any, delay: Any) -> None:
    outgoing = receive(message(application_headers={"x-delay": delay, "mine": 1}))
    assert (outgoing.exchange, outgoing.routing_key) == ("t.seconds.x1", "3.%distribution")
    assert outgoing.message.properties["application_headers"] == {
        "mine": 1,
        headers.DUE: NOW + 3000,
        headers.EXCHANGE: "",
        headers.ROUTING_KEY: "q",
    }
    assert outgoing.message.properties["delivery_mode"] == 2


def test_what_distribution_is_to_restore_waits_in_headers(receive: Any) -> None:
    given = message(application_headers={"x-delay": 1}, priority=9, expiration="60")
    properties = receive(given).message.properties
    told = properties["application_headers"]
    assert (told[headers.PRIORITY], told[headers.EXPIRATION]) == (9, "60")
    assert (properties["priority"], properties["expiration"]) == (4, None)


def test_a_delay_above_the_capacity_meditates_and_comes_back(receive: Any) -> None:
    outgoing = receive(message(application_headers={"x-delay": 25_000}))
    assert outgoing.exchange == "t.meditation"
    told = outgoing.message.properties["application_headers"]
    back = receive(message("t.meditated", application_headers={**told, headers.DUE: NOW + 7000}))
    assert (back.exchange, back.routing_key) == ("t.seconds.x1", "7.%distribution")
    own = receive(
        message("t.meditated", application_headers={headers.DUE: NOW - 5, headers.QUEUE: "a.b"})
    )
    assert (own.exchange, own.routing_key) == ("t.delivery", "0.a%2Eb")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"application_headers": {"x-delay": "9" * 70_000}}, "."),
        ({"application_headers": {"x-delay": float("inf")}}, "not a number"),
        ({"application_headers": {"x-delay": {"a": 1}}}, "not a number"),
        ({"application_headers": {"x-delay": "1_000"}}, "not a number"),
        ({"application_headers": {"x-delay": " 5"}}, "not a number"),
        ({"application_headers": {"x-delay": "٣"}}, "not a number"),
        ({"application_headers": {"x-delay": ""}}, "not a number"),
        ({"application_headers": {"x-delay": 1, "CC": ["secret"]}}, "header CC"),
        ({"application_headers": {"BCC": ["secret"]}}, "header BCC"),
        ({"application_headers": {"x-delay": 1, headers.EXCHANGE: 5}}, "not an exchange's name"),
        ({"content_type": CONTENT_TYPE, "application_headers": {"x-delay": 1}}, "an envelope"),
        ({"key": "secret"}, "may not reach"),
        ({"exchange": "t.meditated"}, "from meditation, but"),
    ],
)
def test_what_is_hostile_is_refused_in_few_words(
    receive: Any, given: dict[str, Any], why: str
) -> None:
    with pytest.raises(UnprocessableMessage, match=why) as caught:
        receive(message(**given))
    assert len(caught.value.reason) < 500


@pytest.mark.parametrize(
    "outgoing",
    [
        Outgoing("x" * 256, "k", amqp.Message(b"")),
        Outgoing("x", "k" * 256, amqp.Message(b"")),
        Outgoing("x", "k", amqp.Message(b"", priority="high")),
        Outgoing("x", "k", amqp.Message(b"", application_headers={"long": "x" * 130_000})),
        Outgoing("x", "k", amqp.Message(b"", application_headers={"what": object()})),
    ],
)
def test_what_amqp_cannot_carry_is_known_before_it_is_sent(outgoing: Outgoing) -> None:
    with pytest.raises(UnprocessableMessage) as caught:
        written(outgoing, 131_072)
    reason = caught.value.reason
    assert len(reason) < 500
    left = bare(TOPOLOGY, outgoing.message, reason)
    assert written(left, 131_072)
    told = undeliverable(TOPOLOGY, Outgoing("x", "k", amqp.Message(b"")), reason)
    assert written(told, 131_072)
