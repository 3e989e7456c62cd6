"""Deletes a topology, after counting the messages that would be lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kombu import Connection

from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.declaration import (
    Counts,
    Progress,
    check_layout,
    delete,
    missing_exchanges,
    queue_counts,
    refuse_to_lose,
)


class Contents(NamedTuple):
    """The contents of a topology on the broker.

    Attributes:
        exchanges: How many exchanges exist, guard and marker included.
        queues: How many queues exist.
        counts: The messages and consumers of each queue, by its name.
    """

    exchanges: int
    queues: int
    counts: Mapping[str, Counts]

    @property
    def waiting(self) -> dict[str, int]:
        """The number of messages in each queue that is not empty, by the queue's name."""
        return {name: each.messages for name, each in self.counts.items() if each.messages}

    @property
    def consumers(self) -> int:
        """How many consumers the queues have: workers, which may hold messages."""
        return sum(each.consumers for each in self.counts.values())

    @property
    def messages(self) -> int:
        """The number of all waiting messages."""
        return sum(self.waiting.values())

    @property
    def exists(self) -> bool:
        """Whether there is anything to delete."""
        return bool(self.exchanges or self.queues)


def contents_of(connection: Connection, topology: Topology) -> Contents:
    """Return the contents that a deletion would delete, without changing anything.

    Args:
        connection: Any kombu connection to RabbitMQ.
        topology: The topology.

    Raises:
        LayoutConflict: Another layout is declared under the same prefix. It shares the module
            queues with this one, so this one must not be deleted.
    """
    check_layout(connection, topology)
    exchanges = len(topology.exchanges) + 2  # guard and marker
    found = {
        name: counts
        for name, counts in queue_counts(connection, topology.queues).items()
        if counts is not None
    }
    return Contents(
        exchanges - len(missing_exchanges(connection, topology)),
        len(found),
        found,
    )


def delete_everything(
    connection: Connection,
    topology: Topology,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Contents:
    """Delete a topology; see :func:`.declaration.delete` for what its count of messages misses.

    The queues of tasks stay. If the call is interrupted, repeat it: the marker is deleted first.

    Args:
        connection: Any kombu connection to RabbitMQ.
        topology: The topology.
        force: Whether to delete waiting messages as well, and those that consumers hold.
        progress: Called with the number of AMQP methods that are done, and of all.

    Returns:
        The contents before the deletion.

    Raises:
        LayoutConflict: Another layout is declared under the same prefix.
        TopologyNotEmpty: Messages wait, and ``force`` is False.
        TopologyInUse: A queue has consumers, and ``force`` is False.
    """
    contents = contents_of(connection, topology)
    if not force:
        refuse_to_lose(topology, contents.counts)
    if contents.exists:
        delete(connection, topology, force=force, progress=progress)
    return contents
