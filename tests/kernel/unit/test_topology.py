"""What is declared, and the route of a message through it, walked over the declared bindings."""

import hashlib
import json
from datetime import timedelta
from itertools import product
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kombu import Exchange, Queue

from celery_rabbitdelay.exceptions import DelayTooLong
from celery_rabbitdelay.kombu import Due, Layout, binary, clock
from celery_rabbitdelay.levels.layout import Zeros, geometric
from celery_rabbitdelay.levels.topology import (
    ARGUMENTS,
    PASS_THROUGH_TTL,
    QueueType,
    Topology,
)
from celery_rabbitdelay.publishing.refusals import conflict_with
from tests.kernel.unit.broker_model import BrokerModel
from tests.kernel.unit.clock import frozen
from tests.kernel.unit.strategies import destinations, layouts

SMALL = geometric(levels=2, factor=3)
HOUR_MS = 3_600_000


@given(layouts, destinations, st.data())
@settings(max_examples=30, deadline=None)
def test_every_delay_ends_as_it_has_to(
    layout: Layout, destination: str, data: st.DataObject
) -> None:
    delay_ms = data.draw(st.integers(1, layout.capacity_ms))
    topology = Topology(layout=layout, shards=data.draw(st.integers(1, 3)))
    task_id = data.draw(st.text())
    route = topology.route(timedelta(milliseconds=delay_ms), destination, task_id)

    walk = BrokerModel(topology, (destination, "other")).walk(route)

    assert walk.delivered_to == {destination}
    assert walk.stops == route.stops
    assert len(set(walk.stops)) == len(walk.stops)
    # It enters at its first digit that is not zero.
    digits = layout.digits(delay_ms)
    first = next(index for index, digit in enumerate(digits) if digit)
    assert route.exchange == f"rabbitdelay.{layout.levels[first].name}"
    assert route.stops[0].startswith(
        f"rabbitdelay.{layout.levels[first].queue_name(digits[first])}"
    )
    # Without a binding, distribution gets it.
    without = BrokerModel(topology, ("other",)).walk(route)
    assert without.delivered_to == {topology.module_queues.distribution.name}
    pass_through = tuple(f"rabbitdelay.{level.queue_name(0)}" for level in layout.levels)
    passes = sum(stop.startswith(pass_through) for stop in walk.stops) * PASS_THROUGH_TTL
    assert 0 <= walk.waited_ms - passes - delay_ms < layout.tick_ms
    assert (walk.waited_ms - passes) % layout.tick_ms == 0


def test_a_message_stays_in_the_shard_of_its_task_and_the_tasks_use_all() -> None:
    topology = Topology(shards=4)
    routes = [topology.route(7 * 3600 + 30, "q", f"task-{number}") for number in range(100)]
    shards = {route.routing_key.split(".")[0]: route.stops for route in routes}
    assert shards == {
        f"s{shard}": (f"rabbitdelay.hours.7.s{shard}", f"rabbitdelay.seconds.30.s{shard}")
        for shard in range(4)
    }
    assert topology.route(60, "q", "task-1") == topology.route(60, "q", "task-1")


@pytest.mark.parametrize("layout", [clock(tick=0.001), binary(tick=0.001, levels=39)])
def test_routing_keys_and_names_fit_into_amqp_s_255_bytes(layout: Layout) -> None:
    topology = Topology("p" * 100, layout, shards=11)
    longest = topology.route(timedelta(milliseconds=layout.capacity_ms), "q" * 255)
    names = [queue.name for queue in topology.queues] + [e.name for e in topology.exchanges]
    for text in (longest.routing_key, topology.identity.marker.name, *names):
        assert len(text.encode()) <= 255


def test_a_queue_gets_its_own_messages_only_though_its_name_ends_another_s() -> None:
    topology = Topology()
    model = BrokerModel(topology, ("reports", "daily.reports", "daily", "*", "#"))
    for destination in ("reports", "daily.reports", "daily", "*", "#"):
        assert model.walk(topology.route(1, destination)).delivered_to == {destination}


def test_every_exchange_of_the_levels_has_an_alternate_exchange() -> None:
    topology = Topology()
    undeliverable = topology.module_queues.undeliverable.exchange
    assert topology.exchanges[0] == undeliverable
    for exchange in topology.exchanges[1:]:
        if exchange == topology.module_queues.paused.exchange:
            assert exchange.arguments is None  # what it cannot route comes back to the worker
            continue
        unrouted = exchange == topology.delivery
        alternate = topology.module_queues.unrouted if unrouted else undeliverable
        assert exchange.arguments == {"alternate-exchange": alternate.name}


def test_a_delay_above_the_capacity_leads_to_meditation_with_its_destination_as_key() -> None:
    topology = Topology()
    assert topology.route(0, "q")[::2] == ("rabbitdelay.delivery", ())
    longest = timedelta(milliseconds=topology.layout.capacity_ms)
    assert topology.route(longest, "q").exchange == "rabbitdelay.days.x1000"
    above = topology.route(longest + timedelta(milliseconds=1), "daily.reports")
    assert above == ("rabbitdelay.meditation", "daily.reports", ("rabbitdelay.meditation",))
    with pytest.raises(DelayTooLong):
        topology.layout.check_capacity(topology.layout.capacity_ms + 1)


