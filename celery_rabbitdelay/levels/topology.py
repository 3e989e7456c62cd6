"""The levels as exchanges, queues and bindings, and the route of a message through them.

A level is a topic exchange with a queue for each non-zero digit, made of kombu's entities::

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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import compress, count
from operator import getitem
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias

from kombu import Exchange, Queue

from celery_rabbitdelay.levels.delay import Delay, Due, milliseconds, tolerance_milliseconds
from celery_rabbitdelay.levels.layout import MAX_TTL, Layout, clock
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION, PROBES, RoutingKeys

QueueType: TypeAlias = Literal["quorum", "classic"]

#: The names of the modules, as in ``rabbitdelay_modules``, and of the probe service.
CHECK_IN: Final = "check-in"
DISTRIBUTE: Final = "distribution"
PROBE: Final = "probe"

#: The property ``type`` of a probe, a message that measures how late the levels are.
PROBE_TYPE: Final = "rabbitdelay-probe"

#: Milliseconds after which probes that no worker receives are dropped.
PROBE_TTL: Final = 300_000

#: Milliseconds that a paused task waits before its worker asks the registry again.
PAUSED_TTL: Final = 600_000

#: The beginning of this package's consumer tags, which verify uses to find foreign consumers.
CONSUMER_TAG: Final = "rabbitdelay-"

#: The delivery limit of queues that should not have a limit; see :data:`.DELIVERY_LIMIT`. RabbitMQ
#: up to 3.13 has no value for "no limit".
NO_DELIVERY_LIMIT: Final = 2**31 - 1

#: Delivery limit of the module queues: a message redelivered more often is assumed to crash workers
#: and is dead-lettered to ``undeliverable``.
POISON_LIMIT: Final = 100


#: Milliseconds that a zero digit waits in a pass-through queue (``zeros = "queue"``). RabbitMQ
#: drops a message with a TTL of 0 unless a consumer is waiting for it.
PASS_THROUGH_TTL: Final = 1

#: The version of all exchanges, queues, bindings and arguments, of any layout. The arguments of an
#: existing exchange or queue cannot change, so another version needs another prefix; see
#: :class:`Identity`. A unit test fails if the arguments change and this version does not.
ARGUMENTS: Final = "v41a81445ab"


class Binding(NamedTuple):
    """A binding of a queue or an exchange to an exchange.

    Attributes:
        source: The exchange that messages come from.
        pattern: The topic pattern; empty for a fanout exchange.
        target: The name of the queue or exchange that gets the matching messages.
        target_is_exchange: Whether ``target`` is an exchange.
    """

    source: str
    pattern: str
    target: str
    target_is_exchange: bool = False


class ModuleQueues(NamedTuple):
    """The queues outside the levels; all but distribution have a fanout exchange of the same name.

    Attributes:
        undeliverable: Gets every message that cannot be delivered.
        checkin: The ingest queue: any AMQP client publishes here, with the delay in a header.
        meditation: The overflow loop: a message waits here while its delay exceeds the capacity.
        distribution: Gets due messages that a worker publishes to their final exchange.
        paused: Holds due tasks that are paused. After :data:`PAUSED_TTL`, a task returns to its
            queue, and its worker asks the registry again; after a resume, workers return it at
            once.
        meditated: The exchange through which a message returns from meditation to check-in's queue.
            Clients need no permission for this exchange.
        unrouted: The alternate exchange of delivery: distribution gets the due messages that no
            queue takes, and tries again later.
    """

    undeliverable: Queue
    checkin: Queue
    meditation: Queue
    distribution: Queue
    paused: Queue
    meditated: Exchange
    unrouted: Exchange

    @property
    def queues(self) -> tuple[Queue, ...]:
        """All module queues."""
        return self.undeliverable, self.checkin, self.meditation, self.distribution, self.paused

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The module exchanges; the first, for ``undeliverable``, is an alternate exchange."""
        return tuple(exchange for exchange, _ in self._fanouts)

    @property
    def bindings(self) -> tuple[Binding, ...]:
        """The module bindings, except the binding of distribution to the delivery exchange."""
        return tuple(Binding(exchange.name, "", queue.name) for exchange, queue in self._fanouts)

    @property
    def _fanouts(self) -> Iterator[tuple[Exchange, Queue]]:
        for queue in (self.undeliverable, self.checkin, self.meditation, self.paused):
            yield queue.exchange, queue
        yield self.meditated, self.checkin
        yield self.unrouted, self.distribution


