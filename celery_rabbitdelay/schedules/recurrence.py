"""Recurrences, and the single occurrences that messages carry. Does no I/O.

cronsim parses cron expressions and computes their times; Celery's crontabs arrive parsed. When
daylight saving time begins, a skipped time is due in the first minute after the gap; when it ends,
a repeated time counts once. A rule that applies to all hours of the day is due whenever the clock
shows its minutes.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterator, Mapping
from copy import copy
from datetime import date, datetime, time, timedelta, tzinfo
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple, Self, get_args
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError
from kombu.utils import json

from celery_rabbitdelay.app.instruments import counter, gauge
from celery_rabbitdelay.exceptions import InvalidSchedule
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import (
    MAX_DELAY,
    MAX_DUE_MS,
    instant_of,
    milliseconds_of,
    plain,
)
from celery_rabbitdelay.levels.headers import MAX_COUNT, MAX_EXACT, is_int

#: The errors that an invalid rule or time zone raises.
INVALID: Final = (ValueError, KeyError, OSError, OverflowError)

#: The limits of rules and of excluded days per schedule.
MAX_RULES: Final = 20
MAX_EXCLUDED: Final = 100

#: The fields of Celery's crontab in cron's order, and the number of values that ``*`` stands for.
_CELERYS: Final = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
_SIZES: Final = (60, 24, 31, 12, 7)

#: Cron's nicknames.
_NAMES: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}

_EVERY: Final = "every "
_CRONTAB: Final = "crontab "
_TAKES: Final = (
    "takes a timedelta, Celery's schedule or crontab, a cron text of five or six fields, or a list"
)

#: A time zone given as an offset.
_OFFSET: Final = re.compile(r"UTC([+-]\d\d:\d\d)")


class Recurrence(NamedTuple):
    """The instants at which a schedule is due.

    Attributes:
        rules: The rules; the schedule is due at the instants of all rules. A rule is ``every`` and
            an interval in milliseconds, counted from ``start_ms``; a cron expression; or
            ``crontab`` and the fields of Celery's crontab, which requires both the day of the month
            and the day of the week to match.
        zone: The time zone of cron expressions: an IANA name or an offset such as UTC+05:30.
        start_ms: The earliest instant, in milliseconds since 1970-01-01 UTC.
        end_ms: The latest instant; None for no end.
        excluded: Days in the time zone without instants, such as 2026-12-25.
    """

    rules: tuple[str, ...]
    zone: str = "UTC"
    start_ms: int = 0
    end_ms: int | None = None
    excluded: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        when: object,
        zone: str,
        start: datetime | str | None = None,
        end: datetime | str | None = None,
        exclude: object = (),
    ) -> Self:
        """Make a recurrence from the arguments of ``put``.

        Args:
            when: A timedelta of at least a second; Celery's ``schedule`` or ``crontab``; a cron
                expression of five or six fields (the first of six are seconds) or a nickname such
                as ``@daily``; or a list of these.
            zone: The time zone of cron expressions: an IANA name or an offset such as UTC+05:30.
            start: The earliest instant: an aware datetime or its ISO 8601 text. Intervals count
                from this instant or, without a start, from 1970-01-01 UTC, so that an interval of
                an hour is due on the hour.
            end: The latest instant, in the same forms.
            exclude: Days in the time zone without instants: a date or its text, or a list of these.

        Raises:
            InvalidSchedule: An argument is invalid, or no instant is ever due. An end in the past
                is allowed.
            InvalidDelay: ``start`` or ``end`` is naive.
            ValueError: The text of ``start`` or ``end`` is not ISO 8601.
        """
        made = cls(
            tuple(map(_rule, _as_list(when))),
            zone,
            0 if start is None else _milliseconds_of(start),
            None if end is None else _milliseconds_of(end),
            tuple(map(_exclusion, _as_list(exclude))),
        )
        try:
            made._check()
            now_ms = wall_clock.ms()
            is_ahead = now_ms < (made.end_ms or 0)
            if made.after(now_ms) is None and is_ahead and made.after(-1) is None:
                raise ValueError("it is never due from its start to its end")
        except INVALID as error:
            raise InvalidSchedule(when, str(error)) from error
        return made

    @classmethod
    def read(cls, given: Any) -> Self:
        """Parse the JSON form; raise one of :data:`INVALID` or TypeError if it is invalid."""
        # A later version may append fields.
        rules, zone, start_ms, end_ms, excluded = given[:5]
        if not all(isinstance(text, str) for text in (zone, *rules, *excluded)):
            raise TypeError(given)
        if not all(
            is_int(limit, 0, MAX_DUE_MS) for limit in (start_ms, 0 if end_ms is None else end_ms)
        ):
            raise TypeError(given)
        made = cls(tuple(rules), zone, start_ms, end_ms, tuple(excluded))
        made._check()
        return made

    def _check(self) -> None:
        """Raise one of :data:`INVALID` if the instants cannot be computed."""
        if not 1 <= len(self.rules) <= MAX_RULES or len(self.excluded) > MAX_EXCLUDED:
            takes = f"takes 1 to {MAX_RULES} rules, and at most {MAX_EXCLUDED} days to exclude"
            raise ValueError(takes)
        _zone(self.zone)
        for rule in self.rules:
            if rule.startswith(_EVERY):
                if not 1000 <= int(rule.removeprefix(_EVERY)) <= MAX_DELAY * 1000:
                    raise ValueError("takes intervals from a second to 100 years")
            else:
                _cron(rule)
        for day in self.excluded:
            if date.fromisoformat(day).isoformat() != day:
                raise ValueError(f"{day!r} is not a date such as 2026-12-25")

    def after(self, instant_ms: int) -> int | None:
        """Return the first instant of the recurrence after a given instant; None after the last."""
        instant_ms = max(instant_ms, self.start_ms - 1)
        end_ms = MAX_DUE_MS if self.end_ms is None else self.end_ms
        found: dict[str, int] = {}
        while True:
            for rule in self.rules:
                if found.get(rule, -1) <= instant_ms:
                    found[rule] = _next(rule, self, instant_ms)
            at_ms = min(found.values())
            if at_ms > end_ms:
                return None
            local = instant_of(at_ms).astimezone(_zone(self.zone))
            if f"{local:%Y-%m-%d}" not in self.excluded:
                return at_ms
            tomorrow = datetime.combine(local + timedelta(days=1), time.min, local.tzinfo)
            instant_ms = milliseconds_of(tomorrow) - 1

    def all_after(self, instant_ms: int) -> Iterator[int]:
        """Yield all instants of the recurrence after a given instant."""
        following = self.after(instant_ms)
        while following is not None:
            yield following
            following = self.after(following)


def _milliseconds_of(instant: datetime | str) -> int:
    return milliseconds_of(datetime.fromisoformat(instant) if isinstance(instant, str) else instant)


def _as_list(given: object) -> list[object]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _rule(when: object) -> str:
    """Return the text form of a rule."""
    every = plain(getattr(when, "run_every", when), "when")
    if hasattr(when, "_orig_minute"):
        return _CRONTAB + " ".join(map(_field, attrgetter(*_CELERYS)(when), _SIZES))
    if isinstance(every, timedelta):
        return f"{_EVERY}{round(every / timedelta(milliseconds=1))}"
    if isinstance(when, str):
        return _NAMES.get(when.strip(), " ".join(when.split()))
    raise InvalidSchedule(when, _TAKES)


def _exclusion(given: object) -> str:
    """Return the text form of an excluded day."""
    if isinstance(given, date):
        return f"{plain(given, 'exclude'):%Y-%m-%d}"
    if isinstance(given, str):
        return given
    raise InvalidSchedule(given, "the days to exclude must be dates")


def _field(values: Collection[int], whole: int) -> str:
    """Return numbers as a cron field: ``1,2,5``."""
    return "*" if len(values) == whole else ",".join(map(str, sorted(values)))


@lru_cache(1000)
def _cron(rule: str) -> CronSim:
    """Parse a cron expression or a Celery crontab; callers must copy the cached result.

    Raises:
        ValueError: The text is not a cron expression, or it is never due.
    """
    text = rule.removeprefix(_CRONTAB)
    try:
        found = CronSim(text, datetime(2000, 1, 1))
    except CronSimError as error:
        raise ValueError(f"{rule!r} is not a cron expression, or is never due: {error}") from None
    found.day_and |= text != rule
    # cronsim searches 50 years; a 29th of February on a given weekday comes within 40.
    if next(copy(found), None) is None:
        raise ValueError(f"{rule!r} is never due")
    return found


@lru_cache(100)
def _zone(name: str) -> tzinfo:
    offset = _OFFSET.fullmatch(name)
    zone = offset and datetime.strptime(offset[1], "%z").tzinfo
    return zone or ZoneInfo(name)


def _next(rule: str, recurrence: Recurrence, instant_ms: int) -> int:
    """Return the first instant of one rule after another instant."""
    if rule.startswith(_EVERY):
        every, start = int(rule.removeprefix(_EVERY)), recurrence.start_ms
        return start + ((instant_ms - start) // every + 1) * every
    cron, zone = copy(_cron(rule)), _zone(recurrence.zone)
    cron.dt = instant_of(instant_ms).replace(microsecond=0).astimezone(zone)
    if len(cron.hours) < 24:
        # cronsim steps through local times and maps them to instants.
        cron.fixup_tz, cron.dt = zone, cron.dt.replace(tzinfo=None)
    else:
        # With a single minute cronsim jumps a whole hour, but a clock may change by half an hour.
        cron.minutes = cron.minutes | {-1}
    # A clock that was set back shows earlier times again.
    return next(found for found in map(milliseconds_of, cron) if found > instant_ms)


#: The longest header of an occurrence, in characters.
MAX_TEXT: Final = 16_384

OCCURRENCES: Final = counter(
    "occurrences",
    "Arrived occurrences of schedules by fate: ran, cancelled, late, paused, overlapped; and "
    "missing occurrences: sent again.",
    labels=("task", "fate"),
)
OVERDUE: Final = gauge(
    "schedules_overdue_seconds",
    "Seconds since the longest missing occurrence of all schedules was due.",
)

#: The longest name of a schedule, in bytes. The name is part of the task id, for which AMQP allows
#: 255 bytes.
MAX_NAME: Final = 222

#: The longest jitter, in milliseconds: a day.
MAX_JITTER_MS: Final = 86_400_000

#: The ways to treat an occurrence while another run of its schedule has not ended.
Overlap = Literal["allow", "skip", "queue-one"]

#: Values of ``catch_up_ms``: after missed occurrences, run one occurrence, or run all of them in
#: turn.
LAST: Final = -1
ALL: Final = -2

_NAME: Final = re.compile(r"[0-9a-f]{0,32}", re.ASCII)


class Occurrence(NamedTuple):
    """One instant of a schedule; its message carries it in a header.

    Attributes:
        name: The name of the schedule.
        instant_ms: The instant, in milliseconds since 1970-01-01 UTC.
        recurrence: The recurrence of the schedule.
        catch_up_ms: How many milliseconds late the occurrence may still run; or :data:`LAST` or
            :data:`ALL`.
        jitter_ms: The largest jitter in milliseconds. The jitter is computed from the instant.
        overlap: Whether to skip, wait or run while another run of the schedule has not ended.
        options: The options of the task.
        order: A number that grows with every edit of the schedule.
        revision: A fingerprint of the arguments of ``put``.
        message: The name of the message.
        turns: How often the message was put back.
        is_followed: Whether the message of the following instant was published.
    """

    name: str
    instant_ms: int
    recurrence: Recurrence
    catch_up_ms: int
    jitter_ms: int = 0
    overlap: Overlap = "allow"
    options: Mapping[str, Any] = {}
    order: int = 0
    revision: str = ""
    message: str = ""
    turns: int = 0
    is_followed: bool = False

    @classmethod
    def of(cls, text: object) -> Self | None:
        """Parse a header, which any sender may have written; return None if it is invalid."""
        try:
            if not isinstance(text, str) or len(text) > MAX_TEXT:
                return None
            # A later version may append fields.
            found = cls(*json.loads(text)[: len(cls._fields)])
            found = found._replace(recurrence=Recurrence.read(found.recurrence))
            return found if found._is_valid else None
        except Exception:  # noqa: BLE001 - a client's text may raise any error
            return None

    @property
    def _is_valid(self) -> bool:
        return (
            1 <= len(self.name.encode()) <= MAX_NAME
            and isinstance(self.options, dict)
            and all(_NAME.fullmatch(name) for name in (self.revision, self.message))
            and is_int(self.instant_ms, 0, MAX_DUE_MS)
            and is_int(self.catch_up_ms, ALL, MAX_DUE_MS)
            and is_int(self.jitter_ms, 0, MAX_JITTER_MS)
            and is_int(self.order, 0, MAX_EXACT)
            and is_int(self.turns, 0, MAX_COUNT)
            and self.overlap in get_args(Overlap)
        )

    @property
    def text(self) -> str:
        """The text of the header: the inverse of :meth:`of`."""
        return str(json.dumps(list(self), separators=(",", ":")))

    @property
    def task_id(self) -> str:
        """The id of the occurrence's task."""
        return f"{self.name}:{self.instant_ms:015d}:{self.order}"

    @property
    def due_ms(self) -> int:
        """The due time: the instant plus the jitter, which all processes compute alike."""
        words = f"{self.name}:{self.instant_ms}".encode()
        return self.instant_ms + zlib.crc32(words) % (self.jitter_ms + 1)

    def at(self, now_ms: int) -> tuple[bool, int | None]:
        """Return whether the occurrence still runs, and the following instant, or None.

        With :data:`LAST`, the following instant is the first instant in the future; with a number
        of milliseconds, it is the first instant that is not too late.
        """
        if self.catch_up_ms == ALL:
            return True, self.recurrence.after(self.instant_ms)
        is_last = self.catch_up_ms == LAST
        earliest_ms = now_ms + 1 if is_last else now_ms - self.catch_up_ms
        since_ms = max(self.instant_ms, earliest_ms - self.jitter_ms - 1)
        ahead = (self._replace(instant_ms=found) for found in self.recurrence.all_after(since_ms))
        following_ms = next((one.instant_ms for one in ahead if one.due_ms >= earliest_ms), None)
        return is_last or self.due_ms >= earliest_ms, following_ms
