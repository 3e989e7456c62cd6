"""Layouts: lists of levels, in which a delay is written digit by digit.

A layout is a list of levels, highest first, and a rule for zero digits. A level is one digit: a
unit, a multiple of the unit, and a base. The levels determine names, TTLs, queues and the capacity.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, Literal, TypeAlias, get_args

from celery_rabbitdelay.exceptions import DelayTooLong, InvalidLayout
from celery_rabbitdelay.levels.delay import Delay, milliseconds

#: How a message passes a zero digit: ``bind`` (exchange to exchange), ``skip`` (each exchange is
#: bound to the queues of every lower level), ``queue`` (a pass-through queue, for brokers without
#: exchange-to-exchange bindings).
Zeros: TypeAlias = Literal["bind", "skip", "queue"]

#: The units of levels and queues, in milliseconds; a ``custom`` layout may add units.
UNITS: Final = {"days": 86_400_000, "hours": 3_600_000, "minutes": 60_000, "seconds": 1000, "ms": 1}

#: The largest ``x-message-ttl`` that RabbitMQ accepts (measured on 3.10 to 4.3): ten years, in
#: milliseconds. A layout has at most 39 levels, whose digits take 78 of a routing key's 255 bytes.
MAX_TTL: Final = 315_360_000_000

_UNIT_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,50}")


@dataclass(frozen=True, slots=True)
class Level:
    """One digit of a delay.

    Attributes:
        unit: The name of the unit of the level's queues, for example "days".
        multiple: The units in one count of the digit: 10 for tens of days.
        base: The number of the digit's values, zero included.
        unit_ms: The length of one unit in milliseconds.
    """

    unit: str
    multiple: int
    base: int
    unit_ms: int

    @property
    def place_ms(self) -> int:
        """The place value: the milliseconds of one count of the digit."""
        return self.multiple * self.unit_ms

    @property
    def name(self) -> str:
        """The level's name, ``days.x10``; with the prefix, also the exchange's name."""
        return f"{self.unit}.x{self.multiple}"

    def queue_name(self, digit: int) -> str:
        """Return the name of a digit's queue without the prefix: ``days.70``, ``days.x10.0``."""
        return f"{self.unit}.{digit * self.multiple}" if digit else f"{self.name}.0"


