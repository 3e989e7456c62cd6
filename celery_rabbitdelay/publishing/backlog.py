"""How many messages wait in which queue of a topology, as the broker reports it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kombu import Connection, Queue

from celery_rabbitdelay.levels.topology import CHECK_IN, DISTRIBUTE, Topology
from celery_rabbitdelay.publishing.declaration import Counts, queue_counts


class Backlog(NamedTuple):
    """The messages that wait in a topology.

    Attributes:
        levels: The messages in each level's queues, by the level's name without prefix. A message
            that is just passing from one level to the next is not counted.
        digits: The messages of each digit, by the level's name and the digit; those of all shards
            together, and 0 for a queue that does not exist.
        others: The messages and consumers of the queues of ``check-in``, ``meditation``,
            ``distribution`` and ``undeliverable``.
        missing: The names of queues that do not exist.
    """

    levels: Mapping[str, int]
    digits: Mapping[str, Mapping[int, int]]
    others: Mapping[str, Counts]
    missing: tuple[str, ...]


def backlog_of(connection: Connection, topology: Topology) -> Backlog:
    """Ask the broker for the counts of every queue of a topology, in a few round trips.

    Args:
        connection: Any kombu connection to RabbitMQ.
        topology: The topology; nothing is declared.
    """
    found = queue_counts(connection, topology.queues)
    messages = {name: counts.messages if counts else 0 for name, counts in found.items()}
    digits = {
        level: _by_digit(topology, [messages[queue.name] for queue in queues])
        for level, queues in topology.level_queues.items()
    }
    others = module_queues(topology).items()
    return Backlog(
        {level: sum(counts.values()) for level, counts in digits.items()},
        digits,
        {name: counts for name, queue in others if (counts := found[queue.name])},
        tuple(name for name, counts in found.items() if counts is None),
    )


def module_queues(topology: Topology) -> dict[str, Queue]:
    """Return the queues outside the levels, by the names in :attr:`Backlog.others`."""
    queues = topology.module_queues
    return {
        CHECK_IN: queues.checkin,
        "meditation": queues.meditation,
        DISTRIBUTE: queues.distribution,
        "undeliverable": queues.undeliverable,
        "paused": queues.paused,
    }


def _by_digit(topology: Topology, messages: list[int]) -> dict[int, int]:
    """Add up the messages of a level's queues, which are in the order of shards and digits."""
    first = 0 if topology.layout.zeros == "queue" else 1
    each = len(messages) // topology.shards
    return {first + place: sum(messages[place::each]) for place in range(each)}
