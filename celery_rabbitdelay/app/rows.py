"""The rows of ``send_many``, and the report on what was sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

from celery_rabbitdelay.exceptions import InvalidRow
from celery_rabbitdelay.levels.delay import Delay

#: After so many rows that were not confirmed, no further rows are taken.
MAX_ERRORS: Final = 1000

#: Seconds between two calls of the caller's ``progress``.
PROGRESS_INTERVAL: Final = 0.5


class Row(NamedTuple):
    """One call of the task.

    Attributes:
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        delay: Seconds, or a timedelta, until it may start, from when the row is taken.
        eta: The instant at which it may start; instead of a delay.
        task_id: Its id; a random one by default.
        key: Only the newest task under a key runs; needs the registry.
    """

    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    delay: Delay | None = None
    eta: datetime | str | None = None
    task_id: str | None = None
    key: str | None = None


@dataclass
class Report:
    """What was sent, so far.

    Attributes:
        sent: How many rows publishing was attempted for.
        confirmed: How many of these the broker has confirmed.
        resent: How often a message was published again.
        messages: How many messages were confirmed, envelopes among them.
        envelopes: How many messages that hold several rows were confirmed.
        seconds: How long it has taken.
        errors: How many rows were not confirmed, by the name of the error.
    """

    sent: int = 0
    confirmed: int = 0
    resent: int = 0
    messages: int = 0
    envelopes: int = 0
    seconds: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        """Confirmed rows a second."""
        return self.confirmed / self.seconds if self.seconds else 0.0


def checked_row(given: Row | Mapping[str, Any]) -> Row:
    """Return a row, also of a mapping of its fields.

    Raises:
        InvalidRow: It is neither, or has an unknown field.
    """
    return given if isinstance(given, Row) else _row_of(given)


def _row_of(given: Mapping[str, Any]) -> Row:
    if not isinstance(given, Mapping):
        raise InvalidRow(given, "takes a celery_rabbitdelay.Row, or a mapping of its fields")
    try:
        return Row(**given)
    except TypeError as wrong:
        unknown = ", ".join(sorted(map(str, given.keys() - set(Row._fields))))
        takes = ", ".join(Row._fields)
        raise InvalidRow(given, f"has {unknown}; takes {takes}") from wrong
