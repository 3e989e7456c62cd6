"""When the occurrences of a schedule are due, and what one of them says of the next. Pure.

The instants of cron texts are computed by cronsim, which follows Debian's cron when clocks change:
of a time that is skipped, the instant is the end of the gap; a fixed time that comes twice counts
once, and ``*`` counts both times.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, Final, NamedTuple, Self
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from celery_rabbitdelay.exceptions import InvalidSchedule
from celery_rabbitdelay.levels.delay import MAX_DELAY, MAX_DUE_MS, instant_of, milliseconds_of
from celery_rabbitdelay.levels.headers import is_int

#: The most rules of one schedule, and the most characters of what an occurrence carries.
MAX_RULES: Final = 20
MAX_TEXT: Final = 4096

#: The longest time before and after a change of the clock in which it may show a time twice.
_CHANGE: Final = timedelta(hours=3)

#: The most instants of a cron text that are looked at to find one. A day of the week may be far.
MAX_STEPS: Final = 20_000

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
_AND: Final = " and "
_TAKES: Final = (
    "takes a timedelta, Celery's schedule or crontab, a cron text of five or six fields, or a list"
)


class Recurrence(NamedTuple):
    """When something is due again and again.

    Attributes:
        rules: It is due when one of them says: ``every`` and milliseconds from ``start_ms`` on; or
            a cron text, behind which ``and`` may say which days of the week (0 is Sunday) it has to
            be as well.
        zone: The time zone of cron texts, an IANA name.
        start_ms: Nothing is due before that, in milliseconds since 1970-01-01 UTC.
        end_ms: Nothing is due after that; None for no end.
    """

    rules: tuple[str, ...]
    zone: str = "UTC"
    start_ms: int = 0
    end_ms: int | None = None

    @classmethod
    def of(
        cls, when: Any, zone: str, start: datetime | None = None, end: datetime | None = None
    ) -> Self:
        """Return it as a user says it.

        Args:
            when: A timedelta of at least a second; Celery's ``schedule`` or ``crontab``; a cron
                text of five or six fields (the first of six are seconds), or one such as
                ``@daily``; or a list of these.
            zone: The IANA name of a time zone, for cron texts.
            start: Nothing is due before that, an aware datetime. Intervals count from it; without
                it, from 1970-01-01 UTC, so that an hour is due at each full hour.
            end: Nothing is due after that.

        Raises:
            InvalidSchedule: One of these is wrong, or nothing is ever due.
            InvalidDelay: ``start`` or ``end`` is naive.
        """
        given = when if isinstance(when, list | tuple) else [when]
        if not 1 <= len(given) <= MAX_RULES:
            raise InvalidSchedule(when, f"takes 1 to {MAX_RULES} rules")
        made = cls(
            tuple(map(_rule, given)),
            zone,
            0 if start is None else milliseconds_of(start),
            None if end is None else milliseconds_of(end),
        )
        try:
            made._check()
            first = made.after(max(made.start_ms - 1, time.time_ns() // 1_000_000))
        except _INVALID as error:
            raise InvalidSchedule(when, str(error)) from error
        if first is None and (end is None or made._replace(end_ms=None).after(0) is None):
            raise InvalidSchedule(when, "is never due")
        return made

    def _check(self) -> None:
        """Raise one of :data:`_INVALID` if it cannot be computed."""
        ZoneInfo(self.zone)
        for rule in self.rules:
            if rule.startswith(_EVERY):
                if not 1000 <= int(rule.removeprefix(_EVERY)) <= MAX_DELAY * 1000:
                    raise ValueError("an interval is a second at least, and 100 years at most")
            else:
                cron, _, days = rule.partition(_AND)
                _cron(cron, instant_of(0))
                if days and (not set(days) <= set("0123456") or cron.split()[4:] != ["*"]):
                    raise ValueError(f"{rule!r} has no days of the week")

    def after(self, instant_ms: int) -> int | None:
        """Return when it is due first after an instant; None for never again."""
        instant_ms = max(instant_ms, self.start_ms - 1)
        found = [_nearest(rule, self, instant_ms, is_back=False) for rule in self.rules]
        first = min((each for each in found if each is not None), default=None)
        if first is None or (self.end_ms is not None and first > self.end_ms):
            return None
        return first

    def latest(self, instant_ms: int) -> int | None:
        """Return when it was due last, up to an instant; None for never before."""
        if self.end_ms is not None:
            instant_ms = min(instant_ms, self.end_ms)
        found = [_nearest(rule, self, instant_ms, is_back=True) for rule in self.rules]
        last = max((each for each in found if each is not None), default=None)
        return None if last is None or last < self.start_ms else last


class Occurrence(NamedTuple):
    """One instant of a schedule; its task carries it in a header.

    Attributes:
        name: The name of the schedule.
        instant_ms: The instant, in milliseconds since 1970-01-01 UTC.
        recurrence: When the schedule is due.
        catch_up_ms: How many milliseconds late it may still run; :data:`UNTIL_NEXT` or
            :data:`ALWAYS`.
        revision: Distinguishes what was put under the name, one after another.
    """

    name: str
    instant_ms: int
    recurrence: Recurrence
    catch_up_ms: int
    revision: str

    @classmethod
    def of(cls, text: object) -> Self | None:
        """Read it from a header, which anybody may have written; None if that is invalid."""
        try:
            if not isinstance(text, str) or len(text) > MAX_TEXT:
                return None
            name, instant_ms, recurrence, catch_up_ms, revision = json.loads(text)
            rules, zone, start_ms, end_ms = recurrence
            if not all(isinstance(each, str) for each in (name, revision, zone, *rules)):
                return None
            numbers = (instant_ms, start_ms, 0 if end_ms is None else end_ms, catch_up_ms)
            if not all(is_int(each, ALWAYS, MAX_DUE_MS) for each in numbers):
                return None
            if not 1 <= len(rules) <= MAX_RULES:
                return None
            again = Recurrence(tuple(rules), zone, start_ms, end_ms)
            again._check()
        except (*_INVALID, TypeError, RecursionError):
            return None
        return cls(name, instant_ms, again, catch_up_ms, revision)

    @property
    def text(self) -> str:
        """The text of the header: the inverse of :meth:`of`."""
        return json.dumps(self, separators=(",", ":"))

    @property
    def key(self) -> str:
        """The key of its task, which is the same for all occurrences of a schedule."""
        return key_of(self.name)

    @property
    def task_id(self) -> str:
        """The id of its task. That of a later instant is greater."""
        return f"{self.name}:{self.instant_ms:015d}:{self.revision}"

    def with_id(self, task_id: str) -> Occurrence | None:
        """Return the occurrence of the same schedule whose task has an id; None if none has."""
        instant = task_id.rpartition(":")[0].rpartition(":")[2]
        if not (instant.isascii() and instant.isdigit()):
            return None
        found = self._replace(instant_ms=int(instant))
        return found if found.task_id == task_id else None

    def at(self, now_ms: int) -> tuple[bool, Occurrence | None]:
        """Return whether it still runs, and which one follows it.

        What follows is the first one after it that still runs.
        """
        following = self.recurrence.after(self.instant_ms)
        is_passed = following is not None and following <= now_ms
        if self.catch_up_ms == ALWAYS:
            runs = True
        elif self.catch_up_ms == UNTIL_NEXT:
            runs = not is_passed
            following = self.recurrence.latest(now_ms) if is_passed else following
        else:
            earliest_ms = now_ms - self.catch_up_ms
            runs = self.instant_ms >= earliest_ms
            following = self.recurrence.after(max(self.instant_ms, earliest_ms - 1))
        return runs, None if following is None else self._replace(instant_ms=following)


def key_of(name: str) -> str:
    """Return the key of the tasks of a schedule."""
    return f"schedule:{name}"


#: An occurrence runs as long as the next one is not due; or however late it is.
UNTIL_NEXT: Final = -1
ALWAYS: Final = -2


def _rule(when: Any) -> str:
    """Return one rule as a text."""
    every = when if isinstance(when, timedelta) else getattr(when, "run_every", None)
    fields = getattr(when, "_orig_minute", None)
    if fields is not None:
        return _rule_of_crontab(when)
    if isinstance(every, timedelta):
        return f"{_EVERY}{round(every.total_seconds() * 1000)}"
    if isinstance(when, str):
        return _NAMES.get(when.strip(), " ".join(when.split()))
    raise InvalidSchedule(when, _TAKES)


def _rule_of_crontab(crontab: Any) -> str:
    """Return the rule of Celery's crontab, which is due if the day fits both of its fields."""
    names = ("minute", "hour", "day_of_month", "month_of_year")
    fields = [_field(getattr(crontab, f"_orig_{name}"), getattr(crontab, name)) for name in names]
    days = sorted(crontab.day_of_week)
    if len(days) == 7 or fields[2] == "*":
        return " ".join([*fields, "*" if len(days) == 7 else ",".join(map(str, days))])
    return f"{' '.join(fields)} *{_AND}{''.join(map(str, days))}"


