"""The registry of an application, by its settings."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Final

from celery_rabbitdelay.app.delays import Delays
from celery_rabbitdelay.exceptions import RegistryRequired, RegistryUnavailable
from celery_rabbitdelay.levels.delay import milliseconds
from celery_rabbitdelay.registry.connection import connect
from celery_rabbitdelay.registry.instruments import JOBS_EXPIRED, REGISTRY, REGISTRY_FAILURES
from celery_rabbitdelay.registry.registry import Registration, Registry
from celery_rabbitdelay.registry.settings import RegistrySettings

logger = logging.getLogger(__name__)

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
