"""Uses of the private or undocumented parts of a running Celery worker.

If Celery changes such a part, tests/kernel/unit/test_upstream.py fails with the part's name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import amqp
import click
from celery import bootsteps
from celery.exceptions import CeleryCommandException
from celery.platforms import EX_FAILURE
from celery.utils.quorum_queues import detect_quorum_queues
from celery.utils.serialization import strtobool
from celery.worker import control
from kombu import Message
from kombu.compression import compress

from celery_rabbitdelay.exceptions import InvalidSetting, UnprocessableMessage
from celery_rabbitdelay.levels.headers import CHECKED_IN, DUE, shortened
from celery_rabbitdelay.levels.shown_url import without_passwords_in
from celery_rabbitdelay.publishing.kombu_internals import decompressed_size
from celery_rabbitdelay.publishing.message import body_of, headers_of
from celery_rabbitdelay.publishing.wire import Seen

#: A worker, its consumer on one connection, the event loop of both, and a received task: Celery's
#: types lack most of the attributes used here.
Worker: TypeAlias = Any
Consumer: TypeAlias = Any
Hub: TypeAlias = Any
Request: TypeAlias = Any


@control.inspect_command(
    alias="dump_conf", signature="[include_defaults=False]", args=[("with_defaults", strtobool)]
)
def conf(state: object, with_defaults: bool = False, **options: object) -> dict[str, object]:
    """List configuration, without passwords; replaces Celery's control command."""
    shown = control.conf(state, with_defaults, **options)  # type: ignore[attr-defined]
    # Celery has already hidden the values of names such as "password".
    return {name: without_passwords_in(value) for name, value in shown.items()}


class RabbitMQStep(bootsteps.StartStopStep):
    """A bootstep of a worker or of its consumer, included only if the broker is RabbitMQ."""

    def include_if(self, parent: Worker | Consumer) -> bool:
        """Return whether the application uses the levels."""
        return bool(parent.app.rabbitdelay.available)

    def include(self, parent: Worker | Consumer) -> bool:
        """Add the step; an invalid setting ends ``celery worker`` without a traceback.

        Raises:
            InvalidSetting: A setting is invalid, and ``celery worker`` did not start the worker.
        """
        try:
            return bool(super().include(parent))
        except InvalidSetting as wrong:
            if click.get_current_context(silent=True) is None:
                raise
            text = "\n".join([str(wrong), *wrong.__notes__])
            raise CeleryCommandException(text, EX_FAILURE) from wrong


class Delivery(NamedTuple):
    """The arguments that Celery's consumer passes to a task's strategy.

    Attributes:
        message: The task's message.
        body: The body, if the consumer has read it.
        ack: Acknowledges the message.
        go_on: Passes the task to Celery, which runs it, or holds it until its ``eta``.
        task: The task's name.
        redelivered: Whether RabbitMQ has redelivered the message.
    """

    message: Message
    body: object
    ack: Callable[..., object]
    go_on: Callable[[], object]
    task: str
    redelivered: bool


def name_of_queue(consumer: Consumer, message: Message) -> str | None:
    """Return the name of the queue that a worker has received a message from."""
    tags: Mapping[str, str] = consumer.task_consumer._active_tags
    consumed = message.delivery_info.get("consumer_tag")
    return next((name for name, tag in tags.items() if tag == consumed), None)


def id_of(message: Message) -> str:
    """Return the id of a message's task, in any version of Celery's protocol; empty if unknown."""
    task_id = message.headers.get("id") or message.properties.get("correlation_id")
    return task_id if isinstance(task_id, str) else ""


def shown(task_id: object) -> str:
    """Return a task's id, escaped for the log: a client may choose any string as an id."""
    return shortened(task_id).strip("'")


def bound_bodies(consumer: Consumer, refuse: Callable[[Message, str], None]) -> None:
    """Mark delayed messages, and refuse a delayed message whose decompressed body is too large.

    The limit is ``rabbitdelay_max_message_bytes``. kombu decompresses a body as soon as it receives
    the message, in the worker's main process. A delayed message has passed the levels or check-in;
    other messages have no limit. Any message with unreadable properties is refused.

    Args:
        consumer: The worker's consumer, on one connection.
        refuse: Called with a refused message, and the reason.
    """
    delays = consumer.app.rabbitdelay
    most = delays.settings.max_message_bytes
    exchanges = {exchange.name for exchange in delays.topology.exchanges}
    tasks = consumer.task_consumer
    kombus: Any = tasks.channel.Message

    class Bounded(kombus):  # type: ignore[misc]
        """A message whose body is not decompressed beyond the limit."""

        def __init__(self, received: amqp.Message, **options: object) -> None:
            headers, info = headers_of(received), received.delivery_info
            compression = headers.get("compression")
            self.rabbitdelay_is_ours = (
                DUE in headers or CHECKED_IN in headers or info["exchange"] in exchanges
            )
            try:
                if unreadable := getattr(received, "rabbitdelay_seen", Seen()).unreadable:
                    raise UnprocessableMessage(unreadable)
                if compression and self.rabbitdelay_is_ours:
                    size = decompressed_size(body_of(received), compression, most)
                    if size > most:
                        raise UnprocessableMessage(
                            f"its body exceeds {most:,} bytes after decompression: "
                            "see rabbitdelay_max_message_bytes"
                        )
            except Exception:  # noqa: BLE001 - kombu's consumer calls on_error with it
                self.errors = [sys.exc_info()]
            super().__init__(received, **options)

    def on_error(message: Message, error: Exception) -> None:
        if isinstance(error, UnprocessableMessage):
            refuse(message, error.reason)
        else:
            consumer.on_decode_error(message, error)

    tasks.channel.Message = Bounded
    tasks.on_decode_error = on_error


def as_received(message: Message) -> amqp.Message:
    """Return a message as AMQP delivered it: compress the body that kombu has decompressed."""
    body: Any = message.body
    compression = message.headers.get("compression")
    if compression and not message.errors:
        body, _ = compress(body, compression)
    properties = {**message.properties, "application_headers": dict(message.headers)}
    received = amqp.Message(body, **properties)
    received.delivery_info = dict(message.delivery_info)
    return received


def has_static_prefetch(consumer: Consumer) -> bool:
    """Return whether the prefetch count stays the same while a worker holds tasks.

    With quorum queues, Celery sets the prefetch count per consumer. RabbitMQ applies a changed
    count to new consumers only, and a consumer cannot be replaced while it has unacknowledged
    messages: RabbitMQ 3.10 closes the connection (measured).
    """
    app = consumer.app
    return bool(app.conf.worker_detect_quorum_queues and detect_quorum_queues(app, "amqp")[0])
