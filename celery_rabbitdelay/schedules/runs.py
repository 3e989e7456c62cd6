"""Runs of schedules that others must not overlap: each has a lease in Redis while it goes.

The rule: whoever has the lease of a schedule runs. A lease belongs to one arrival of an occurrence;
if RabbitMQ delivers the occurrence again, that arrival takes it over. The end of a run, and of a
worker that is not killed, gives it back. A thread keeps the leases of this process.
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
        lease: Takes, keeps or gives back its lease, whose token identifies this arrival; see
            :meth:`.Store.lease`.
        waits: Returns whether it waits in Celery because of its rate limit; None before Celery has
            got it.
        is_seen: Whether Celery had it at the last look.
    """

    lease: Callable[..., bool]
    waits: Callable[[], bool] | None = None
    is_seen: bool = True

    def is_over(self, task_id: str) -> bool:
        """Return whether Celery has got it, and has it no more."""
        if self.waits is None:
            return False
        # Celery has it in neither for an instant when it leaves the rate limit's bucket.
        was_seen, self.is_seen = self.is_seen, self.waits() or task_id in state.requests
        return not (was_seen or self.is_seen)


#: The runs, by the ids of their tasks. They outlive the connection that they came over, and a
#: worker that stops waits for them.
_going: Final[dict[str, _Run]] = {}


def waits_for_rate(consumer: Any, delivery: Delivery) -> bool:
    """Return whether a task waits in Celery's bucket because of its rate limit. From any thread."""
    bucket = consumer.task_buckets[delivery.task]
    contents = () if bucket is None else tuple(bucket.contents)
    return id_of(delivery.message) in {request.id for request, _ in contents}


def forget_what_has_not_begun() -> None:
    """Forget the runs of a lost connection that RabbitMQ delivers again."""
    for task_id in set(_going) - {request.id for request in tuple(state.active_requests)}:
        _going.pop(task_id, None)


def try_start(registry: Registry, occurrence: Occurrence) -> bool:
    """Return whether an occurrence may run now, or cannot be told not to; keep its lease."""
    family = f"{occurrence.task_id} "
    key = registry.names.of("running", occurrence.name)
    lease = partial(registry.store.lease, key, family + new_copy())
    try:
        if not lease(LEASE_MS, family):
            return False
    except RegistryUnavailable as error:
        logger.warning("Occurrence %s may overlap another: %s", occurrence.task_id, error)
        return True
    queue(registry, occurrence, 0)
    _going[occurrence.task_id] = _Run(lease)
    _start()
    return True


def given(consumer: Any, delivery: Delivery) -> None:
    """Note that Celery has got a task."""
    if (run := _going.get(id_of(delivery.message))) is not None:
        run.waits = partial(waits_for_rate, consumer, delivery)


def queue(registry: Registry, occurrence: Occurrence, lasts_ms: int) -> bool:
    """Lease the place of the one that waits for the end of a run, or give it back.

    Each edit of a schedule has a place of its own: what an earlier one left there is dropped when
    it comes back, and keeps no other out.

    Returns:
        Whether the occurrence has it, or Redis does not answer: then it runs.
    """
    key = registry.names.of("queued", f"{occurrence.order}:{occurrence.name}")
    with suppress(RegistryUnavailable):  # it ends by itself
        return registry.store.lease(key, occurrence.task_id, lasts_ms)
    return True


@cache
def _start() -> None:
    """Start the thread, once."""
    Thread(target=_keep, name="rabbitdelay-runs", daemon=True).start()


def _keep() -> None:
    """Renew the leases of what runs, and give back those of what has ended."""
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
            except Exception as error:  # noqa: BLE001 - the thread has to live on
                logger.warning("The lease of %s is not kept: %s", task_id, error)


@worker_shutdown.connect
def _end(**_: object) -> None:
    """Give back all leases at the end of a worker: then no run goes on."""
    with suppress(RegistryUnavailable):  # they end by themselves
        for run in tuple(_going.values()):
            run.lease(0)
