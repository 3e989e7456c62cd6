"""Declare a topology and the queues of tasks, and say what was missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kombu import Connection, Queue
from kombu.common import Broadcast

from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.declaration import (
    Progress,
    check_layout,
    declare,
    declare_destination,
    forget,
    missing,
    queue_counts,
)

__all__ = ["Declared", "declare_everything", "missing_entities"]


class Declared(NamedTuple):
    """What was declared, or has to be.

    Attributes:
        missing: The names of the topology's exchanges and queues that did not exist.
        missing_queues: The names of the tasks' queues that did not exist.
        bound: The names of the tasks' queues that are bound to the delivery exchange now.
    """

    missing: tuple[str, ...]
    missing_queues: tuple[str, ...]
    bound: tuple[str, ...] = ()


def missing_entities(
    connection: Connection, topology: Topology, queues: Sequence[Queue] = ()
) -> Declared:
    """Return what does not exist on the broker; nothing is changed.

    AMQP has no method that tells whether a binding exists, so a missing one is not found.

    Args:
        connection: Any kombu connection to RabbitMQ.
        topology: The topology.
        queues: The tasks' queues. Exclusive ones and those of broadcasts are left out: each worker
            has its own.

    Raises:
        LayoutConflict: Another layout is declared under the same prefix.
    """
    check_layout(connection, topology)
    counts = queue_counts(connection, _declarable(queues))
    absent = tuple(name for name, found in counts.items() if found is None)
    return Declared(missing(connection, topology), absent)


def declare_everything(
    connection: Connection,
    topology: Topology,
    queues: Sequence[Queue] = (),
    progress: Progress | None = None,
) -> Declared:
    """Declare a topology and bind the queues of tasks to its delivery exchange.

    Everything that exists is left alone, and every binding is made, since none can be looked for.
    If this is interrupted, call it again: the marker by which processes take the topology for
    complete is declared last.

    Args:
        connection: Any kombu connection to RabbitMQ.
        topology: The topology.
        queues: The tasks' queues, declared with their exchanges; the same are left out.
        progress: Called with how many methods are done, and of how many.

    Raises:
        LayoutConflict: Another layout is declared under the same prefix.
        amqp.exceptions.PreconditionFailed: A queue exists with other arguments.
    """
    absent = missing_entities(connection, topology, queues)
    declare(connection, topology, progress)
    # The connection may remember queues of before.
    forget(connection)
    for queue in _declarable(queues):
        declare_destination(connection, topology, queue)
    return absent._replace(bound=tuple(queue.name for queue in _declarable(queues)))


def _declarable(queues: Sequence[Queue]) -> list[Queue]:
    return [each for each in queues if not each.exclusive and not isinstance(each, Broadcast)]
