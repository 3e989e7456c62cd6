"""Keeps runs of a schedule from overlapping: a run holds the schedule's lease in Redis.

The lease belongs to one arrival of an occurrence. If RabbitMQ redelivers the occurrence, the new
arrival takes the lease over. The lease is released when the run ends or the worker stops; after a
kill it expires. A thread renews the leases of this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from threading import Thread
from typing import Any, Final

from celery.signals import worker_shutdown
from celery.utils.log import get_logger
from celery.worker import state

from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.registry.decision import new_copy
from celery_rabbitdelay.registry.registry import Registry
from celery_rabbitdelay.schedules.recurrence import Occurrence
from celery_rabbitdelay.worker.celery_internals import Delivery, id_of

logger = get_logger(__name__)

#: Seconds between two checks for ended runs.
POLL: Final = 0.05

#: Milliseconds after which a run counts as ended, unless its worker renews the lease.
LEASE_MS: Final = 60_000

#: Seconds between two renewals of the leases.
RENEW_EVERY: Final = LEASE_MS / 4000


@dataclass
class _Run:
    """A run of a schedule in this worker.

    Attributes:
        lease: Takes, renews or releases the lease; the lease's token identifies this arrival. See
            :meth:`.Store.lease`.
        waits: Returns whether Celery makes the task wait for its rate limit; None until Celery has
            the task.
        is_seen: Whether Celery had the task at the last check.
    """

    lease: Callable[..., bool]
    waits: Callable[[], bool] | None = None
    is_seen: bool = True

    def is_over(self, task_id: str) -> bool:
        """Return whether Celery had the task and has finished it."""
        if self.waits is None:
            return False
        # When a task leaves its rate limit's bucket, it is reserved only an instant later.
        was_seen, self.is_seen = self.is_seen, self.waits() or task_id in state.requests
        return not (was_seen or self.is_seen)


#: The runs by task id. Runs outlive their connection, and a stopping worker waits for them.
_going: Final[dict[str, _Run]] = {}


def waits_for_rate(consumer: Any, delivery: Delivery) -> bool:
    """Return whether a task waits in the bucket of its rate limit. Any thread may call this."""
    bucket = consumer.task_buckets[delivery.task]
    contents = () if bucket is None else tuple(bucket.contents)
    return id_of(delivery.message) in {request.id for request, _ in contents}


def forget_what_has_not_begun() -> None:
    """Forget runs that had not begun on a lost connection: RabbitMQ redelivers their tasks."""
    for task_id in set(_going) - {request.id for request in tuple(state.active_requests)}:
        _going.pop(task_id, None)


def try_start(registry: Registry, occurrence: Occurrence) -> bool:
    """Take the lease for an occurrence; return True if it may run, or if Redis is down."""
    family = f"{occurrence.task_id} "
    key = registry.names.of("running", occurrence.name)
    lease = partial(registry.store.lease, key, family + new_copy())
    try:
        if not lease(LEASE_MS, family):
            return False
    except RegistryUnavailable as error:
        logger.warning(
            "Cannot check whether occurrence %s overlaps another run; it runs anyway: %s",
            occurrence.task_id,
            error,
        )
        return True
    queue(registry, occurrence, 0)
    _going[occurrence.task_id] = _Run(lease)
    _start()
    return True


def given(consumer: Any, delivery: Delivery) -> None:
    """Record that Celery has received the task of a run."""
    if (run := _going.get(id_of(delivery.message))) is not None:
        run.waits = partial(waits_for_rate, consumer, delivery)


def queue(registry: Registry, occurrence: Occurrence, lasts_ms: int) -> bool:
    """Take or release the only place for an occurrence that waits for the end of a run.

    Every edit of a schedule has its own place. So an occurrence that waits since before the edit,
    and will be dropped, does not block the occurrences of the edited schedule.

    Returns: Whether the occurrence has the place; True if Redis does not answer.
    """
    key = registry.names.of("queued", f"{occurrence.order}:{occurrence.name}")
    with suppress(RegistryUnavailable):  # the lease expires by itself
        return registry.store.lease(key, occurrence.task_id, lasts_ms)
    return True


@cache
def _start() -> None:
    """Start the thread, once."""
    Thread(target=_keep, name="rabbitdelay-runs", daemon=True).start()


def _keep() -> None:
    """Renew the leases of runs, and release the leases of ended runs."""
    renew_at = time.monotonic() + RENEW_EVERY
    while True:
        time.sleep(POLL)
        renews = time.monotonic() >= renew_at
        if renews:
            renew_at = time.monotonic() + RENEW_EVERY
        for task_id, run in list(_going.items()):
            try:
                if run.is_over(task_id):
                    _going.pop(task_id, None)
                    run.lease(0)
                elif renews:
                    run.lease(LEASE_MS)
            except Exception as error:  # noqa: BLE001 - the thread must survive
                logger.warning("Cannot renew or end the lease of occurrence %s: %s", task_id, error)


@worker_shutdown.connect
def _end(**_: object) -> None:
    """Release all leases when a worker ends, because its runs have ended."""
    with suppress(RegistryUnavailable):  # the leases expire by themselves
        for run in tuple(_going.values()):
            run.lease(0)
