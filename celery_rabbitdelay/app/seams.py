"""The seams: the methods of additions that the kernel calls.

A subclass of :class:`Addition` overrides the methods that it needs; :mod:`.app.additions` registers
it. One more seam decides whether a task that has arrived at a worker runs: ``Decisions`` in
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

#: Rows whose messages are already serialized.
WrittenT = TypeVar("WrittenT")

#: An addition's hooks in a send, or in a ``send_many``.
PartT = TypeVar("PartT")

#: No headers, for a call without its own headers.
NO_HEADERS: Final[Mapping[str, str]] = {}


class Call(NamedTuple):
    """One call of a task.

    Attributes:
        task_id: The task's id.
        args: The task's positional arguments.
        kwargs: The task's keyword arguments.
        due: When the task may start.
        headers: Headers of this call's message alone: an addition's, or the ``group_index`` of a
            group's member.
        has_id: Whether the caller gave the id; otherwise it is new.
    """

    task_id: str
    args: Sequence[Any]
    kwargs: Mapping[str, object]
    due: Due
    headers: Mapping[str, Any] = NO_HEADERS
    has_id: bool = True


@dataclass
class Send:
    """One call of ``Celery.send_task``, after the check of its options and delay.

    Attributes:
        delays: The application's delay levels.
        name: The task's name.
        task: The task; None if the application knows only its name.
        options: Celery's options, as the caller gave them. Additions get them with ``task_id``.
        added: The options of additions.
        former: This package's headers of the task that this send retries or replaces; empty for any
            other send.
        has_id: Whether the caller gave the task's id.
    """

    delays: Delays
    name: str
    task: object
    options: OwnOptions
    added: Options
    former: Options
    has_id: bool


class AddedToSend:
    """An addition's hooks in one send; its methods do nothing by default."""

    @property
    def is_alone(self) -> bool:
        """Whether the send waits for its own confirm, even inside a block of ``pipeline()``."""
        return False

    def headers(self, due: Due) -> Mapping[str, object]:
        """Return headers to add to the message; called just before it is made."""
        return {}

    def confirmed(self, task_id: str, due: Due, delayed: Delayed) -> None:
        """Handle the broker's confirm of the message."""


class AddedToRows(Protocol):
    """An addition's hooks in a ``send_many``. Rows are numbered from 0."""

    @property
    def shared_headers(self) -> Mapping[str, object]:
        """The headers that the messages of all rows have."""

    @property
    def needs_each(self) -> bool:
        """Whether the addition needs every row; otherwise :class:`.WrittenRows` pass unread."""

    def take(self, due: Due) -> None:
        """Record the due time of a row; raise an error if the row cannot be sent."""

    def with_headers(
        self, work: Iterator[tuple[int, Call | WrittenT]]
    ) -> Iterator[tuple[int, Call | WrittenT]]:
        """Yield the rows in their order, with the addition's headers for each.

        Only a :class:`.Call` can have its own headers; :class:`.WrittenRows` pass unchanged.
        """

    def sent(
        self, row: int, call: Call, content: Callable[[], Content] | None, delayed: Delayed
    ) -> None:
        """Record that a row is sent; ``content`` is None if its message cannot be written again."""

    def ended(self, rows: Iterable[int], is_confirmed: bool) -> None:
        """Record whether the broker has confirmed rows."""

    def close(self) -> None:
        """Finish; called after the last row."""


