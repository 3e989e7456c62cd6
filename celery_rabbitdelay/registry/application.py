"""The registry of an application: its settings, its options of a send, and its metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple, Self, TypeAlias

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app.delays import Delays
from celery_rabbitdelay.app.instruments import Instrument, counter, gauge
from celery_rabbitdelay.app.options import Options, OwnOptions
from celery_rabbitdelay.app.settings import (
    NAME_PREFIX,
    PREFIX,
    SECONDS,
    SettingsGroup,
    SettingType,
    hidden,
)
from celery_rabbitdelay.levels.delay import milliseconds
from celery_rabbitdelay.levels.headers import COPY, JOB, JOB_ID, KEY, ONCE, TRACKED
from celery_rabbitdelay.levels.shown_url import without_password
from celery_rabbitdelay.registry.connection import TAKES_URL, connect, is_redis_url
from celery_rabbitdelay.registry.decision import Registration, Ticket, new_copy
from celery_rabbitdelay.registry.registry import Registry

RegistryDown: TypeAlias = Literal["hold", "run"]
Track: TypeAlias = Literal["none", "all"]


def _without_password(value: object) -> object:
    is_url = isinstance(value, str) and "://" in value
    return without_password(str(value)) if is_url else hidden(value)


_REGISTRY_URL: Final = SettingType(TAKES_URL, is_redis_url, _without_password)

_REGISTRY_OPTIONS: Final = SettingType(
    "a mapping of arguments of redis-py's client",
    lambda value: isinstance(value, Mapping),
    _without_password,
)


@dataclass(frozen=True, repr=False)
class RegistrySettings(SettingsGroup):
    """The settings of the registry."""

    #: The URL of the registry's Redis; None for no registry. ``redis://``,
    #: ``rediss://``, ``unix://`` and ``sentinel://`` are written as for Celery's result backend;
    #: ``redis+cluster://host:6379`` names any server of a cluster.
    registry_url: Annotated[str | None, _REGISTRY_URL] = None

    #: Other arguments of redis-py's client, such as ``socket_timeout``: the timeout in seconds of
    #: connecting and of every answer, by default 0.5. For Sentinel also ``master_name`` and
    #: ``sentinel_kwargs``.
    registry_options: Annotated[Options | None, _REGISTRY_OPTIONS] = None

    #: The prefix of the registry's keys; None for ``prefix``. Before you migrate tasks to another
    #: prefix, set this to the former prefix.
    registry_prefix: Annotated[str | None, NAME_PREFIX] = None

    #: What happens to a due task with ``key``, ``job``, ``once`` or ``track`` if Redis does not
    #: answer: "hold" puts it back into the levels for some seconds, "run" runs it. All other tasks
    #: run.
    registry_down: RegistryDown = "hold"

    #: How long decisions are kept after the task's due time, in seconds. If a task with an option
    #: of the registry arrives later, it is undeliverable.
    registry_keep: Annotated[float, SECONDS] = 2_592_000.0

    #: "all" lists every waiting delayed task in the registry; "none" lists only tasks sent with
    #: ``track=True`` or defined with ``track = True``.
    track: Track = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.track == "all" and self.registry_url is None:
            raise exceptions.InvalidSetting(f"{PREFIX}track", "all", f"needs {PREFIX}registry_url")


_TEXT: Final = (
    lambda value: isinstance(value, str) and value != "",
    "takes a non-empty text, such as '{name}:7'",
)
_BOOL: Final = lambda value: isinstance(value, bool), "takes True or False"

#: The registry's options of a send: for each option, the check of its value and the error text.
OPTIONS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "key": _TEXT,
    "job": _TEXT,
    "once": _BOOL,
    "track": _BOOL,
}


NO_TICKET: Final = Ticket()


class RegistryOptions(NamedTuple):
    """The options of one send that concern the registry.

    Attributes:
        key: The task's key: only the newest task under a key runs; empty without a key.
        job: The job that the task belongs to; empty without a job.
        once: Whether only the first message with the task's id runs.
        track: Whether the task is listed while it waits.
    """

    key: str = ""
    job: str = ""
    once: bool = False
    track: bool = False

    @classmethod
    def of(
        cls,
        settings: RegistrySettings,
        task: object,
        given: Options,
        former: Options,
    ) -> Self:
        """Return the options of one send.

        Args:
            settings: The registry's settings, which have the lowest precedence.
            task: The task, whose attributes ``once`` and ``track`` override the settings. None if
                only the task's name is known.
            given: The options passed to ``apply_async``, which have the highest precedence.
            former: The headers of the task that this task retries or replaces; they override the
                task's attributes.
        """
        once = given.get("once", former.get(ONCE, getattr(task, "once", False)))
        track = given.get("track", former.get(TRACKED, getattr(task, "track", None)))
        return cls(
            given.get("key", former.get(KEY, "")),
            given.get("job", former.get(JOB, "")),
            bool(once),
            settings.track == "all" if track is None else bool(track),
        )

    @property
    def is_registered(self) -> bool:
        """Whether the task is registered when it is sent."""
        return bool(self.key) or self.track

    def headers(self, copy: str, ticket: Ticket = NO_TICKET, job_id: str = "") -> OwnOptions:
        """Return the registry's headers for a message.

        Args:
            copy: The name of the message, if the task is registered when it is sent.
            ticket: The ticket from the registry.
            job_id: The id of the task's job.
        """
        once = self.once and new_copy()
        headers: OwnOptions = {COPY: copy, KEY: self.key, JOB: self.job, JOB_ID: job_id}
        headers |= {ONCE: once, TRACKED: self.track}
        return {name: value for name, value in headers.items() if value} | ticket.headers


def is_tracked(delays: Delays, task: object) -> bool:
    """Return whether a task is tracked by default, without ``track=`` at the send.

    Args:
        delays: The application's delay levels.
        task: The task; None if the application does not know it.
    """
    settings = delays.settings_of(RegistrySettings)
    has_registry = bool(delays.setting("registry_url"))
    return has_registry and RegistryOptions.of(settings, task, {}, {}).track


RETURNED: Final = counter(
    "returned",
    "Due tasks put back to wait, counted once: postponed, paused, job open, or Redis down.",
)
CANCELLED: Final = counter(
    "cancelled", "Due tasks that a worker discarded because they were cancelled."
)
SUPERSEDED: Final = counter(
    "superseded", "Due tasks that a worker discarded for a newer task with their key."
)
EXPIRED: Final = counter(
    "expired", "Due tasks that did not run: job aborted or not committed in time, or task too late."
)
DUPLICATES: Final = counter(
    "duplicates", "Messages that a worker discarded because another message of the same task runs."
)
JOBS_EXPIRED: Final = counter("jobs_expired", "Jobs that were not committed in time.", labels=())
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
    "1 while the worker sends no query to Redis, because the last one failed; otherwise 0.",
)


logger = logging.getLogger(__name__)

#: The maximum lateness of a listed task, in seconds, in addition to ``rabbitdelay_retry_for`` (the
#: time for which a task that its queue refuses is tried again).
MARGIN: Final = 3600.0


def registry_of(delays: Delays) -> Registry:
    """Return the application's registry in this process; it connects at its first use.

    Raises:
        RegistryRequired: ``rabbitdelay_registry_url`` is not set.
        InvalidSetting: The URL is invalid, or the package ``redis`` is missing.
    """
    return delays.part(open_registry)


def open_registry(delays: Delays) -> Registry:
    """Make the registry of an application; see :func:`registry_of`."""
    settings, kept = delays.settings_of(RegistrySettings), how_kept(delays)
    store = connect(str(settings.registry_url), settings.registry_options)

    def note_call(seconds: float, has_succeeded: bool) -> None:
        delays.recorder.record({REGISTRY: seconds, REGISTRY_FAILURES: int(not has_succeeded)})

    store.on_call = note_call
    registry = Registry(store, *kept)
    registry.jobs.on_expired = partial(delays.recorder.record, {JOBS_EXPIRED: 1})
    return registry


def how_kept(delays: Delays) -> tuple[str, int, int]:
    """Return the prefix, ``keep_ms`` and ``margin_ms`` of a registry; see :class:`.Registry`.

    Raises:
        RegistryRequired: ``rabbitdelay_registry_url`` is not set.
    """
    settings = delays.settings_of(RegistrySettings)
    if settings.registry_url is None:
        raise exceptions.RegistryRequired("app.rabbitdelay.registry")
    margin = delays.settings.retry_for + MARGIN
    keep_ms = milliseconds(max(settings.registry_keep, margin))
    return settings.registry_prefix or delays.settings.prefix, keep_ms, milliseconds(margin)


def register_sent(registry: Registry, registrations: Sequence[Registration]) -> list[str]:
    """Register messages that the broker has confirmed; log errors of Redis instead of raising.

    A message's headers contain all that the registry needs when the message arrives.

    Returns:
        The states, as from :meth:`.Registry.register`; empty if Redis does not answer.
    """
    try:
        return registry.register(registrations)
    except exceptions.RegistryUnavailable as error:
        logger.warning(
            "Cannot register %d tasks that were sent (first id: %s). Until they arrive, they are "
            "not listed and do not supersede older tasks: %s",
            len(registrations),
            registrations[0].task_id,
            error,
        )
        return []
