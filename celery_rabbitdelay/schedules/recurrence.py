"""When something is due again and again, and one of its instants, as its message says it. Pure.

cronsim reads cron texts and walks their times, and Celery's crontabs are the numbers that Celery
has read. Where a clock changes, a time that is skipped is due in the first minute behind the gap,
and a time that comes twice counts once. A rule for all hours of the day is due whenever the clock
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

#: The errors that a wrong rule or time zone raises.
INVALID: Final = (ValueError, KeyError, OSError, OverflowError)

#: The most rules of one schedule, and the most days that it excludes.
MAX_RULES: Final = 20
MAX_EXCLUDED: Final = 100

#: The fields of Celery's crontab, in the order of cron, and how many numbers ``*`` says.
_CELERYS: Final = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
_SIZES: Final = (60, 24, 31, 12, 7)

#: Cron's short names.
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

#: A time zone that has no name.
_OFFSET: Final = re.compile(r"UTC([+-]\d\d:\d\d)")


class Recurrence(NamedTuple):
    """When something is due again and again.

    Attributes:
        rules: It is due when one of them says: ``every`` and milliseconds from ``start_ms`` on; or
            a cron text; or ``crontab`` and the numbers of Celery's, which is due if both of its
            days fit.
        zone: The time zone of cron texts, an IANA name or an offset such as UTC+05:30.
        start_ms: Nothing is due before that, in milliseconds since 1970-01-01 UTC.
        end_ms: Nothing is due after that; None for no end.
        excluded: The days in the time zone on which it is not due all the same: 2026-12-25.
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
        """Return it as a user says it.

        Args:
            when: A timedelta of at least a second; Celery's ``schedule`` or ``crontab``; a cron
                text of five or six fields (the first of six are seconds), or one such as
                ``@daily``; or a list of these.
            zone: The IANA name of a time zone, or an offset such as UTC+05:30, for cron texts.
            start: Nothing is due before that, an aware datetime or its ISO 8601 text. Intervals
                count from it; without it, from 1970-01-01 UTC, so that an hour is due at each full
                hour.
            end: Nothing is due after that, likewise.
            exclude: The days in the time zone on which it is not due all the same: a date or its
                text, or a list of these.

        Raises:
            InvalidSchedule: One of these is wrong, or nothing is ever due. Nothing is due any more
                after an end that is over, which is no error.
            InvalidDelay: ``start`` or ``end`` is naive.
            ValueError: The text of one of them is no instant.
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
        """Read what JSON has made of it; raise one of :data:`INVALID` or TypeError if invalid."""
        # A later version may say more.
        rules, zone, start_ms, end_ms, excluded = given[:5]
        if not all(isinstance(each, str) for each in (zone, *rules, *excluded)):
            raise TypeError(given)
        if not all(
            is_int(each, 0, MAX_DUE_MS) for each in (start_ms, 0 if end_ms is None else end_ms)
        ):
            raise TypeError(given)
        made = cls(tuple(rules), zone, start_ms, end_ms, tuple(excluded))
        made._check()
        return made

    def _check(self) -> None:
        """Raise one of :data:`INVALID` if it cannot be computed."""
        if not 1 <= len(self.rules) <= MAX_RULES or len(self.excluded) > MAX_EXCLUDED:
            takes = f"takes 1 to {MAX_RULES} rules, and at most {MAX_EXCLUDED} days to exclude"
            raise ValueError(takes)
        _zone(self.zone)
        for rule in self.rules:
            if rule.startswith(_EVERY):
                if not 1000 <= int(rule.removeprefix(_EVERY)) <= MAX_DELAY * 1000:
                    raise ValueError("an interval is a second at least, and 100 years at most")
            else:
                _cron(rule)
        for each in self.excluded:
            if date.fromisoformat(each).isoformat() != each:
                raise ValueError(f"{each!r} is not a date such as 2026-12-25")

    def after(self, instant_ms: int) -> int | None:
        """Return when it is due first after an instant; None for never again."""
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
        """Yield when it is due after an instant."""
        following = self.after(instant_ms)
        while following is not None:
            yield following
            following = self.after(following)


def _milliseconds_of(instant: datetime | str) -> int:
    return milliseconds_of(datetime.fromisoformat(instant) if isinstance(instant, str) else instant)


def _as_list(given: object) -> list[object]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _rule(when: object) -> str:
    """Return one rule as a text."""
    every = plain(getattr(when, "run_every", when), "when")
    if hasattr(when, "_orig_minute"):
        return _CRONTAB + " ".join(map(_field, attrgetter(*_CELERYS)(when), _SIZES))
    if isinstance(every, timedelta):
        return f"{_EVERY}{round(every / timedelta(milliseconds=1))}"
    if isinstance(when, str):
        return _NAMES.get(when.strip(), " ".join(when.split()))
    raise InvalidSchedule(when, _TAKES)


def _exclusion(given: object) -> str:
    """Return a day that is excluded as a text."""
    if isinstance(given, date):
        return f"{plain(given, 'exclude'):%Y-%m-%d}"
    if isinstance(given, str):
        return given
    raise InvalidSchedule(given, "takes dates to exclude")


def _field(values: Collection[int], whole: int) -> str:
    """Return numbers as a field of cron: ``1,2,5``."""
    return "*" if len(values) == whole else ",".join(map(str, sorted(values)))


@lru_cache(1000)
def _cron(rule: str) -> CronSim:
    """Return what a cron text, or Celery's crontab, says; it is never changed.

    Raises:
        ValueError: The text is not a cron text, or it is never due.
    """
    text = rule.removeprefix(_CRONTAB)
    try:
        found = CronSim(text, datetime(2000, 1, 1))
    except CronSimError as error:
        raise ValueError(f"{rule!r} is no cron text, or is never due: {error}") from None
    found.day_and |= text != rule
    # It looks for 50 years; a 29th of February that is a Monday comes after 40 at most.
    if next(copy(found), None) is None:
        raise ValueError(f"{rule!r} is never due")
    return found


@lru_cache(100)
def _zone(name: str) -> tzinfo:
    offset = _OFFSET.fullmatch(name)
    zone = offset and datetime.strptime(offset[1], "%z").tzinfo
    return zone or ZoneInfo(name)


def _next(rule: str, recurrence: Recurrence, instant_ms: int) -> int:
    """Return the first instant of a rule after another."""
    if rule.startswith(_EVERY):
        every, start = int(rule.removeprefix(_EVERY)), recurrence.start_ms
        return start + ((instant_ms - start) // every + 1) * every
    cron, zone = copy(_cron(rule)), _zone(recurrence.zone)
    cron.dt = instant_of(instant_ms).replace(microsecond=0).astimezone(zone)
    if len(cron.hours) < 24:
        # cronsim walks the times of the clock, and finds the instant of each.
        cron.fixup_tz, cron.dt = zone, cron.dt.replace(tzinfo=None)
    else:
        # cronsim jumps to the next hour if there is one minute; a clock may change by half of that.
        cron.minutes = cron.minutes | {-1}
    # The clock may have shown a time before, and shows it again.
    return next(each for each in map(milliseconds_of, cron) if each > instant_ms)


#: The most characters of what an occurrence's header says.
MAX_TEXT: Final = 16_384

OCCURRENCES: Final = counter(
    "occurrences",
    "Occurrences of schedules that came, by what became of them: ran, cancelled, late, paused, "
    "overlapped; and those that did not come: sent again.",
    labels=("task", "fate"),
)
OVERDUE: Final = gauge(
    "schedules_overdue_seconds",
    "Seconds since the next occurrence of a schedule was due that has not come; of the schedule "
    "where that is longest.",
)

#: The most bytes of a name: the id of a task, which AMQP has to carry, has 255.
MAX_NAME: Final = 222

#: The longest jitter, in milliseconds: a day.
MAX_JITTER_MS: Final = 86_400_000

#: What becomes of an occurrence while a run of its schedule is still going.
Overlap = Literal["allow", "skip", "queue-one"]

#: What has come runs, for all that was missed; or each runs, one after the other.
LAST: Final = -1
ALL: Final = -2

_NAME: Final = re.compile(r"[0-9a-f]{0,32}", re.ASCII)


class Occurrence(NamedTuple):
    """One instant of a schedule; a header of its message says it.

    Attributes:
        name: The name of the schedule.
        instant_ms: The instant, in milliseconds since 1970-01-01 UTC.
        recurrence: When the schedule is due.
        catch_up_ms: How many milliseconds late it may still run; :data:`LAST` or :data:`ALL`.
        jitter_ms: It is due up to so many milliseconds later; how many, its instant decides.
        overlap: What becomes of it while another run of the schedule is still going.
        options: The options of the task.
        order: Grows with each edit of the schedule.
        revision: Stands for all that was put.
        message: The name of the message.
        turns: How often it was put back.
        is_followed: Whether the message of the instant that follows it was published.
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
        """Read it from a header, which anybody may have written; None if that is invalid."""
        try:
            if not isinstance(text, str) or len(text) > MAX_TEXT:
                return None
            # A later version may say more.
            found = cls(*json.loads(text)[: len(cls._fields)])
            found = found._replace(recurrence=Recurrence.read(found.recurrence))
            return found if found._is_valid else None
        except Exception:  # noqa: BLE001 - a stranger's text raises errors of any kind
            return None

    @property
    def _is_valid(self) -> bool:
        return (
            1 <= len(self.name.encode()) <= MAX_NAME
            and isinstance(self.options, dict)
            and all(_NAME.fullmatch(each) for each in (self.revision, self.message))
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
        """The id of its task."""
        return f"{self.name}:{self.instant_ms:015d}:{self.order}"

    @property
    def due_ms(self) -> int:
        """When it is due: its instant, and a jitter that is the same whoever computes it."""
        words = f"{self.name}:{self.instant_ms}".encode()
        return self.instant_ms + zlib.crc32(words) % (self.jitter_ms + 1)

    def at(self, now_ms: int) -> tuple[bool, int | None]:
        """Return whether it still runs, and the instant that follows it; None if none does.

        With :data:`LAST`, the first one that is still ahead follows, and with a number of
        milliseconds the first one that is not too late.
        """
        if self.catch_up_ms == ALL:
            return True, self.recurrence.after(self.instant_ms)
        is_last = self.catch_up_ms == LAST
        earliest_ms = now_ms + 1 if is_last else now_ms - self.catch_up_ms
        since_ms = max(self.instant_ms, earliest_ms - self.jitter_ms - 1)
        ahead = (self._replace(instant_ms=each) for each in self.recurrence.all_after(since_ms))
        following_ms = next((each.instant_ms for each in ahead if each.due_ms >= earliest_ms), None)
        return is_last or self.due_ms >= earliest_ms, following_ms
