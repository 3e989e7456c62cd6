"""What takes messages and results instead of a broker and a result backend, and reads messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple, Self, TypeAlias

import amqp
import celery
from celery import states
from celery.backends.cache import CacheBackend
from celery.utils.functional import LRUCache
from kombu import Connection, Exchange, Producer, Queue
from kombu.compression import decompress
from kombu.serialization import loads

from celery_rabbitdelay.app.celery_internals import eta_of
from celery_rabbitdelay.exceptions import NotRecorded
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import Due, instant_of, milliseconds_of
from celery_rabbitdelay.levels.headers import parse
from celery_rabbitdelay.publishing.kombu_internals import serialized
from celery_rabbitdelay.publishing.message import Publication, body_of, headers_of
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.registry.decision import Arrival
from celery_rabbitdelay.testing.sent import Sent
from celery_rabbitdelay.worker.restore import restore


class Address(NamedTuple):
    """Where a message without a delay goes.

    Attributes:
        exchange: The exchange; empty for the default exchange.
        routing_key: The routing key.
        queue: The name of the queue; None if the exchange decides.
    """

    exchange: str
    routing_key: str
    queue: str | None


#: Takes a message, where it goes, and when it is due; None if it does not wait in the levels. Then
#: the address counts, otherwise what its headers say.
Take: TypeAlias = Callable[[amqp.Message, Address, Due | None], None]


@dataclass(slots=True)
class Recorded:
    """A task that was recorded.

    Attributes:
        sent: What tests see.
        arrival: What the registry is asked about it.
        message: Its message, as a worker receives it: headers, properties and delivery_info.
        body: Its arguments, its keyword arguments, and its callbacks, chain and chord.
        at_ms: When it arrives at a worker, in milliseconds since 1970-01-01 UTC.
        has_waited: Whether it comes from the levels, so that the registry is asked about it.
        waits: Whether it has not arrived yet, or waits again.
        is_held: Whether it was put back for as long as its job is open, or it is paused.
    """

    sent: Sent
    arrival: Arrival
    message: SimpleNamespace
    body: tuple[Any, Any, Mapping[str, Any]]
    at_ms: int
    has_waited: bool
    waits: bool = True
    is_held: bool = False

    @classmethod
    def of(cls, message: amqp.Message, address: Address, due: Due | None) -> Self | None:
        """Read a message; None for a note or an event.

        Args:
            message: The message.
            address: As for :data:`Take`.
            due: As for :data:`Take`.
        """
        raw, properties = headers_of(message), dict(message.properties)
        said, _ = parse(raw)
        headers = said.others
        if "task" not in headers:
            return None
        if due is not None:
            address = Address(said.exchange or "", said.routing_key or "", said.queue)
        due_ms, delay_ms, has_eta = _times(due, headers.get("eta"))
        delivery = {"exchange": address.exchange, "routing_key": address.routing_key}
        received: Any = SimpleNamespace(headers=raw, properties=properties, delivery_info=delivery)
        restore(received)
        body = _body(message, headers)
        arrival = Arrival.of(said, due_ms, address.queue or "", redelivered=False)
        return cls(
            sent=Sent(
                task=headers["task"],
                args=body[0],
                kwargs=body[1],
                task_id=headers["id"],
                due=instant_of(due_ms),
                delay=timedelta(milliseconds=delay_ms),
                has_eta=has_eta,
                tolerance=timedelta(milliseconds=0 if due is None else due.tolerance_ms),
                exchange=address.exchange,
                routing_key=address.routing_key,
                queue=address.queue,
                priority=said.priority or properties.get("priority") or 0,
                expires=eta_of(headers.get("expires"), UTC),
                headers=headers,
                key=arrival.key or None,
                job=arrival.job or None,
                once=bool(arrival.once),
            ),
            arrival=arrival,
            message=received,
            body=body,
            at_ms=due_ms,
            has_waited=due is not None,
        )


def _body(message: amqp.Message, headers: Mapping[str, Any]) -> tuple[Any, Any, Mapping[str, Any]]:
    data, content_type = body_of(message), message.properties["content_type"]
    if headers.get("compression"):
        data = decompress(data, headers["compression"])
    encoding = message.properties["content_encoding"]
    args, kwargs, embedded = loads(data, content_type, encoding, accept=[content_type])
    return args, kwargs, embedded


def _times(due: Due | None, eta: Any) -> tuple[int, int, bool]:
    """Return when a task is due and after how long, in milliseconds, and whether it has an eta."""
    now_ms = wall_clock.ms()
    if due is not None:
        delay_ms = max(due.at_ms - now_ms, 0) if due.is_instant else max(due.delay_ms, 0)
        return due.at_ms, delay_ms, due.is_instant
    # A worker would hold it until its eta.
    instant = eta_of(eta, UTC)
    due_ms = now_ms if instant is None else max(milliseconds_of(instant), now_ms)
    return due_ms, due_ms - now_ms, instant is not None


class RecordingPublisher(Publisher):
    """Takes the messages that would wait in the levels; each counts as confirmed.

    Args:
        connection: A connection to the broker, which is never opened.
        take: Takes a message.
    """

    def __init__(self, connection: Connection, take: Take) -> None:
        super().__init__(connection)
        self._take = take

    def publish_all(
        self,
        publications: Iterable[Publication],
        *args: Any,
        done: Callable[[Publication], None] | None = None,
        **options: Any,
    ) -> None:
        """Take messages, as :meth:`.Publisher.publish_all` publishes them."""
        for publication in publications:
            # Of all that is published here, it is DelayedProducer.address with its arguments.
            address: Any = publication.address
            *_, due = address.args
            self._take(publication.content.message(), Address("", "", None), due)
            if done is not None:
                done(publication)


class RecordingProducer(Producer):
    """Takes the messages that would go straight to their queues.

    Args:
        connection: A connection to the broker, which is never opened.
        take: Takes a message.
    """

    def __init__(self, connection: Connection, take: Take) -> None:
        super().__init__(connection, auto_declare=False)
        self._take = take

    def publish(  # type: ignore[override]
        self,
        body: Any,
        routing_key: str | None = None,
        *,
        headers: Mapping[str, Any] | None = None,
        exchange: str | Exchange | None = None,
        declare: Iterable[Exchange | Queue] | None = None,
        serializer: str | None = None,
        compression: str | None = None,
        **properties: Any,
    ) -> None:
        """Take a message of a task, or of an event."""
        own = dict(headers or {})
        data, content_type, content_encoding = serialized(
            self, body, own, serializer=serializer, compression=compression
        )
        exchange_name = exchange.name if isinstance(exchange, Exchange) else exchange or ""
        known = [each.name for each in declare or () if isinstance(each, Queue)]
        direct = routing_key if exchange_name == "" else None
        message = amqp.Message(
            data,
            application_headers=own,
            content_type=content_type,
            content_encoding=content_encoding,
            **{name: properties.get(name) for name in ("priority", "correlation_id", "reply_to")},
        )
        self._take(message, Address(exchange_name, routing_key or "", [*known, direct][0]), None)


class ResultsInMemory(CacheBackend):
    """A result backend that keeps results in memory, of this block alone.

    Args:
        app: The application.
    """

    def __init__(self, app: celery.Celery) -> None:
        super().__init__(app, url="memory://")
        self.client.cache = LRUCache(limit=None)

    def wait_for(self, task_id: str, *more: Any, **options: Any) -> Any:
        """Return the result of a task that has run.

        Raises:
            NotRecorded: It has not; nobody would run it meanwhile.
        """
        meta: Any = self.get_task_meta(task_id)
        if meta["status"] not in states.READY_STATES:
            raise NotRecorded("waiting for the result of a task that run_due() has not run")
        return meta
