"""Faults that an operator, or an accident, plants on a broker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import amqp
from kombu import Exchange, Queue

from celery_rabbitdelay.levels.entities import PROBE
from celery_rabbitdelay.levels.layout import custom
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.declaration import delete, forget
from celery_rabbitdelay.schedules.beat import put_beat
from celery_rabbitdelay.schedules.record import Records
from celery_rabbitdelay.testing import wait_for
from tests import node_control
from tests.integration.management import QUORUM, Place

#: The policy that the documentation recommends.
GUARD: dict[str, Any] = {"pattern": r"^shop\.", "priority": 1000, "overflow": "reject-publish"}

Plant = Callable[[Place], object]


def channel(place: Place) -> Any:
    return place.connection.default_channel


def without_queue(place: Place) -> None:
    channel(place).queue_delete("shop.ms.300")


def without_marker(place: Place) -> None:
    place.topology.identity.marker(channel(place)).delete()


def without_levels(place: Place) -> None:
    delete(place.connection, place.topology)


def no_alternate(place: Place) -> None:
    channel(place).exchange_delete("shop.meditated")
    Exchange("shop.meditated", type="fanout")(channel(place)).declare()
    channel(place).queue_bind("shop.checkin", "shop.meditated")


def other_layout(place: Place) -> None:
    guard = place.topology.identity.guard
    guard(channel(place)).delete()
    arguments = {"alternate-exchange": "shop.layout.other"}
    Exchange(guard.name, type="fanout", arguments=arguments)(channel(place)).declare()


def unbound_digit(place: Place) -> None:
    binding = next(each for each in place.topology.bindings if each.target == "shop.seconds.3")
    channel(place).queue_unbind(binding.target, binding.source, binding.pattern)


def copies_of_all(place: Place) -> None:
    copies = Queue("copies", queue_arguments=QUORUM)
    copies(channel(place)).declare()
    channel(place).queue_bind("copies", "shop.delivery", "#")


def foreign_binding(place: Place) -> None:
    channel(place).queue_bind("shop.undeliverable", "amq.topic", "#")


def consumer(place: Place) -> None:
    channel(place).basic_consume("shop.seconds.3", arguments={"x-priority": -10})


def policy(pattern: str, **keys: Any) -> Plant:
    return lambda place: place.policy(pattern, **keys)


def operator_policy_despite_the_guard(place: Place) -> None:
    place.policy(**GUARD)
    place.policy(r"^shop\.ms", kind="operator-policies", message_ttl=50)


def never_declares(place: Place) -> None:
    another_destination(place)
    place.settings = replace(place.settings, declare="never")


def another_destination(place: Place) -> None:
    place.destinations.append(Queue("invoices", queue_arguments=QUORUM))


def unbound_destination(place: Place) -> None:
    pattern = place.topology.keys.destination_pattern("orders")
    channel(place).queue_unbind("orders", "shop.delivery", pattern)


def unbound_without_distribution(place: Place) -> None:
    unbound_destination(place)
    place.settings = replace(place.settings, modules=("check-in",))


def classic_destination(place: Place) -> None:
    channel(place).queue_delete("orders")
    place.orders.queue_arguments = {}
    forget(place.connection)
    place.declare()


def may_not_declare(place: Place) -> None:
    place.user(configure=r"^(orders|shop\.(layout|s).*|amq\.gen.*)", write=".*", read=".*")


def other_destination(place: Place) -> None:
    place.orders.queue_arguments = {**QUORUM, "x-delivery-limit": 3}


def older_layout(place: Place) -> None:
    """The exchanges stay, and messages wait in a queue of an older layout."""
    older = Topology("shop", custom([("hours", 3, 3600), ("minutes", 60, 60)]))
    for exchange in older.exchanges[1:3]:
        exchange(channel(place)).declare()
    for queue in older.digit_queues[:3]:
        queue(channel(place)).queue_declare()
    channel(place).basic_publish(amqp.Message("late"), "", "shop.hours.1")
    wait_for(
        lambda: channel(place).queue_declare("shop.hours.1", passive=True).message_count,
        "the message",
    )


def passing_destinations(place: Place) -> None:
    place.destinations += [Queue("a", exclusive=True), Queue("b", auto_delete=True)]


def known_to_refuse(place: Place) -> None:
    place.policy("orders", max_length=5, overflow="reject-publish")
    place.settings = replace(place.settings, may_refuse=["ord*"])


def full_destination(place: Place) -> None:
    """Dead-lettering holds due messages, because the queue of their task takes no more."""
    channel(place).queue_delete("orders")
    refusing = {**QUORUM, "x-max-length": 1, "x-overflow": "reject-publish"}
    place.orders.queue_arguments = refusing
    forget(place.connection)
    place.declare()

    def publish(exchange: str, key: str, times: int) -> None:
        # A queue counts a message when it has confirmed it, and not before.
        with place.connection.clone(transport_options={"confirm_publish": True}) as own:
            channel: Any = own.default_channel
            for _ in range(times):
                channel.basic_publish(amqp.Message("due"), exchange, key)

    def depth() -> int:
        return int(channel(place).queue_declare("orders", passive=True).message_count)

    # RabbitMQ tells those who publish to a queue first when it is above its bound that it refuses.
    publish("", "orders", 2)
    wait_for(lambda: depth() == 2, "a full queue")
    route = place.topology.route(0.1, "orders")
    publish(route.exchange, route.routing_key, 8)


def limited(place: Place) -> None:
    queues = place.api.get("queues", place.name, disable_stats="true")
    place.put("vhost-limits", place.name, "max-queues", value=len(queues))


def blocked(place: Place) -> None:
    """A memory alarm and a disk alarm, which last until somebody changes the limits."""
    node_control.set_memory_limit(place.node, "{absolute, 1000000}")
    node_control.set_disk_limit(place.node, "{mem_relative, 1.0e6}")
    place.is_blocked = place.app().rabbitdelay.is_blocked


def nobody_declares(place: Place) -> None:
    without_levels(place)
    place.settings = replace(place.settings, declare="never")


def classic_levels(place: Place) -> None:
    without_levels(place)
    place.settings = replace(place.settings, queue_type="classic")
    place.topology = place.settings.topology
    forget(place.connection)
    place.declare()


def without_answers(place: Place) -> None:
    place.workers = {}


def late_probe(place: Place) -> None:
    place.workers = {"worker": {PROBE: {"prefix": "shop", "late": {"seconds": 45.0}}}}


def schedule(change: Callable[[Records, str], None]) -> Plant:
    """Change what Redis notes of an entry of the application's beat_schedule."""

    def plant(place: Place) -> None:
        place.app_settings = {
            "rabbitdelay_registry_url": place.redis_url,
            "rabbitdelay_registry_prefix": place.name,
            "beat_schedule": {"nightly": {"task": "look", "schedule": 3600}},
        }
        delays = place.app().rabbitdelay
        put_beat(delays.schedules)
        place.schedules = known = Records(delays.registry)
        for name in known.all():
            change(known, name)

    return plant


