"""When something is due again and again. Pure.

Cron texts are read by cronsim, and Celery's crontabs are the numbers that Celery has read. Where a
clock changes, the instant of a time that is skipped is the end of the gap, and a time that comes
twice counts once. A rule for all hours of the day is due whenever the clock shows its minutes.
Events of the sun are computed by ephem.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from functools import lru_cache
from importlib import import_module
from itertools import groupby, product
from operator import attrgetter
from typing import Any, Final, NamedTuple, Self
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from celery_rabbitdelay.exceptions import InvalidSchedule
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import (
    MAX_DELAY,
    MAX_DUE_MS,
    instant_of,
    milliseconds_of,
    plain,
)
from celery_rabbitdelay.levels.headers import is_int

#: The most rules of one schedule, and what it may exclude at most.
MAX_RULES: Final = 20
MAX_EXCLUDED: Final = 100

_MINUTE_MS: Final = 60_000
_TOO_MUCH_EXCLUDED: Final = "so much is excluded that the next instant is not found"

_SECOND, _MINUTE = timedelta(seconds=1), timedelta(minutes=1)

#: The days after which the calendar repeats, with its days of the week: 400 years.
_CYCLE: Final = 146_097

#: The most instants, or days, that may be excluded one after another; a day has 1,440 minutes.
MAX_EXCLUDED_STEPS: Final = 10_080

#: The events of the sun: how ephem finds the next one, and how high the sun is then.
_TWILIGHTS: Final = {"civil": "-6", "nautical": "-12", "astronomical": "-18"}
_EVENTS: Final = {
    "sunrise": ("next_rising", "-0:34"),
    "solar_noon": ("next_transit", "0"),
    "sunset": ("next_setting", "-0:34"),
    **{f"dawn_{name}": ("next_rising", horizon) for name, horizon in _TWILIGHTS.items()},
    **{f"dusk_{name}": ("next_setting", horizon) for name, horizon in _TWILIGHTS.items()},
}
#: The hour of the day, in the mean time of a longitude, from which one is searched for.
_BEGIN: Final = {"next_rising": -6, "next_transit": 0, "next_setting": 6}

_HOUR_MS: Final = 3_600_000
_DAY_MS: Final = 24 * _HOUR_MS

#: Beyond that, no instant is searched for.
_CENTURY_MS: Final = 36_525 * _DAY_MS

#: For how many days an event of the sun is looked for: beyond the polar circles it may be far.
_YEAR: Final = 370

#: Beyond all instants.
_FAR_MS: Final = 2 * MAX_DUE_MS

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
_SOLAR: Final = "solar "
_CRONTAB: Final = "crontab "
_TAKES: Final = (
    "takes a timedelta, Celery's schedule, crontab or solar, a cron text of five or six fields, or "
    "a list"
)

#: A day, in what is excluded.
_DAY: Final = re.compile(r"\d{4}-\d\d-\d\d")

#: The numbers of Celery's crontab, which cronsim reads as they are meant.
_NUMBERS: Final = re.compile(r"([\d,-]+|\*)( ([\d,-]+|\*)){4}")

#: A time zone that has no name.
_OFFSET: Final = re.compile(r"UTC([+-]\d\d:\d\d)")


class Recurrence(NamedTuple):
    """When something is due again and again.

    Attributes:
        rules: It is due when one of them says: ``every`` and milliseconds from ``start_ms`` on; or
            a cron text; or ``crontab`` and the numbers of Celery's, which is due if both of its
            days fit; or ``solar`` with an event, a latitude and a longitude.
        zone: The time zone of cron texts, an IANA name or an offset such as UTC+05:30.
        start_ms: Nothing is due before that, in milliseconds since 1970-01-01 UTC.
        end_ms: Nothing is due after that; None for no end.
        excluded: When it is not due all the same: days, such as 2026-12-25, and the minutes in
            which cron texts are due.
    """

    rules: tuple[str, ...]
    zone: str = "UTC"
    start_ms: int = 0
    end_ms: int | None = None
    excluded: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        when: Any,
        zone: str,
        start: datetime | None = None,
        end: datetime | None = None,
        exclude: Any = (),
    ) -> Self:
        """Return it as a user says it.

        Args:
            when: A timedelta of at least a second; Celery's ``schedule``, ``crontab`` or ``solar``;
                a cron text of five or six fields (the first of six are seconds), or one such as
                ``@daily``; or a list of these.
            zone: The IANA name of a time zone, or an offset such as UTC+05:30, for cron texts.
            start: Nothing is due before that, an aware datetime. Intervals count from it; without
                it, from 1970-01-01 UTC, so that an hour is due at each full hour.
            end: Nothing is due after that.
            exclude: When it is not due all the same: a date or its text, as a whole day in the time
                zone; Celery's ``crontab`` or a cron text, as the minutes in which that is due; or a
                list of these.

        Raises:
            InvalidSchedule: One of these is wrong, or nothing is ever due. Nothing is due any more
                after an end that is over, which is no error.
            InvalidDelay: ``start`` or ``end`` is naive.
        """
        given, excluded = map(_as_list, (when, exclude))
        if not 1 <= len(given) <= MAX_RULES or len(excluded) > MAX_EXCLUDED:
            raise InvalidSchedule(
                when, f"takes 1 to {MAX_RULES} rules, and at most {MAX_EXCLUDED} to exclude"
            )
        made = cls(
            tuple(map(_rule, given)),
            zone,
            0 if start is None else milliseconds_of(start),
            None if end is None else milliseconds_of(end),
            tuple(map(_exclusion, excluded)),
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
        if not 1 <= len(rules) <= MAX_RULES or len(excluded) > MAX_EXCLUDED:
            raise ValueError(given)
        made = cls(tuple(rules), zone, start_ms, end_ms, tuple(excluded))
        made._check()
        return made

    def _check(self) -> None:
        """Raise one of :data:`INVALID` if it cannot be computed."""
        _zone(self.zone)
        for rule in self.rules:
            if rule.startswith(_EVERY):
                if not 1000 <= int(rule.removeprefix(_EVERY)) <= MAX_DELAY * 1000:
                    raise ValueError("an interval is a second at least, and 100 years at most")
            elif rule.startswith(_SOLAR):
                _sun(rule, 0)
            else:
                _cron(rule)
        for each in self.excluded:
            if _DAY.fullmatch(each):
                date.fromisoformat(each)
            else:
                _cron(each)

    def after(self, instant_ms: int) -> int | None:
        """Return when it is due first after an instant; None for never again.

        Raises:
            ValueError: Too much is excluded, or the sun is away too long, to find that out.
        """
        instant_ms = begin_ms = max(instant_ms, self.start_ms - 1)
        end_ms = MAX_DUE_MS if self.end_ms is None else self.end_ms
        found: dict[str, int] = {}
        for _ in range(MAX_EXCLUDED_STEPS):
            for rule in self.rules:
                if found.get(rule, -1) <= instant_ms:
                    found[rule] = _next(rule, self, instant_ms)
            at_ms = min(found.values())
            if at_ms > end_ms:
                away = [each for each in self.rules if found[each] == _FAR_MS]
                if away and end_ms - begin_ms > (_YEAR - 1) * _DAY_MS:
                    raise ValueError(f"{away[0]!r} is never due within a year")
                return None
            behind_ms = self._end_of_excluded(at_ms)
            if behind_ms is None:
                return at_ms
            instant_ms = behind_ms - 1
            if instant_ms - begin_ms > _CENTURY_MS:
                break
        raise ValueError(_TOO_MUCH_EXCLUDED)

    def _end_of_excluded(self, instant_ms: int) -> int | None:
        """Return the end of what is excluded around an instant; None if it is not."""
        if not self.excluded:
            return None
        local = instant_of(instant_ms).astimezone(_zone(self.zone))
        tomorrow = datetime.combine(local + timedelta(days=1), time.min, local.tzinfo)
        found = None
        for each in self.excluded:
            if _DAY.fullmatch(each):
                if each == f"{local:%Y-%m-%d}":
                    return milliseconds_of(tomorrow)
            elif _is_day(cron := _cron(each), local) and (
                local.hour in cron.hours and local.minute in cron.minutes
            ):
                if len(cron.hours) == 24 and len(cron.minutes) == 60:
                    return milliseconds_of(tomorrow)
                found = instant_ms // _MINUTE_MS * _MINUTE_MS + _MINUTE_MS
        return found


def _as_list(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _rule(when: Any) -> str:
    """Return one rule as a text."""
    every = plain(getattr(when, "run_every", when), "when")
    if hasattr(when, "_orig_minute"):
        return _CRONTAB + " ".join(map(_field, attrgetter(*_CELERYS)(when), _SIZES))
    if isinstance(every, timedelta):
        return f"{_EVERY}{round(every / timedelta(milliseconds=1))}"
    if isinstance(when, str):
        return _NAMES.get(when.strip(), " ".join(when.split()))
    if all(hasattr(when, name) for name in ("event", "lat", "lon")):
        return f"{_SOLAR}{when.event} {when.lat} {when.lon}"
    raise InvalidSchedule(when, _TAKES)


def _exclusion(given: Any) -> str:
    """Return what is excluded as a text."""
    if isinstance(given, date):
        return f"{plain(given, 'exclude'):%Y-%m-%d}"
    rule = _rule(given)
    if rule.startswith((_EVERY, _SOLAR)) or len(rule.removeprefix(_CRONTAB).split()) > 5:
        raise InvalidSchedule(given, "takes a date, or a cron text of five fields, to exclude")
    return rule


def _field(values: Iterable[int], whole: int) -> str:
    """Return numbers as a field of cron: ``1-5,7``."""
    numbers = sorted(values)
    if len(numbers) == whole:
        return "*"
    spans = groupby(enumerate(numbers), lambda each: each[1] - each[0])
    runs = [[number for _, number in span] for _, span in spans]
    return ",".join(f"{each[0]}-{each[-1]}" if each[1:] else f"{each[0]}" for each in runs)


@lru_cache(1000)
def _cron(rule: str) -> CronSim:
    """Return what a cron text, or Celery's crontab, says; it is never changed.

    Raises:
        ValueError: The text is not a cron text, or it is never due.
    """
    text = rule.removeprefix(_CRONTAB)
    if text != rule and not _NUMBERS.fullmatch(text):
        raise ValueError(f"{rule!r} takes five fields of numbers")
    try:
        found = CronSim(text, datetime.min)
    except CronSimError as error:
        raise ValueError(f"{rule!r} is no cron text, or is never due: {error}") from None
    found.day_and |= text != rule
    if not any(_is_day(found, date.fromordinal(1 + day)) for day in range(_CYCLE)):
        raise ValueError(f"{rule!r} is never due")
    return found


@lru_cache(100)
def _zone(name: str) -> tzinfo:
    offset = _OFFSET.fullmatch(name)
    zone = offset and datetime.strptime(offset[1], "%z").tzinfo
    return zone or ZoneInfo(name)


def _is_day(cron: CronSim, day: date) -> bool:
    return day.month in cron.months and cron.match_day(day)


def _times(cron: CronSim, day: datetime) -> Iterator[datetime]:
    """Yield the times of a cron text, from one on, without end."""
    all_hours, minutes, seconds = map(sorted, (cron.hours, cron.minutes, cron.seconds))
    while True:
        if _is_day(cron, day):
            clock = day.hour, day.minute, day.second
            hours = [each for each in all_hours if each >= day.hour]
            for at in product(hours, minutes, seconds):
                if at >= clock:
                    yield datetime.combine(day, time(*at))
        day = datetime.combine(day + timedelta(days=1), time.min)


def _instant(local: datetime, zone: tzinfo, fold: int, is_fixed: bool) -> datetime | None:
    """Return when the clock shows a time, first or again; the end of the gap, or None, if never."""
    while True:
        instant = local.replace(tzinfo=zone, fold=fold).astimezone(UTC)
        if instant.astimezone(zone).replace(tzinfo=None) == local:
            return instant
        if not is_fixed:
            return None
        local = local.replace(second=0) + _MINUTE


def _next(rule: str, recurrence: Recurrence, instant_ms: int) -> int:
    """Return the first instant of a rule after another."""
    if rule.startswith(_EVERY):
        every, start = int(rule.removeprefix(_EVERY)), recurrence.start_ms
        return start + ((instant_ms - start) // every + 1) * every
    if rule.startswith(_SOLAR):
        return _sun(rule, instant_ms)
    cron, zone = _cron(rule), _zone(recurrence.zone)
    # The instants of cron are whole seconds.
    at = instant_of(instant_ms // 1000 * 1000 + 1000)
    # Of a time that the clock shows twice, the search begins where it is sure to meet both.
    shown = (at - _SECOND).astimezone(zone)
    offsets = [shown.replace(fold=fold).utcoffset() or timedelta() for fold in (0, 1)]
    begin = at.replace(tzinfo=None) + min(offsets)
    is_fixed = len(cron.hours) < 24

    def first(fold: int) -> datetime:
        instants = (_instant(each, zone, fold, is_fixed) for each in _times(cron, begin))
        return next(each for each in instants if each is not None and each >= at)

    return milliseconds_of(min(map(first, range(2 - is_fixed))))


def _sun(rule: str, instant_ms: int) -> int:
    """Return the first instant of a solar rule after another.

    The result is in whole seconds. The events are Celery's ``solar``: the center of the sun is 6,
    12 or 18 degrees below the horizon at dawn and dusk, and 34 minutes of arc its upper edge at
    sunrise and sunset. An event is always searched for from the same hour of its longitude's mean
    time, because ephem finds another second from each start. The sun rises between midnight and
    noon everywhere, so what is found within a day is all there is. If it is not found in a year,
    the result is beyond all instants.

    Raises:
        ValueError: The rule is wrong, or ephem is not installed.
    """
    try:
        ephem: Any = import_module("ephem")
    except ModuleNotFoundError:
        raise ValueError("solar events take the package ephem, in all workers too") from None

    event, latitude, longitude = rule.removeprefix(_SOLAR).split()
    if event not in _EVENTS or abs(float(latitude)) > 90 or abs(float(longitude)) > 180:
        raise ValueError(f"{rule!r} takes an event of Celery's solar, a latitude and a longitude")
    method, horizon = _EVENTS[event]
    place = ephem.Observer()
    place.lat, place.lon, place.horizon, place.pressure = latitude, longitude, horizon, 0
    how = {"use_center": True} if horizon in _TWILIGHTS.values() else {}
    first_ms = int((_BEGIN[method] - float(longitude) / 15) * _HOUR_MS)
    today = (instant_ms - first_ms) // _DAY_MS
    for day in range(today, today + _YEAR):
        begin_ms = first_ms + day * _DAY_MS
        with suppress(ephem.CircumpolarError):
            start = ephem.Date(instant_of(begin_ms))
            found = getattr(place, method)(ephem.Sun(), start=start, **how).datetime()
            found_ms = milliseconds_of(found.replace(tzinfo=UTC)) // 1000 * 1000
            if instant_ms < found_ms < begin_ms + _DAY_MS:
                return found_ms
    return _FAR_MS


#: The errors that a wrong rule or time zone raises.
INVALID: Final = (ValueError, KeyError, OSError, OverflowError)
