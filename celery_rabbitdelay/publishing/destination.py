"""The queue that a message would reach without a delay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from kombu import Connection, Exchange, Queue
from kombu.common import Broadcast

from celery_rabbitdelay.publishing.kombu_internals import declared_arguments


class Destination(NamedTuple):
    """The destination of a due message.

    Attributes:
        queue: The queue that gets the message; None if the exchange chooses the queues.
        exchange: The exchange that the message would have been published to without a delay.
        routing_key: The routing key that the message would have had without a delay.
    """

    queue: Queue | None
    exchange: str
    routing_key: str

    def __str__(self) -> str:
        return f"a message to the exchange {self.exchange!r} with routing key {self.routing_key!r}"


def resolve(
    exchange: str,
    routing_key: str,
    candidates: Iterable[Queue],
    consumed: Iterable[str] = (),
    came_from: str | None = None,
) -> Destination:
    """Return the destination, with its queue if exactly one known queue matches.

    Otherwise ``queue`` is None. Fanout and headers exchanges may have unknown queues, so for such
    an exchange, only the original queue of a retry is used.

    Args:
        exchange: The exchange's name; empty for the default exchange, whose routing key is the
            name of the queue.
        routing_key: The routing key.
        candidates: The queues that the application knows, preferred ones first.
        consumed: For a retry, the names of the queues that this process consumes from. If several
            queues match, but this process consumes from only one, the retry goes to that one.
        came_from: The name of the queue that a retried message came from, if known.
    """
    # Every worker declares its own queue for a broadcast.
    candidates = [each for each in candidates if not isinstance(each, Broadcast)]
    if not exchange:
        named = (each for each in candidates if each.name == routing_key)
        queue = next(named, None) or Queue(routing_key, no_declare=True)
        return Destination(queue, exchange, routing_key)
    matching: dict[str, Queue] = {}
    types: set[str] = set()
    for queue in candidates:
        through = [
            source.type
            for source, pattern in bindings_of(queue)
            if source.name == exchange and _matches(source, pattern, routing_key)
        ]
        if through:
            matching[queue.name] = queue
            types.update(through)
    found = list(matching) if types <= {"direct", "topic"} else []
    for choice in ([came_from], found, list(consumed)):
        names = [name for name in choice if name in matching]
        if len(names) == 1:
            return Destination(matching[names[0]], exchange, routing_key)
    return Destination(None, exchange, routing_key)


def may_refuse(
    queue: Queue, patterns: Iterable[str] = (), connection: Connection | None = None
) -> bool:
    """Return whether a queue may refuse a message, judging by its arguments or its name.

    A classic queue of a cluster refuses messages while its node is down. AMQP does not report the
    number of nodes: a broker counts as a cluster if the connection's URL lists several hosts.

    If a queue refuses a message straight from the levels, the message occupies one of 32 slots in a
    level's dead-letter worker, and RabbitMQ retries only after minutes
    (https://www.rabbitmq.com/docs/quorum-queues#dead-lettering).

    Args:
        queue: The queue, with its arguments.
        patterns: Glob patterns of names: ``*`` matches any characters, ``?`` any one character.
        connection: A connection to the broker; it is not opened.
    """
    arguments = declared_arguments(queue)
    is_cluster = connection is not None and len(connection.alt) > 1
    if is_cluster and arguments.get("x-queue-type", "classic") == "classic":
        return True
    bounds = map(arguments.get, ("x-max-length", "x-max-length-bytes"))
    refuses = str(arguments.get("x-overflow", "")).startswith("reject-publish")
    if refuses and any(bound is not None for bound in bounds):
        return True
    return any(fnmatchcase(queue.name, pattern) for pattern in patterns)


def bindings_of(queue: Queue) -> Iterator[tuple[Exchange, str]]:
    """Yield the exchanges that a queue is bound to, with the binding keys."""
    if queue.exchange:
        yield queue.exchange, queue.routing_key
    for binding in queue.bindings:
        if binding.exchange:
            yield binding.exchange, binding.routing_key


def _matches(exchange: Exchange, pattern: str, routing_key: str) -> bool:
    match exchange.type:
        case "fanout" | "headers":
            return True
        case "direct":
            return pattern == routing_key
        case "topic":
            return topic_matches(pattern.split("."), routing_key.split("."))
    return False


def topic_matches(pattern: Sequence[str], words: Sequence[str]) -> bool:
    """Return whether the words of a topic pattern match the words of a routing key.

    ``*`` stands for one word, ``#`` for any number of words
    (https://www.rabbitmq.com/tutorials/tutorial-five-python).
    """
    if not pattern:
        return not words
    if pattern[0] == "#":
        return any(topic_matches(pattern[1:], words[skipped:]) for skipped in range(len(words) + 1))
    return bool(words) and pattern[0] in ("*", words[0]) and topic_matches(pattern[1:], words[1:])
