"""The seams: what the kernel asks the additions that are turned on.

A subclass of :class:`Addition` overrides what it needs, and :mod:`.app.additions` names it. Whether
a task runs that has arrived at a worker is asked elsewhere: see ``Decisions`` in
:mod:`.worker.restore`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from celery_rabbitdelay.app import additions
from celery_rabbitdelay.app.delays import Delays
from celery_rabbitdelay.app.options import Options, OwnOptions
from celery_rabbitdelay.exceptions import UnknownOption, UnprocessableMessage
from celery_rabbitdelay.levels.delay import Due
from celery_rabbitdelay.levels.headers import DelayHeaders
from celery_rabbitdelay.publishing.message import WaitingMessage
from celery_rabbitdelay.publishing.producer import Delayed

if TYPE_CHECKING:
    from celery.beat import Service

    from celery_rabbitdelay.publishing.message import Content

#: Rows that are written already.
WrittenT = TypeVar("WrittenT")

#: An addition's part in a send, or in a ``send_many``.
PartT = TypeVar("PartT")

#: No headers, for a call without headers of its own.
NO_HEADERS: Final[Mapping[str, str]] = {}


class Call(NamedTuple):
    """One call of a task.

    Attributes:
        task_id: Its id.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        due: When it may start.
        headers: Headers that only the message of this call has: those of an addition, or the
            ``group_index`` of a member of a group.
        has_id: Whether the caller has given the id; otherwise no task had it before.
    """

    task_id: str
    args: Sequence[Any]
    kwargs: Mapping[str, object]
    due: Due
    headers: Mapping[str, Any] = NO_HEADERS
    has_id: bool = True


@dataclass
class Send:
    """One call of ``Celery.send_task``, whose options and delay are checked.

    Attributes:
        delays: The application's delay levels.
        name: The task's name.
        task: The task; None if the application knows only its name.
        options: Celery's options, given by the caller. When an addition is asked, they include
            ``task_id``.
        added: The options that additions have brought.
        former: The headers of this package on the task that this one retries or replaces; empty if
            it does neither.
        has_id: Whether the caller has given the task's id.
    """

    delays: Delays
    name: str
    task: object
    options: OwnOptions
    added: Options
    former: Options
    has_id: bool


class AddedToSend:
    """An addition's part in one send; each method does nothing by default."""

    @property
    def is_alone(self) -> bool:
        """Whether the send is confirmed by itself, and not at the end of a block."""
        return False

    def headers(self, due: Due) -> Mapping[str, object]:
        """Return the headers that the message gets; called just before it is made."""
        return {}

    def confirmed(self, task_id: str, due: Due, delayed: Delayed) -> None:
        """Note that the broker has confirmed the message."""


class AddedToRows(Protocol):
    """An addition's part in a ``send_many``. Rows are known by their numbers, counted from 0."""

    @property
    def shared_headers(self) -> Mapping[str, object]:
        """The headers that the messages of all rows have."""

    @property
    def needs_each(self) -> bool:
        """Whether the addition must see each row; otherwise rows that are written already pass."""

    def take(self, due: Due) -> None:
        """Note that a row is due; raise if it cannot be sent."""

    def asked(
        self, work: Iterator[tuple[int, Call | WrittenT]]
    ) -> Iterator[tuple[int, Call | WrittenT]]:
        """Yield the rows, in their order.

        Give a :class:`.Call` its own headers if it needs any; pass rows that are already written on
        unchanged.
        """

    def sent(
        self, row: int, call: Call, content: Callable[[], Content] | None, delayed: Delayed
    ) -> None:
        """Note that a row is sent; ``content`` is None if its message cannot be written again."""

    def ended(self, rows: Iterable[int], is_confirmed: bool) -> None:
        """Note that the broker has confirmed rows, or has not."""

    def close(self) -> None:
        """Finish; no further row comes."""


