"""Where messages are: read from the queues of the topology and of the application."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from kombu import Connection, Queue

from celery_rabbitdelay.kombu import Topology
from celery_rabbitdelay.levels.headers import ENVELOPE
from celery_rabbitdelay.modules.envelope import OpenedEnvelope
from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.publishing.message import headers_of


def look(
    connection: Connection, topology: Topology, queues: Sequence[Queue]
) -> dict[str, list[str]]:
    """Return, by the id of a task, the queues in which it is; each message is put back."""
    found = defaultdict[str, list[str]](list)
    for place, message in messages(connection, topology, queues):
        for identity in _ids(message):
            found[identity].append(place)
    return found


def messages(
    connection: Connection, topology: Topology, queues: Sequence[Queue]
) -> Iterator[tuple[str, Any]]:
    """Yield each message with its place; closing the channel puts them back.

    Whoever takes the first message of a queue with a TTL lets those behind it expire. So the queues
    are read in the order in which messages pass them, and what has come to a queue meanwhile is
    told apart.
    """
    undeliverable, checkin, meditation, distribution, paused = topology.module_queues.queues
    levels = (checkin, meditation, *topology.digit_queues)
    in_order = (*levels, paused, distribution, undeliverable, *queues)
    for name, counts in queue_counts(connection, in_order).items():
        number = 0
        with connection.channel() as opened:
            channel: Any = opened
            channel.auto_decode = False
            while counts is not None and (message := channel.basic_get(name)) is not None:
                number += 1
                yield name if number <= counts.messages else f"{name}, since", message


def _ids(message: Any) -> list[str]:
    """Return the ids of a message's starts, as the ledger has them; an envelope has many."""
    headers: list[Any] = [headers_of(message)]
    if message.properties.get("content_type") == ENVELOPE:
        headers = [each.headers for each in tuple(OpenedEnvelope(message.body))]
    return [
        f"{each.get('id')}" + f"/{each.get('retries')}" * bool(each.get("retries"))
        for each in headers
    ]
