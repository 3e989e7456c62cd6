"""Where messages are: read from the queues of the topology and of the application."""

from __future__ import annotations

import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Final

from kombu import Connection, Queue

from celery_rabbitdelay.exceptions import InvalidEnvelope
from celery_rabbitdelay.kombu import Topology, examine
from celery_rabbitdelay.modules.envelope import CONTENT_TYPE, Envelope
from celery_rabbitdelay.publishing.declaration import queue_counts
from tests.chaos.cluster import Node
from tests.chaos.ledger import Whereabouts

__all__ = ["look"]

#: How many messages of a queue are looked at.
MOST: Final = 20_000

#: What RabbitMQ's info of a quorum queue calls the messages that its dead-letter worker holds.
HELD: Final = (
    '[io:format("~ts\\t~b~n", [element(4, N), C]) || '
    "Q <- rabbit_amqqueue:list(), N <- [amqqueue:get_name(Q)], "
    "{messages_dlx, C} <- rabbit_amqqueue:info(Q, [messages_dlx]), is_integer(C), C > 0]."
)


def look(
    connection: Connection, nodes: Iterable[Node], topology: Topology, queues: list[Queue]
) -> Whereabouts:
    """Look into every queue; each message is put back.

    Args:
        connection: A connection to a node that runs.
        nodes: All nodes that run.
        topology: The topology.
        queues: The queues of the application.
    """
    found: dict[str, list[str]] = defaultdict(list)
    reasons: Counter[str] = Counter()
    undeliverable = topology.module_queues.undeliverable.name
    for name, count in _filled(connection, [*queues, *topology.queues]):
        for message in _messages(connection, name, min(count, MOST)):
            for identity in _ids(message):
                found[identity].append(name)
            if name == undeliverable:
                key = message.delivery_info["routing_key"]
                reasons[examine(message.headers, topology, key).reason] += 1
    return Whereabouts({key: tuple(names) for key, names in found.items()}, held(nodes), reasons)


def held(nodes: Iterable[Node]) -> dict[str, int]:
    """Return how many messages each queue's dead-letter worker holds, up to 5 s late.

    ``rabbitmqctl list_queues`` does not know this figure, so the node is asked for it.
    """
    held: Counter[str] = Counter()
    for node in nodes:
        with suppress(subprocess.CalledProcessError):
            lines = [line.split("\t") for line in node.ctl("eval", HELD).splitlines()]
            # Each node may know about the queues that it leads only.
            held |= Counter({line[0]: int(line[1]) for line in lines if len(line) > 1})
    return dict(held)


def _filled(connection: Connection, queues: Iterable[Queue]) -> Iterator[tuple[str, int]]:
    for name, counts in queue_counts(connection, queues).items():
        if counts is not None and counts.messages:
            yield name, counts.messages


def _messages(connection: Connection, name: str, count: int) -> Iterator[Any]:
    """Yield messages; closing the channel puts them back."""
    with connection.channel() as channel:
        queue = Queue(name, channel=channel)
        for _ in range(count):
            message = queue.get(no_ack=False)
            if message is None:
                return
            yield message


def _ids(message: Any) -> list[str]:
    """Return the ids of a message's tasks; an envelope has many."""
    if message.content_type == CONTENT_TYPE:
        with suppress(InvalidEnvelope):
            items = Envelope.unpack(message.body).items
            return [str(each.headers.get("id")) for each in items]
        return []
    return [str(message.headers.get("id"))]
