"""What is published elsewhere for a message that waits, whoever has written it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import amqp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.kombu import Topology, binary, clock, custom
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.modules.forwarding import Outgoing
from celery_rabbitdelay.operations.moving.migration import Migration
from celery_rabbitdelay.operations.moving.mover import Stay

SOURCE = Topology("old", binary(), shards=3)
TARGET = Topology("new", clock(), shards=2)
MODULES = SOURCE.module_queues

#: Milliseconds since 1970, ten years ahead of any run of these tests.
DUE = time.time_ns() // 1_000_000 + 3650 * 86_400_000


@pytest.fixture
def ensured() -> list[str]:
    """The queues that were bound at the target."""
    return []


@pytest.fixture
def convert(ensured: list[str]) -> Callable[..., Outgoing]:
    """Convert a message that was in a queue of the source."""
    migration = Migration(SOURCE, TARGET, ensured.append)

    def call(queue: str, key: str, headers: dict[str, Any], **more: Any) -> Outgoing:
        exchange = more.pop("exchange", "old.x")
        message = amqp.Message("body", application_headers=headers, **more)
        message.delivery_info = {"exchange": exchange, "routing_key": key, "delivery_tag": 1}
        return migration.convert(message, queue)

    return call


def task(**more: Any) -> dict[str, Any]:
    return {
        header_names.DUE: DUE,
        header_names.QUEUE: "emails",
        header_names.EXCHANGE: "",
        header_names.ROUTING_KEY: "emails",
        "id": "1",
        **more,
    }


def key_of(topology: Topology, destination: str, seconds: float = 3600) -> str:
    return topology.route(seconds, destination, "1").routing_key


def digits_of(outgoing: Outgoing) -> int:
    """Return the milliseconds that a message waits in the target's levels."""
    digits = TARGET.keys.digits(outgoing.routing_key)
    assert digits is not None
    levels = zip(TARGET.layout.levels, digits, strict=True)
    return sum(level.place_ms * int(digit) for level, digit in levels)


@pytest.mark.parametrize("destination", ["daily.reports", DISTRIBUTION])
def test_what_waits_goes_on_for_the_rest(
    convert: Callable[..., Outgoing], ensured: list[str], destination: str
) -> None:
    queue = SOURCE.digit_queues[0].name
    outgoing = convert(queue, key_of(SOURCE, destination), task(), correlation_id="1")
    assert outgoing.exchange.startswith("new.")
    assert outgoing.routing_key.split(".")[-1] == key_of(TARGET, destination).split(".")[-1]
    now = time.time_ns() // 1_000_000
    # Rounded up to ticks: never early.
    assert DUE - now <= digits_of(outgoing) <= DUE - now + 60_000
    assert ensured == ([destination] if destination else [])
    assert outgoing.message.headers.to_headers() == task()
    assert outgoing.reroute is not None


def test_what_the_broker_has_added_goes_and_the_users_own_stays(convert: Any) -> None:
    deaths = {"x-death": [{"queue": "old.seconds.1"}], "x-delivery-count": 2, "x-mine": "kept"}
    options = {"priority": 3, "expiration": "5000"}
    outgoing = convert("old.s.1", key_of(SOURCE, "emails"), task(**deaths), **options)
    assert outgoing.message.headers.to_headers() == task(**{"x-mine": "kept"})
    properties = outgoing.message.amqp().properties
    # The levels drop no message before it is due.
    assert (properties["priority"], properties["expiration"]) == (3, None)


def test_a_message_that_is_due_goes_to_its_queue_at_once(convert: Callable[..., Outgoing]) -> None:
    past = {**task(), header_names.DUE: 5}
    outgoing = convert("old.s.1", key_of(SOURCE, "emails"), past)
    assert (outgoing.exchange, digits_of(outgoing)) == ("new.delivery", 0)


def test_in_meditation_the_key_is_the_bare_destination(convert: Callable[..., Outgoing]) -> None:
    outgoing = convert(MODULES.meditation.name, "daily.reports", task())
    assert outgoing.routing_key.endswith(".daily%2Ereports")
    back = convert(MODULES.checkin.name, "daily.reports", task(), exchange=MODULES.meditated.name)
    assert back.routing_key.endswith(".daily%2Ereports")


def test_a_delay_above_the_targets_capacity_meditates_there() -> None:
    small = Topology("new", custom([("seconds", 10, 1)]))
    migration = Migration(SOURCE, small, lambda name: None)
    message = amqp.Message("", application_headers=task())
    message.delivery_info = {"exchange": "", "routing_key": key_of(SOURCE, "emails")}
    outgoing = migration.convert(message, "old.s.1")
    assert (outgoing.exchange, outgoing.routing_key) == ("new.meditation", "emails")


def test_what_a_client_has_checked_in_stays_so_at_the_target(convert: Any) -> None:
    headers = {"x-delay": 5000, "rabbitdelay-exchange": "reports"}
    outgoing = convert(MODULES.checkin.name, "daily", headers, expiration="9000")
    assert (outgoing.exchange, outgoing.routing_key) == ("new.checkin", "daily")
    assert outgoing.message.headers.to_headers() == headers
    assert outgoing.message.amqp().properties["expiration"] == "9000"


def test_an_undeliverable_message_keeps_its_reason(convert: Callable[..., Outgoing]) -> None:
    known = convert(MODULES.undeliverable.name, "key", {header_names.REASON: "no such queue"})
    assert known.exchange == "new.undeliverable"
    assert known.message.headers.to_headers() == {header_names.REASON: "no such queue"}
    died = {"x-death": [{"queue": MODULES.checkin.name, "routing-keys": ["key"]}]}
    told = convert(MODULES.undeliverable.name, "key", died).message.headers.to_headers()
    assert told == {
        header_names.REASON: "delivery limit of old.checkin exceeded: no worker acknowledged it"
    }


def test_a_long_name_is_hashed_in_the_key(convert: Any, ensured: list[str]) -> None:
    name = "q" * 200
    convert("old.s.1", key_of(SOURCE, name), task(**{header_names.QUEUE: name}))
    assert ensured == [name]
    with pytest.raises(UnprocessableMessage, match="hash"):
        convert("old.s.1", key_of(SOURCE, name), task())


def test_a_priority_too_high_for_the_levels_goes_through_distribution(convert: Any) -> None:
    outgoing = convert("old.s.1", key_of(SOURCE, "emails"), task(), priority=9)
    assert outgoing.routing_key.endswith(".%distribution")
    assert outgoing.message.amqp().properties["priority"] == 4
    assert outgoing.message.headers.to_headers()[header_names.PRIORITY] == 9


@pytest.mark.parametrize("due", [None, -1, 2**63])
def test_a_message_without_a_due_time_is_undeliverable(convert: Any, due: Any) -> None:
    with pytest.raises(UnprocessableMessage, match="rabbitdelay-due"):
        convert("old.s.1", key_of(SOURCE, "emails"), task(**{header_names.DUE: due}))


@given(key=st.text(max_size=60))
def test_no_routing_key_breaks_the_migration(key: str) -> None:
    migration = Migration(SOURCE, TARGET, lambda name: None)
    message = amqp.Message("", application_headers=task())
    message.delivery_info = {"exchange": "", "routing_key": key}
    for queue in SOURCE.queues:
        try:
            migration.convert(message, queue.name)
        except (Stay, UnprocessableMessage):
            assert queue.name not in (MODULES.checkin.name, MODULES.undeliverable.name)


def test_a_message_of_another_layout_stays(convert: Callable[..., Outgoing]) -> None:
    with pytest.raises(Stay, match="another layout"):
        convert("old.s.1", "0.1.emails", task())
