"""Runs of schedules that others must not overlap: each has a lease in Redis while it goes.

The rule: whoever has the lease of a schedule runs. A lease belongs to one arrival of an occurrence;
if RabbitMQ delivers the occurrence again, that arrival takes it over. The end of a run, and of a
worker that is not killed, gives it back.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock, Thread
from typing import ClassVar, Final

from celery.utils.log import get_logger

from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.registry.decision import new_copy
from celery_rabbitdelay.registry.registry import Registry
from celery_rabbitdelay.schedules.recurrence import Occurrence
from celery_rabbitdelay.worker import celery_internals

logger = get_logger(__name__)

#: Seconds between two looks whether runs have ended.
POLL: Final = 0.05

#: Milliseconds after which a run is taken to be over, unless its worker says that it still runs.
LEASE_MS: Final = 60_000

#: Seconds between two renewals of the leases.
RENEW_EVERY: Final = LEASE_MS / 4000


@dataclass
class _Run:
    """A run in this worker.

    Attributes:
        lease: The key of its lease.
        token: The value of its lease, which identifies this arrival.
        is_given: Whether Celery has it, or has run it. Then it ends when Celery has it no more.
        waits: Returns whether it waits in Celery because of its rate limit.
        waited: Whether it did so at the last look.
    """

    lease: str
    token: str
    is_given: bool = False
    waits: Callable[[], bool] = bool
    waited: bool = False

    def is_over(self, task_id: str) -> bool:
        """Return whether Celery has it no more."""
        # Celery has it in neither for an instant when it leaves the rate limit's bucket.
        waited, self.waited = self.waited, self.waits()
        return not (waited or self.waited or celery_internals.is_reserved(task_id))


class Runs:
    """Keeps the leases of the runs in this worker, in a thread that ends with the last of them.

    Args:
        registry: Where they are kept.
    """

    #: The runs, by the ids of their tasks. They outlive the connection that they came over, and a
    #: worker that stops waits for them.
    _going: ClassVar[dict[str, _Run]] = {}
    _thread: ClassVar[Thread | None] = None
    _lock: ClassVar[Lock] = Lock()

    def __init__(self, registry: Registry) -> None:
        self._store = registry.store
        self._names = registry.names
        # RabbitMQ delivers again what the pool had not begun when the connection was lost.
        begun = celery_internals.active_ids()
        for task_id in set(self._going) - begun:
            self._going.pop(task_id, None)

    def try_start(self, occurrence: Occurrence) -> bool:
        """Return whether an occurrence may run now, or cannot be told not to; keep its lease."""
        family = f"{occurrence.task_id} "
        token, running = family + new_copy(), self._names.of("running", occurrence.name)
        try:
            if not self._store.lease(running, token, LEASE_MS, family):
                return False
            self._lease_queue(occurrence, 0)
        except RegistryUnavailable as error:
            logger.warning("Occurrence %s may overlap another: %s", occurrence.task_id, error)
            return True
        with self._lock:
            self._going[occurrence.task_id] = _Run(running, token)
            if self._thread is None:
                atexit.unregister(self._end)
                atexit.register(self._end, os.getpid())
                Runs._thread = Thread(target=self._keep, name="rabbitdelay-runs", daemon=True)
                Runs._thread.start()
        return True

    def given(self, task_id: str, waits: Callable[[], bool]) -> None:
        """Note that Celery has got a task, and what returns whether its rate limit holds it."""
        if (run := self._going.get(task_id)) is not None:
            run.waits, run.waited = waits, waits()
            run.is_given = True

    def try_queue(self, occurrence: Occurrence) -> bool:
        """Return whether an occurrence is the one that waits for the end of a run, or runs."""
        try:
            return self._lease_queue(occurrence, LEASE_MS)
        except RegistryUnavailable:
            return True  # and it runs

    def leave_queue(self, occurrence: Occurrence) -> None:
        """Let another occurrence wait for the end of a run."""
        with suppress(RegistryUnavailable):  # it ends by itself
            self._lease_queue(occurrence, 0)

    def _lease_queue(self, occurrence: Occurrence, lasts_ms: int) -> bool:
        """Lease the place of the one that runs next; see :meth:`.Store.lease`."""
        queued = self._names.of("queued", occurrence.name)
        return self._store.lease(queued, occurrence.task_id, lasts_ms)

    def _end(self, process: int) -> None:
        """Give back all leases at the end of a process: then no run goes on."""
        with suppress(RegistryUnavailable):  # they end by themselves
            for run in tuple(self._going.values()) if os.getpid() == process else ():
                self._store.lease(run.lease, run.token, 0)

    def _keep(self) -> None:
        """Renew the leases of what runs, and give back those of what has ended."""
        renew_at = time.monotonic() + RENEW_EVERY
        while True:
            time.sleep(POLL)
            renews = time.monotonic() >= renew_at
            if renews:
                renew_at = time.monotonic() + RENEW_EVERY
            for task_id, run in list(self._going.items()):
                try:
                    if run.is_given and run.is_over(task_id):
                        self._going.pop(task_id, None)
                        self._store.lease(run.lease, run.token, 0)
                    elif renews:
                        self._store.lease(run.lease, run.token, LEASE_MS)
                except Exception as error:  # noqa: BLE001 - the thread has to live on
                    logger.warning("The lease of %s is not kept: %s", task_id, error)
            with self._lock:
                if not self._going:
                    Runs._thread = None
                    return