@dataclass(frozen=True)
class Layout:
    """A checked list of levels, highest first, and a rule for zero digits.

    Attributes:
        name: The layout's name in errors and in its fingerprint: "clock", "binary", ...
        levels: The levels, highest first.
        zeros: How a message passes a zero digit.

    Raises:
        InvalidLayout: The levels do not form a place-value system, or exceed RabbitMQ's limits.
    """

    name: str
    levels: tuple[Level, ...]
    zeros: Zeros = "bind"

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise InvalidLayout(f"layout {self.name!r}: {problem}")

    def _problems(self) -> Iterator[str]:
        if not self.levels:
            yield "takes at least one level"
        if self.zeros not in get_args(Zeros):
            yield f"zeros = {self.zeros!r}; takes one of {', '.join(get_args(Zeros))}"
        for level in self.levels:
            if level.base < 2 or level.multiple < 1 or level.unit_ms < 1:
                yield f"level {level.name}: takes a base of at least 2 and a unit of at least 1 ms"
            ttl = (level.base - 1) * level.place_ms
            if ttl > MAX_TTL:
                yield f"level {level.name}: TTL {ttl} ms exceeds RabbitMQ's maximum of {MAX_TTL}"
        for higher, lower in pairwise(self.levels):
            if higher.place_ms != lower.place_ms * lower.base:
                yield (
                    f"one {higher.name} is {higher.place_ms} ms, but {lower.base} of {lower.name} "
                    f"are {lower.place_ms * lower.base} ms; they have to be equal"
                )
        names = [level.queue_name(digit) for level in self.levels for digit in range(1, level.base)]
        if len(set(names)) != len(names):
            yield "queues of two levels have the same name; the units need different names"

    @cached_property
    def bases(self) -> tuple[int, ...]:
        """The base of each level, highest first."""
        return tuple(level.base for level in self.levels)

    @cached_property
    def places_ms(self) -> tuple[int, ...]:
        """The place value of each level in milliseconds, highest first."""
        return tuple(level.place_ms for level in self.levels)

    @cached_property
    def tick_ms(self) -> int:
        """The resolution in milliseconds: the place value of the lowest level."""
        return self.places_ms[-1]

    @cached_property
    def capacity_ms(self) -> int:
        """The largest delay that one pass through the levels can express, in milliseconds."""
        return self.places_ms[0] * self.bases[0] - self.tick_ms

    @cached_property
    def fingerprint(self) -> str:
        """A short word that identifies the layout: only equal layouts have the same word."""
        levels = [(level.unit, level.multiple, level.base, level.unit_ms) for level in self.levels]
        text = json.dumps([levels, self.zeros])
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    def check_capacity(self, delay_ms: int) -> None:
        """Refuse a delay above the capacity, with :class:`DelayTooLong`."""
        if delay_ms > self.capacity_ms:
            raise DelayTooLong(delay_ms, self.capacity_ms)

    def digits(self, delay_ms: int) -> tuple[int, ...]:
        """Return the digits of a delay, rounded up to ticks; all zeros for zero or less.

        Raises:
            DelayTooLong: The delay is above the capacity.
        """
        self.check_capacity(delay_ms)
        # Ceiling division: add tick - 1 ms.
        rest = max(delay_ms + self.tick_ms - 1, 0)
        digits = []
        for place_ms in self.places_ms:
            digit, rest = divmod(rest, place_ms)
            digits.append(digit)
        return tuple(digits)

    def round_to_fewest_stops(
        self, delay_ms: int, tolerance_ms: int, *, coarsest: bool = False
    ) -> int:
        """Return the delay in the range [delay, delay + tolerance] that has the fewest stops.

        A message stops once for each non-zero digit. A multiple of a place value has only zeros
        below that place, so the next multiple of each place value is a candidate. The result is the
        shortest candidate with the fewest stops; with ``coarsest=True``, the candidate of the
        largest place value.
        """
        longest_ms = min(delay_ms + tolerance_ms, self.capacity_ms)
        in_range: list[int] = []
        for place_ms in self.places_ms:
            multiple = -(-delay_ms // place_ms) * place_ms
            if 0 < multiple <= longest_ms:
                if coarsest:
                    return multiple
                in_range.insert(0, multiple)
        return min(in_range, key=lambda each: sum(map(bool, self.digits(each))), default=delay_ms)


def clock(tick: Delay = 0.1, zeros: Zeros = "bind") -> Layout:
    """Return the layout of days, hours, minutes, seconds and ticks: 4,000 days in 180 queues."""
    tick_ms = milliseconds(tick)
    if tick_ms not in (1, 10, 100, 1000):
        raise InvalidLayout(f"the clock takes a tick of 1, 0.1, 0.01 or 0.001 s, not {tick!r}")
    counts = [("days", 1000, 4), ("days", 100, 10), ("days", 10, 10), ("days", 1, 10)]
    counts += [("hours", 1, 24), ("minutes", 1, 60), ("seconds", 1, 60)]
    counts += [("ms", multiple, 10) for multiple in (100, 10, 1) if multiple >= tick_ms]
    return Layout("clock", tuple(Level(*count, UNITS[count[0]]) for count in counts), zeros)


def binary(tick: Delay = 0.1, levels: int = 28, zeros: Zeros = "bind") -> Layout:
    """Return levels of one bit, as in NServiceBus; the lowest level is ``tick`` seconds."""
    return _uniform("binary", tick, 2, levels, zeros)


def geometric(
    tick: Delay = 0.1, factor: int = 10, levels: int = 9, zeros: Zeros = "bind"
) -> Layout:
    """Return levels of base ``factor``; one count of the lowest level is ``tick`` seconds."""
    return _uniform("geometric", tick, factor, levels, zeros)


#: The layouts that a setting can name; the first parameter of each function is ``tick``.
NAMED: Final[Mapping[str, Callable[..., Layout]]] = {
    "clock": clock,
    "binary": binary,
    "geometric": geometric,
}


def custom(levels: Iterable[tuple[str, int, Delay]], zeros: Zeros = "bind") -> Layout:
    """Return a layout of custom levels, highest first, each given as (name, base, unit).

    name: the unit in the queues' names; base: the number of the digit's values; unit: the value of
    one count, in seconds or as a timedelta. A level named "days" with a unit of ten days has the
    exchange ``days.x10``.
    """
    return Layout("custom", tuple(map(_custom_level, levels)), zeros)


def _custom_level(triple: tuple[str, int, Delay]) -> Level:
    if len(triple) != 3:
        raise InvalidLayout(f"level {triple!r}: takes a (name, base, unit)")
    name, base, unit = triple
    if not isinstance(name, str) or not _UNIT_NAME.fullmatch(name):
        raise InvalidLayout(f"level {name!r}: its name may have up to 50 letters, digits, - and _")
    place_ms = milliseconds(unit)
    unit_ms = UNITS.get(name, place_ms)
    if place_ms < 1 or place_ms % unit_ms:
        raise InvalidLayout(f"level {name!r}: {unit!r} is not a whole number of {name}")
    return Level(name, place_ms // unit_ms, base, unit_ms)


def _uniform(name: str, tick: Delay, base: int, count: int, zeros: Zeros) -> Layout:
    tick_ms = milliseconds(tick)
    unit = "ms" if tick_ms % UNITS["seconds"] else "seconds"
    lowest = tick_ms // UNITS[unit]
    places = reversed(range(count))
    levels = (Level(unit, lowest * base**place, base, UNITS[unit]) for place in places)
    return Layout(name, tuple(levels), zeros)