def overdue(records: Records, name: str) -> None:
    records.note_due({name: 0})


def half_put(records: Records, name: str) -> None:
    records.note(name, unsent=1)


def without_its_task(records: Records, name: str) -> None:
    records.note(name, message="")


def without_redis(place: Place) -> None:
    place.app_settings = {"rabbitdelay_registry_url": "redis://127.0.0.1:1"}
    place.schedules = Records(place.app().rabbitdelay.registry)


def fast_clock(place: Place) -> None:
    place.clock_ahead = 90


#: What is no fault.
SOUND: dict[str, Plant] = {
    "nothing": lambda place: None,
    "destinations-that-go-with-their-consumer": passing_destinations,
    # No level waits longer; where there is an argument, that of a policy does not count.
    "harmless-policy": policy(
        r"^shop\.(seconds|ms)", message_ttl=5000, dead_letter_exchange="amq.fanout"
    ),
    "destination-that-is-known-to-refuse": known_to_refuse,
    # The documentation recommends it.
    "bounded-checkin": policy(r"^shop\.checkin$", max_length=1000, max_length_bytes=10**6),
}

Fault = tuple[Plant, str, set[str]]


def danger(plant: Plant, *codes: str) -> Fault:
    return plant, "danger", {*codes}


def warning(plant: Plant, *codes: str) -> Fault:
    return plant, "warning", {*codes}


