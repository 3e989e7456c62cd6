"""Exchanges, queues and bindings, as all of ours are declared."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

from kombu import Exchange, Queue

__all__ = ["Binding", "Entities", "QueueType"]

QueueType: TypeAlias = Literal["quorum", "classic"]


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
    """Makes the exchanges and queues of one topology.

    Attributes:
        prefix: The first part of every name.
        queue_type: The type of every queue.
    """

    prefix: str
    queue_type: QueueType

    def name(self, suffix: str) -> str:
        """Return the name of an exchange or queue with its prefix."""
        return f"{self.prefix}.{suffix}"

    def exchange(self, name: str, kind: str) -> Exchange:
        """Return an exchange, whose unroutable messages go to ``undeliverable``."""
        arguments = {"alternate-exchange": self.name("undeliverable")}
        return Exchange(name, type=kind, durable=True, arguments=arguments)

    def queue(
        self,
        name: str,
        exchange: Exchange | None = None,
        *,
        ttl_ms: int | None = None,
        dead_letter_to: str | None = None,
        delivery_limit: int | None = None,
    ) -> Queue:
        """Return a queue, with those arguments that its type has."""
        arguments: dict[str, Any] = {"x-queue-type": self.queue_type}
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
                # Only both together make RabbitMQ keep a message until the next queue has it:
                # https://www.rabbitmq.com/docs/quorum-queues#activating-at-least-once-dead-lettering
                arguments["x-dead-letter-strategy"] = "at-least-once"
                arguments["x-overflow"] = "reject-publish"
        return Queue(name, exchange, durable=True, queue_arguments=arguments)
