"""What is published elsewhere for a message that waits, whoever has written it."""

from __future__ import annotations

from collections.abc import Iterator
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
from tests.unit.clock import frozen

SOURCE = Topology("old", binary(), shards=3)
TARGET = Topology("new", clock())
MODULES = SOURCE.module_queues

#: The instant of all that happens here.
NOW = 1_900_000_000


@pytest.fixture(autouse=True, scope="module")
def standstill() -> Iterator[None]:
    with frozen(NOW):
        yield


def convert(
    queue: str,
    key: str,
    headers: dict[str, Any],
    *,
    target: Topology = TARGET,
    ensured: list[str] | None = None,
    exchange: str = "old.x",
    **properties: Any,
) -> Outgoing:
    """Convert a message that was in a queue of the source."""
    migration = Migration(SOURCE, target, [].append if ensured is None else ensured.append)
    message = amqp.Message("body", application_headers=headers, **properties)
    message.delivery_info = {"exchange": exchange, "routing_key": key, "delivery_tag": 1}
    return migration.convert(message, queue)


def task(**more: Any) -> dict[str, Any]:
    return {
        header_names.DUE: (NOW + 3600) * 1000,
        header_names.QUEUE: "emails",
        header_names.EXCHANGE: "",
        header_names.ROUTING_KEY: "emails",
        "id": "1",
        **more,
    }


def key_of(topology: Topology, destination: str, seconds: float = 3600) -> str:
    return topology.route(seconds, destination, "1").routing_key


@pytest.mark.parametrize("destination", ["daily.reports", DISTRIBUTION])
def test_what_waits_goes_on_for_the_rest(destination: str) -> None:
    ensured: list[str] = []
    key = key_of(SOURCE, destination)
    # What the broker has added goes, and the users' own stays.
    deaths = {"x-death": [{"queue": "old.seconds.1"}], "x-delivery-count": 2}
    given, more = task(**{"x-mine": "kept"}), {"priority": 3, "expiration": "5000"}
    outgoing = convert(MODULES.meditation.name, destination, {**given, **deaths}, **more)
    assert outgoing.routing_key == key_of(TARGET, destination)
    outgoing = convert("old.s.1", key, {**given, **deaths}, ensured=ensured, **more)
    assert outgoing.routing_key == key_of(TARGET, destination)
    assert ensured == ([destination] if destination else [])
    assert headers_of(outgoing) == given
    properties = outgoing.message.amqp().properties
    # The levels drop no message before it is due.
    assert (properties["priority"], properties["expiration"]) == (3, None)
    assert outgoing.reroute is not None
    # What comes back from meditation waits for the rest, what is due goes at once, and what waits
    # longer than the target's levels do meditates there.
    back = convert(MODULES.checkin.name, destination, given, exchange=MODULES.meditated.name)
    assert back.routing_key == outgoing.routing_key
    due = convert("old.s.1", key, {**given, header_names.DUE: 5})
    assert (due.exchange, due.routing_key) == ("new.delivery", key_of(TARGET, destination, 0))
    small = Topology("new", custom([("seconds", 10, 1)]))
    assert convert("old.s.1", key, given, target=small).exchange == "new.meditation"


def headers_of(outgoing: Outgoing) -> dict[str, Any]:
    headers: dict[str, Any] = outgoing.message.headers.to_headers()
    return headers


def test_what_no_level_holds_stays_what_it_is() -> None:
    # What a client has checked in.
    headers = {"x-delay": 5000, "rabbitdelay-exchange": "reports"}
    outgoing = convert(MODULES.checkin.name, "daily", headers, expiration="9000")
    assert (outgoing.exchange, outgoing.routing_key) == ("new.checkin", "daily")
    assert headers_of(outgoing) == headers
    assert outgoing.message.amqp().properties["expiration"] == "9000"
    # What is undeliverable keeps its reason, or gets the broker's.
    known = {header_names.REASON: "no such queue"}
    outgoing = convert(MODULES.undeliverable.name, "key", known)
    assert (outgoing.exchange, headers_of(outgoing)) == ("new.undeliverable", known)
    died = {"x-death": [{"queue": MODULES.checkin.name, "routing-keys": ["key"]}]}
    told = headers_of(convert(MODULES.undeliverable.name, "key", died))
    assert told[header_names.REASON].startswith("delivery limit of old.checkin exceeded")


def test_a_long_name_is_hashed_in_the_key() -> None:
    name, ensured = "q" * 200, list[str]()
    named = task(**{header_names.QUEUE: name})
    convert("old.s.1", key_of(SOURCE, name), named, ensured=ensured)
    assert ensured == [name]
    with pytest.raises(UnprocessableMessage, match="hash"):
        convert("old.s.1", key_of(SOURCE, name), task())


def test_a_priority_too_high_for_the_levels_goes_through_distribution() -> None:
    outgoing = convert("old.s.1", key_of(SOURCE, "emails"), task(), priority=9)
    assert outgoing.routing_key.endswith(".%distribution")
    assert outgoing.message.amqp().properties["priority"] == 4
    assert headers_of(outgoing)[header_names.PRIORITY] == 9


def test_a_message_without_a_due_time_is_undeliverable_and_one_of_another_layout_stays() -> None:
    for due in (None, -1, 2**63):
        with pytest.raises(UnprocessableMessage, match="rabbitdelay-due"):
            convert("old.s.1", key_of(SOURCE, "emails"), task(**{header_names.DUE: due}))
    with pytest.raises(Stay, match="another layout"):
        convert("old.s.1", "0.1.emails", task())


@given(key=st.text(max_size=60))
def test_no_routing_key_breaks_the_migration(key: str) -> None:
    for queue in SOURCE.queues:
        try:
            convert(queue.name, key, task(), exchange="")
        except (Stay, UnprocessableMessage):
            assert queue.name not in (MODULES.checkin.name, MODULES.undeliverable.name)
