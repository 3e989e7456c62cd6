"""The delay levels as exchanges, queues and bindings, and the way of a message through them.

Pure: everything here is a value, built from kombu's entities; nothing opens a connection. The
whole machine is in this file, but for what its routing keys look like
(:mod:`celery_rabbitdelay.levels.routing_key`)::

    producer --> exchange of the first non-zero digit
                    | digit 7                     | digit 0
                    v                             v
                 queue rabbitdelay.hours.7     next level's exchange
                 (TTL 7 h, dead-letters to the next level's exchange)
                    ...
                 rabbitdelay.delivery --> the destination's queue
                    | (no route: alternate exchange)
                    v
                 rabbitdelay.undeliverable
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from kombu import Exchange, Queue

from celery_rabbitdelay.levels.layout import MAX_TTL, Layout, Level, clock
from celery_rabbitdelay.levels.place_value import Delay, milliseconds
from celery_rabbitdelay.levels.routing_key import (
    DISTRIBUTION,
    RoutingKeys,
    decode_destination,
    encode_destination,
)

__all__ = [
    "DISTRIBUTION",
    "Binding",
    "QueueType",
    "Route",
    "Topology",
    "decode_destination",
    "encode_destination",
]

QueueType: TypeAlias = Literal["quorum", "classic"]

#: Milliseconds that a zero digit waits in a pass-through queue (``zeros = "queue"``). RabbitMQ
#: would drop what expires at 0 unless a consumer were waiting.
PASS_THROUGH_TTL: Final = 1

#: How often a module's message may come back unacknowledged, with the worker that had it, until it
#: is taken for the reason and goes to ``undeliverable``.
POISON_LIMIT: Final = 100

#: How often a message may be looked at in ``undeliverable``. From 4.0 on, RabbitMQ drops one after
#: 20 times where nothing else is said; up to 3.13 it knows no word for "without a limit".
NO_DELIVERY_LIMIT: Final = 2**31 - 1


class Binding(NamedTuple):
    """An exchange sends what matches ``pattern`` to a queue or to another exchange.

    Attributes:
        source: The exchange.
        pattern: The topic pattern; empty for a fanout exchange, which sends everything.
        target: The name of the queue or exchange that gets it.
        target_is_exchange: Whether ``target`` is an exchange.
    """

    source: str
    pattern: str
    target: str
    target_is_exchange: bool


class Route(NamedTuple):
    """The way of one delayed message.

    Attributes:
        exchange: The exchange to publish to: the first non-zero digit's.
        routing_key: The delay's digits and the destination's word, separated by dots; with several
            shards, the shard's word before them.
        stops: The names of the queues that the message waits in, in order.
    """

    exchange: str
    routing_key: str
    stops: tuple[str, ...]


@dataclass(frozen=True)
class Topology:
    """Everything that a layout needs on the broker, under one prefix.

    Attributes:
        prefix: The first part of every name; two topologies of different prefixes never meet.
        layout: The levels.
        queue_type: ``quorum`` (nothing is lost between two levels), or ``classic`` (a message can
            be lost when the broker fails while it goes from one level to the next).
        shards: How many queues each digit has; a message takes one of them by its task's id. Each
            queue has a leader, and a dead-letter worker, of its own.
    """

    prefix: str = "rabbitdelay"
    layout: Layout = field(default_factory=clock)
    queue_type: QueueType = "quorum"
    shards: int = 1

    def route(self, delay: Delay, destination: str, task_id: str = "") -> Route:
        """Return how to publish a message that is due after ``delay`` at a queue.

        Args:
            delay: Seconds, or a timedelta. Rounded up to ticks; zero or less goes straight to the
                delivery exchange.
            destination: The name of the queue that gets the message when it is due; or
                :data:`.DISTRIBUTION`, for the module that delivers it.
            task_id: With several shards, what says which: any text.

        Raises:
            DelayTooLong: The delay is above the layout's capacity.
            InvalidDelay: The delay is not a finite number.
            InvalidDelayType: The delay is not a number and not a timedelta.
        """
        return self.route_of_milliseconds(milliseconds(delay), destination, task_id)

    def route_of_milliseconds(self, delay_ms: int, destination: str, task_id: str = "") -> Route:
        """The same for a delay in whole milliseconds."""
        digits, shard = self.layout.digits_of_milliseconds(delay_ms), self._keys.shard(task_id)
        first, exchange, routing_key = self._address(digits, destination, shard)
        return Route(exchange, routing_key, tuple(self._stops(digits, first, shard)))

    def address(
        self, left_ms: int, destination: str, task_id: str = "", tolerance_ms: int = 0
    ) -> tuple[str, str]:
        """Return the exchange and the routing key to publish with: a level's, or meditation's.

        Args:
            left_ms: Milliseconds until the message is due; above the capacity, it meditates first.
            destination: The name of the queue that gets it, or :data:`.DISTRIBUTION`.
            task_id: With several shards, what says which: any text.
            tolerance_ms: How many milliseconds later is early enough, if that saves stops.
        """
        if left_ms > self.layout.capacity_ms:
            return self.meditation.exchange.name, destination
        eased = self.layout.eased(left_ms, tolerance_ms) if tolerance_ms else left_ms
        digits = self.layout.digits_of_milliseconds(eased)
        _, exchange, routing_key = self._address(digits, destination, self._keys.shard(task_id))
        return exchange, routing_key

    def _address(
        self, digits: tuple[int, ...], destination: str, shard: int
    ) -> tuple[int, str, str]:
        """The index of the first level, its exchange, and the routing key."""
        first = next((index for index, digit in enumerate(digits) if digit), len(digits))
        return first, self._exchange_names[first], self._keys.key(shard, digits, destination)

    def digits_of_key(self, routing_key: str) -> tuple[str, ...] | None:
        """Return the digits in a routing key; None where it is none of this topology."""
        return self._keys.digits(routing_key)

    def _stops(self, digits: tuple[int, ...], first: int, shard: int) -> Iterator[str]:
        stops_at_zero = self.layout.zeros == "queue"
        for level, digit in zip(self.layout.levels[first:], digits[first:], strict=True):
            if digit or stops_at_zero:
                yield self._queue_name(level, digit, shard)

    def destination_pattern(self, destination: str) -> str:
        """Return the exact pattern that binds a queue to the delivery exchange."""
        return self._keys.destination_pattern(destination)

    @property
    def delivery(self) -> Exchange:
        """The exchange behind the last level: it hands each message to its destination."""
        return self._topic(self._name("delivery"))

    @property
    def undeliverable(self) -> Queue:
        """Where a message goes that no queue takes, so that it holds up none of the others."""
        exchange = Exchange(self._name("undeliverable"), type="fanout", durable=True)
        arguments: dict[str, Any] = {"x-queue-type": self.queue_type}
        if self.queue_type == "quorum":
            arguments["x-delivery-limit"] = NO_DELIVERY_LIMIT
        return self._queue(exchange.name, exchange, arguments)

    @property
    def checkin(self) -> Queue:
        """Where any AMQP client publishes a message with its delay."""
        return self._module_queue("checkin", self._fanout("checkin"))

    @property
    def meditation(self) -> Queue:
        """Where a delay above the capacity waits for one capacity; then it is checked in again."""
        ttl = min(self.layout.capacity_ms, MAX_TTL)
        arguments = self._waiting_arguments(ttl, self.meditated.name)
        return self._queue(self._name("meditation"), self._fanout("meditation"), arguments)

    @property
    def meditated(self) -> Exchange:
        """The exchange by which a message comes back from meditation to check-in.

        Not check-in's own: what comes by it was checked in before, and a client needs no permission
        to publish there.
        """
        return self._fanout("meditated")

    @property
    def distribution(self) -> Queue:
        """Where a message that is due waits for the module that delivers it."""
        return self._module_queue("distribution", None)

    @property
    def guard(self) -> Exchange:
        """An exchange that only one layout can declare: the broker compares alternate exchanges."""
        arguments = {"alternate-exchange": self.marker.name}
        return Exchange(self._name("layout"), type="fanout", durable=True, arguments=arguments)

    @property
    def marker(self) -> Exchange:
        """The exchange that is declared last: where it stands, the topology is complete."""
        return Exchange(f"{self._name('layout')}.{self.fingerprint}", type="fanout", durable=True)

    @cached_property
    def fingerprint(self) -> str:
        """A short word that is the same for two topologies if, and only if, they are the same."""
        shards = self._keys.shard_words(self.shards)
        return "-".join((self.layout.fingerprint, self.queue_type, *shards))

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Every exchange but guard and marker, in an order in which they can be declared."""
        levels = [self._topic(self._name(level.name)) for level in self.layout.levels]
        modules = (self.checkin.exchange, self.meditation.exchange, self.meditated)
        return (self.undeliverable.exchange, *levels, self.delivery, *modules)

    @cached_property
    def digit_queues(self) -> tuple[Queue, ...]:
        """The queues that messages wait in: those of each non-zero digit of each level."""
        return tuple(queue for queues in self.level_queues.values() for queue in queues)

    @cached_property
    def level_queues(self) -> Mapping[str, tuple[Queue, ...]]:
        """The same by the level's name without prefix, ``hours.x1``; the highest level first."""
        return {
            level.name: tuple(
                self._digit_queue(index, level, digit, shard)
                for digit in range(1, level.base)
                for shard in range(self.shards)
            )
            for index, level in enumerate(self.layout.levels)
        }

    @cached_property
    def pass_through_queues(self) -> tuple[Queue, ...]:
        """The queues of the zero digits, of ``zeros = "queue"`` only."""
        if self.layout.zeros != "queue":
            return ()
        return tuple(
            self._digit_queue(index, level, 0, shard)
            for index, level in enumerate(self.layout.levels)
            for shard in range(self.shards)
        )

    @property
    def queues(self) -> tuple[Queue, ...]:
        """Every queue of the topology."""
        modules = (self.checkin, self.meditation, self.distribution)
        return (self.undeliverable, *self.digit_queues, *self.pass_through_queues, *modules)

    @cached_property
    def bindings(self) -> tuple[Binding, ...]:
        """Every binding of the topology; those of destinations come with the destinations."""
        undeliverable, checkin = self.undeliverable.name, self.checkin.name
        distributed = self.destination_pattern(DISTRIBUTION)
        return (
            Binding(undeliverable, "", undeliverable, False),
            Binding(checkin, "", checkin, False),
            Binding(self.meditation.name, "", self.meditation.name, False),
            Binding(self.meditated.name, "", checkin, False),
            Binding(self.delivery.name, distributed, self.distribution.name, False),
            *(each for shard in range(self.shards) for each in self._level_bindings(shard)),
        )

    def _level_bindings(self, shard: int) -> Iterator[Binding]:
        for index, level in enumerate(self.layout.levels):
            source = self._name(level.name)
            for digit in range(1, level.base):
                target = self._queue_name(level, digit, shard)
                yield Binding(source, self._keys.pattern(shard, index, digit), target, False)
            yield from self._zero_bindings(index, level, shard)

    def _zero_bindings(self, index: int, level: Level, shard: int) -> Iterator[Binding]:
        source = self._name(level.name)
        match self.layout.zeros:
            case "bind":
                following = self._exchange_name(index + 1)
                yield Binding(source, self._keys.pattern(shard, index, 0), following, True)
            case "queue":
                target = self._queue_name(level, 0, shard)
                yield Binding(source, self._keys.pattern(shard, index, 0), target, False)
            case "skip":
                for zeros, lower in enumerate(self.layout.levels[index + 1 :], start=1):
                    for digit in range(1, lower.base):
                        pattern = self._keys.pattern(shard, index, *[0] * zeros, digit)
                        yield Binding(source, pattern, self._queue_name(lower, digit, shard), False)
                all_zero = [0] * (len(self.layout.levels) - index)
                pattern = self._keys.pattern(shard, index, *all_zero)
                yield Binding(source, pattern, self.delivery.name, True)

    @cached_property
    def _keys(self) -> RoutingKeys:
        return RoutingKeys(len(self.layout.levels), self.shards)

    def _queue_name(self, level: Level, digit: int, shard: int) -> str:
        return ".".join((self._name(level.queue_name(digit)), *self._keys.shard_words(shard)))

    def _digit_queue(self, index: int, level: Level, digit: int, shard: int) -> Queue:
        ttl = digit * level.place_ms or PASS_THROUGH_TTL
        arguments = self._waiting_arguments(ttl, self._exchange_name(index + 1))
        return self._queue(self._queue_name(level, digit, shard), None, arguments)

    def _waiting_arguments(self, ttl: int, following: str) -> dict[str, Any]:
        """The arguments of a queue in which a message waits ``ttl`` ms before it goes on."""
        return {"x-message-ttl": ttl, **self._dead_letter_arguments(following)}

    def _module_queue(self, name: str, exchange: Exchange | None) -> Queue:
        arguments = self._dead_letter_arguments(self._name("undeliverable"))
        if self.queue_type == "quorum":
            arguments["x-delivery-limit"] = POISON_LIMIT
        return self._queue(self._name(name), exchange, arguments)

    def _dead_letter_arguments(self, following: str) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "x-queue-type": self.queue_type,
            "x-dead-letter-exchange": following,
        }
        if self.queue_type == "quorum":
            # Only these two together make RabbitMQ keep a message until the next level has it:
            # https://www.rabbitmq.com/docs/quorum-queues#activating-at-least-once-dead-lettering
            arguments["x-dead-letter-strategy"] = "at-least-once"
            arguments["x-overflow"] = "reject-publish"
        return arguments

    def _queue(self, name: str, exchange: Exchange | None, arguments: Mapping[str, Any]) -> Queue:
        if self.queue_type == "quorum":
            # Over the nodes of a cluster; else all leaders are where the declaring process is
            # connected to: https://www.rabbitmq.com/docs/clustering#replica-placement
            arguments = {**arguments, "x-queue-leader-locator": "balanced"}
        return Queue(name, exchange=exchange, durable=True, queue_arguments=dict(arguments))

    def _topic(self, name: str) -> Exchange:
        return self._exchange(name, "topic")

    def _fanout(self, suffix: str) -> Exchange:
        return self._exchange(self._name(suffix), "fanout")

    def _exchange(self, name: str, kind: str) -> Exchange:
        arguments = {"alternate-exchange": self._name("undeliverable")}
        return Exchange(name, type=kind, durable=True, arguments=arguments)

    def _exchange_name(self, index: int) -> str:
        """The exchange of a level, or the delivery exchange behind the last one."""
        return self._exchange_names[index]

    @cached_property
    def _exchange_names(self) -> tuple[str, ...]:
        suffixes = (*(level.name for level in self.layout.levels), "delivery")
        return tuple(map(self._name, suffixes))

    def _name(self, suffix: str) -> str:
        return f"{self.prefix}.{suffix}"
