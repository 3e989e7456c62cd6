"""The registry of an application: its settings, its options of a send, and what is measured."""

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

    #: The URL of the Redis that the registry is kept in; None for no registry. ``redis://``,
    #: ``rediss://``, ``unix://`` and ``sentinel://`` are written as for Celery's result backend;
    #: ``redis+cluster://host:6379`` names any server of a cluster.
    registry_url: Annotated[str | None, _REGISTRY_URL] = None

    #: Further arguments of redis-py's client, such as ``socket_timeout``: the seconds for
    #: connecting and for each answer, 0.5 by default. For Sentinel also ``master_name`` and
    #: ``sentinel_kwargs``.
    registry_options: Annotated[Options | None, _REGISTRY_OPTIONS] = None

    #: The first part of the registry's keys; None for ``prefix``. Set it to the former prefix
    #: before tasks are migrated to another one.
    registry_prefix: Annotated[str | None, NAME_PREFIX] = None

    #: What becomes of a task with a key or a job, or that is tracked or runs once, if Redis does
    #: not answer when it is due: "hold", it goes back into the levels for some seconds; "run", it
    #: runs. All other tasks run.
    registry_down: RegistryDown = "hold"

    #: Seconds for which the registry remembers what was decided about a task after the task is due.
    #: A task with such an option that arrives later is undeliverable.
    registry_keep: Annotated[float, SECONDS] = 2_592_000.0

    #: "all": every delayed task is listed in the registry while it waits; "none": those that are
    #: sent with ``track=True``, or whose task has ``track = True``.
    track: Track = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.track == "all" and self.registry_url is None:
            raise exceptions.InvalidSetting(
                f"{PREFIX}track", "all", f"all needs {PREFIX}registry_url"
            )


_TEXT: Final = (
    lambda value: isinstance(value, str) and value != "",
    "takes a text that is not empty, such as '{name}:7'",
)
_BOOL: Final = lambda value: isinstance(value, bool), "takes True or False"

#: The options of a send that the registry takes; for each, which values it takes, and in words.
OPTIONS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "key": _TEXT,
    "job": _TEXT,
    "once": _BOOL,
    "track": _BOOL,
}


def check_options(options: Options, settings: RegistrySettings) -> None:
    """Refuse values that an option does not take, and all options without a registry.

    Args:
        options: The options of a send.
        settings: The settings of the registry.

    Raises:
        RegistryRequired: One of the registry's options is given, and there is none.
        UnknownOption: One of them has a value that it does not take.
    """
    given = {name: options[name] for name in OPTIONS if options.get(name) is not None}
    for name, value in given.items():
        is_taken, takes = OPTIONS[name]
        if not is_taken(value):
            raise exceptions.UnknownOption(name, value, takes.format(name=name))
    for name, value in given.items():
        if value is not False and settings.registry_url is None:
            raise exceptions.RegistryRequired(f"{name} = {value!r}")


NO_TICKET: Final = Ticket()


class RegistryOptions(NamedTuple):
    """The options of one send that concern the registry.

    Attributes:
        key: Only the newest task under a key runs; empty for none.
        job: The job that the task belongs to; empty for none.
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
            settings: The registry's settings, whose defaults count last.
            task: The task, whose attributes ``once`` and ``track`` count before them; None if it is
                only known by name.
            given: The options of the registry that ``apply_async`` got, which count first.
            former: The headers of the task that this one retries or replaces.
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
        """Whether the task is noted in the registry when it is sent."""
        return bool(self.key) or self.track

    def headers(self, copy: str, ticket: Ticket = NO_TICKET, job_id: str = "") -> OwnOptions:
        """Return the headers that the message gets.

        Args:
            copy: Its name, if it is registered.
            ticket: What the registry has said of the task.
            job_id: The id of its job.
        """
        once = self.once and new_copy()
        headers: OwnOptions = {COPY: copy, KEY: self.key, JOB: self.job, JOB_ID: job_id}
        headers |= {ONCE: once, TRACKED: self.track}
        return {name: value for name, value in headers.items() if value} | ticket.headers


def is_tracked(delays: Delays, task: object) -> bool:
    """Return whether a task is tracked whose send does not say so.

    Args:
        delays: The application's delay levels.
        task: The task; None for one that the application does not know.
    """
    settings = delays.settings_of(RegistrySettings)
    has_registry = bool(delays.setting("registry_url"))
    return has_registry and RegistryOptions.of(settings, task, {}, {}).track


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

#: For how many seconds a task may be late, and is listed, in addition to ``rabbitdelay_retry_for``,
#: for which it is tried again if its queue does not take it.
MARGIN: Final = 3600.0


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
    store = connect(str(settings.registry_url), settings.registry_options)

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
        raise exceptions.RegistryRequired("app.rabbitdelay.registry")
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
    except exceptions.RegistryUnavailable as error:
        logger.warning(
            "%d tasks were sent, beginning with %s, and are neither listed nor supersede older "
            "ones before they arrive: %s",
            len(registrations),
            registrations[0].task_id,
            error,
        )
        return []