class Addition:
    """Base class of additions. The kernel calls its methods, which do nothing by default.

    Args:
        delays: The application's delay levels.
    """

    def __init__(self, delays: Delays) -> None:
        self.delays = delays

    def check(self, options: Options) -> None:
        """Refuse options of ``apply_async`` that the addition does not take.

        It is called even if the addition's ``switch`` is off.

        Raises:
            UnknownOption: One of them has a value that it does not take.
        """

    def to_send(self, send: Send) -> AddedToSend | None:
        """Return what the addition does with a send; None for nothing.

        With None, a send that has one of the addition's options is refused.
        """

    def to_rows(
        self,
        name: str,
        task: object,
        options: Options,
        fail: Callable[[Sequence[int], Exception], None],
    ) -> AddedToRows | None:
        """Return what the addition does with the rows of a ``send_many``; None for nothing.

        With None, a ``send_many`` that has one of the addition's options is refused.

        Args:
            name: The task's name.
            task: The task; None if the application knows only its name.
            options: The options that the addition has brought, for all rows.
            fail: Called with the numbers of rows that cannot be sent, and the error.
        """

    def affects(self, task: object) -> bool:
        """Return whether the addition affects a send of a task that has none of its options."""
        return False

    #: Whether distribution asks the addition; it asks only one.
    is_asked_by_distribution = False

    def envelope_arrived(
        self, inner: Sequence[DelayHeaders], due_ms: int
    ) -> int | Sequence[bool] | None:
        """Say what becomes of an envelope that is due, before distribution publishes its messages.

        The workers ask again about each of them.

        Args:
            inner: The headers of each message in it.
            due_ms: When it was due.

        Returns:
            Until when the whole envelope waits, in milliseconds since 1970-01-01 UTC; or for each
            message whether it goes on; None if all of them do.
        """

    def note_arrived(self, note: WaitingMessage) -> Due | None:
        """Take a due message that is for the addition itself; return until when it waits again.

        Raises:
            UnprocessableMessage: The addition did not send this message.
        """
        raise UnprocessableMessage("no addition has sent it")

    def revoked(self, task_ids: Sequence[str]) -> None:
        """Note that Celery's ``revoke`` is called."""

    def purged(self) -> int:
        """Note that Celery's ``purge`` is called; return how many tasks were discarded."""
        return 0

    def is_waiting(self, task_id: str) -> bool:
        """Return whether a task that Celery does not know is known to wait."""
        return False

    def why_not_ready(self) -> str:
        """Return why a worker cannot do its work; empty if it can."""
        return ""

    def status(self) -> Mapping[str, object]:
        """Return what ``celery rabbitdelay status`` shows beside what waits.

        Returns:
            Of these: ``next_due``, a :class:`datetime.datetime`; ``paused``, mappings of ``task``,
            ``queue`` and ``since``; and ``error``, why this is not known.
        """
        return {}

    def problems(self) -> Iterator[tuple[str, str, Mapping[str, object]]]:
        """Yield findings for ``celery rabbitdelay verify``.

        Each finding is its code in ``operations/findings.toml``, its subject, and the values that
        its text names.
        """
        yield from ()

    def beat_starts(self, service: Service) -> None:
        """Do something to the service of ``celery beat`` before it runs."""


def additions_of(delays: Delays) -> Sequence[Addition]:
    """Return the additions of an application that are turned on."""
    return delays.part(_turned_on)


def checked_added_options(options: Options, delays: Delays) -> OwnOptions:
    """Return those of a send's options that additions have brought, checked by them.

    Celery silently drops unknown options. Callers rely on the options that they pass, so an option
    that would have no effect is an error, with a delay and without one.

    Args:
        options: What ``apply_async`` takes, without stamps of such names.
        delays: The application's delay levels. Their settings are only read if there is such an
            option.

    Raises:
        UnknownOption: The addition does not take the value.
        RegistryRequired: The option needs a registry, and the application has no registry.
        AdditionMissing: Its folder was deleted.
    """
    given = {name: options[name] for name in additions.options if options.get(name) is not None}
    by_hooks: dict[str, OwnOptions] = {}
    for name, value in given.items():
        by_hooks.setdefault(additions.options[name].hooks, {})[name] = value
    for hooks, own in by_hooks.items():
        addition: Addition = delays.part(additions.load(hooks))
        addition.check(own)
    return given


def parts_of(
    delays: Delays, added: Options, ask: Callable[[Addition, OwnOptions], PartT | None], way: str
) -> list[PartT]:
    """Return what the additions that are turned on do with a send, or with rows.

    Args:
        delays: The application's delay levels.
        added: The options that additions have brought.
        ask: Asks an addition, with its own options among these; None if it does nothing.
        way: The advice in the error: how to send without the option.

    Raises:
        UnknownOption: An option would have no effect, because its addition does nothing.
    """
    parts, unused = list[PartT](), dict(added)
    for addition in additions_of(delays):
        names = [
            name
            for name in added
            if delays.part(additions.load(additions.options[name].hooks)) is addition
        ]
        part = ask(addition, {name: added[name] for name in names})
        if part is not None:
            parts.append(part)
            for name in names:
                del unused[name]
    for name, value in unused.items():
        if value is not False:
            raise UnknownOption(name, value, way)
    return parts


def _turned_on(delays: Delays) -> Sequence[Addition]:
    return [
        delays.part(additions.load(each.hooks))
        for each in filter(additions.exists, additions.entries)
        if each.hooks and (not each.switch or delays.setting(each.switch))
    ]
