"""How a message can wait on the broker until it is due, for the lateness benchmark."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import amqp
from kombu import Connection
from kombu.transport.native_delayed_delivery import (
    bind_queue_to_native_delayed_delivery_exchange,
    calculate_routing_key,
    declare_native_delayed_delivery_exchanges_and_queues,
)

from celery_rabbitdelay.levels.headers import DUE
from celery_rabbitdelay.levels.layout import Layout, Level
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.declaration import declare, declare_destination
from celery_rabbitdelay.publishing.publication import Address, Publication, PublishPolicy
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.publishing.wire import Content
from tests.benchmarks.waiting import NATIVE_ENTRANCE, quorum_queue

BODY: Final = b"x" * 200
NS_PER_MS: Final = 1_000_000
MS_PER_S: Final = 1000


class Place(NamedTuple):
    """Where to publish a message, when it is then due, and in how many queues it waits."""

    address: Address
    due_ms: int
    stops: int


@dataclass
class Batch:
    """Messages that were published together.

    Attributes:
        seconds: From the first publish to the last confirm.
        confirmed_at_ms: When the last was confirmed, in milliseconds since 1970.
        first_due_ms: When the first of them is due.
        stops: In how many queues they wait, all together.
    """

    seconds: float = 0.0
    confirmed_at_ms: float = 0.0
    first_due_ms: int = 2**62
    stops: int = 0

    @property
    def in_time(self) -> bool:
        """Whether every message was confirmed before the first was due."""
        return self.confirmed_at_ms < self.first_due_ms


class Way(ABC):
    """A way to delay a message for one quorum queue.

    Args:
        name: What it is called in the results.

    Attributes:
        queue: The destination.
    """

    def __init__(self, name: str) -> None:
        self.queue = quorum_queue(f"bench-{name}-end")

    @abstractmethod
    def declare(self, connection: Connection) -> None:
        """Declare all that it needs, and the destination."""

    @abstractmethod
    def place(self, due_ms: int) -> Place:
        """Return how to publish, now, what is to be due then, or as close to that as it can."""

    def publish(
        self,
        publisher: Publisher,
        due_ms: Sequence[int],
        patience: PublishPolicy,
        over: float = 0.0,
    ) -> Batch:
        """Publish a message for each instant, with a window of confirms.

        Args:
            publisher: What publishes.
            due_ms: The instants, in milliseconds since 1970.
            patience: The window, and how long it may take.
            over: Seconds to spread the sending over, evenly, one window at a time; by default, the
                next is sent as soon as there is room for it.

        Raises:
            PublishError: One of them was not confirmed.
        """
        batch = Batch()
        size = patience.window if over else len(due_ms)

        errors: list[Exception] = []

        def done(posting: Publication) -> None:
            if posting.error is not None or posting.resent:
                errors.append(posting.error or RuntimeError("sent again"))

        began = time.monotonic()
        for start in range(0, len(due_ms), size):
            ahead = began + over * start / len(due_ms) - time.monotonic()
            time.sleep(max(ahead, 0.0))
            part = due_ms[start : start + size]
            publisher.publish_all(self._postings(part, batch), patience, done=done)
        batch.seconds, batch.confirmed_at_ms = time.monotonic() - began, time.time() * MS_PER_S
        for error in errors:
            raise error
        return batch

    def _postings(self, due_ms: Iterable[int], batch: Batch) -> Iterator[Publication]:
        for each in due_ms:
            place = self.place(each)
            batch.first_due_ms = min(batch.first_due_ms, place.due_ms)
            batch.stops += place.stops
            headers = {DUE: place.due_ms}
            message = amqp.Message(BODY, application_headers=headers, delivery_mode=2)
            yield Publication(Content.of(message), place.address)


def scaled(layout: Layout, scale: int) -> Layout:
    """The same levels, with every time divided by ``scale``."""
    levels = (
        Level(f"{level.unit}x{level.multiple}", 1, level.base, level.place_ms // scale)
        for level in layout.levels
    )
    return Layout(layout.name, tuple(levels), layout.zeros)


class Levels(Way):
    """The levels of a layout of ours, entered at the first digit that is not zero."""

    def __init__(self, name: str, layout: Layout, scale: int) -> None:
        super().__init__(name)
        self.topology = Topology(f"bench-{name}", scaled(layout, scale))

    def declare(self, connection: Connection) -> None:
        declare(connection, self.topology)
        declare_destination(connection, self.topology, self.queue)

    def place(self, due_ms: int) -> Place:
        left_ms = -((time.time_ns() - due_ms * NS_PER_MS) // NS_PER_MS)
        route = self.topology.route(left_ms / 1000, self.queue.name)
        return Place(lambda: (route.exchange, route.routing_key), due_ms, len(route.stops))


class Native(Way):
    """Celery's native delayed delivery, as kombu declares it: 28 levels, entered at the top.

    It waits whole seconds. So a message is due a whole number of seconds after it is published, the
    number with which it is due closest to the instant that was asked for. As publishing takes time,
    the instants at which messages come due are spread like those of the others. Celery itself cuts
    off what is left of a second, up to which a task is then early; that is not counted here.
    """

    def __init__(self, scale: int) -> None:
        super().__init__("native")
        self._second_ms = MS_PER_S // scale

    def declare(self, connection: Connection) -> None:
        channel: Any = connection.default_channel
        with connection.channel() as scaling:
            self._scale(scaling)
            lender: Any = SimpleNamespace(channel=lambda: scaling)
            declare_native_delayed_delivery_exchanges_and_queues(lender, "quorum")
        self.queue(channel).declare()
        bind_queue_to_native_delayed_delivery_exchange(connection, self.queue)

    def _scale(self, channel: Any) -> None:
        """Have a channel declare queues whose seconds are shorter."""
        declare = channel.queue_declare

        def queue_declare(arguments: dict[str, Any], **options: Any) -> Any:
            ttl = arguments["x-message-ttl"] // MS_PER_S * self._second_ms
            return declare(arguments={**arguments, "x-message-ttl": ttl}, **options)

        channel.queue_declare = queue_declare

    def place(self, due_ms: int) -> Place:
        now_ms = time.time_ns() // NS_PER_MS
        seconds = max(1, round((due_ms - now_ms) / self._second_ms))
        key = calculate_routing_key(seconds, self.queue.routing_key)
        return Place(
            lambda: (NATIVE_ENTRANCE, key),
            now_ms + seconds * self._second_ms,
            seconds.bit_count(),
        )
