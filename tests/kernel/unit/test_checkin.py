"""What check-in makes of messages, also of hostile ones."""

from collections.abc import Callable
from functools import reduce
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
)

TOPOLOGY = Topology("t", custom([("seconds", 10, 1)]))
NOW = 1_000_000

#: As many tables as headers may have within each other.
DEEP: dict[str, Any] = reduce(lambda inner, _: {"a": inner}, range(31), {})


def message(exchange: str = "t.checkin", key: str = "q", **options: Any) -> amqp.Message:
    made = amqp.Message(b"body", **options)
    made.delivery_info = {"exchange": exchange, "routing_key": key}
    return made


@pytest.fixture
def receive(monkeypatch: pytest.MonkeyPatch) -> Callable[[amqp.Message], Outgoing]:
    monkeypatch.setattr(wall_clock, "ns", lambda: NOW * 1_000_000)
    module = CheckIn(TOPOLOGY, lambda exchange, key: not key.startswith("secret"))

    def receive(received: amqp.Message) -> Outgoing:
        (outgoing,) = module.receive(received)
        return outgoing

    return receive


@pytest.mark.parametrize("delay", [3000, "3000", 2999.5])
def test_a_delay_is_a_number_or_looks_like_one(receive: Any, delay: Any) -> None:
    told = {"x-delay": delay, "mine": 1}
    outgoing = receive(message(application_headers=told, priority=9, expiration="60"))
    assert (outgoing.exchange, outgoing.routing_key) == ("t.seconds.x1", "3.%distribution")
    properties = outgoing.message.amqp().properties
    # Distribution restores what the levels do not take.
    assert (properties["priority"], properties["expiration"]) == (4, None)
    assert properties["application_headers"] == {
        "mine": 1,
        headers.DUE: NOW + 3000,
        headers.EXCHANGE: "",
        headers.ROUTING_KEY: "q",
        headers.PRIORITY: 9,
        headers.EXPIRATION: "60",
    }


@pytest.mark.parametrize(
    ("delay", "exchange", "key"),
    [
        *((delay, "office", "q") for delay in (None, 0, "0", -0.5, "-1000", -1e300)),
        *((0, *address) for address in (("", "q"), ("papers", ""))),
    ],
)
def test_a_message_without_a_delay_is_passed_on_at_once_as_it_came(
    receive: Any, delay: Any, exchange: str, key: str
) -> None:
    told = {"x-delay": delay, "mine": 1, headers.EXCHANGE: exchange or None, "x-death": []}
    given = {name: value for name, value in told.items() if value is not None}
    outgoing = receive(message(key=key, application_headers=given, priority=9, expiration="60"))
    assert (outgoing.exchange, outgoing.routing_key) == (exchange, key)
    properties = outgoing.message.amqp().properties
    assert properties["application_headers"] == {"mine": 1}
    assert (properties["priority"], properties["expiration"]) == (9, "60")


@pytest.mark.parametrize(
    ("key", "due_ms", "expected"),
    [
        ("", NOW + 9001, ("t.meditation", "")),
        ("", NOW + 9000, ("t.seconds.x1", "9.%distribution")),
        ("", NOW + 7000, ("t.seconds.x1", "7.%distribution")),
        ("", NOW - 5, ("t.delivery", "0.%distribution")),
        ("a.b", NOW - 5, ("t.delivery", "0.a%2Eb")),
    ],
)
def test_after_meditation_a_message_waits_for_the_rest(
    receive: Any, key: str, due_ms: int, expected: tuple[str, str]
) -> None:
    told = {headers.DUE: due_ms, headers.QUEUE: "a.b", "x-death": [{"queue": "t.meditation"}]}
    back = receive(message("t.meditated", key, application_headers=told))
    assert (back.exchange, back.routing_key) == expected
    assert back.message.headers.to_headers() == {headers.DUE: due_ms, headers.QUEUE: "a.b"}