class Addition:
    """Base class of additions. The kernel calls its methods, which do nothing by default.

    Args:
        delays: The application's delay levels.
    """

    def __init__(self, delays: Delays) -> None:
        self.delays = delays

    def check(self, options: Options) -> None:
        """Refuse options of ``apply_async`` that the addition does not take.

        Called even if the addition's ``switch`` is off.

        Raises:
            UnknownOption: An option has an invalid value.
        """

    def to_send(self, send: Send) -> AddedToSend | None:
        """Return the addition's part in a send; None if it has no part.

        With None, a send with an option of the addition is refused.
        """

    def to_rows(
        self,
        name: str,
        task: object,
        options: Options,
        fail: Callable[[Sequence[int], Exception], None],
    ) -> AddedToRows | None:
        """Return the addition's part in a ``send_many``; None if it has no part.

        With None, a ``send_many`` with an option of the addition is refused.

        Args:
            name: The task's name.
            task: The task; None if the application knows only its name.
            options: The addition's own options, for all rows.
            fail: Called with the numbers of rows that cannot be sent, and the error.
        """

    def affects(self, task: object) -> bool:
        """Return whether the addition affects sends of a task even without its options."""
        return False

    #: Whether distribution calls the next two methods; at most one addition may set it.
    is_asked_by_distribution = False

    def envelope_arrived(
        self, inner: Sequence[DelayHeaders], due_ms: int
    ) -> int | Sequence[bool] | None:
        """Decide about an envelope that is due, before distribution publishes its messages.

        When these messages arrive, the workers decide about each message again.

        Args:
            inner: The headers of the messages in the envelope.
            due_ms: When the envelope was due.

        Returns:
            None to publish all messages; for each message, True to publish it; or a new due time of
            the whole envelope, in milliseconds since 1970-01-01 UTC.
        """

    def note_arrived(self, note: WaitingMessage) -> Due | None:
        """Handle a due message for the addition itself; return its next due time, if there is one.

        Raises:
            UnprocessableMessage: The addition did not send this message.
        """
        raise UnprocessableMessage("it was sent by no installed addition")

    def revoked(self, task_ids: Sequence[str]) -> None:
        """Handle a call of Celery's ``revoke``."""

    def purged(self) -> int:
        """Handle a call of Celery's ``purge``; return how many tasks were cancelled."""
        return 0

    def is_waiting(self, task_id: str) -> bool:
        """Return whether a task waits; asked if Celery's result backend does not know the task."""
        return False

    def why_not_ready(self) -> str:
        """Return why a worker cannot do its work; empty if it can."""
        return ""

    def status(self) -> Mapping[str, object]:
        """Return the addition's part of ``celery rabbitdelay status``.

        Returns:
            Any of ``next_due``, a :class:`datetime.datetime`; ``paused``, mappings of ``task``,
            ``queue`` and ``since``; and ``error``, the reason why these are unknown.
        """
        return {}

    def problems(self) -> Iterator[tuple[str, str, Mapping[str, object]]]:
        """Yield findings for ``celery rabbitdelay verify``.

        Each finding consists of its code in ``operations/findings.toml``, its subject, and the
        values in its text.
        """
        yield from ()

    def beat_starts(self, service: Service) -> None:
        """Change the service of ``celery beat`` before it runs."""


def checked_added_options(options: Options, delays: Delays) -> OwnOptions:
    """Return a send's options of additions, after each addition has checked its own options.

    Celery silently drops unknown options. Callers rely on the options that they pass, so an option
    without effect is an error, whether or not the send has a delay.

    Args:
        options: The options of ``apply_async``, without stamps of the same names.
        delays: The application's delay levels. The settings are read only if an option of an
            addition is given.

    Raises:
        UnknownOption: An option has an invalid value.
        RegistryRequired: An option needs a registry, and the application has no registry.
        AdditionMissing: The folder of an option's addition was deleted.
    """
    given = {name: options[name] for name in additions.options if options.get(name) is not None}
    for addition, own in _by_addition(delays, given).items():
        addition.check(own)
    return given


def parts_of(
    delays: Delays, added: Options, ask: Callable[[Addition, OwnOptions], PartT | None], advice: str
) -> list[PartT]:
    """Return the parts that the additions have in a send, or in a ``send_many``.

    Args:
        delays: The application's delay levels.
        added: The options of additions.
        ask: Returns the part of an addition with the given options; None if it has no part.
        advice: The advice in the error: how to send without the option.

    Raises:
        UnknownOption: An option would have no effect, because its addition has no part.
    """
    parts, unused = list[PartT](), _by_addition(delays, added)
    for addition in delays.part(additions_of):
        part = ask(addition, unused.get(addition, {}))
        if part is not None:
            parts.append(part)
            unused.pop(addition, None)
    for own in unused.values():
        refuse_unused(own, advice)
    return parts


def refuse_unused(added: Options, advice: str) -> None:
    """Refuse options of additions that would have no effect; False turns an option off.

    Args:
        added: The options.
        advice: The advice in the error: why the options have no effect, or how to send without
            them.

    Raises:
        UnknownOption: An option of an addition is not False.
    """
    for name, value in added.items():
        if value is not False:
            raise UnknownOption(name, value, advice)


def _by_addition(delays: Delays, added: Options) -> dict[Addition, OwnOptions]:
    """Group options by the addition that they belong to."""
    options_of: dict[Addition, OwnOptions] = {}
    for name, value in added.items():
        addition = delays.part(additions.load(additions.options[name]))
        options_of.setdefault(addition, {})[name] = value
    return options_of


def additions_of(delays: Delays) -> Sequence[Addition]:
    """Return the additions that an application has turned on; :meth:`.Delays.part` caches them."""
    return [
        delays.part(additions.load(each.hooks))
        for each in filter(additions.exists, additions.entries)
        if each.hooks and (not each.switch or delays.setting(each.switch))
    ]
