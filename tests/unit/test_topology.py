"""The way of a message through the levels, walked by hand over the declared bindings."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_rabbitdelay.exceptions import DelayTooLong, InvalidDelay
from celery_rabbitdelay.kombu import Due, Layout, binary, clock
from celery_rabbitdelay.levels.topology import PASS_THROUGH_TTL, Topology
from tests.unit.broker_model import BrokerModel
from tests.unit.clock import frozen
from tests.unit.strategies import destinations, layouts


@given(layouts, destinations, st.data())
@settings(max_examples=50, deadline=None)
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


@given(layouts)
@settings(max_examples=20)
def test_skipping_zeros_never_crosses_an_exchange_for_nothing(layout: Layout) -> None:
    topology = Topology(layout=Layout(layout.name, layout.levels, "skip"))
    to_exchanges = [binding for binding in topology.bindings if binding.target_is_exchange]
    assert {binding.target for binding in to_exchanges} == {topology.delivery.name}
    assert len(to_exchanges) == len(layout.levels)


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


@pytest.mark.parametrize(
    ("topology", "fingerprint"),
    [
        (Topology(), "clock-a934f5bbf4-quorum-v41a81445ab"),
        (Topology(queue_type="classic"), "clock-a934f5bbf4-classic-v41a81445ab"),
        (
            Topology("p", clock(zeros="skip"), shards=2),
            "clock-c61849cdd8-quorum-s2-v41a81445ab",
        ),
        (Topology("p", binary(levels=5, zeros="queue")), "binary-03b67241a4-quorum-v41a81445ab"),
    ],
)
def test_a_topology_stays_as_it_is(topology: Topology, fingerprint: str) -> None:
    """Brokers refuse to mix two declarations; a change makes users move to another prefix.

    The last word is a digest of all exchanges, queues, bindings and arguments.
    """
    assert topology.identity.fingerprint == fingerprint


def test_a_delay_above_the_capacity_leads_to_meditation_with_its_destination_as_key() -> None:
    topology = Topology()
    assert topology.route(0, "q")[::2] == ("rabbitdelay.delivery", ())
    longest = timedelta(milliseconds=topology.layout.capacity_ms)
    assert topology.route(longest, "q").exchange == "rabbitdelay.days.x1000"
    above = topology.route(longest + timedelta(milliseconds=1), "daily.reports")
    assert above == ("rabbitdelay.meditation", "daily.reports", ("rabbitdelay.meditation",))
    with pytest.raises(DelayTooLong):
        topology.layout.check_capacity(topology.layout.capacity_ms + 1)


def test_a_tolerance_saves_stops() -> None:
    topology = Topology()
    assert topology.route(3599.95, "q").stops == ("rabbitdelay.hours.1",)
    assert len(topology.route(3590.5, "q").stops) == 3
    assert topology.route(3590.5, "q", tolerance=60).stops == ("rabbitdelay.hours.1",)
    assert topology.route(Due.after(3590.5, 60_000), "q").stops == ("rabbitdelay.hours.1",)
    with pytest.raises(InvalidDelay, match="tolerance"):
        topology.route(60, "q", tolerance=-1)


@frozen()
def test_a_due_time_is_routed_by_what_remains_of_its_delay() -> None:
    due = Due.after(3600)
    assert Topology().route(due, "q") == Topology().route(3600, "q")
    half_over = due._replace(at_ns=due.at_ns - 1_800_000_000_000)
    assert Topology().route(half_over, "q").exchange == "rabbitdelay.minutes.x1"
