"""The registry of an application, by its settings; and what is counted and measured about it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from celery_rabbitdelay.app.delays import Delays
from celery_rabbitdelay.app.instruments import Instrument, counter, gauge
from celery_rabbitdelay.exceptions import RegistryRequired, RegistryUnavailable
from celery_rabbitdelay.levels.delay import milliseconds
from celery_rabbitdelay.registry.connection import connect
from celery_rabbitdelay.registry.decision import Registration
from celery_rabbitdelay.registry.registry import Registry
from celery_rabbitdelay.registry.settings import RegistrySettings

RETURNED: Final = counter(
    "returned",
    "Due tasks that went back to wait, once each: postponed, paused, job open, or Redis away.",
)
CANCELLED: Final = counter(
    "cancelled", "Due tasks that a worker discarded because they were cancelled."
)
SUPERSEDED: Final = counter(
    "superseded", "Due tasks that a worker discarded for a newer one under their key."
)
EXPIRED: Final = counter(
    "expired", "Due tasks that a worker discarded: job aborted, or not committed in time."
)
DUPLICATES: Final = counter(
    "duplicates", "Messages that a worker discarded because another message of the same task runs."
)
JOBS_EXPIRED: Final = counter(
    "jobs_expired", "Jobs found not to have been committed in time.", labels=()
)
REGISTRY: Final = Instrument(
    "registry_seconds",
    "histogram",
    "Seconds that a round trip to Redis took.",
    labels=(),
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
)
REGISTRY_FAILURES: Final = counter(
    "registry_failures", "Round trips to Redis that failed or took too long.", labels=()
)
BREAKER_OPEN: Final = gauge(
    "registry_breaker_open",
    "Whether the worker asks Redis nothing at the moment, because it did not answer: 1 or 0.",
)


logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

#: For how many seconds a task may be late, and is listed, in addition to ``rabbitdelay_retry_for``,
#: for which it is tried again if its queue does not take it.
MARGIN: Final = 3600.0


def has_registry(delays: Delays) -> bool:
    """Return whether an application has a registry, and its broker has levels."""
    return delays.available and delays.uses("registry_url")


def registry_of(delays: Delays) -> Registry:
    """Return the registry of an application in this process, which connects when it is first used.

    Raises:
        RegistryRequired: ``rabbitdelay_registry_url`` is not set.
        InvalidSetting: There is no such URL, or the package ``redis`` is missing.
    """
    return delays.part(open_registry)


def open_registry(delays: Delays) -> Registry:
    """Make the registry of an application; see :func:`registry_of`."""
    settings, kept = delays.settings_of(RegistrySettings), how_kept(delays)
    store = connect(
        str(settings.registry_url), settings.registry_options, settings.registry_durability or 0
    )

    def note_call(seconds: float, has_succeeded: bool) -> None:
        delays.recorder.record({REGISTRY: seconds, REGISTRY_FAILURES: int(not has_succeeded)})

    store.on_call = note_call
    registry = Registry(store, *kept)
    registry.jobs.on_expired = partial(delays.recorder.record, {JOBS_EXPIRED: 1})
    return registry


def how_kept(delays: Delays) -> tuple[str, int, int]:
    """Return the prefix of an application's registry, and its two times; see :class:`.Registry`.

    Raises:
        RegistryRequired: ``rabbitdelay_registry_url`` is not set.
    """
    settings = delays.settings_of(RegistrySettings)
    if settings.registry_url is None:
        raise RegistryRequired("app.rabbitdelay.registry")
    margin = delays.settings.retry_for + MARGIN
    keep_ms = milliseconds(max(settings.registry_keep, margin))
    return settings.registry_prefix or delays.settings.prefix, keep_ms, milliseconds(margin)


def register_sent(registry: Registry, registrations: Sequence[Registration]) -> list[str]:
    """Register messages that the broker has confirmed; what Redis does not note is no error.

    The messages carry all that the registry has to know, and are registered when they arrive.

    Returns:
        As :meth:`.Registry.register`; empty if Redis does not answer.
    """
    try:
        return registry.register(registrations)
    except RegistryUnavailable as error:
        logger.warning(
            "%d tasks were sent, beginning with %s, and are neither listed nor supersede older "
            "ones before they arrive: %s",
            len(registrations),
            registrations[0].task_id,
            error,
        )
        return []


#: Seconds for which a :class:`Breaker` is open after the first failure in a row; they double with
#: each further one, up to the maximum.
FIRST_PAUSE: Final = 1.0
MAX_PAUSE: Final = 30.0


class Breaker:
    """Says whether a call is worth trying.

    After a failure it is open for some time, in which calls fail at once. Then it lets calls
    through again: the first one that succeeds closes it, and one that fails opens it for longer.

    Args:
        now: Returns the time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._pause = 0.0
        self._again_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether calls are to be left out."""
        return self._pause > 0 and self._now() < self._again_at

    def call(self, ask: Callable[[], AnswerT]) -> AnswerT:
        """Return what a call returns.

        Raises:
            RegistryUnavailable: Redis did not answer, or the breaker is open.
        """
        if self.is_open:
            raise RegistryUnavailable("Redis did not answer a moment ago")
        try:
            answer = ask()
        except RegistryUnavailable:
            self.failed()
            raise
        self.succeeded()
        return answer

    def succeeded(self) -> None:
        """Note that a call has succeeded."""
        self._pause = 0.0

    def failed(self) -> None:
        """Note that a call has failed."""
        if self.is_open:
            return  # the call began before: it is the same failure
        self._pause = min(self._pause * 2, MAX_PAUSE) if self._pause else FIRST_PAUSE
        self._again_at = self._now() + self._pause