class Identity(NamedTuple):
    """Two exchanges that identify the topology under a prefix, and show that it is complete.

    Attributes:
        fingerprint: A word that identifies the topology: only equal topologies have the same word.
        guard: Declared first. RabbitMQ refuses to declare it again with another alternate exchange,
            and so refuses every other topology under the prefix.
        marker: Declared last: if it exists, the topology is complete.
    """

    fingerprint: str
    guard: Exchange
    marker: Exchange


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
        prefix: The first part of every name; topologies with different prefixes share nothing.
        layout: The levels.
        queue_type: ``quorum`` (no message is lost between two levels), or ``classic`` (if the
            broker fails, a message that is being dead-lettered to the next level can be lost).
        shards: The number of queues per digit; the task's id selects one of them. Every queue has
            its own leader and dead-letter worker.
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
        workers that serve check-in. Without such workers, call ``layout.check_capacity`` first.

        Args:
            delay: Seconds, or a timedelta; or a :class:`Due`, which has its own tolerance. Rounded
                up to ticks; zero or less leads straight to the delivery exchange.
            destination: The queue that gets the message when it is due, or :data:`.DISTRIBUTION`.
            task_id: Any text; with several shards, it determines the shard.
            tolerance: Seconds, or a timedelta, by which the message may be late to save stops.

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
        """Return how to publish a message with these digits directly to the level ``first``."""
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
        # This is the last alternate exchange, so it has no alternate exchange itself.
        last = Exchange(self._name("undeliverable"), type="fanout", durable=True)
        meditated = self._exchange("meditated", "fanout")
        served = partial(self._queue, dead_letter_to=last.name, delivery_limit=POISON_LIMIT)
        kept = partial(self._queue, delivery_limit=NO_DELIVERY_LIMIT)
        return ModuleQueues(
            undeliverable=kept("undeliverable", last),
            checkin=served("checkin", self._exchange("checkin", "fanout")),
            meditation=kept(
                "meditation",
                self._exchange("meditation", "fanout"),
                ttl_ms=min(self.layout.capacity_ms, MAX_TTL),
                dead_letter_to=meditated.name,
            ),
            distribution=served("distribution"),
            paused=kept(
                "paused",
                # This exchange has no alternate exchange: unroutable messages are returned, and go
                # into the levels.
                Exchange(self._name("paused"), type="fanout", durable=True),
                ttl_ms=PAUSED_TTL,
                dead_letter_to=self.delivery.name,
            ),
            meditated=meditated,
            unrouted=self._exchange("unrouted", "fanout"),
        )

    @cached_property
    def probe(self) -> Queue:
        """The queue of probes; levels that an earlier version declared need not have it."""
        return self._queue("probe", further={"x-single-active-consumer": True}, ttl_ms=PROBE_TTL)

    @cached_property
    def probe_binding(self) -> Binding:
        """The binding of :attr:`probe`."""
        pattern = self.keys.destination_pattern(PROBES)
        return Binding(self.delivery.name, pattern, self.probe.name)

    @cached_property
    def identity(self) -> Identity:
        """The topology's fingerprint, guard and marker."""
        shards = self.keys.shard_words(self.shards)
        fingerprint = "-".join((self.layout.fingerprint, self.queue_type, *shards, ARGUMENTS))
        name = self._name("layout")
        marker = Exchange(f"{name}.{fingerprint}", type="fanout", durable=True)
        arguments = {"alternate-exchange": marker.name}
        guard = Exchange(name, type="fanout", durable=True, arguments=arguments)
        return Identity(fingerprint, guard, marker)

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All exchanges except guard and marker, in an order in which they can be declared."""
        first, *others = self.module_queues.exchanges
        return (first, *self.level_exchanges, self.delivery, *others)

    @cached_property
    def all_exchanges(self) -> tuple[Exchange, ...]:
        """All exchanges, from the guard to the marker."""
        return (self.identity.guard, *self.exchanges, self.identity.marker)

    @cached_property
    def level_exchanges(self) -> tuple[Exchange, ...]:
        """The exchange of each level, the highest first."""
        return tuple(self._exchange(level.name, "topic") for level in self.layout.levels)

    @cached_property
    def delivery(self) -> Exchange:
        """The exchange behind the last level, which routes every message to its destination."""
        return self._exchange("delivery", "topic", alternate="unrouted")

    @cached_property
    def queues(self) -> tuple[Queue, ...]:
        """All queues except :attr:`probe`: ``undeliverable``, then levels, then other modules."""
        return (*self.module_queues.queues[:1], *self.digit_queues, *self.module_queues.queues[1:])

    @cached_property
    def digit_queues(self) -> tuple[Queue, ...]:
        """The queues of all digits, the highest level first."""
        return tuple(queue for queues in self.level_queues.values() for queue in queues)

    @cached_property
    def level_queues(self) -> Mapping[str, tuple[Queue, ...]]:
        """The digit queues of each level, keyed by level name without prefix, ``hours.x1``."""
        return {
            level.name: tuple(queue for shard in self._queues for queue in shard[index] if queue)
            for index, level in enumerate(self.layout.levels)
        }

    @cached_property
    def bindings(self) -> tuple[Binding, ...]:
        """All bindings, except the bindings that producers and workers make for destinations."""
        distributed = self.keys.destination_pattern(DISTRIBUTION)
        return (
            *self.module_queues.bindings,
            Binding(self.delivery.name, distributed, self.module_queues.distribution.name),
            *(each for shard in range(self.shards) for each in self._level_bindings(shard)),
        )

    def _level_bindings(self, shard: int) -> Iterator[Binding]:
        """Yield the bindings of each level's exchange to queues and to the next exchange."""
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
        """The digit queues by shard, level and digit; None for a zero without a queue."""
        bases = list(enumerate(self.layout.bases))
        return [
            [
                [self._digit_queue(index, digit, shard) for digit in range(base)]
                for index, base in bases
            ]
            for shard in range(self.shards)
        ]

    def _digit_queue(self, index: int, digit: int, shard: int) -> Queue | None:
        """Return the queue of a digit; None for a zero that needs no queue."""
        if not digit and self.layout.zeros != "queue":
            return None
        level = self.layout.levels[index]
        words = (level.queue_name(digit), *self.keys.shard_words(shard))
        return self._queue(
            ".".join(words),
            ttl_ms=digit * level.place_ms or PASS_THROUGH_TTL,
            dead_letter_to=self._exchange_names[index + 1],
            delivery_limit=NO_DELIVERY_LIMIT,
        )

    @cached_property
    def _exchange_names(self) -> tuple[str, ...]:
        """The names of the levels' exchanges, highest first, then of the delivery exchange."""
        return tuple(exchange.name for exchange in (*self.level_exchanges, self.delivery))

    def _name(self, suffix: str) -> str:
        """Return the name of an exchange or queue with its prefix."""
        return f"{self.prefix}.{suffix}"

    def _exchange(self, suffix: str, kind: str, alternate: str = "undeliverable") -> Exchange:
        """Return an exchange with an alternate exchange, which gets its unroutable messages."""
        arguments = {"alternate-exchange": self._name(alternate)}
        return Exchange(self._name(suffix), type=kind, durable=True, arguments=arguments)

    def _queue(
        self,
        suffix: str,
        exchange: Exchange | None = None,
        *,
        ttl_ms: int | None = None,
        dead_letter_to: str | None = None,
        delivery_limit: int | None = None,
        further: Mapping[str, object] = MappingProxyType({}),
    ) -> Queue:
        """Return a queue; arguments that its type does not support are left out."""
        arguments: dict[str, object] = {"x-queue-type": self.queue_type, **further}
        if ttl_ms is not None:
            arguments["x-message-ttl"] = ttl_ms
        if dead_letter_to is not None:
            arguments["x-dead-letter-exchange"] = dead_letter_to
        if self.queue_type == "quorum":
            # Spread the leaders over a cluster; by default, the declaring connection's node leads:
            # https://www.rabbitmq.com/docs/clustering#replica-placement
            arguments["x-queue-leader-locator"] = "balanced"
            if delivery_limit is not None:
                arguments["x-delivery-limit"] = delivery_limit
            if dead_letter_to is not None:
                # With both arguments, RabbitMQ keeps a message until the next queue has it:
                # https://www.rabbitmq.com/docs/quorum-queues#activating-at-least-once-dead-lettering
                arguments["x-dead-letter-strategy"] = "at-least-once"
                arguments["x-overflow"] = "reject-publish"
        return Queue(self._name(suffix), exchange, durable=True, queue_arguments=arguments)
