"""Deletes chosen undeliverable messages; the others keep their order."""

from __future__ import annotations

from kombu import Connection

from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.removal import Matches, Progress, Removal, RemovalReport
from celery_rabbitdelay.operations.undeliverable_reader import reading


def purge(
    connection: Connection,
    topology: Topology,
    matches: Matches = lambda message: True,
    *,
    limit: int | None = None,
    dry_run: bool = False,
    progress: Progress = lambda report: None,
) -> RemovalReport:
    """Delete undeliverable messages.

    Args:
        connection: A connection to the broker; another one like it is opened.
        topology: The topology whose messages are deleted.
        matches: Returns whether a message is chosen.
        limit: The most messages that are deleted; None for all.
        dry_run: Whether to count the messages only.
        progress: Called with the report during the deletion and at its end.

    Returns:
        The report. If the broker goes away after the start, the report says so.

    Raises:
        amqp.exceptions.NotFound: The queue does not exist.
        OSError: The broker cannot be reached.
    """
    with reading(connection, topology, is_removing=True) as reader:
        removal = Removal(reader, topology, matches, progress)
        with removal.reporting() as report:
            for message in removal.matching():
                if dry_run:
                    report.removed += 1
                else:
                    removal.settle(message)
                if report.removed == limit:
                    break
    return removal.report