def test_a_delay_above_the_capacity_meditates_and_one_beyond_the_longest_is_refused(
    receive: Any,
) -> None:
    longest_ms = int(MAX_DELAY * 1000)
    too_long = "the delay exceeds the maximum of 3,153,600,000 s"
    for above_the_capacity_ms in (9001, longest_ms):
        told = {"x-delay": above_the_capacity_ms, "a": DEEP}
        outgoing = receive(message(application_headers=told))
        assert outgoing.exchange == "t.meditation"
        assert outgoing.message.headers.due_ms == NOW + above_the_capacity_ms
    with pytest.raises(UnprocessableMessage, match=f"x-delay is {longest_ms + 1}: {too_long}"):
        receive(message(application_headers={"x-delay": longest_ms + 1}))
    # A message that waits already was accepted earlier, perhaps by another clock.
    told = {headers.DUE: NOW + 4 * longest_ms}
    assert receive(message("t.meditated", "q", application_headers=told)).exchange == "t.meditation"


FORGED: dict[Any, Any] = {
    headers.DUE: 5,
    headers.QUEUE: "secret",
    "rabbitdelay-later-version": 1,
    "x-death": [{"queue": "t.undeliverable"}],
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
    # Whatever has an exchange is told from what has left check-in.
    undelayed = [message(application_headers={name: "x"}) for name in (headers.EXCHANGE, "mine")]
    for each in undelayed:
        module.admit(each)
    admitted = [each.properties["application_headers"] for each in undelayed]
    assert admitted == [{headers.EXCHANGE: "x", "x-delay": 0}, {"mine": "x"}]
    # What comes from meditation was written by producers, or by check-in itself.
    returning = message("t.meditated", application_headers=dict(FORGED))
    module.admit(returning)
    assert returning.properties["application_headers"] == FORGED


#: What is no header of a message, in the table below.
OPTIONS = ("exchange", "key", "content_type")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"key": ""}, "it has no destination: neither a routing key nor rabbitdelay-exchange"),
        ({"key": "secret"}, "check-in may not reach the queue 'secret': see rabbitdelay_checkin_"),
        (
            {"key": "secret", headers.EXCHANGE: "office"},
            "check-in may not reach the exchange 'office': see rabbitdelay_checkin_allowed",
        ),
        (
            {headers.EXCHANGE: False},
            "its header rabbitdelay-exchange is False, not an exchange's name",
        ),
        *(
            ({"x-delay": wrong}, f"x-delay is {wrong!r}, not a number of milliseconds")
            for wrong in ("soon", True, float("inf"), "1_000", " 5", "٣", "")
        ),
        ({"x-delay": "9" * 70_000}, "x-delay is '999"),
        (
            {"exchange": "t.meditated", headers.DUE: "soon"},
            "it returned from meditation without a valid header rabbitdelay-due: 'soon'",
        ),
        ({"x-delay": 1, "CC": ["secret"]}, "it has the header CC"),
        ({"BCC": ["secret"]}, "it has the header BCC"),
        ({"content_type": ENVELOPE, "x-delay": 1}, "it is an envelope"),
        ({"content_type": ENVELOPE.replace("1", "2"), "x-delay": 1}, "it is an envelope"),
        ({"a": [DEEP]}, "its headers nest tables and arrays more than 32 deep"),
    ],
)
def test_what_is_refused_is_told_briefly(receive: Any, given: dict[str, Any], reason: str) -> None:
    told = {name: value for name, value in given.items() if name not in OPTIONS}
    options = {name: given[name] for name in OPTIONS if name in given}
    with pytest.raises(UnprocessableMessage) as caught:
        receive(message(**options, application_headers=told))
    assert caught.value.reason.startswith(reason)
    assert len(caught.value.reason) < 500


def test_a_task_with_callbacks_is_let_in_only_from_a_trusted_client(receive: Any) -> None:
    told = {"task": "t", "id": "1", "callbacks": ["evil"]}
    task = message(application_headers=told, content_type="application/json")
    with pytest.raises(UnprocessableMessage, match="rabbitdelay_checkin_trusted"):
        receive(task)
    trusting = CheckIn(TOPOLOGY, lambda exchange, key: True, trusts_clients=True)
    (outgoing,) = trusting.receive(task)
    assert outgoing.message.headers.others == told
