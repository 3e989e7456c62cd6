"""The levels as exchanges, queues and bindings, and the route of a message through them.

A level is a topic exchange, and a queue for each of its digits, built from kombu's entities::

    producer --> exchange of the first non-zero digit
                    | digit 7                     | digit 0
                    v                             v
                 queue rabbitdelay.hours.7     next level's exchange
                 (TTL 7 h, dead-letters to the next level's exchange)
                    ...
                 rabbitdelay.delivery --> the destination's queue
                    v (no route: alternate exchange)
                 rabbitdelay.unrouted --> distribution, which tries again later
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import compress, count, product
from operator import getitem
from typing import Final, NamedTuple, get_args

from kombu import Exchange, Queue

from celery_rabbitdelay.levels.delay import Delay, Due, milliseconds, tolerance_milliseconds
from celery_rabbitdelay.levels.entities import (
    NO_DELIVERY_LIMIT,
    PROBE_TTL,
    Binding,
    Entities,
    Identity,
    ModuleQueues,
    QueueType,
)
from celery_rabbitdelay.levels.layout import Layout, Zeros, clock, geometric
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION, PROBES, RoutingKeys

#: Milliseconds that a zero digit waits in a pass-through queue (``zeros = "queue"``). RabbitMQ
#: drops a message with a TTL of 0 unless a consumer is waiting for it.
PASS_THROUGH_TTL: Final = 1

#: What is declared is known by levels of these ticks. Three levels of base 3 show each kind of
#: binding, and with the second tick their capacity is above RabbitMQ's longest TTL.
REFERENCE_TICKS: Final = (0.1, 16_000_000)


class Route(NamedTuple):
    """How to publish one delayed message, and where it will wait.

    Attributes:
        exchange: The exchange of the first non-zero digit; delivery if all are zero; meditation
            above the capacity.
        routing_key: The shard's word if there are several, the digits and the destination's word,
            separated by dots; in meditation, the bare destination.
        stops: The names of the queues that the message waits in, in order.
    """

    exchange: str
    routing_key: str
    stops: tuple[str, ...]


@dataclass(frozen=True)
class Topology:
    """The levels of a layout under one prefix, and the module queues.

    Attributes:
        prefix: The first part of every name; two topologies of different prefixes never meet.
        layout: The levels.
        queue_type: ``quorum`` (no message is lost between two levels), or ``classic`` (if the
            broker fails, a message that is being dead-lettered to the next level can be lost).
        shards: How many queues each digit has; a message takes one of them by its task's id. Each
            queue has a leader, and a dead-letter worker, of its own.
    """

    prefix: str = "rabbitdelay"
    layout: Layout = field(default_factory=clock)
    queue_type: QueueType = "quorum"
    shards: int = 1

    def route(
        self, delay: Delay | Due, destination: str, task_id: str = "", tolerance: Delay = 0
    ) -> Route:
        """Return how to publish a message that is due after ``delay`` at a queue.

        A delay above the layout's capacity leads to meditation, the overflow loop, which needs
        workers that serve check-in. Without them, call ``layout.check_capacity`` first.

        Args:
            delay: Seconds, or a timedelta; or a :class:`Due`, which has its own tolerance. Rounded
                up to ticks; zero or less leads straight to the delivery exchange.
            destination: The queue that gets the message when it is due, or :data:`.DISTRIBUTION`.
            task_id: Any text; with several shards, it determines the shard.
            tolerance: Seconds, or a timedelta, that it may arrive later if that saves stops.

        Raises:
            InvalidDelay: The delay or the tolerance is invalid.
        """
        if isinstance(delay, Due):
            delay_ms, tolerance_ms = delay.remaining_ms(), delay.tolerance_ms
        else:
            delay_ms = milliseconds(delay)
            tolerance_ms = tolerance_milliseconds(tolerance)
        if delay_ms > self.layout.capacity_ms:
            meditation = self.module_queues.meditation
            return Route(meditation.exchange.name, destination, (meditation.name,))
        if tolerance_ms:
            delay_ms = self.layout.round_to_fewest_stops(delay_ms, tolerance_ms)
        digits = self.layout.digits(delay_ms)
        first = next(compress(count(), digits), len(digits))
        return self.route_of(digits, first, self.keys.shard(task_id), destination)

    def route_of(self, digits: tuple[int, ...], first: int, shard: int, destination: str) -> Route:
        """Return how to publish a message with given digits that enters at the level ``first``."""
        queues = map(getitem, self._queues[shard][first:], digits[first:])
        routing_key = self.keys.key(shard, digits, destination)
        stops = tuple([queue.name for queue in queues if queue is not None])
        return Route(self._exchange_names[first], routing_key, stops)

    @cached_property
    def keys(self) -> RoutingKeys:
        """The routing keys of this topology."""
        return RoutingKeys(len(self.layout.levels), self.shards)

    @cached_property
    def module_queues(self) -> ModuleQueues:
        """The module queues, which are outside the levels."""
        return ModuleQueues.of(self._entities, self.layout.capacity_ms)

    @cached_property
    def probe(self) -> Queue:
        """The queue of probes. Levels that lack it are complete, as those of an earlier version."""
        return self._entities.queue("probe", ttl_ms=PROBE_TTL, single_active_consumer=True)

    @cached_property
    def probe_binding(self) -> Binding:
        """The binding of that queue."""
        pattern = self.keys.destination_pattern(PROBES)
        return Binding(self.delivery.name, pattern, self.probe.name)

    @cached_property
    def identity(self) -> Identity:
        """Fingerprint, guard and marker."""
        shards = self.keys.shard_words(self.shards)
        words = (self.layout.fingerprint, self.queue_type, *shards, f"v{arguments_digest()}")
        return Identity.of(self._entities, "-".join(words))

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All exchanges except those of the identity, in an order in which they can be declared."""
        first, *others = self.module_queues.exchanges
        return (first, *self.level_exchanges, self.delivery, *others)

    @cached_property
    def level_exchanges(self) -> tuple[Exchange, ...]:
        """The exchange of each level, the highest first."""
        return tuple(self._entities.exchange(level.name, "topic") for level in self.layout.levels)

    @cached_property
    def delivery(self) -> Exchange:
        """The exchange behind the last level: it routes each message to its destination."""
        return self._entities.exchange("delivery", "topic", alternate="unrouted")

    def is_optional(self, name: str) -> bool:
        """Return whether levels are complete without the exchange or queue of a name.

        That is the case for those of paused tasks, which wait in the levels otherwise.
        """
        return name == self.module_queues.paused.name

    @cached_property
    def queues(self) -> tuple[Queue, ...]:
        """All queues, in the order ``undeliverable``, levels, other modules."""
        return (*self.module_queues.queues[:1], *self.digit_queues, *self.module_queues.queues[1:])

    @cached_property
    def digit_queues(self) -> tuple[Queue, ...]:
        """The queues of all digits, the highest level first."""
        return tuple(queue for queues in self.level_queues.values() for queue in queues)

    @cached_property
    def level_queues(self) -> Mapping[str, tuple[Queue, ...]]:
        """The digit queues of each level, by the level's name without prefix, ``hours.x1``."""
        return {
            level.name: tuple(queue for shard in self._queues for queue in shard[index] if queue)
            for index, level in enumerate(self.layout.levels)
        }

    @cached_property
    def bindings(self) -> tuple[Binding, ...]:
        """All bindings, except those of destination queues, which producers and workers declare."""
        distributed = self.keys.destination_pattern(DISTRIBUTION)
        return (
            *self.module_queues.bindings,
            Binding(self.delivery.name, distributed, self.module_queues.distribution.name),
            *(each for shard in range(self.shards) for each in self._level_bindings(shard)),
        )

    def _level_bindings(self, shard: int) -> Iterator[Binding]:
        """Bindings of a level to its queues ("skip": also lower ones) and to the next exchange."""
        *sources, _ = self._exchange_names
        for index, source in enumerate(sources):
            behind = len(sources) if self.layout.zeros == "skip" else index + 1
            for lower in range(index, behind):
                for digit, queue in enumerate(self._queues[shard][lower]):
                    if queue:
                        pattern = self.keys.pattern(shard, index, *[0] * (lower - index), digit)
                        yield Binding(source, pattern, queue.name)
            if self.layout.zeros != "queue":
                pattern = self.keys.pattern(shard, index, *[0] * (behind - index))
                yield Binding(source, pattern, self._exchange_names[behind], True)

    @cached_property
    def _queues(self) -> list[list[list[Queue | None]]]:
        """By shard, level and digit."""
        bases = list(enumerate(self.layout.bases))
        return [
            [[self._queue(index, digit, shard) for digit in range(base)] for index, base in bases]
            for shard in range(self.shards)
        ]

    def _queue(self, index: int, digit: int, shard: int) -> Queue | None:
        """The queue of a digit; None for a zero that is passed without one."""
        if not digit and self.layout.zeros != "queue":
            return None
        level = self.layout.levels[index]
        words = (level.queue_name(digit), *self.keys.shard_words(shard))
        return self._entities.queue(
            ".".join(words),
            ttl_ms=digit * level.place_ms or PASS_THROUGH_TTL,
            dead_letter_to=self._exchange_names[index + 1],
            delivery_limit=NO_DELIVERY_LIMIT,
        )

    @cached_property
    def _exchange_names(self) -> tuple[str, ...]:
        """The exchange of each level, highest first, and delivery behind the last one."""
        levels = (level.name for level in self.layout.levels)
        return tuple(map(self._entities.name, (*levels, "delivery")))

    @property
    def _entities(self) -> Entities:
        return Entities(self.prefix, self.queue_type)


