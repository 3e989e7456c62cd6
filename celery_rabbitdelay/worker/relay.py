"""Putting tasks that come to a worker before they are due into the levels.

A producer that does not know the levels (plain Celery, another language, an older version) sends
a task at once, with an ``eta`` ahead. Celery would hold it in the worker until then.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from queue import Queue
from threading import Event, Thread
from typing import Any, Final, NamedTuple

from celery.exceptions import InvalidTaskError
from celery.utils.log import get_logger
from celery.utils.time import make_aware, maybe_iso8601
from kombu import Message
from kombu.exceptions import ContentDisallowed

from celery_rabbitdelay.destination import Destination
from celery_rabbitdelay.due import Due
from celery_rabbitdelay.producer import DelayedProducer
from celery_rabbitdelay.task import MAY_PASS

__all__ = ["Relay"]

logger = get_logger(__name__)

#: The properties of a message that are sent on. Not ``user_id``, which has to be the connection's
#: own user (https://www.rabbitmq.com/docs/validated-user-id).
PROPERTIES: Final = ("priority", "correlation_id", "reply_to", "message_id", "timestamp", "type")

#: Seconds between two attempts to publish what the broker does not take at the moment.
PAUSE: Final = 1.0

#: Seconds that a worker which stops waits for the message that is being published.
FAREWELL: Final = 5.0


class _Early(NamedTuple):
    """A message that came before it is due."""

    message: Message
    destination: Destination
    due: Due
    acknowledge: Callable[[], None]
    hold: Callable[[], None]


class Relay:
    """Publishes early tasks into the levels in a thread and on a connection of its own.

    So neither the worker's tasks nor its heartbeat wait for a confirm. A message is acknowledged
    once the broker has confirmed the one that replaces it; where the worker dies before that, the
    broker delivers it again.

    Args:
        consumer: The worker's consumer, on one connection.
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._delays = consumer.app.rabbitdelay
        self._tick_ms: int = self._delays.topology.layout.tick_ms
        self._came: Queue[_Early | None] = Queue()
        self._for_the_loop: deque[Callable[[], None]] = deque()
        self._wakes, self._wake = os.pipe()
        os.set_blocking(self._wakes, False)
        os.set_blocking(self._wake, False)
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="rabbitdelay-relay", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def register(self, hub: Any) -> None:
        """Have the worker's event loop run what has to run in it: acknowledging."""
        hub.add_reader(self._wakes, self._run_in_loop)

    def stop(self) -> None:
        """End the thread; what was not published yet is the broker's to deliver again."""
        self._stopping.set()
        self._came.put(None)
        self._thread.join(FAREWELL)
        self._run_in_loop()
        if self._consumer.hub is not None:
            self._consumer.hub.remove_reader(self._wakes)
        if not self._thread.is_alive():
            os.close(self._wakes)
            os.close(self._wake)

    def takes(
        self, message: Message, body: Any, ack: Callable[..., Any], hold: Callable[[], Any]
    ) -> bool:
        """Take over a task that is not due by more than a tick; return whether it was taken.

        Args:
            message: The message that the task came in.
            body: What Celery gives a strategy as body.
            ack: Acknowledges the message, as Celery gives it to a strategy.
            hold: Goes on as Celery does, which holds the task until it is due.
        """
        due = self._due(message, body)
        if due is None or due.delay_ms <= self._tick_ms:
            return False
        revoked = self._consumer.controller.state.revoked
        destination = self._destination(message)
        if destination is None or message.headers.get("id") in revoked:
            return False

        def acknowledge() -> None:
            ack(logger, self._consumer.connection_errors)

        def hold_it() -> None:
            try:
                hold()
            except (InvalidTaskError, ContentDisallowed) as invalid:
                self._consumer.on_invalid_task(body, message, invalid)

        self._came.put(_Early(message, destination, due, acknowledge, hold_it))
        return True

    def _due(self, message: Message, body: Any) -> Due | None:
        eta = message.headers.get("eta")
        if eta is None:
            # Protocol 1, and the mixture of both: Celery's strategies look there as well.
            with suppress(Exception):  # what is wrong with the body is theirs to say
                fields = message.payload if body is None else body
                eta = fields.get("eta") if isinstance(fields, Mapping) else None
        try:
            instant = maybe_iso8601(eta)
        except (AttributeError, TypeError, ValueError):
            return None
        if not isinstance(instant, datetime):
            return None
        if instant.tzinfo is None:
            # As Celery's requests do.
            instant = make_aware(instant, self._consumer.app.timezone)
        return Due.at(instant)

    def _destination(self, message: Message) -> Destination | None:
        """The queue that the message came out of, unless it ends with this worker."""
        info = message.delivery_info
        tags: dict[str, str] = self._consumer.task_consumer._active_tags
        name = next((name for name, tag in tags.items() if tag == info.get("consumer_tag")), None)
        queue = self._consumer.app.amqp.queues.get(name)
        if queue is None or queue.auto_delete or queue.exclusive:
            return None
        return Destination(queue, info["exchange"], info["routing_key"])

    def _run(self) -> None:
        while (early := self._came.get()) is not None and not self._stopping.is_set():
            try:
                done = self._publish(early)
            except Exception as error:  # noqa: BLE001 - the thread has to live on
                logger.warning(
                    "Task %s is due in %.1f s and cannot wait in the levels, so the worker holds "
                    "it: %s",
                    early.message.headers.get("id"),
                    early.due.left_ms() / 1000,
                    error,
                )
                self._do_in_loop(early.hold)
            else:
                if done:
                    self._do_in_loop(early.acknowledge)

    def _publish(self, early: _Early) -> bool:
        """Publish until it succeeds; return False where the worker stops before."""
        while not self._stopping.is_set():
            try:
                self._publish_once(early)
            except MAY_PASS as failure:
                logger.warning(
                    "A task that is not due could not be put into the levels: %s", failure
                )
                if early.due.left_ms() <= 0:
                    raise
                self._stopping.wait(PAUSE)
            else:
                return True
        return False

    def _publish_once(self, early: _Early) -> None:
        message, settings = early.message, self._delays.settings
        headers: dict[str, Any] = dict(message.headers)
        if "eta" in headers:
            headers["eta"] = None
        properties: dict[str, Any] = {
            name: message.properties[name]
            for name in PROPERTIES
            if message.properties.get(name) is not None
        }
        with self._delays.publisher() as publisher:
            producer = DelayedProducer(
                publisher,
                settings.topology,
                timeout=settings.confirm_timeout,
                may_declare=settings.declare == "auto",
            )
            producer.publish_delayed(
                message.body,
                early.destination,
                early.due,
                headers=headers,
                # kombu has taken the message's own compression off.
                compression=headers.pop("compression", None),
                content_type=message.content_type,
                content_encoding=message.content_encoding,
                **properties,
            )

    def _do_in_loop(self, action: Callable[[], None]) -> None:
        if self._consumer.hub is None:
            # gevent and eventlet: this thread is a greenlet beside the loop's.
            action()
            return
        self._for_the_loop.append(action)
        with suppress(BlockingIOError):  # full of bytes, each of which wakes the loop
            os.write(self._wake, b"\0")

    def _run_in_loop(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wakes, 4096)
        while self._for_the_loop:
            action = self._for_the_loop.popleft()
            try:
                action()
            except Exception:  # the loop has other things to do
                logger.exception("A task that was not due is left to the broker")
