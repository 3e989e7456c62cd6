"""The settings of the registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

from celery_rabbitdelay.app.settings import (
    NAME_PREFIX,
    PREFIX,
    SECONDS,
    SettingsGroup,
    SettingType,
    hidden,
    whole_number,
)
from celery_rabbitdelay.exceptions import InvalidSetting
from celery_rabbitdelay.levels.shown_url import without_password
from celery_rabbitdelay.registry.connection import TAKES_URL, is_redis_url

#: The most copies of a decision that a call can wait for.
MAX_COPIES: Final = 100

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
    registry_options: Annotated[Mapping[str, Any] | None, _REGISTRY_OPTIONS] = None

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

    #: How many copies a cancel, a commit or an abort has to have before the call returns: the
    #: server's append-only file (Redis 7.2, Valkey) is one, and so is each of its replicas. None:
    #: Redis has it in memory, and a fail-over may lose it.
    registry_durability: Annotated[int | None, whole_number(MAX_COPIES)] = None

    #: "all": every delayed task is listed in the registry while it waits; "none": those that are
    #: sent with ``track=True``, or whose task has ``track = True``.
    track: Track = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.track == "all" and self.registry_url is None:
            raise InvalidSetting(f"{PREFIX}track", "all", f"all needs {PREFIX}registry_url")