def _field(value: Any, expanded: Iterable[int]) -> str:
    """Return a field of cron, as it was written unless cron takes it otherwise."""
    text = "".join(str(value).split()) if isinstance(value, str | int) else ""
    begin, _, end = text.partition("-")
    wraps = begin.isdigit() and end.isdigit() and int(begin) > int(end)
    return ",".join(map(str, sorted(expanded))) if wraps or not text else text


def _cron(cron: str, instant: datetime, is_back: bool = False) -> Iterator[datetime]:
    """Return the instants of a cron text after another instant, or before it.

    Raises:
        ValueError: The text is not a cron text.
    """
    try:
        return CronSim(cron, instant, reverse=is_back)
    except CronSimError as error:
        raise ValueError(str(error)) from None


def _nearest(rule: str, recurrence: Recurrence, instant_ms: int, is_back: bool) -> int | None:
    """Return the first instant of a rule after another, or the last one up to it."""
    if rule.startswith(_EVERY):
        every, start = int(rule.removeprefix(_EVERY)), recurrence.start_ms
        return start + ((instant_ms - start) // every + (not is_back)) * every
    cron, _, days = rule.partition(_AND)
    if is_back:
        # Cron's instants are whole seconds, and the one that is sought may be this one.
        instant_ms = instant_ms // 1000 * 1000 + 1000
    zone, instant = ZoneInfo(recurrence.zone), instant_of(instant_ms).replace(microsecond=0)
    local = instant.astimezone(zone)
    # cronsim takes the first of two times that the clock shows alike, so it begins where the clock
    # shows each once.
    around = [(instant + each).astimezone(zone) for each in (-_CHANGE, _CHANGE)]
    if {each.utcoffset() for each in around} != {local.utcoffset()}:
        local = around[is_back]
    for found in islice(_cron(cron, local, is_back), MAX_STEPS):
        found_ms = milliseconds_of(found)
        is_beyond = found_ms >= instant_ms if is_back else found_ms <= instant_ms
        if not is_beyond and (not days or str(found.isoweekday() % 7) in days):
            return found_ms
    return None


#: The errors that a wrong rule or time zone raises.
_INVALID: Final = (ValueError, KeyError, OSError, OverflowError)


def definition_of(
    task: str, args: Iterable[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> str:
    """Return what a schedule sends, as JSON with sorted keys.

    Raises:
        InvalidSchedule: JSON cannot write it.
    """
    try:
        return json.dumps([task, list(args), dict(kwargs), dict(options)], sort_keys=True)
    except (TypeError, ValueError) as error:
        raise InvalidSchedule(
            (args, kwargs, options), f"takes what JSON can write: {error}"
        ) from None
