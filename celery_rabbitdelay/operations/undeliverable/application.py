"""``redrive`` for an application: its destinations, its keys, its settings for publishing."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from amqp.exceptions import NotFound, ResourceLocked
from kombu import Connection

from celery_rabbitdelay.app.destinations import configured_queues
from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.exceptions import InvalidDestination
from celery_rabbitdelay.operations.moving.mover import Destinations, Place
from celery_rabbitdelay.operations.moving.source import ready_in
from celery_rabbitdelay.operations.undeliverable import redrive as removing
from celery_rabbitdelay.operations.undeliverable.redrive import Matches, RemovalReport


class ApplicationRedrive:
    """Redrives the undeliverable messages of an application.

    Args:
        delays: The application's delays.
        dry_run: Whether to say only what would be done.
        **options: Arguments of :func:`.redriving_for`.

    Raises:
        InvalidDelay: As there.
        InvalidDestination: As there.
        DelayTooLong: As there.
    """

    def __init__(self, delays: RabbitDelay, *, dry_run: bool, **options: Any) -> None:
        app = delays.app
        app.loader.import_default_modules()
        self._delays = delays
        self._dry_run = dry_run
        self._may_declare = delays.settings.declare == "auto"
        place = Place(
            app.connection_for_write(), delays.topology, self._may_declare and not dry_run
        )
        self._destinations = Destinations(place, configured_queues(app))
        self._redriving = removing.redriving_for(app, ensure=self._destinations.ensure, **options)

    def run(
        self,
        connection: Connection,
        matches: Matches,
        limit: int | None = None,
        rate: float | None = None,
        report: RemovalReport | None = None,
    ) -> RemovalReport:
        """Redrive messages.

        Args:
            connection: The broker that tasks are sent to.
            matches: Returns whether a message is chosen.
            limit: At most so many.
            rate: At most so many a second.
            report: As for :func:`.redrive`.

        Raises:
            InvalidDestination: The queue that all of them are to go to does not exist.
        """
        delays, to = self._delays, self._redriving.to
        if to is not None:
            try:
                with suppress(ResourceLocked):  # an exclusive queue of another connection exists
                    ready_in(connection, to)
            except NotFound as missing:
                raise InvalidDestination(to, "does not exist: declare it first") from missing
        return removing.redrive(
            Place(connection, delays.topology, self._may_declare),
            self._redriving,
            matches,
            report=report,
            limit=limit,
            rate=rate,
            dry_run=self._dry_run,
            timeout=delays.settings.confirm_timeout,
            # All of them, since a level that was deleted may be why they are undeliverable.
            declare=delays.declare,
            redeclare=delays.declare if self._may_declare else None,
        )

    def close(self) -> None:
        """Close its connections."""
        self._destinations.close()
