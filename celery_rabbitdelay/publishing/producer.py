"""A kombu producer whose messages wait in the levels before they reach their queue."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from kombu import Connection, Exchange, Producer, Queue
from kombu.common import Broadcast, maybe_declare
from kombu.compression import compress

from celery_rabbitdelay.exceptions import MessageTooLarge, NeedsDistribution
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.delay import Delay, Due, check_max_delay
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.levels.topology import CHECK_IN, DISTRIBUTE, Topology
from celery_rabbitdelay.publishing import declaration
from celery_rabbitdelay.publishing.destination import Destination, may_refuse
from celery_rabbitdelay.publishing.kombu_internals import SERIALIZING, serialized
from celery_rabbitdelay.publishing.message import (
    DEFAULT_MAX_MESSAGE_BYTES,
    Publication,
    WaitingMessage,
)
from celery_rabbitdelay.publishing.publish_loop import BACKOFF, RESENDS, PublishPolicy
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.publishing.signature import SigningKeys, signed


class Delayed(NamedTuple):
    """A message that is ready to be published into the levels.

    Attributes:
        message: The message.
        destination: The name of the queue that gets the due message, or :data:`.DISTRIBUTION`.
        task_id: The task's id, which selects the shard.
        queue: The destination queue; None if the exchange routes the message.
    """

    message: WaitingMessage
    destination: str
    task_id: str
    queue: Queue | None


class DelayedProducer(Producer):
    """Publishes delayed messages, each with a publisher confirm.

    In a plain kombu program::

        producer = DelayedProducer(Publisher(connection), Topology())
        destination = Destination(Queue("reports"), "", "reports")
        producer.publish_delayed({"month": 7}, destination, due=3600)

    Args:
        publisher: Publishes the messages; :meth:`publish`, without a delay, uses its connection.
        topology: The levels.
        timeout: The timeout of a message in seconds, including connecting, declaring and resends.
        may_declare: Whether a missing topology is declared; if False, it is an error.
        modules: The names of the modules that workers serve; see ``rabbitdelay_modules``. A kombu
            program does not serve modules itself.
        may_refuse: Patterns for names of queues that may refuse a message, with ``*`` and ``?``. If
            workers serve distribution, it publishes the messages for these queues, for bounded
            queues with ``reject-publish``, and, if the connection lists several hosts, for classic
            queues.
        max_message_bytes: The largest body, in bytes and before compression, of a message that is
            compressed or passes through a module; None: no limit. Workers refuse a larger message;
            see ``rabbitdelay_max_message_bytes``.
        serializer: The name of kombu's default serializer.
        signing_keys: The keys that sign every message; None to leave messages unsigned.

    Attributes:
        added_headers: Other headers of every message, such as the headers in :data:`.REGISTRY`.
    """

    def __init__(
        self,
        publisher: Publisher,
        topology: Topology,
        *,
        timeout: float = 30.0,
        may_declare: bool = True,
        modules: Collection[str] = (),
        may_refuse: Collection[str] = (),
        max_message_bytes: int | None = DEFAULT_MAX_MESSAGE_BYTES,
        serializer: str | None = None,
        signing_keys: SigningKeys | None = None,
    ) -> None:
        super().__init__(publisher.connection, serializer=serializer, auto_declare=False)
        self.publisher = publisher
        self.topology = topology
        self.timeout = timeout
        self.may_declare = may_declare
        self.modules = modules
        self.may_refuse = may_refuse
        self.signing_keys = signing_keys
        self.max_message_bytes = max_message_bytes
        self.added_headers: Mapping[str, Any] = {}

    def publish_delayed(
        self,
        body: object,
        destination: Destination,
        due: Due | Delay,
        *,
        declare: Iterable[Exchange | Queue] = (),
        resends: int | None = RESENDS,
        backoff: tuple[float, float, float] = BACKOFF,
        **options: Any,
    ) -> None:
        """Publish a message that reaches ``destination`` when it is due, never before.

        The destination's queue is declared and bound first, so no consumer needs to have run. Only
        an exclusive queue has to be declared and bound by its consumer.

        Args:
            body: The body, as for :meth:`kombu.Producer.publish`.
            destination: The queue, and the exchange and routing key that its consumer will see.
            due: A delay in seconds or as a timedelta, rounded up to ticks; or a :class:`Due`.
            declare: Other exchanges and queues to declare first.
            resends: Maximum resends after a nack or a lost connection. None: no limit but the
                timeout.
            backoff: The seconds before the first resend, the increment, and the maximum; each pause
                is shortened at random, by up to a quarter.
            **options: ``headers`` (broker headers, ``rabbitdelay-*``, ``CC`` and ``BCC`` are
                removed); kombu's ``serializer`` and ``compression``; ``content_type`` and
                ``content_encoding`` of a serialized body; AMQP's message properties.
                ``expiration`` is dropped: RabbitMQ would apply it to the wait in each level.

        Raises:
            DelayTooLong: The delay is above the layout's capacity, and ``modules`` lacks check-in.
            InvalidDelay: The delay is above 100 years.
            MessageTooLarge: The message is compressed or passes through a module, and is larger
                than workers accept.
            NeedsDistribution: ``modules`` lacks distribution, and either no single known queue
                matches, or the priority is above 4 and the levels are quorum queues.
            PublishError: The broker did not confirm the message; see :meth:`Publisher.publish`.
            TopologyIncomplete: The topology is missing, and ``may_declare`` is False.
        """
        due = due if isinstance(due, Due) else Due.after(due)
        delayed = self.delayed_message(body, destination, due, **options)
        policy = PublishPolicy(self.timeout, resends, backoff)
        self.publish_message(delayed, due, policy, declare)

    def publish_message(
        self,
        delayed: Delayed,
        due: Due,
        policy: PublishPolicy,
        declare: Iterable[Exchange | Queue] = (),
    ) -> None:
        """Publish a message that :meth:`delayed_message` has made.

        Args:
            delayed: The message.
            due: When the message is due.
            policy: The timeout and the resends.
            declare: As for :meth:`publish_delayed`.

        Raises:
            PublishError: The broker did not confirm the message; see :meth:`Publisher.publish`.
            TopologyIncomplete: The topology is missing, and ``may_declare`` is False.
        """
        publication = Publication.of(delayed.message.amqp(), partial(self.address, delayed, due))
        self.publisher.publish(publication, policy, **self.declarations(delayed.queue, declare))

    def address(self, delayed: Delayed, due: Due) -> tuple[str, str]:
        """Return the exchange and the routing key of a message that is published now."""
        route = self.topology.route(due, delayed.destination, delayed.task_id)
        return route.exchange, route.routing_key

    def declarations(
        self, queue: Queue | None, declare: Iterable[Exchange | Queue]
    ) -> dict[str, Callable[[Connection], None] | None]:
        """Return the arguments ``declare`` and ``redeclare`` of :meth:`Publisher.publish`.

        Args:
            queue: The messages' queue; None if the exchange routes them.
            declare: Other exchanges and queues that the messages need.
        """
        further = [entity for entity in declare if entity is not queue]
        first = partial(self._declare, queue=queue, further=further)
        again = partial(first, again=True) if self.may_declare else None
        return {"declare": first, "redeclare": again}

    def delayed_message(
        self,
        body: object,
        destination: Destination,
        due: Due,
        *,
        headers: Mapping[str, object] | None = None,
        **properties: object,
    ) -> Delayed:
        """Return the message that :meth:`publish_delayed` publishes, from the same arguments.

        Raises:
            DelayTooLong: The delay is above the layout's capacity, and ``modules`` lacks check-in.
            InvalidDelay: The delay is above 100 years.
            MessageTooLarge: The message is compressed or passes through a module, and is larger
                than workers accept.
            NeedsDistribution: The message needs distribution, which ``modules`` lacks.
        """
        properties.pop("expiration", None)
        properties.setdefault("priority", 0)  # kombu's default
        own_headers = header_names.strip(headers or {})
        how = {name: properties.pop(name) for name in SERIALIZING if name in properties}
        body, properties["content_type"], properties["content_encoding"] = self.serialize(
            body, own_headers, **how
        )
        reply_to = properties.get("reply_to")
        if isinstance(reply_to, Queue):
            properties["reply_to"] = reply_to.name
        registry = header_names.REGISTRY & self.added_headers.keys()
        others = {name: self.added_headers[name] for name in self.added_headers.keys() - registry}
        delay_headers = header_names.DelayHeaders(
            due.at_ms,
            destination.exchange,
            destination.routing_key,
            registry={name: self.added_headers[name] for name in registry},
            others={**own_headers, **others},
        )
        message = WaitingMessage(body, properties, delay_headers)
        return self.routed(message, destination.queue, due)

    def routed(self, message: WaitingMessage, queue: Queue | None, due: Due) -> Delayed:
        """Check and sign a message, and choose its destination: a queue, or distribution.

        Args:
            message: The message; its headers name the exchange and the routing key that its
                consumer sees.
            queue: The queue that gets the message; None if the exchange chooses the queues.
            due: When the message leaves the levels.

        Raises:
            RabbitDelayError: As for :meth:`delayed_message`.
        """
        if CHECK_IN not in self.modules:
            self.topology.layout.check_capacity(due.delay_ms)
        check_max_delay(due)
        headers = message.headers
        priority = message.properties.get("priority") or 0
        is_too_high = self.topology.queue_type == "quorum" and priority > header_names.MAX_PRIORITY
        has_distribution = DISTRIBUTE in self.modules
        if queue is None or is_too_high:
            if not has_distribution:
                named = Destination(None, str(headers.exchange), str(headers.routing_key))
                raise NeedsDistribution(
                    str(named) if queue is None else f"a message of priority {priority}"
                )
            name = DISTRIBUTION
        else:
            refuses = has_distribution and may_refuse(
                queue, self.may_refuse, self.publisher.connection
            )
            name = DISTRIBUTION if refuses else queue.name
        # Drop CC and BCC: modules refuse a message that names further destinations.
        others = {
            name: value
            for name, value in headers.others.items()
            if name not in header_names.SENDER_SELECTED
        }
        message = message.saying(queue=None if queue is None else queue.name, others=others)
        if is_too_high:
            message = message.with_low_priority()
        self.check_size(len(message.body), name, due)
        return Delayed(signed(message, self.signing_keys), name, message.task_id, queue)

    def check_size(self, size: int, destination: str, due: Due) -> None:
        """Refuse a message that a module would refuse after the wait.

        A message passes through distribution unless it goes straight to a queue. A delay above the
        capacity of the levels passes through meditation, the overflow loop, which check-in serves.

        Args:
            size: The size of the message's body, in bytes.
            destination: As in :class:`Delayed`.
            due: When the message is due.

        Raises:
            MessageTooLarge: The message is too large.
        """
        most = self.max_message_bytes
        capacity_ms = self.topology.layout.capacity_ms
        is_straight = destination != DISTRIBUTION and due.delay_ms <= capacity_ms
        if not is_straight and most is not None and size > most:
            raise MessageTooLarge(size, most)

    def serialize(
        self, body: object, headers: dict[str, Any], **how: Any
    ) -> tuple[bytes, str | None, str | None]:
        """Serialize and compress a body as kombu does; see :func:`.serialized`.

        Raises:
            MessageTooLarge: The body is compressed, and a worker would not decompress it.
        """
        compression, most = how.pop("compression", None), self.max_message_bytes
        body, content_type, content_encoding = serialized(self, body, headers, **how)
        if compression:
            if most is not None and len(body) > most:
                raise MessageTooLarge(len(body), most)
            body, headers["compression"] = compress(body, compression)
        return body, content_type, content_encoding

    def _declare(
        self,
        connection: Connection,
        queue: Queue | None,
        further: list[Exchange | Queue],
        again: bool = False,
    ) -> None:
        if not self.may_declare:
            declaration.check_complete(connection, self.topology, queue, by_marker=True)
            return
        if again:
            # An exchange of the topology may have been deleted, but not its marker.
            declaration.declare(connection, self.topology)
        if queue is None:
            declaration.declare_if_missing(connection, self.topology)
        else:
            declaration.declare_destination(connection, self.topology, queue)
        for entity in further:
            # Every worker declares its own queue for a broadcast.
            declared = entity.exchange if isinstance(entity, Broadcast) else entity
            maybe_declare(declared, connection.default_channel)
