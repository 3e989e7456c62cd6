"""Deletes a topology, after counting the messages that would be lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kombu import Connection

from celery_rabbitdelay.exceptions import TopologyNotEmpty
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.declaration import (
    Progress,
    check_layout,
    delete,
    missing_exchanges,
    queue_counts,
)

__all__ = ["Contents", "contents_of", "delete_everything"]


class Contents(NamedTuple):
    """The contents of a topology on the broker.

    Attributes:
        exchanges: How many exchanges exist, guard and marker included.
        queues: How many queues exist.
        waiting: The number of messages in each queue that is not empty, by the queue's name.
        consumers: How many consumers the module queues have: workers, which would declare the
            topology again.
    """

    exchanges: int
    queues: int
    waiting: Mapping[str, int]
    consumers: int

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
        {name: counts.messages for name, counts in found.items() if counts.messages},
        sum(counts.consumers for counts in found.values()),
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
        force: Whether to delete waiting messages as well.
        progress: Called with the number of AMQP methods that are done, and of all.

    Returns:
        The contents before the deletion.

    Raises:
        LayoutConflict: Another layout is declared under the same prefix.
        TopologyNotEmpty: Messages wait, and ``force`` is False.
    """
    contents = contents_of(connection, topology)
    if contents.waiting and not force:
        raise TopologyNotEmpty(topology.prefix, dict(contents.waiting))
    if contents.exists:
        delete(connection, topology, force=force, progress=progress)
    return contents
