"""Runs of schedules that others must not overlap: each has a lease in Redis while it goes."""

from __future__ import annotations

import time
from typing import ClassVar, Final

from celery.utils.log import get_logger

from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.levels.schedule import Occurrence
from celery_rabbitdelay.registry.schedules import LEASE, Schedules
from celery_rabbitdelay.worker import celery_internals

logger = get_logger(__name__)

#: Seconds between two looks whether runs have ended.
POLL: Final = 0.5

#: Seconds between two renewals of the leases.
RENEW_EVERY: Final = LEASE / 4


class Runs:
    """Keeps the leases of the runs in this worker.

    Args:
        schedules: Where they are kept.
    """

    #: The names of the schedules, by the ids of the tasks that run. They may outlive the connection
    #: that they came over, so all objects share them.
    _going: ClassVar[dict[str, str]] = {}

    def __init__(self, schedules: Schedules) -> None:
        self._schedules = schedules
        self._renew_at = 0.0

    @property
    def look_in(self) -> float | None:
        """Seconds until the next look; None if nothing runs."""
        return POLL if self._going else None

    def try_start(self, occurrence: Occurrence) -> bool:
        """Return whether an occurrence may run now, or cannot be told not to."""
        try:
            return self._schedules.start(occurrence)
        except RegistryUnavailable as error:
            logger.warning("Occurrence %s may overlap another: %s", occurrence.task_id, error)
            return True

    def try_queue(self, occurrence: Occurrence) -> bool:
        """Return whether an occurrence is the one that waits for the end of a run, or runs."""
        try:
            return self._schedules.queue(occurrence)
        except RegistryUnavailable:
            return True  # and it runs

    def begun(self, occurrence: Occurrence) -> None:
        """Keep the lease of a task that Celery has from now on; called in the event loop."""
        self._going[occurrence.task_id] = occurrence.name

    def look_after(self) -> None:
        """Renew the leases of what runs, and give back those of what has ended."""
        renews = time.monotonic() >= self._renew_at
        if renews:
            self._renew_at = time.monotonic() + RENEW_EVERY
        for task_id, name in list(self._going.items()):
            try:
                if not celery_internals.is_reserved(task_id):
                    del self._going[task_id]
                    self._schedules.end_run(name, task_id)
                elif renews:
                    self._schedules.keep_run(name, task_id)
            except RegistryUnavailable as error:
                logger.warning("The lease of %s is not kept: %s", task_id, error)
