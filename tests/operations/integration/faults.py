"""Faults that an operator, or an accident, plants on a broker."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import amqp
from kombu import Exchange, Queue

from celery_rabbitdelay.levels.layout import custom
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.declaration import declare_destination, delete, forget
from celery_rabbitdelay.schedules.beat import BeatEntries
from celery_rabbitdelay.schedules.record import Records
from celery_rabbitdelay.testing import wait_for
from tests.operations.integration.management import QUORUM, Place

Plant = Callable[[Place], object]


def channel(place: Place) -> Any:
    return place.connection.default_channel


def without_queue(place: Place) -> None:
    channel(place).queue_delete("shop.ms.300")


def damaged(place: Place) -> None:
    """A level lacks a queue, another one its binding, and the layout its marker."""
    without_queue(place)
    unbound_digit(place)
    place.topology.identity.marker(channel(place)).delete()


def unbound_digit(place: Place) -> None:
    binding = next(each for each in place.topology.bindings if each.target == "shop.seconds.3")
    channel(place).queue_unbind(binding.target, binding.source, binding.pattern)


def leaking(place: Place) -> None:
    """A stranger copies all tasks, and another one consumes from a level."""
    Queue("copies", queue_arguments=QUORUM)(channel(place)).declare()
    channel(place).queue_bind("copies", "shop.delivery", "#")
    channel(place).basic_consume("shop.seconds.3", arguments={"x-priority": -10})


def without_levels(place: Place) -> None:
    delete(place.connection, place.topology)


def longer_ttl(place: Place) -> None:
    channel(place).queue_delete("shop.ms.300")
    queue = next(each for each in place.topology.queues if each.name == "shop.ms.300")
    arguments = {**(queue.queue_arguments or {}), "x-message-ttl": 5000}
    Queue(queue.name, queue_arguments=arguments)(channel(place)).queue_declare()
    bind_again(place, queue.name)


def no_alternate(place: Place) -> None:
    channel(place).exchange_delete("shop.meditated")
    Exchange("shop.meditated", type="fanout")(channel(place)).declare()
    channel(place).queue_bind("shop.checkin", "shop.meditated")


def other_layout(place: Place) -> None:
    guard = place.topology.identity.guard
    guard(channel(place)).delete()
    arguments = {"alternate-exchange": "shop.layout.other"}
    Exchange(guard.name, type="fanout", arguments=arguments)(channel(place)).declare()


def bind_again(place: Place, name: str) -> None:
    for binding in place.topology.bindings:
        if binding.target == name:
            channel(place).queue_bind(name, binding.source, binding.pattern)


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


def nobody_declares(place: Place) -> None:
    without_levels(place)
    place.settings = replace(place.settings, declare="never")


def classic_levels(place: Place) -> None:
    without_levels(place)
    place.settings = replace(place.settings, queue_type="classic")
    forget(place.connection)
    declare_destination(place.connection, place.settings.topology, place.orders)


def without_redis(place: Place) -> None:
    place.app_settings = {"rabbitdelay_registry_url": "redis://127.0.0.1:1"}
    place.delays = place.app().rabbitdelay


def harmless(place: Place) -> None:
    """Policies and queues that are no faults."""
    # No level waits longer; where there is an argument, that of a policy does not count.
    place.policy(r"^shop\.(seconds|ms)", message_ttl=5000, dead_letter_exchange="amq.fanout")
    # The documentation recommends it.
    place.policy(r"^shop\.checkin$", max_length=1000, max_length_bytes=10**6)
    place.policy("orders", max_length=5, overflow="reject-publish")
    place.settings = replace(place.settings, may_refuse=["ord*"])
    # They go with their connection or consumer.
    place.destinations += [Queue("a", exclusive=True), Queue("b", auto_delete=True)]


def bad_policies(place: Place) -> None:
    place.policy(
        r"^shop\.",
        expires=3_600_000,
        message_ttl=50,
        max_length=10,
        overflow="drop-head",
        dead_letter_routing_key="elsewhere",
        delivery_limit=5,
    )


def bad_policies_of_a_destination(place: Place) -> None:
    place.policy("orders", expires=60_000, message_ttl=1000, delivery_limit=5, max_length=5)


def refusing_destination(place: Place) -> None:
    place.policy("orders", max_length=5, overflow="reject-publish")


def forgotten_destinations(place: Place) -> None:
    """The queue of a task is not bound, and another one does not exist."""
    pattern = place.topology.keys.destination_pattern("orders")
    channel(place).queue_unbind("orders", "shop.delivery", pattern)
    place.destinations.append(Queue("invoices", queue_arguments=QUORUM))


def forgotten_where_nobody_helps(place: Place) -> None:
    forgotten_destinations(place)
    place.settings = replace(place.settings, declare="never", modules=("check-in",))


def classic_destination(place: Place) -> None:
    """It also differs from what the application says."""
    channel(place).queue_delete("orders")
    place.orders.queue_arguments = {}
    forget(place.connection)
    place.declare()
    place.orders.queue_arguments = QUORUM


def older_layout(place: Place) -> None:
    """The exchanges stay, and messages wait in a queue of an older layout."""
    older = Topology("shop", custom([("hours", 3, 3600), ("minutes", 60, 60)]))
    for exchange in older.exchanges[1:3]:
        exchange(channel(place)).declare()
    for queue in older.digit_queues[:3]:
        queue(channel(place)).queue_declare()
    channel(place).basic_publish(amqp.Message("late"), "", "shop.hours.1")
    wait_for(partial(has_messages, place, "shop.hours.1"), "the message")


def unserved_modules(place: Place) -> None:
    modules = place.topology.module_queues
    for queue in (modules.checkin, modules.distribution):
        channel(place).basic_publish(amqp.Message("late"), "", queue.name)
        wait_for(partial(has_messages, place, queue.name), "the message")


def has_messages(place: Place, name: str) -> bool:
    return bool(channel(place).queue_declare(name, passive=True).message_count)


def neglected_schedules(place: Place) -> None:
    """One is overdue, and Redis has lost the task of another one."""
    entry = {"task": "look", "schedule": 3600}
    place.app_settings = {
        "rabbitdelay_registry_url": place.redis_url,
        "rabbitdelay_registry_prefix": place.name,
        "beat_schedule": dict.fromkeys(("overdue", "lost"), entry),
    }
    place.delays = delays = place.app().rabbitdelay
    BeatEntries(delays.schedules).put()
    records = Records(delays.registry)
    overdue, lost, *_ = records.all()  # and one of Celery's own
    records.note_due({overdue: 0})
    records.note(lost, message="")


#: What is planted, and the codes that have to be found, no others.
FAULTS: Final[dict[Plant, set[str]]] = {
    damaged: {"missing"},
    without_levels: {"not-declared"},
    nobody_declares: {"missing"},
    longer_ttl: {"differs"},
    no_alternate: {"differs"},
    other_layout: {"layout-conflict"},
    leaking: {"binding-additional", "level-consumed"},
    bad_policies: {"policy"},
    bad_policies_of_a_destination: {"destination-policy", "destination-drops"},
    refusing_destination: {"destination-refuses"},
    forgotten_destinations: {"destination-unbound"},
    forgotten_where_nobody_helps: {"missing"},
    classic_destination: {"destination-classic", "destination-differs"},
    older_layout: {"orphan", "orphan-empty"},
    classic_levels: {"classic-levels"},
    neglected_schedules: {"schedule-overdue", "schedule-lost"},
    unserved_modules: {"module-unserved"},
    without_redis: {"registry-unavailable"},
}

#: What the findings name besides.
NAMED: Final[dict[Plant, tuple[str, ...]]] = {
    older_layout: ("1 messages wait", "queue shop.hours.1", "exchange shop."),
    unserved_modules: ("queue shop.checkin", "1 messages wait for distribution"),
    damaged: ("queue shop.", "binding shop.", "exchange shop.layout"),
    bad_policies: (
        *("expires", "message-ttl", "max-length", "overflow", "dead-letter-routing-key"),
        "delivery-limit",
    ),
    bad_policies_of_a_destination: ("expires", "message-ttl", "delivery-limit"),
}
