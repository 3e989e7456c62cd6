"""Where messages are: read from the queues of the topology and of the application."""

from __future__ import annotations

import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from kombu import Connection, Queue

from celery_rabbitdelay.exceptions import InvalidEnvelope
from celery_rabbitdelay.kombu import Topology, examine
from celery_rabbitdelay.levels.headers import ENVELOPE
from celery_rabbitdelay.modules.envelope import Envelope
from celery_rabbitdelay.publishing.declaration import queue_counts
from tests.chaos.cluster import Node
from tests.chaos.ledger import Whereabouts

#: How many messages of a queue are looked at.
MOST: Final = 20_000

#: Seconds; a little more than the interval in which RabbitMQ counts messages.
COUNTED_EVERY: Final = 6.0

#: Tells how many messages the dead-letter worker of each queue holds, which ``list_queues`` omits.
HELD: Final = (
    '[io:format("~ts\\t~b~n", [element(4, N), C]) || '
    "Q <- rabbit_amqqueue:list(), N <- [amqqueue:get_name(Q)], "
    "{messages_dlx, C} <- rabbit_amqqueue:info(Q, [messages_dlx]), is_integer(C), C > 0]."
)


def look(
    connection: Connection, nodes: Sequence[Node], topology: Topology, queues: Sequence[Queue]
) -> Whereabouts:
    """Look into every queue; each message is put back.

    Whoever takes the first message of a queue with a TTL lets those behind it expire. So the queues
    are read in the order in which messages pass them, and what has come to a queue meanwhile is
    told apart.

    Args:
        connection: A connection to a node that runs.
        nodes: All nodes that run.
        topology: The topology.
        queues: The queues of the application.
    """
    held_now = held(nodes)
    found: dict[str, list[str]] = defaultdict(list)
    reasons: Counter[str] = Counter()
    undeliverable, checkin, meditation, distribution, paused = topology.module_queues.queues
    levels = (checkin, meditation, *topology.digit_queues)
    in_order = (*levels, paused, distribution, undeliverable, *queues)
    for name, counts in queue_counts(connection, in_order).items():
        if counts is None:
            continue
        for number, message in enumerate(_messages(connection, name)):
            place = name if number < counts.messages else f"{name}, since it was looked for"
            for identity in _ids(message):
                found[identity].append(place)
            if name == undeliverable.name:
                key = message.delivery_info["routing_key"]
                reasons[examine(message.headers, topology, key).reason] += 1
    return Whereabouts({key: tuple(names) for key, names in found.items()}, held_now, reasons)


def held(nodes: Sequence[Node]) -> dict[str, int]:
    """Return how many messages the broker holds and does not show, by who holds them.

    RabbitMQ counts them every 5 s.
    """
    time.sleep(COUNTED_EVERY)
    by_worker: Counter[str] = Counter()
    for node in nodes:
        # Each node may know about the queues that it leads only.
        by_worker |= _counts(node, "eval", HELD)
    unacknowledged = _counts(nodes[0], "list_queues", "name", "messages_unacknowledged")
    return {
        **{f"{name}, held by its dead-letter worker": count for name, count in by_worker.items()},
        **{f"{name}, unacknowledged": count for name, count in (+unacknowledged).items()},
    }


def _counts(node: Node, *command: str) -> Counter[str]:
    """Return what a command of rabbitmqctl prints: a name and a number in each line."""
    counts: Counter[str] = Counter()
    with suppress(subprocess.CalledProcessError):
        for line in node.ctl(*command).splitlines():
            name, _, count = line.partition("\t")
            if count.isdecimal():
                counts[name] = int(count)
    return counts


def _messages(connection: Connection, name: str) -> Iterator[Any]:
    """Yield messages; closing the channel puts them back."""
    with connection.channel() as channel:
        queue = Queue(name, channel=channel)
        for _ in range(MOST):
            message = queue.get(no_ack=False)
            if message is None:
                return
            yield message


def _ids(message: Any) -> list[str]:
    """Return the ids of a message's tasks; an envelope has many."""
    if message.content_type == ENVELOPE:
        with suppress(InvalidEnvelope):
            items = Envelope.unpack(message.body).items
            return [str(each.headers.get("id")) for each in items]
        return []
    return [str(message.headers.get("id"))]
