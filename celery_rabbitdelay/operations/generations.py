"""The levels of former generations that are still on a broker, and what waits in them."""

from __future__ import annotations

from kombu import Connection, Queue

from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.declaration import queue_counts


def former_generations(connection: Connection, topology: Topology) -> dict[int, int]:
    """Return how many messages wait in each former generation that is declared, by its number.

    Nothing is declared or changed.

    Args:
        connection: The broker.
        topology: The present topology, under whose prefix is looked.
    """
    found = {}
    for former in topology.former:
        # One question where there is none, as on most brokers.
        if _counts(connection, [former.module_queues.undeliverable]):
            found[former.generation.number] = sum(_counts(connection, former.queues))
    return found


def _counts(connection: Connection, queues: list[Queue] | tuple[Queue, ...]) -> list[int]:
    counts = queue_counts(connection, queues).values()
    return [each.messages for each in counts if each is not None]


def migrate_remedy(generation: int) -> str:
    """Return the commands that empty a former generation and delete it."""
    return (
        f"`celery -A proj rabbitdelay migrate --from-generation {generation}`, and "
        f"`celery -A proj rabbitdelay delete --generation {generation}` once all producers, "
        "workers and clients of check-in use the present generation, and no worker serves this one"
    )
