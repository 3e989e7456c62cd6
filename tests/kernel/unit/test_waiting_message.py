"""Whatever becomes of a waiting message, it keeps its task, its body, its headers, its due time."""

import math
from collections.abc import Callable
from typing import Any

import amqp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules import limits
from celery_rabbitdelay.modules.checkin import CheckIn
from celery_rabbitdelay.modules.distribution import Distribution
from celery_rabbitdelay.modules.forwarding import (
    EarlyMessages,
    Outgoing,
    Redelivery,
    to_undeliverable,
)
from celery_rabbitdelay.publishing.message import WaitingMessage
from tests.kernel.unit.waiting import waiting

TOPOLOGY = Topology()
MODULES = TOPOLOGY.module_queues
OLD = Topology("old")
DUE = 1_900_000_000_000

texts = st.text(max_size=8)
users = st.dictionaries(
    texts.filter(lambda name: not name.startswith(("rabbitdelay-", "x-", "CC", "BCC"))),
    st.none() | st.booleans() | texts,
    max_size=3,
)


@st.composite
def received(draw: Callable[[Any], Any]) -> amqp.Message:
    """A task's message as a module receives it, for an exchange or for one queue."""
    priority = draw(st.integers(0, 255))
    says: dict[str, Any] = {
        header_names.DUE: draw(st.integers(0, 2 * DUE)),
        header_names.EXCHANGE: draw(texts.filter(bool)),
        header_names.ROUTING_KEY: draw(texts),
    }
    if draw(st.booleans()):
        says |= {header_names.QUEUE: "letters", header_names.EXCHANGE: draw(texts)}
    if priority > header_names.MAX_PRIORITY:
        says[header_names.PRIORITY] = priority
    says |= draw(st.just({}) | st.just({header_names.KEY: "k", header_names.COPY: "c"}))
    message = amqp.Message(
        draw(st.binary(max_size=8)),
        application_headers={**draw(users), **says, "x-death": [], "id": "7"},
        correlation_id=draw(st.none() | st.just("7")),
        priority=min(priority, header_names.MAX_PRIORITY),
        app_id="shop",
    )
    message.delivery_info = {"exchange": "", "routing_key": ""}
    return message


def after_failure(message: amqp.Message) -> WaitingMessage:
    outgoing = Outgoing("office", "paper", waiting(message))
    return Redelivery(TOPOLOGY, 2**40).after_failure(outgoing, outgoing.message.headers, "").message


def put_back(message: amqp.Message) -> WaitingMessage:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "MAX_DELAY", math.inf)
        patch.setattr(wall_clock, "ns", lambda: -wall_clock.NS_PER_MS)
        early = EarlyMessages(TOPOLOGY, 0).put_back(waiting(message))
    assert early is not None
    return early.message


def after_meditation(message: amqp.Message) -> WaitingMessage:
    message.delivery_info = {"exchange": MODULES.meditated.name, "routing_key": "letters"}
    (outgoing,) = CheckIn(TOPOLOGY, lambda exchange, key: True).receive(message)
    return outgoing.message


def until_upgraded(message: amqp.Message) -> WaitingMessage:
    return Redelivery(TOPOLOGY, 2**40).until_upgraded(message, "it is of a later version").message


def undeliverable(message: amqp.Message) -> WaitingMessage:
    return to_undeliverable(TOPOLOGY, Outgoing("", "q", waiting(message)), "why").message


def distributed(message: amqp.Message) -> WaitingMessage:
    (outgoing,) = Distribution(TOPOLOGY).receive(message)
    return outgoing.message


WAYS = [after_failure, put_back, after_meditation, until_upgraded, undeliverable]


@pytest.mark.parametrize("way", [*WAYS, distributed], ids=lambda way: way.__name__)
@settings(max_examples=40)
@given(message=received())
def test_a_message_stays_what_it_is_on_each_way(way: Any, message: amqp.Message) -> None:
    assert_it_stays_what_it_is(way, message)


def assert_it_stays_what_it_is(way: Any, message: amqp.Message) -> None:
    before = waiting(message)
    after = way(message)
    says, said = after.headers, before.headers
    # It is read as the broker returns it, and some ways keep all headers as they came.
    again = waiting(after.amqp()).headers
    assert (after.task_id, after.body, again.others) == (before.task_id, before.body, said.others)
    assert (says.due_ms, says.registry) == (said.due_ms, said.registry)
    assert after.properties["app_id"] == "shop"
    priority, high = before.properties["priority"], said.priority
    if way is distributed:
        # It gives back what the levels do not take.
        assert (after.properties["priority"], says.priority) == (high or priority, None)
    else:
        assert (after.properties["priority"], says.priority) == (priority, high)
        assert (says.exchange, says.routing_key, says.queue) == said[1:4]
