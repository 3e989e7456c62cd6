"""How many messages wait in which queue of a topology, as the broker reports it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kombu import Connection

from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.declaration import Counts, queue_counts

__all__ = ["Backlog", "backlog_of"]


class Backlog(NamedTuple):
    """The messages that wait in a topology.

    Attributes:
        levels: The messages in each level's queues, by the level's name without prefix. A message
            that is just passing from one level to the next is not counted.
        others: The messages and consumers of the queues of ``check-in``, ``meditation``,
            ``distribution`` and ``undeliverable``.
        missing: The names of queues that do not exist.
    """

    levels: Mapping[str, int]
    others: Mapping[str, Counts]
    missing: tuple[str, ...]


def backlog_of(connection: Connection, topology: Topology) -> Backlog:
    """Ask the broker for the counts of every queue of a topology, in a few round trips.

    Args:
        connection: Any kombu connection to RabbitMQ.
        topology: The topology; nothing is declared.
    """
    found = queue_counts(connection, topology.queues)
    levels = {
        level: sum(counts.messages for queue in queues if (counts := found[queue.name]))
        for level, queues in topology.level_queues.items()
    }
    others = {
        "check-in": topology.module_queues.checkin,
        "meditation": topology.module_queues.meditation,
        "distribution": topology.module_queues.distribution,
        "undeliverable": topology.module_queues.undeliverable,
    }
    return Backlog(
        levels,
        {name: counts for name, queue in others.items() if (counts := found[queue.name])},
        tuple(name for name, counts in found.items() if counts is None),
    )
