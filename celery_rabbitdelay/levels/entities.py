"""Exchange, queue and binding definitions, with the module queues."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from kombu import Exchange, Queue

from celery_rabbitdelay.levels.layout import MAX_TTL

QueueType: TypeAlias = Literal["quorum", "classic"]

#: What a worker can serve, as ``rabbitdelay_modules`` names it: the modules around the levels, and
#: the probe.
CHECK_IN: Final = "check-in"
DISTRIBUTE: Final = "distribution"
PROBE: Final = "probe"
MODULES: Final = (CHECK_IN, DISTRIBUTE, PROBE)

#: Milliseconds after which probes that no worker receives are dropped.
PROBE_TTL: Final = 300_000

#: Milliseconds for which a task that is paused waits before it asks the registry again.
PAUSED_TTL: Final = 600_000

#: How the tags of this package's consumers begin, by which verify tells them from a stranger's.
CONSUMER_TAG: Final = "rabbitdelay-"

#: How often a message may be given back to its queue; see :data:`.DELIVERY_LIMIT`. Up to 3.13, "no
#: limit" cannot be written.
NO_DELIVERY_LIMIT: Final = 2**31 - 1

#: Delivery limit of the module queues: a message redelivered more often is assumed to crash workers
#: and is dead-lettered to ``undeliverable``.
POISON_LIMIT: Final = 100


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
    target_is_exchange: bool = False


class Entities(NamedTuple):
    """Makes the exchanges and queues of one topology, from their names without prefix.

    Attributes:
        prefix: The first part of every name.
        queue_type: The type of every queue.
    """

    prefix: str
    queue_type: QueueType

    def name(self, suffix: str) -> str:
        """Return the name of an exchange or queue with its prefix."""
        return f"{self.prefix}.{suffix}"

    def exchange(self, suffix: str, kind: str, alternate: str = "undeliverable") -> Exchange:
        """Return an exchange, whose unroutable messages go to another one, its alternate."""
        arguments = {"alternate-exchange": self.name(alternate)}
        return Exchange(self.name(suffix), type=kind, durable=True, arguments=arguments)

    def queue(
        self,
        suffix: str,
        exchange: Exchange | None = None,
        *,
        ttl_ms: int | None = None,
        dead_letter_to: str | None = None,
        delivery_limit: int | None = None,
        single_active_consumer: bool = False,
    ) -> Queue:
        """Return a queue; arguments that its type does not support are left out."""
        arguments: dict[str, Any] = {"x-queue-type": self.queue_type}
        if single_active_consumer:
            arguments["x-single-active-consumer"] = True
        if ttl_ms is not None:
            arguments["x-message-ttl"] = ttl_ms
        if dead_letter_to is not None:
            arguments["x-dead-letter-exchange"] = dead_letter_to
        if self.queue_type == "quorum":
            # Over the nodes of a cluster; otherwise the declaring connection's node leads them all:
            # https://www.rabbitmq.com/docs/clustering#replica-placement
            arguments["x-queue-leader-locator"] = "balanced"
            if delivery_limit is not None:
                arguments["x-delivery-limit"] = delivery_limit
            if dead_letter_to is not None:
                # Both are required; RabbitMQ then keeps a message until the next queue has it:
                # https://www.rabbitmq.com/docs/quorum-queues#activating-at-least-once-dead-lettering
                arguments["x-dead-letter-strategy"] = "at-least-once"
                arguments["x-overflow"] = "reject-publish"
        return Queue(self.name(suffix), exchange, durable=True, queue_arguments=arguments)


class ModuleQueues(NamedTuple):
    """The queues outside the levels; all but distribution have a fanout exchange of the same name.

    Attributes:
        undeliverable: Gets every message that cannot be delivered, so that it blocks no others.
        checkin: The ingest queue: any AMQP client publishes here, with the delay in a header.
        meditation: The overflow loop: a delay above the capacity waits here once per capacity.
        distribution: Gets due messages that a worker publishes to their final exchange.
        meditated: The exchange through which a message returns from meditation to check-in's queue.
            Clients need no permission for it.
        paused: Holds due tasks that are paused. After :data:`PAUSED_TTL` a task returns to its
            queue and asks the registry again; after a resume, workers return it at once.
        unrouted: The exchange through which distribution gets the due messages that find no queue,
            to try again later: the alternate exchange of delivery.
    """

    undeliverable: Queue
    checkin: Queue
    meditation: Queue
    distribution: Queue
    paused: Queue
    meditated: Exchange
    unrouted: Exchange

    @classmethod
    def of(cls, entities: Entities, capacity_ms: int) -> ModuleQueues:
        """Return the module queues for levels of a given capacity.

        Args:
            entities: Makes them.
            capacity_ms: The capacity in milliseconds.
        """
        fanout, queue = partial(entities.exchange, kind="fanout"), entities.queue
        # The alternate exchange of all others; it has none itself.
        last = Exchange(entities.name("undeliverable"), type="fanout", durable=True)
        served = partial(queue, dead_letter_to=last.name, delivery_limit=POISON_LIMIT)
        meditated, ttl_ms = fanout("meditated"), min(capacity_ms, MAX_TTL)
        loop = partial(queue, delivery_limit=NO_DELIVERY_LIMIT)
        return cls(
            undeliverable=loop("undeliverable", last),
            checkin=served("checkin", fanout("checkin")),
            meditation=loop(
                "meditation", fanout("meditation"), ttl_ms=ttl_ms, dead_letter_to=meditated.name
            ),
            distribution=served("distribution"),
            paused=loop(
                "paused",
                # Without an alternate: what it cannot route comes back, and goes into the levels.
                Exchange(entities.name("paused"), type="fanout", durable=True),
                ttl_ms=PAUSED_TTL,
                dead_letter_to=entities.name("delivery"),
            ),
            meditated=meditated,
            unrouted=fanout("unrouted"),
        )

    @property
    def queues(self) -> tuple[Queue, ...]:
        """All queues."""
        return self.undeliverable, self.checkin, self.meditation, self.distribution, self.paused

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All exchanges; first that of ``undeliverable``, which all others refer to."""
        return tuple(exchange for exchange, _ in self._fanouts)

    @property
    def bindings(self) -> tuple[Binding, ...]:
        """All bindings, except that of distribution to the delivery exchange."""
        return tuple(Binding(exchange.name, "", queue.name) for exchange, queue in self._fanouts)

    @property
    def _fanouts(self) -> Iterator[tuple[Exchange, Queue]]:
        for queue in (self.undeliverable, self.checkin, self.meditation, self.paused):
            yield queue.exchange, queue
        yield self.meditated, self.checkin
        yield self.unrouted, self.distribution


class Identity(NamedTuple):
    """Two exchanges that say which topology is declared under a prefix, and that it is complete.

    Attributes:
        fingerprint: A word that is the same for two topologies if, and only if, they are the same.
        guard: Declared first. RabbitMQ refuses to declare it again with another alternate exchange,
            and so refuses every other topology under the prefix.
        marker: Declared last: where it exists, the topology is complete.
    """

    fingerprint: str
    guard: Exchange
    marker: Exchange

    @classmethod
    def of(cls, entities: Entities, fingerprint: str) -> Identity:
        """Return the identity of the topology that has a fingerprint."""
        name = entities.name("layout")
        marker = Exchange(f"{name}.{fingerprint}", type="fanout", durable=True)
        arguments = {"alternate-exchange": marker.name}
        guard = Exchange(name, type="fanout", durable=True, arguments=arguments)
        return cls(fingerprint, guard, marker)
