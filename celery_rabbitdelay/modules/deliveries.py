"""What a module takes from its queue: how many messages at a time, and how many bytes of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, cast

import amqp
from kombu import Connection

from celery_rabbitdelay.levels.entities import CONSUMER_TAG
from celery_rabbitdelay.modules.bounds import HeldBytes, cost_of
from celery_rabbitdelay.publishing.wire import (
    ACK,
    REJECT,
    REQUEUE,
    Settlement,
    Wire,
    settle_frames,
)

logger = logging.getLogger(__name__)

#: The maximum prefetch count of AMQP, a 16-bit number.
MAX_PREFETCH: Final = 65_535


class Deliveries:
    """Consumes a queue on a channel of its own, and settles what it has taken.

    If the messages that are held take more than the budget of bytes, further ones are given back at
    once, and the consumer is cancelled until half of the budget is free. It goes on with a prefetch
    count that fits the largest of the latest messages, and raises it again once they are smaller:
    cancelled and begun anew, as AMQP cannot raise the prefetch of a consumer.

    Args:
        connection: A connection that is open.
        queue: The name of the queue.
        timeout: Seconds to wait for an answer of the broker.
        on_message: Called with each message that is taken.

    Attributes:
        unfinished: The costs of the messages that were taken and are not settled, by delivery tag.
        consuming: Whether messages are to be taken.
        channel: The channel.
    """

    def __init__(
        self,
        connection: Connection,
        queue: str,
        timeout: float,
        on_message: Callable[[amqp.Message], None],
    ) -> None:
        self.unfinished: dict[int, int] = {}
        self.consuming = False
        self.channel = cast(Any, connection.channel())
        # Bodies stay bytes.
        self.channel.auto_decode = False
        self._wire = Wire(connection)
        self._queue = queue
        self._timeout = timeout
        self._on_message = on_message
        self._held = HeldBytes()
        #: The prefetch count that is wanted, and the one that is set, which fits the budget.
        self._wanted = self._prefetch = 1
        self._consumers = 0
        self._tag: str | None = None
        self._former_tag: str | None = None
        #: The delivery tags that are settled with the next :meth:`write`, by how.
        self._settled: dict[Settlement, list[int]] = {ACK: [], REJECT: [], REQUEUE: []}

    def take(self, prefetch: int) -> None:
        """Take at most this many messages ahead, from now on."""
        self._wanted, self.consuming = min(prefetch, MAX_PREFETCH), True
        self._cancel()
        self._consume()

    def stop(self) -> None:
        """Take no more messages."""
        self.consuming = False
        self._cancel()

    def adapt(self) -> None:
        """Go on if there is room again; raise the prefetch count if the messages are smaller."""
        if not self.consuming:
            return
        doubled = min(self._prefetch * 2, self._wanted)
        if self._tag is None:
            if self._held.may_go_on:
                self._consume()
        elif self._prefetch < doubled <= self._held.fitting:
            self._cancel()
            self._consume()

    def settle(self, message: amqp.Message, how: Settlement) -> None:
        """Settle a message with the next :meth:`write`."""
        tag = cast(int, message.delivery_tag)
        self._held.held -= self.unfinished.pop(tag)
        self._settled[how].append(tag)

    def write(self) -> None:
        """Write what was settled."""
        number, frames = self.channel.channel_id, b""
        for how, tags in self._settled.items():
            if tags:
                frames += settle_frames(number, how, tags)
                tags.clear()
        if frames:
            self._wire.write(frames, self._timeout)

    def _consume(self) -> None:
        self._prefetch = min(self._wanted, self._held.fitting)
        with self._wire.answers_within(self._timeout):
            self.channel.basic_qos(0, self._prefetch, False)
            self._consumers += 1
            tag = f"{CONSUMER_TAG}{self._consumers}"
            self._tag = self.channel.basic_consume(self._queue, tag, callback=self._received)
        # py-amqp keeps the callback of a consumer that was cancelled without waiting.
        self.channel.callbacks.pop(self._former_tag, None)

    def _cancel(self) -> None:
        if self._tag is None:
            return
        tag, self._tag = self._tag, None
        with self._wire.answers_within(self._timeout):
            self.channel.basic_cancel(tag)

    def _received(self, message: amqp.Message) -> None:
        cost, tag = cost_of(message), cast(int, message.delivery_tag)
        if self._held.take(cost):
            self.unfinished[tag] = cost
            self._on_message(message)
            return
        if self._tag is not None:
            logger.info(
                "%s: %s bytes of messages are held; the next ones are taken later.",
                self._queue,
                self._held.held,
            )
            # Without waiting for the answer, because frames are being read. Before the messages are
            # given back, so that the broker does not deliver them here again.
            self.channel.basic_cancel(self._tag, nowait=True)
            self._former_tag, self._tag = self._tag, None
        self._settled[REQUEUE].append(tag)