def note(plant: Plant, *codes: str) -> Fault:
    return plant, "note", {*codes}


#: What is planted, how bad it is, and the codes that have to be found, no others.
FAULTS: dict[str, Fault] = {
    "queue-deleted": danger(without_queue, "missing"),
    "marker-deleted": warning(without_marker, "marker-missing"),
    "nothing-declared": warning(without_levels, "not-declared"),
    "no-alternate-exchange": danger(no_alternate, "differs"),
    "other-layout": danger(other_layout, "layout-conflict"),
    "digit-unbound": danger(unbound_digit, "binding-missing"),
    "copies-of-all": danger(copies_of_all, "binding-additional"),
    "foreign-binding": danger(foreign_binding, "binding-additional"),
    "consumer": danger(consumer, "level-consumed"),
    "expires": danger(policy(r"^shop\.", expires=3_600_000), "policy-expires"),
    "checkin-that-drops": danger(
        policy("checkin", max_length=10, overflow="drop-head"),
        "policy-max-length",
        "policy-overflow",
    ),
    "other-routing-key": danger(
        policy(r"\.ms\.", dead_letter_routing_key="elsewhere"), "policy-dead-letter"
    ),
    "drop-undeliverable": danger(
        policy("undeliverable", delivery_limit=5), "policy-drops-undeliverable"
    ),
    "impatient-module": warning(policy("distribution", delivery_limit=5), "policy-delivery-limit"),
    "operator-policy": danger(operator_policy_despite_the_guard, "policy-message-ttl"),
    "destination-expires": warning(policy("orders", expires=60_000), "destination-expires"),
    "destination-ttl": warning(policy("orders", message_ttl=1000), "destination-message-ttl"),
    "destination-drops-poison": warning(
        policy("orders", delivery_limit=5), "destination-delivery-limit"
    ),
    "destination-drops": warning(policy("orders", max_length=5), "destination-drops"),
    "destination-refuses": danger(
        policy("orders", max_length=5, overflow="reject-publish"), "destination-refuses"
    ),
    "destination-not-declared": danger(never_declares, "destination-missing"),
    "destination-not-yet-declared": note(another_destination, "destination-not-declared"),
    "destination-unbound": warning(unbound_destination, "destination-unbound"),
    "destination-cut-off": danger(unbound_without_distribution, "destination-cut-off"),
    "destination-classic": note(classic_destination, "destination-classic"),
    "destination-differs": danger(other_destination, "destination-differs"),
    "may-not-declare": danger(may_not_declare, "permission-missing"),
    "older-layout": danger(older_layout, "orphan", "orphan-empty"),
    "full-destination": note(full_destination, "held"),
    "limited": danger(limited, "queue-limit"),
    "blocked": danger(blocked, "publishers-blocked"),
    "nobody-declares": danger(nobody_declares, "nobody-declares"),
    "classic-levels": warning(classic_levels, "classic-levels"),
    "no-worker-probes": note(without_answers, "probe-unknown"),
    "late-probe": danger(late_probe, "probe-failed"),
    "overdue-schedule": danger(schedule(overdue), "schedule-overdue"),
    "schedule-half-put": warning(schedule(half_put), "schedule-unsent"),
    "schedule-without-its-task": warning(schedule(without_its_task), "schedule-lost"),
    "redis-away": danger(without_redis, "registry-unavailable"),
    "clock-ahead": warning(fast_clock, "clock-difference"),
}