@cache
def arguments_digest() -> str:
    """Return a digest of what this version of the package declares, whatever the layout.

    It is that of a few small topologies, which have all there is in any topology. RabbitMQ does not
    let an exchange or a queue change its arguments: a version of this package that needs other ones
    has another digest, and is refused under the prefix; see :class:`.Identity`. What is optional
    does not count.
    """
    kinds = product(REFERENCE_TICKS, get_args(Zeros), get_args(QueueType), (1, 2))
    topologies = [
        Topology("p", geometric(tick, 3, 3, zeros), queue_type, shards)
        for tick, zeros, queue_type, shards in kinds
    ]
    is_optional = topologies[0].is_optional
    return digest_of(
        [each for all_ in topologies for each in all_.exchanges if not is_optional(each.name)],
        [each for all_ in topologies for each in all_.queues if not is_optional(each.name)],
        [each for all_ in topologies for each in all_.bindings if not is_optional(each.source)],
    )


def digest_of(
    exchanges: Iterable[Exchange], queues: Iterable[Queue], bindings: Iterable[Binding]
) -> str:
    """Return a digest that changes with any exchange, queue, binding, or argument of one.

    The order does not count.
    """
    declared = {
        "exchanges": sorted(
            [e.name, e.type, e.durable, e.auto_delete, _written(e.arguments)] for e in exchanges
        ),
        "queues": sorted(
            [q.name, q.durable, q.exclusive, q.auto_delete, _written(q.queue_arguments)]
            for q in queues
        ),
        "bindings": sorted(map(list, bindings)),
    }
    return hashlib.sha256(json.dumps(declared).encode()).hexdigest()[:10]


def _written(arguments: dict[str, object] | None) -> str:
    return json.dumps(arguments or {}, sort_keys=True)
