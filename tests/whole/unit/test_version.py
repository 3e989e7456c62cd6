"""A message of a later version is neither opened, dropped nor passed on by this one."""

from collections.abc import Iterator
from typing import Any

import amqp
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kombu import Connection

from celery_rabbitdelay.exceptions import LaterVersion
from celery_rabbitdelay.kombu import DelayedProducer, Publisher, Topology
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.headers import ENVELOPE, MESSAGE_VERSION, later_version
from celery_rabbitdelay.modules.checkin import CheckIn
from celery_rabbitdelay.modules.distribution import Distribution
from celery_rabbitdelay.modules.forwarding import Redelivery
from celery_rabbitdelay.modules.limits import AllowedDestinations
from celery_rabbitdelay.operations.conversion import Migration
from celery_rabbitdelay.operations.mover import Stay
from celery_rabbitdelay.operations.redriving import Redriving
from tests.kernel.unit.clock import NS_PER_S, Clock, frozen

TOPOLOGY = Topology()
MODULES = TOPOLOGY.module_queues
NOW_MS = 1_900_000_000_000

#: What only a later version can read: by its header, and by its content type.
LATER: list[dict[str, Any]] = [
    {"application_headers": {header_names.VERSION: MESSAGE_VERSION + 1}},
    {"content_type": "application/vnd.rabbitdelay.envelope.2"},
]

in_each_way = pytest.mark.parametrize("given_as", LATER)


@pytest.fixture(autouse=True)
def clock() -> Iterator[Clock]:
    """A clock that stands at the time at which the message is due."""
    with frozen(NOW_MS / 1000) as clock:
        yield clock


def later_message(given: dict[str, Any], **headers: Any) -> amqp.Message:
    """Return a message that an hour's wait has brought to distribution."""
    own = {header_names.DUE: NOW_MS, header_names.EXCHANGE: "", header_names.ROUTING_KEY: "q"}
    every = {**own, **given.get("application_headers", {}), "rabbitdelay-new": [1], **headers}
    message = amqp.Message(b"\0later", **{**given, "application_headers": every, "priority": 3})
    key = TOPOLOGY.keys.key(0, [0] * len(TOPOLOGY.layout.levels), "")
    message.delivery_info = {"exchange": TOPOLOGY.delivery.name, "routing_key": key}
    return message


@given(st.one_of(st.integers(), st.floats(), st.text(), st.binary(), st.none(), st.booleans()))
@example(True)
@example(1.0)
@example(MESSAGE_VERSION)
def test_nothing_is_opened_by_guess(version: Any) -> None:
    reads = type(version) is int and 1 <= version <= MESSAGE_VERSION
    for content_type in (None, "application/json", ENVELOPE):
        found = later_version({header_names.VERSION: version}, content_type)
        assert (found is None) == reads
    assert later_version({}, "application/vnd.rabbitdelay.parcel.1") is not None


@in_each_way
def test_distribution_and_redriving_leave_it_to_a_later_version(given_as: dict[str, Any]) -> None:
    producer = DelayedProducer(Publisher(Connection("amqp://")), TOPOLOGY)
    redriving = Redriving(producer, AllowedDestinations.matching(["*"]))
    with pytest.raises(LaterVersion, match="needs a later version"):
        list(Distribution(TOPOLOGY).receive(later_message(given_as)))
    with pytest.raises(LaterVersion):
        redriving.redriven(later_message(given_as))


@in_each_way
def test_it_goes_back_into_the_levels_for_a_day_and_then_is_undeliverable(
    given_as: dict[str, Any], clock: Clock
) -> None:
    redelivery = Redelivery(TOPOLOGY, 86_400, lambda a, b: 1.0)
    message = before = later_message(given_as)
    for attempt in range(1, 145):
        outgoing = redelivery.until_upgraded(message, "it is of a later version")
        assert outgoing.reroute is not None
        message = outgoing.message.amqp()
        headers = dict(message.properties["application_headers"])
        assert headers.pop(header_names.ATTEMPTS) == attempt
        clock.now_ns += 600 * NS_PER_S
    for name in ("FAILED_SINCE", "FIRST_REASON", "REASON"):
        headers.pop(getattr(header_names, name))
    assert (headers, message.body) == (before.properties["application_headers"], before.body)
    for name in ("priority", "content_type"):
        assert message.properties.get(name) == before.properties.get(name)
    outgoing = redelivery.until_upgraded(message, "it is of a later version")
    assert outgoing.exchange == MODULES.undeliverable.exchange.name
    assert "145 attempts" in outgoing.message.headers.to_headers()[header_names.REASON]


def test_one_that_is_early_waits_until_it_is_due_and_that_is_no_attempt(clock: Clock) -> None:
    clock.now_ns -= 3600 * NS_PER_S
    outgoing = Redelivery(TOPOLOGY, 0).until_upgraded(later_message(LATER[0]), "later")
    assert outgoing.exchange == "rabbitdelay.hours.x1"
    assert header_names.ATTEMPTS not in outgoing.message.headers.to_headers()


@in_each_way
def test_it_meditates_on_unopened(given_as: dict[str, Any]) -> None:
    message = later_message(given_as, **{header_names.DUE: 2 * NOW_MS})
    message.delivery_info = {"exchange": MODULES.meditated.name, "routing_key": "q"}
    (outgoing,) = CheckIn(TOPOLOGY, lambda exchange, key: False).receive(message)
    assert (outgoing.exchange, outgoing.routing_key) == (MODULES.meditation.exchange.name, "q")
    for name in ("application_headers", "content_type"):
        assert outgoing.message.amqp().properties.get(name) == message.properties.get(name)


@in_each_way
def test_migrate_leaves_it_unless_it_is_undeliverable(given_as: dict[str, Any]) -> None:
    migration = Migration(TOPOLOGY, Topology("new"), lambda queue: None)
    message = later_message(given_as)
    queues = [each for each in TOPOLOGY.queues if each is not MODULES.undeliverable]
    for queue in queues[::20]:
        with pytest.raises(Stay, match="later version"):
            migration.convert(message, queue.name)
    moved = migration.convert(message, MODULES.undeliverable.name)
    assert moved.exchange == "new.undeliverable"
