"""What check-in makes of messages, also of hostile ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import amqp
import pytest

from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.kombu import Topology, custom
from celery_rabbitdelay.levels import headers, wall_clock
from celery_rabbitdelay.levels.delay import MAX_DELAY
from celery_rabbitdelay.levels.headers import ENVELOPE
from celery_rabbitdelay.modules.checkin import CheckIn
from celery_rabbitdelay.modules.forwarding import (
    Outgoing,
    encoded,
    to_undeliverable,
    without_headers,
)
from tests.unit.waiting import waiting

TOPOLOGY = Topology("t", custom([("seconds", 10, 1)]))
UNDELIVERABLE = TOPOLOGY.module_queues.undeliverable.exchange.name
NOW = 1_000_000


def message(exchange: str = "t.checkin", key: str = "q", **options: Any) -> amqp.Message:
    made = amqp.Message(b"body", **options)
    made.delivery_info = {"exchange": exchange, "routing_key": key}
    return made


@pytest.fixture
def receive(monkeypatch: pytest.MonkeyPatch) -> Callable[[amqp.Message], Outgoing]:
    monkeypatch.setattr(wall_clock, "source", lambda: NOW * 1_000_000)
    module = CheckIn(TOPOLOGY, lambda exchange, key: not key.startswith("secret"))

    def receive(received: amqp.Message) -> Outgoing:
        (outgoing,) = module.receive(received)
        return outgoing

    return receive


@pytest.mark.parametrize("delay", [3000, "3000", 2999.5])
def test_a_delay_is_a_number_or_looks_like_one(receive: Any, delay: Any) -> None:
    outgoing = receive(message(application_headers={"x-delay": delay, "mine": 1}))
    assert (outgoing.exchange, outgoing.routing_key) == ("t.seconds.x1", "3.%distribution")
    assert outgoing.message.headers.to_headers() == {
        "mine": 1,
        headers.DUE: NOW + 3000,
        headers.EXCHANGE: "",
        headers.ROUTING_KEY: "q",
    }
    assert outgoing.message.amqp().properties["delivery_mode"] == 2


@pytest.mark.parametrize("delay", [-1, "-1000", -0.5, -1e300, -(2**63)])
def test_a_negative_delay_means_now(receive: Any, delay: Any) -> None:
    outgoing = receive(message(application_headers={"x-delay": delay, "mine": 1}))
    assert (outgoing.exchange, outgoing.routing_key) == ("", "q")
    assert outgoing.message.headers.to_headers() == {"mine": 1}


def test_what_distribution_is_to_restore_waits_in_headers(receive: Any) -> None:
    given = message(application_headers={"x-delay": 1}, priority=9, expiration="60")
    properties = receive(given).message.amqp().properties
    told = properties["application_headers"]
    assert (told[headers.PRIORITY], told[headers.EXPIRATION]) == (9, "60")
    assert (properties["priority"], properties["expiration"]) == (4, None)


def test_a_delay_above_the_capacity_meditates_and_comes_back(receive: Any) -> None:
    outgoing = receive(message(application_headers={"x-delay": 25_000}))
    assert outgoing.exchange == "t.meditation"
    told = outgoing.message.headers.to_headers()
    back = receive(
        message("t.meditated", "", application_headers={**told, headers.DUE: NOW + 7000})
    )
    assert (back.exchange, back.routing_key) == ("t.seconds.x1", "7.%distribution")
    own = receive(message("t.meditated", "a.b", application_headers={headers.DUE: NOW - 5}))
    assert (own.exchange, own.routing_key) == ("t.delivery", "0.a%2Eb")


def test_what_goes_through_distribution_does_so_after_meditation_too(receive: Any) -> None:
    told = {headers.DUE: NOW - 5, headers.QUEUE: "a.b"}
    back = receive(message("t.meditated", "", application_headers=told))
    assert (back.exchange, back.routing_key) == ("t.delivery", "0.%distribution")


def test_a_message_without_a_delay_is_passed_on_at_once(receive: Any) -> None:
    for told in ({}, {"x-delay": 0}, {"x-delay": "0"}, {"x-delay": -0.5}):
        given = {**told, "mine": 1, headers.EXCHANGE: "office", "x-death": []}
        outgoing = receive(message(application_headers=given, priority=9, expiration="60"))
        assert (outgoing.exchange, outgoing.routing_key) == ("office", "q")
        properties = outgoing.message.amqp().properties
        assert properties["application_headers"] == {"mine": 1}
        assert (properties["priority"], properties["expiration"]) == (9, "60")


def test_a_message_without_headers_goes_to_the_queue_that_its_key_names(receive: Any) -> None:
    outgoing = receive(message())
    assert (outgoing.exchange, outgoing.routing_key) == ("", "q")


def test_a_millisecond_is_a_delay_already(receive: Any) -> None:
    outgoing = receive(message(application_headers={"x-delay": 0.1, headers.EXCHANGE: "office"}))
    assert (outgoing.exchange, outgoing.routing_key) == ("t.seconds.x1", "1.%distribution")
    told = outgoing.message.headers.to_headers()
    assert (told[headers.DUE], told[headers.EXCHANGE]) == (NOW + 1, "office")


def test_an_exchange_alone_is_a_destination(receive: Any) -> None:
    given = {headers.EXCHANGE: "papers"}
    outgoing = receive(message(key="", application_headers=given))
    assert (outgoing.exchange, outgoing.routing_key) == ("papers", "")


def test_a_priority_and_no_expiration_need_no_headers(receive: Any) -> None:
    properties = (
        receive(message(application_headers={"x-delay": 1}, priority=4)).message.amqp().properties
    )
    assert properties["priority"] == 4
    assert not {headers.PRIORITY, headers.EXPIRATION} & set(properties["application_headers"])


def test_a_delay_beyond_the_longest_is_refused(receive: Any) -> None:
    longest_ms = int(MAX_DELAY * 1000)
    too_long = "which is more than the longest delay ahead, 3,153,600,000 s"
    from_client = message(application_headers={"x-delay": longest_ms})
    assert receive(from_client).exchange == "t.meditation"
    with pytest.raises(UnprocessableMessage, match=f"x-delay is {longest_ms + 1}, {too_long}"):
        receive(message(application_headers={"x-delay": longest_ms + 1}))
    # A message that waits already was accepted earlier, perhaps by another clock.
    for ahead in (longest_ms, longest_ms + 1, 4 * longest_ms):
        told = {headers.DUE: NOW + ahead}
        meditated = message("t.meditated", "q", application_headers=told)
        assert receive(meditated).exchange == "t.meditation"


FORGED: dict[Any, Any] = {
    headers.DUE: 5,
    headers.QUEUE: "secret",
    headers.ROUTING_KEY: "secret",
    "rabbitdelay-reason": "all is well",
    "rabbitdelay-redriven": 2,
    "rabbitdelay-failed-since": 1,
    "rabbitdelay-unreadable": "no",
    "rabbitdelay-later-version": 1,
    "x-death": [{"queue": "t.undeliverable"}],
    "x-delivery-count": 9,
    b"rabbitdelay-\xff": 1,
    "headers": {headers.DUE: 5, "mine": 1, "headers": {"rabbitdelay-key": 1}},
}


def test_what_no_client_may_say_is_removed_where_its_message_enters() -> None:
    module = CheckIn(TOPOLOGY, lambda exchange, key: True)
    told = {headers.EXCHANGE: "news", "x-delay": 5, "x-mine": 1, b"\xff": 2}
    entering = message(application_headers={**FORGED, **told})
    module.admit(entering)
    assert entering.properties["application_headers"] == {
        **told,
        "headers": {"mine": 1, "headers": {}},
    }
    # What comes from meditation was written by producers, or by check-in itself.
    returning = message("t.meditated", application_headers=dict(FORGED))
    module.admit(returning)
    assert returning.properties["application_headers"] == FORGED


def test_headers_nested_too_deep_are_refused(receive: Any) -> None:
    deep: Any = {}
    for _ in range(32):
        deep = {"a": deep}
    assert receive(message(application_headers=deep))
    with pytest.raises(UnprocessableMessage, match="more than 32 tables and arrays"):
        receive(message(application_headers={"a": [deep]}))


def test_after_meditation_no_header_of_the_broker_is_left_and_all_others_are(receive: Any) -> None:
    told = {headers.DUE: NOW + 4000, headers.EXCHANGE: "e", headers.ROUTING_KEY: "k", "x-mine": 1}
    deaths = {"x-death": [{"queue": "t.meditation"}], "x-first-death-queue": "t.meditation"}
    back = receive(message("t.meditated", "", application_headers={**told, **deaths}, priority=3))
    assert (back.exchange, back.routing_key) == ("t.seconds.x1", "4.%distribution")
    assert back.message.headers.to_headers() == told
    assert (back.message.amqp().properties["priority"], back.message.body) == (3, b"body")


def test_after_meditation_a_delay_may_still_be_above_the_capacity(receive: Any) -> None:
    told = {headers.DUE: NOW + 9001}
    again = receive(message("t.meditated", "", application_headers=told))
    assert (again.exchange, again.routing_key) == ("t.meditation", "")
    told = {headers.DUE: NOW + 9000}
    assert receive(message("t.meditated", "", application_headers=told)).exchange == "t.seconds.x1"


def test_after_meditation_part_of_a_millisecond_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wall_clock, "source", lambda: NOW * 1_000_000 + 999_999)
    module = CheckIn(TOPOLOGY, lambda exchange, key: True)
    told = {headers.DUE: NOW + 4001}
    (back,) = module.receive(message("t.meditated", "", application_headers=told))
    assert back.routing_key == "5.%distribution"


def test_the_shard_is_that_of_the_task() -> None:
    topology = Topology("t", custom([("seconds", 10, 1)]), shards=8)
    module = CheckIn(topology, lambda exchange, key: True)
    for task_id in ("a", "b", "c", "d"):
        told = {"x-delay": 3000}
        (outgoing,) = module.receive(message(application_headers=told, correlation_id=task_id))
        shard = topology.keys.shard(task_id)
        assert outgoing.routing_key == f"s{shard}.3.%distribution"


#: What is no header of a message, in the table below.
OPTIONS = ("exchange", "key", "content_type")
NO_NUMBER = "x-delay is {}, not a number of milliseconds"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"key": ""}, "it has no destination, neither a routing key nor rabbitdelay-exchange"),
        ({"key": "secret"}, "check-in may not reach the queue 'secret': see rabbitdelay_checkin_"),
        (
            {"key": "secret", headers.EXCHANGE: "office"},
            "check-in may not reach the exchange 'office': see rabbitdelay_checkin_allowed",
        ),
        ({headers.EXCHANGE: 5}, "rabbitdelay-exchange is 5, not an exchange's name"),
        ({headers.EXCHANGE: 5, "x-delay": 1}, "rabbitdelay-exchange is 5, not an exchange's name"),
        ({headers.EXCHANGE: False}, "rabbitdelay-exchange is False, not an exchange's name"),
        *(
            ({"x-delay": wrong}, NO_NUMBER.format(repr(wrong)))
            for wrong in ("soon", True, float("inf"), {"a": 1}, "1_000", " 5", "٣", "")
        ),
        ({"x-delay": "9" * 70_000}, "x-delay is '999"),
        (
            {"exchange": "t.meditated", headers.DUE: "soon"},
            "it comes from meditation, but its header rabbitdelay-due is 'soon'",
        ),
        ({"exchange": "t.meditated"}, "it comes from meditation, but"),
        ({"x-delay": 1, "CC": ["secret"]}, "it has the header CC"),
        ({"BCC": ["secret"]}, "it has the header BCC"),
        ({"content_type": ENVELOPE, "x-delay": 1}, "it is an envelope"),
    ],
)
def test_what_is_refused_is_told_briefly(receive: Any, given: dict[str, Any], reason: str) -> None:
    told = {name: value for name, value in given.items() if name not in OPTIONS}
    options = {name: given[name] for name in OPTIONS if name in given}
    with pytest.raises(UnprocessableMessage) as caught:
        receive(message(**options, application_headers=told))
    assert caught.value.reason.startswith(reason)
    assert len(caught.value.reason) < 500


@pytest.mark.parametrize(
    "outgoing",
    [
        Outgoing("x" * 256, "k", waiting(amqp.Message(b""))),
        Outgoing("x", "k" * 256, waiting(amqp.Message(b""))),
        Outgoing("x", "k", waiting(amqp.Message(b"", priority="high"))),
        Outgoing("x", "k", waiting(amqp.Message(b"", application_headers={"long": "x" * 130_000}))),
        Outgoing("x", "k", waiting(amqp.Message(b"", application_headers={"what": object()}))),
    ],
)
def test_what_amqp_cannot_carry_is_known_before_it_is_sent(outgoing: Outgoing) -> None:
    with pytest.raises(UnprocessableMessage) as caught:
        encoded(outgoing, 131_072)
    reason = caught.value.reason
    assert len(reason) < 500
    explained = to_undeliverable(UNDELIVERABLE, outgoing, reason)
    assert encoded(without_headers(UNDELIVERABLE, explained), 131_072)
    told = to_undeliverable(UNDELIVERABLE, Outgoing("x", "k", waiting(amqp.Message(b""))), reason)
    assert encoded(told, 131_072)
