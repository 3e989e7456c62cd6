"""What is declared beside the levels: the modules' queues, and the identity of a topology."""

from __future__ import annotations

from functools import partial
from typing import Final, NamedTuple

from kombu import Exchange, Queue

from celery_rabbitdelay.levels.entities import Binding, Entities
from celery_rabbitdelay.levels.layout import MAX_TTL

__all__ = ["Identity", "ModuleQueues"]

#: How often a module's message may come back unacknowledged, because its worker ended, until it is
#: taken for the cause and goes to ``undeliverable``.
POISON_LIMIT: Final = 100

#: How often a message may be fetched from ``undeliverable`` and put back. From 4.0 on, RabbitMQ's
#: default is 20, after which it drops the message; up to 3.13 "no limit" cannot be written.
NO_DELIVERY_LIMIT: Final = 2**31 - 1


class ModuleQueues(NamedTuple):
    """The queues beside the levels; each but distribution's has a fanout exchange of its name.

    Attributes:
        undeliverable: Gets each message that no queue takes, so that it does not hold up others.
        checkin: The ingest queue: any AMQP client publishes here, with the delay in a header.
        meditation: The overflow loop: a delay above the capacity waits here for one capacity.
        distribution: Gets the messages that are due and that a worker publishes to their exchange.
        meditated: The exchange through which a message returns from meditation to the queue of
            check-in. It is not check-in's own, which clients publish to: a message that comes this
            way was checked before.
    """

    undeliverable: Queue
    checkin: Queue
    meditation: Queue
    distribution: Queue
    meditated: Exchange

    @classmethod
    def of(cls, entities: Entities, capacity_ms: int) -> ModuleQueues:
        """Return the queues beside levels of a capacity."""
        undeliverable, checkin, meditation, distribution, meditated = map(
            entities.name, cls._fields
        )
        fanout, queue = partial(entities.exchange, kind="fanout"), entities.queue
        served = partial(queue, dead_letter_to=undeliverable, delivery_limit=POISON_LIMIT)
        # The alternate exchange of all others; it has none itself.
        last = Exchange(undeliverable, type="fanout", durable=True)
        ttl_ms = min(capacity_ms, MAX_TTL)
        return cls(
            queue(undeliverable, last, delivery_limit=NO_DELIVERY_LIMIT),
            served(checkin, fanout(checkin)),
            queue(meditation, fanout(meditation), ttl_ms=ttl_ms, dead_letter_to=meditated),
            served(distribution),
            fanout(meditated),
        )

    @property
    def queues(self) -> tuple[Queue, ...]:
        """All queues."""
        return (self.undeliverable, self.checkin, self.meditation, self.distribution)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All exchanges; first that of ``undeliverable``, which all others refer to."""
        own = (self.undeliverable, self.checkin, self.meditation)
        return (*(queue.exchange for queue in own), self.meditated)

    @property
    def bindings(self) -> tuple[Binding, ...]:
        """All bindings, except distribution's to the delivery exchange."""
        own = (self.undeliverable.name, self.checkin.name, self.meditation.name)
        back = Binding(self.meditated.name, "", self.checkin.name)
        return (*(Binding(name, "", name) for name in own), back)


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
