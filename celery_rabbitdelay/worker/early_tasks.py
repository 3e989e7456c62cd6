"""Putting tasks that come to a worker before they are due into the levels.

A producer that does not know the levels (plain Celery, another language, an older version) sends
a task at once, with an ``eta`` ahead. Celery would hold it in the worker until then.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from queue import Empty, Queue
from threading import Event, Lock, Thread
from typing import Any, Final, TypeAlias

from celery.exceptions import InvalidTaskError
from celery.utils.log import get_logger
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu import Message
from kombu.exceptions import ContentDisallowed, DecodeError

from celery_rabbitdelay.app.task import MAY_PASS
from celery_rabbitdelay.levels.delay import Due
from celery_rabbitdelay.publishing.destination import Destination
from celery_rabbitdelay.publishing.message import MAX_PRIORITY
from celery_rabbitdelay.publishing.producer import DelayedProducer

__all__ = ["Relay"]

logger = get_logger(__name__)

#: The properties of a message that are sent on. Not ``user_id``, which has to be the connection's
#: own user (https://www.rabbitmq.com/docs/validated-user-id).
PROPERTIES: Final = (
    "priority",
    "correlation_id",
    "reply_to",
    "message_id",
    "timestamp",
    "type",
    "app_id",
)

#: Seconds between two attempts to publish what the broker does not take at the moment.
PAUSE: Final = 1.0

#: Seconds that a worker which stops waits for the message that is being published.
FAREWELL: Final = 2.0

#: Something that only the worker's event loop may do.
Action: TypeAlias = Callable[[], None]


@dataclass(slots=True)
class _Early:
    """A message that came before it is due.

    Attributes:
        message: The message.
        destination: The queue that it came out of, its exchange and its routing key.
        due: When it is due.
        acknowledge: Acknowledges it.
        hold: Goes on as Celery does.
        again_at: When to try the next time, on the clock of :func:`time.monotonic`; None where it
            was not tried before.
    """

    message: Message
    destination: Destination
    due: Due
    acknowledge: Action
    hold: Action
    again_at: float | None = None


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
        self._failed: deque[_Early] = deque()
        self._acknowledgements: deque[Action] = deque()
        self._other_actions: deque[Action] = deque()
        self._wakes, self._wake = os.pipe()
        os.set_blocking(self._wakes, False)
        os.set_blocking(self._wake, False)
        self._stopping = Event()
        self._ends = Lock()
        self._one_has_ended = False
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
        # Only these: what the worker would begin to hold now comes to it once more.
        _do_all(self._acknowledgements)
        if self._consumer.hub is not None:
            self._consumer.hub.remove_reader(self._wakes)
        self._end()

    def _end(self) -> None:
        """Close the pipe once neither the thread nor the worker uses it any more."""
        with self._ends:
            if self._one_has_ended:
                os.close(self._wakes)
                os.close(self._wake)
            self._one_has_ended = True

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
            if self._consumer.hub is None:
                # Before 5.7, Celery would put it off until the broker happens to say something.
                self._consumer.perform_pending_operations()

        def hold_it() -> None:
            try:
                hold()
            except (InvalidTaskError, ContentDisallowed) as invalid:
                self._consumer.on_invalid_task(body, message, invalid)
            except DecodeError as unreadable:
                self._consumer.on_decode_error(message, unreadable)

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
        # As Celery's requests do, which take a naive one for UTC.
        return Due.at(maybe_make_aware(instant, self._consumer.app.timezone))

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
        while (early := self._next()) is not None and not self._stopping.is_set():
            try:
                self._publish(early)
            except MAY_PASS as failure:
                self._try_again(early, failure)
            except Exception as error:  # noqa: BLE001 - the thread has to live on
                self._give_up(early, error)
            else:
                self._do_in_loop(self._acknowledgements, partial(self._done, early))
        self._end()

    def _next(self) -> _Early | None:
        """The next message: one that came, or one that failed a while ago; None to end."""
        if not self._failed:
            return self._came.get()
        wait = (self._failed[0].again_at or 0.0) - time.monotonic()
        try:
            return self._came.get(timeout=wait) if wait > 0 else self._failed.popleft()
        except Empty:
            return self._failed.popleft()

    def _try_again(self, early: _Early, failure: Exception) -> None:
        """Put a message behind the others, unless it is due: then the worker runs it."""
        if early.due.remaining_ms() <= 0:
            self._give_up(early, failure)
            return
        if early.again_at is None:
            logger.warning("A task that is not due could not be put into the levels: %s", failure)
            # It keeps its place at the worker. As for a task that Celery holds, there is another.
            self._do_in_loop(self._other_actions, self._consumer.qos.increment_eventually)
        early.again_at = time.monotonic() + PAUSE
        self._failed.append(early)

    def _give_up(self, early: _Early, error: Exception) -> None:
        logger.warning(
            "Task %s is due in %.1f s and cannot wait in the levels, so the worker holds it: %s",
            early.message.headers.get("id"),
            early.due.remaining_ms() / 1000,
            error,
        )
        self._do_in_loop(self._other_actions, partial(self._hold, early))

    def _done(self, early: _Early) -> None:
        self._give_back_its_place(early)
        early.acknowledge()

    def _hold(self, early: _Early) -> None:
        self._give_back_its_place(early)
        early.hold()

    def _give_back_its_place(self, early: _Early) -> None:
        if early.again_at is not None:
            self._consumer.qos.decrement_eventually()

    def _publish(self, early: _Early) -> None:
        message, settings = early.message, self._delays.settings
        headers: dict[str, Any] = dict(message.headers)
        if "eta" in headers:
            headers["eta"] = None
        properties: dict[str, Any] = {
            name: message.properties[name]
            for name in PROPERTIES
            if message.properties.get(name) is not None
        }
        destination = early.destination
        if (properties.get("priority") or 0) > MAX_PRIORITY:
            # By distribution, which goes by exchange and key: to this queue, and to no other.
            assert destination.queue is not None
            destination = destination._replace(exchange="", routing_key=destination.queue.name)
        with self._delays.publisher() as publisher:
            producer = DelayedProducer(publisher, **settings.for_producer)
            producer.publish_delayed(
                message.body,
                destination,
                early.due,
                headers=headers,
                # Others wait, and as time goes on it comes to another level.
                resends=0,
                # kombu has taken the message's own compression off.
                compression=headers.pop("compression", None),
                content_type=message.content_type,
                content_encoding=message.content_encoding,
                **properties,
            )

    def _do_in_loop(self, actions: deque[Action], action: Action) -> None:
        actions.append(action)
        if self._consumer.hub is None:
            # gevent and eventlet: this thread is a greenlet beside the loop's.
            _do_all(actions)
        else:
            with suppress(BlockingIOError):  # full of bytes, each of which wakes the loop
                os.write(self._wake, b"\0")

    def _run_in_loop(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wakes, 4096)
        _do_all(self._acknowledgements)
        _do_all(self._other_actions)


def _do_all(actions: deque[Action]) -> None:
    while actions:
        action = actions.popleft()
        try:
            action()
        except Exception:  # whoever calls has other things to do
            logger.exception("A task that was not due is left to the broker")
