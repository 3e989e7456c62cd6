"""The options of a send that Celery does not know: conflicting times, and those of the registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final, Literal, NamedTuple, Self, TypedDict

import kombu
from celery.canvas import Signature

from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.exceptions import InvalidDelayType, RegistryRequired, UnknownOption
from celery_rabbitdelay.levels.delay import Delay, milliseconds
from celery_rabbitdelay.levels.headers import COPY, JOB, JOB_ID, KEY, ONCE, TRACKED
from celery_rabbitdelay.registry.decision import Ticket, new_copy

_TEXT: Final = (
    lambda value: isinstance(value, str) and value != "",
    "takes a text that is not empty, such as '{name}:7'",
)
_BOOL: Final = lambda value: isinstance(value, bool), "takes True or False"

#: The options of a send that the registry takes; for each, which values it takes, and in words.
#: Celery drops an option that it does not know in silence. A user who gives one of these relies on
#: it, so it is an error where there is no registry, with a delay and without one.
REGISTRY_OPTIONS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "key": _TEXT,
    "unique": (lambda value: value in ("first", "newest"), "takes 'first' or 'newest'"),
    "unique_for": (
        lambda value: isinstance(value, int | float | timedelta) and not isinstance(value, bool),
        "takes seconds, or a timedelta",
    ),
    "job": _TEXT,
    "once": _BOOL,
    "track": _BOOL,
}


#: All options of this package. A stamp may have the name of any of them.
OWN_OPTIONS: Final = (*REGISTRY_OPTIONS, "delay", "tolerance", "confirm_timeout")

#: An option that holds options of this package where there may be stamps of the same names, which
#: somebody else has chosen.
BESIDE_STAMPS: Final = "rabbitdelay_options"


class SendOptions(TypedDict, total=False):
    """The options of a send without those of its time, for type checkers: ours, then Celery's."""

    tolerance: Delay
    confirm_timeout: float
    key: str | None
    job: str | None
    unique: Literal["first", "newest"] | None
    unique_for: Delay | None
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
    retry_policy: Mapping[str, Any] | None
    queue: str | kombu.Queue | None
    exchange: str | kombu.Exchange | None
    routing_key: str | None
    priority: int | None
    serializer: str | None
    compression: str | None
    delivery_mode: int | str
    mandatory: bool
    headers: Mapping[str, Any] | None
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
    """What ``apply_async`` and signatures take."""

    delay: Delay | None
    countdown: float | None
    eta: datetime | str | None


NO_TICKET: Final = Ticket()


class RegistryOptions(NamedTuple):
    """The options of one send that concern the registry.

    Attributes:
        key: Only the newest task under a key runs; empty for none.
        job: The job that the task belongs to; empty for none.
        once: Whether only the first message with the task's id runs.
        track: Whether the task is listed while it waits.
        unique_ms: None, unless the task is only sent if none waits under its key: then for how many
            milliseconds after a send another one is left out, even if the task has arrived.
    """

    key: str = ""
    job: str = ""
    once: bool = False
    track: bool = False
    unique_ms: int | None = None

    @classmethod
    def of(
        cls,
        settings: Settings,
        task: object,
        given: Mapping[str, Any],
        former: Mapping[str, Any],
    ) -> Self:
        """Return the options of one send.

        Args:
            settings: The application's settings, whose defaults count last.
            task: The task, whose attributes ``once`` and ``track`` count before them; None if it is
                only known by name.
            given: The options of the registry that ``apply_async`` got, which count first.
            former: The headers of the task that this one retries or replaces.
        """
        if settings.registry_url is None:
            return cls()
        once = given.get("once", former.get(ONCE, getattr(task, "once", False)))
        track = given.get("track", former.get(TRACKED, getattr(task, "track", None)))
        key = given.get("key", former.get(KEY, ""))
        return cls(
            key,
            given.get("job", former.get(JOB, "")),
            bool(once),
            settings.track == "all" if track is None else bool(track),
            _unique_ms(given, key),
        )

    @property
    def is_registered(self) -> bool:
        """Whether the task is noted in the registry when it is sent."""
        return bool(self.key) or self.track

    def headers(self, copy: str, ticket: Ticket = NO_TICKET, job_id: str = "") -> dict[str, Any]:
        """Return the headers that the message gets.

        Args:
            copy: Its name, if it is registered.
            ticket: What the registry has said of the task.
            job_id: The id of its job.
        """
        once = self.once and new_copy()
        headers: dict[str, Any] = {COPY: copy, KEY: self.key, JOB: self.job, JOB_ID: job_id}
        headers |= {ONCE: once, TRACKED: self.track}
        return {name: value for name, value in headers.items() if value} | ticket.headers


def _unique_ms(given: Mapping[str, Any], key: str) -> int | None:
    """Return what ``unique`` and ``unique_for`` say; see :attr:`RegistryOptions.unique_ms`."""
    for name in ("unique", "unique_for"):
        if name in given and not key:
            raise UnknownOption(name, given[name], "needs a key in the same call")
    unique_for = given.get("unique_for")
    if given.get("unique") == "first":
        return 0 if unique_for is None else milliseconds(unique_for)
    if unique_for is not None:
        raise UnknownOption("unique_for", unique_for, "needs unique='first'")
    return None


def without_stamps(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of a send, and apart from them the stamps that have the name of one.

    Celery passes stamps among the options, and lists their names.

    Args:
        options: What ``apply_async`` takes.
    """
    given = dict(options)
    names = given.get("stamped_headers") or ()
    stamps = {name: given.pop(name) for name in OWN_OPTIONS if name in names and name in given}
    beside = given.pop(BESIDE_STAMPS, {})
    return {**given, **beside}, stamps


def checked_registry_options(options: Mapping[str, Any], app: Any) -> dict[str, Any]:
    """Return those of a send's options that the registry takes, checked.

    Args:
        options: What ``apply_async`` takes, without stamps of such names.
        app: The application, whose settings are only looked at if there is such an option.

    Raises:
        RegistryRequired: One of them is given, and there is no registry.
        UnknownOption: One of them has a value that it does not take.
    """
    given = {name: options[name] for name in REGISTRY_OPTIONS if options.get(name) is not None}
    for name, value in given.items():
        is_taken, takes = REGISTRY_OPTIONS[name]
        if not is_taken(value):
            raise UnknownOption(name, value, takes.format(name=name))
    for name, value in given.items():
        if value is not False and app.rabbitdelay.settings.registry_url is None:
            raise RegistryRequired(f"{name} = {value!r}")
    return given


def refuse_two_times(delay: Delay, countdown: float | None, eta: datetime | str | None) -> None:
    """Refuse a delay together with a countdown or an eta.

    Raises:
        InvalidDelayType: Both were given.
    """
    for name, value in (("countdown", countdown), ("eta", eta)):
        if value is not None:
            raise InvalidDelayType(delay, f"cannot be combined with {name} = {value!r}")
