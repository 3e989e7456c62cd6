"""How many messages wait where, as the broker tells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kombu import Connection

from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.declaration import Counts, look_at

__all__ = ["Backlog", "backlog_of"]


class Backlog(NamedTuple):
    """What waits in a topology.

    Attributes:
        levels: For each level, by its name without prefix, the messages in its queues. One that is
            just going from one level to the next is in none of them.
        others: For ``check-in``, ``meditation``, ``distribution`` and ``undeliverable``, the
            messages and consumers of its queue.
        missing: The names of queues that are not there.
    """

    levels: Mapping[str, int]
    others: Mapping[str, Counts]
    missing: tuple[str, ...]


def backlog_of(connection: Connection, topology: Topology) -> Backlog:
    """Ask the broker for every queue of a topology; takes a tenth of a second for the clock.

    Args:
        connection: Any kombu connection to RabbitMQ.
        topology: The topology; nothing is declared.
    """
    found = {queue.name: look_at(connection, queue) for queue in topology.queues}
    levels = {
        level: sum(counts.messages for queue in queues if (counts := found[queue.name]))
        for level, queues in topology.level_queues.items()
    }
    others = {
        "check-in": topology.modules.checkin,
        "meditation": topology.modules.meditation,
        "distribution": topology.modules.distribution,
        "undeliverable": topology.modules.undeliverable,
    }
    return Backlog(
        levels,
        {name: counts for name, queue in others.items() if (counts := found[queue.name])},
        tuple(name for name, counts in found.items() if counts is None),
    )
