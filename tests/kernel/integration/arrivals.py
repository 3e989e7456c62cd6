"""Takes messages from queues and writes down when they came."""

import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from kombu import Connection, Consumer, Message, Queue

from celery_rabbitdelay.testing import wait_for
from celery_rabbitdelay.testing.servers import PATIENCE


class Arrival(NamedTuple):
    """A message that came: from which queue, when (seconds since 1970), and what it was."""

    queue: str
    at: float
    body: Any
    message: Any


def take(
    connection: Connection, queues: Iterable[Queue], count: int, timeout: float = PATIENCE
) -> list[Arrival]:
    """Consume until ``count`` messages came, acknowledge them and return them in their order.

    Raises:
        TimeoutError: Fewer came within ``timeout`` seconds.
    """
    arrivals: list[Arrival] = []

    def consume(queue: Queue, channel: Any) -> Consumer:
        def on_message(body: Any, message: Message) -> None:
            arrivals.append(Arrival(queue.name, time.time(), body, message))
            message.ack()

        return Consumer(channel, [Queue(queue.name, no_declare=True)], callbacks=[on_message])

    def came() -> bool:
        with suppress(TimeoutError):
            connection.drain_events(timeout=0.2)
        return len(arrivals) >= count

    with connection.channel() as channel:
        consumers = [consume(queue, channel) for queue in queues]
        for consumer in consumers:
            consumer.consume()
        try:
            wait_for(came, f"arrival of {count} messages", timeout, interval=0)
        except TimeoutError as late:
            raise TimeoutError(f"{late}; {Counter(a.queue for a in arrivals)} came") from None
        finally:
            for consumer in consumers:
                consumer.cancel()
    return arrivals


def count(connection: Connection, queue_name: str) -> int:
    """Return how many messages are ready in a queue, as the broker counts them now."""
    channel: Any
    with connection.channel() as channel:
        ready: int = channel.queue_declare(queue_name, passive=True).message_count
        return ready


def wait_until_waiting(connection: Connection, queue_name: str, expected: int) -> None:
    """Wait until a queue holds ``expected`` ready messages."""
    what = f"{expected} messages in {queue_name}"
    wait_for(lambda: count(connection, queue_name) == expected, what)