@frozen()
def test_a_due_time_is_routed_by_what_remains_of_its_delay() -> None:
    due = Due.after(3600)
    assert Topology().route(due, "q") == Topology().route(3600, "q")
    half_over = due._replace(at_ns=due.at_ns - 1_800_000_000_000)
    assert Topology().route(half_over, "q").exchange == "rabbitdelay.minutes.x1"


def arguments(entity: Queue | Exchange) -> dict[str, Any]:
    found = entity.queue_arguments if isinstance(entity, Queue) else entity.arguments
    return dict(found or {})


@pytest.mark.parametrize(("queue_type", "limited"), [("quorum", True), ("classic", False)])
def test_what_ends_100_workers_is_undeliverable(queue_type: QueueType, limited: bool) -> None:
    modules = Topology("p", queue_type=queue_type).module_queues
    for queue in (modules.checkin, modules.distribution):
        assert arguments(queue)["x-dead-letter-exchange"] == "p.undeliverable"
        assert arguments(queue).get("x-delivery-limit") == (100 if limited else None)
        assert "x-message-ttl" not in arguments(queue)
    held = arguments(modules.undeliverable)
    assert held.get("x-delivery-limit") == (2_147_483_647 if limited else None)
    assert not {"x-message-ttl", "x-dead-letter-exchange"} & set(held)


@pytest.mark.parametrize(
    ("topology", "fingerprint"),
    [
        (Topology(), f"clock-a934f5bbf4-quorum-{ARGUMENTS}"),
        (Topology(queue_type="classic"), f"clock-a934f5bbf4-classic-{ARGUMENTS}"),
        (Topology("p", clock(zeros="skip"), shards=2), f"clock-c61849cdd8-quorum-s2-{ARGUMENTS}"),
        (Topology("p", binary(levels=5, zeros="queue")), f"binary-03b67241a4-quorum-{ARGUMENTS}"),
        (Topology("p", geometric(levels=3)), f"geometric-c118dcb1dc-quorum-{ARGUMENTS}"),
    ],
)
def test_fingerprints_stay_as_they_are(topology: Topology, fingerprint: str) -> None:
    """Where this fails, brokers refuse this version; users have to move to another prefix."""
    assert topology.identity.fingerprint == fingerprint


def test_what_is_declared_does_not_change_by_accident() -> None:
    """Where this fails, another ``ARGUMENTS`` is needed: brokers refuse to change arguments.

    It is the digest of a few small topologies, which have all there is in any topology: three
    levels of base 3 show each kind of binding, and with the second tick their capacity is above
    RabbitMQ's longest TTL.
    """
    kinds = product((0.1, 16_000_000), get_args(Zeros), get_args(QueueType), (1, 2))
    topologies = [
        Topology("p", geometric(tick, 3, 3, zeros), queue_type, shards)
        for tick, zeros, queue_type, shards in kinds
    ]
    # Levels are complete without it.
    optional = topologies[0].module_queues.paused.name

    def written(entity: Exchange | Queue) -> str:
        return json.dumps(arguments(entity), sort_keys=True)

    exchanges = [e for each in topologies for e in each.exchanges if e.name != optional]
    queues = [q for each in topologies for q in each.queues if q.name != optional]
    bindings = [b for each in topologies for b in each.bindings if b.source != optional]
    declared = {
        "exchanges": sorted(
            [e.name, e.type, e.durable, e.auto_delete, written(e)] for e in exchanges
        ),
        "queues": sorted(
            [q.name, q.durable, q.exclusive, q.auto_delete, written(q)] for q in queues
        ),
        "bindings": sorted(map(list, bindings)),
    }
    digest = hashlib.sha256(json.dumps(declared).encode()).hexdigest()[:10]
    assert f"v{digest}" == ARGUMENTS


def test_a_fingerprint_names_all_that_differs_and_the_guard_the_marker_with_it() -> None:
    layout = clock(tick=0.001, zeros="queue")
    identity = Topology("p", layout, "classic", 3).identity
    expected = f"{layout.fingerprint}-classic-s3-{ARGUMENTS}"
    assert (identity.fingerprint, identity.guard.name) == (expected, "p.layout")
    assert identity.marker.name == f"p.layout.{expected}"
    assert arguments(identity.guard) == {"alternate-exchange": identity.marker.name}
    for exchange in (identity.guard, identity.marker):
        assert (exchange.durable, exchange.type) == (True, "fanout")


def refusal(here: Topology, theirs: str) -> str:
    return (
        "PRECONDITION_FAILED - inequivalent arg 'alternate-exchange' for exchange "
        f"'{here.identity.guard.name}' in vhost '/': received '{here.identity.marker.name}' but "
        f"current is '{theirs}'"
    )


@pytest.mark.parametrize("length", [1, 60, 100, 200])
@pytest.mark.parametrize("end", range(200, 256, 9))
def test_a_refusal_that_is_cut_off_names_the_settings_and_does_not_advise_to_delete_the_guard(
    length: int, end: int
) -> None:
    """RabbitMQ cuts its answer after 255 bytes."""
    here, there = Topology("p" * length, SMALL), Topology("p" * length, SMALL, "classic", shards=3)
    reply = refusal(here, there.identity.marker.name)[:end]
    advice = conflict_with(here, f"Exchange.declare: (406) {reply}").advice
    assert "Delete it" not in advice
    assert "rabbitdelay_queue_type or rabbitdelay_shards" in advice
