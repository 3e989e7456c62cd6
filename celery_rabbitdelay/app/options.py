"""The options of a send: their names and types, and a check for options that conflict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TypeAlias, TypedDict

import celery
import kombu
from celery.canvas import Signature
from celery.result import AsyncResult

from celery_rabbitdelay.app import additions
from celery_rabbitdelay.exceptions import InvalidDelayType
from celery_rabbitdelay.levels.delay import Delay

#: A task, or its name.
TaskOrName: TypeAlias = "celery.Task[Any, Any] | str"

#: The arguments of a task, as callers give them.
Args: TypeAlias = Sequence[object] | None
Kwargs: TypeAlias = Mapping[str, object] | None

#: The options of ``apply_async`` and ``send_task``, by name.
Options: TypeAlias = Mapping[str, Any]

#: A function's own dict of options, which it may change.
OwnOptions: TypeAlias = dict[str, Any]

#: The result of a task.
Result: TypeAlias = "AsyncResult[Any]"

#: The options of the kernel; see :func:`own_options`.
OWN_OPTIONS: Final = ("delay", "tolerance", "confirm_timeout")

#: An option that holds this package's options, because a stamp may have the name of an option.
BESIDE_STAMPS: Final = "rabbitdelay_options"


class SendOptions(TypedDict, total=False):
    """The options of a send except delay, countdown and eta, for type checkers."""

    tolerance: Delay
    confirm_timeout: float
    key: str | None
    job: str | None
    once: bool | None
    track: bool | None

    task_id: str | None
    producer: kombu.Producer | None
    publisher: kombu.Producer | None
    connection: kombu.Connection | None
    link: Signature[Any] | list[Signature[Any]] | None
    link_error: Signature[Any] | list[Signature[Any]] | None
    shadow: str | None
    expires: float | datetime | None
    retry: bool
    retry_policy: Mapping[str, object] | None
    queue: str | kombu.Queue | None
    exchange: str | kombu.Exchange | None
    routing_key: str | None
    priority: int | None
    serializer: str | None
    compression: str | None
    delivery_mode: int | str
    mandatory: bool
    headers: Mapping[str, object] | None
    stamped_headers: list[str] | None
    reply_to: str | None
    root_id: str | None
    parent_id: str | None
    group_id: str | None
    group_index: int | None
    add_to_parent: bool
    ignore_result: bool
    time_limit: float | None
    soft_time_limit: float | None


class DelayOptions(SendOptions, total=False):
    """The options that ``apply_async`` and signatures take, for type checkers."""

    delay: Delay | None
    countdown: float | None
    eta: datetime | str | None


def own_options() -> tuple[str, ...]:
    """Return the names of all options of this package and its additions; stamps may share them."""
    return (*OWN_OPTIONS, *additions.options)


def without_stamps(options: Options) -> tuple[OwnOptions, OwnOptions]:
    """Separate the options of a send from the stamps that have the name of an option.

    Celery passes stamps among the options, and lists their names.

    Args:
        options: The options of ``apply_async``.
    """
    given = dict(options)
    names = given.get("stamped_headers") or ()
    stamps = {name: given.pop(name) for name in names if name in own_options() and name in given}
    beside = given.pop(BESIDE_STAMPS, {})
    return {**given, **beside}, stamps


def refuse_two_times(delay: Delay, countdown: float | None, eta: datetime | str | None) -> None:
    """Refuse a delay together with a countdown or an eta.

    Raises:
        InvalidDelayType: A countdown or an eta is given.
    """
    for name, value in (("countdown", countdown), ("eta", eta)):
        if value is not None:
            raise InvalidDelayType(delay, f"cannot be combined with {name} = {value!r}")
