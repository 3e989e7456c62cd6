"""Declares a topology and the queues of tasks, and finds missing ones."""

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


class Declared(NamedTuple):
    """The exchanges and queues that were missing, and the queues that were bound.

    Attributes:
        missing: The names of the topology's exchanges and queues that did not exist.
        missing_queues: The names of the tasks' queues that did not exist.
        bound: The names of the tasks' queues that were bound to the delivery exchange.
    """

    missing: tuple[str, ...]
    missing_queues: tuple[str, ...]
    bound: tuple[str, ...] = ()


def missing_entities(
    connection: Connection, topology: Topology, queues: Sequence[Queue] = ()
) -> Declared:
    """Return the missing exchanges and queues, without changing anything.

    AMQP has no method that tells whether a binding exists, so missing bindings are not found.

    Args:
        connection: Any kombu connection to RabbitMQ.
        topology: The topology.
        queues: The tasks' queues. Exclusive queues and those of broadcasts are left out, because
            each worker has its own.

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

    Existing exchanges and queues are left alone. Every binding is declared, because AMQP cannot
    tell whether it exists. If the call is interrupted, repeat it: the marker exchange, by which
    processes recognize a complete topology, is declared last.

    Args:
        connection: Any kombu connection to RabbitMQ.
        topology: The topology.
        queues: The tasks' queues, declared with their exchanges; see :func:`missing_entities` for
            those that are left out.
        progress: Called with the number of AMQP methods that are done, and of all.

    Raises:
        LayoutConflict: Another layout is declared under the same prefix.
        amqp.exceptions.PreconditionFailed: A queue exists with other arguments.
    """
    absent = missing_entities(connection, topology, queues)
    declare(connection, topology, progress)
    # kombu remembers declared queues on the connection, even if they were deleted since.
    forget(connection)
    for queue in _declarable(queues):
        declare_destination(connection, topology, queue)
    return absent._replace(bound=tuple(queue.name for queue in _declarable(queues)))


def _declarable(queues: Sequence[Queue]) -> list[Queue]:
    return [each for each in queues if not each.exclusive and not isinstance(each, Broadcast)]
