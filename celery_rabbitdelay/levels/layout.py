"""Layouts: the levels that a delay is written in, and its digits.

A layout is a list of levels, highest first, and a way to pass zero digits. A level is one digit:
a unit, a multiple of it, and a base. Names, times to live, queues and capacity follow from these.
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

#: How a zero digit is passed: ``bind`` (exchange to exchange), ``skip`` (each exchange is bound to
#: the queues of every lower level), ``queue`` (a pass-through queue, for brokers without
#: exchange-to-exchange bindings).
Zeros: TypeAlias = Literal["bind", "skip", "queue"]

#: The units that levels and queues are counted in, in milliseconds; ``custom`` may add others.
UNITS: Final = {"days": 86_400_000, "hours": 3_600_000, "minutes": 60_000, "seconds": 1000, "ms": 1}

#: RabbitMQ refuses an ``x-message-ttl`` above ten years, in milliseconds (measured on 3.10 to 4.3).
#: So there are at most 39 levels, whose digits take 78 of the 255 bytes of a routing key.
MAX_TTL: Final = 315_360_000_000

_UNIT_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,50}")


@dataclass(frozen=True, slots=True)
class Level:
    """One digit of a delay.

    Attributes:
        unit: The name of the unit that the level's queues are counted in, for example "days".
        multiple: How many units one count of the digit stands for: 10 for tens of days.
        base: How many values the digit takes, zero included.
        unit_ms: The length of one unit in milliseconds.
    """

    unit: str
    multiple: int
    base: int
    unit_ms: int

    @property
    def place_ms(self) -> int:
        """What one count of the digit is worth, in milliseconds."""
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
    """The levels of a delay, highest first, checked.

    Attributes:
        name: What the layout is called in errors and in its fingerprint: "clock", "binary", ...
        levels: The levels, highest first.
        zeros: How a zero digit is passed.

    Raises:
        InvalidLayout: The levels are not a place-value system, or RabbitMQ cannot hold them.
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
                yield f"level {level.name}: needs a TTL of {ttl} ms, RabbitMQ's bound is {MAX_TTL}"
        for higher, lower in pairwise(self.levels):
            if higher.place_ms != lower.place_ms * lower.base:
                yield (
                    f"one {higher.name} is {higher.place_ms} ms, but {lower.base} of {lower.name} "
                    f"are {lower.place_ms * lower.base} ms; they have to be equal"
                )
        names = [level.queue_name(digit) for level in self.levels for digit in range(1, level.base)]
        if len(set(names)) != len(names):
            yield "two levels have queues of the same name; give the units different names"

    @cached_property
    def bases(self) -> tuple[int, ...]:
        """The base of each level, highest first."""
        return tuple(level.base for level in self.levels)

    @cached_property
    def places_ms(self) -> tuple[int, ...]:
        """What one count of each level is worth in milliseconds, highest first."""
        return tuple(level.place_ms for level in self.levels)

    @cached_property
    def tick_ms(self) -> int:
        """The resolution in milliseconds: what one count of the lowest level is worth."""
        return self.places_ms[-1]

    @cached_property
    def capacity_ms(self) -> int:
        """The largest delay that one pass through the levels can express, in milliseconds."""
        return self.places_ms[0] * self.bases[0] - self.tick_ms

    @cached_property
    def fingerprint(self) -> str:
        """A short word that is the same for two layouts if, and only if, they are the same."""
        levels = [(level.unit, level.multiple, level.base, level.unit_ms) for level in self.levels]
        text = json.dumps([levels, self.zeros])
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    def check_capacity(self, delay_ms: int) -> None:
        """Refuse a delay above the capacity, with :class:`DelayTooLong`."""
        if delay_ms > self.capacity_ms:
            raise DelayTooLong(delay_ms, self.capacity_ms)

    def digits(self, delay_ms: int) -> tuple[int, ...]:
        """Write a delay of at most the capacity, rounded up to ticks; zero or less is all zeros."""
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

        A message stops once for each non-zero digit. Rounding a delay up to a multiple of a place
        value clears all digits below, so the result is one of these multiples: the shortest with
        the fewest stops, or with ``coarsest=True`` the multiple of the largest place value.
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
    """Days, hours, minutes, seconds and ticks: 180 queues and 4,000 days at the default tick."""
    tick_ms = milliseconds(tick)
    if tick_ms not in (1, 10, 100, 1000):
        raise InvalidLayout(f"the clock takes a tick of 1, 0.1, 0.01 or 0.001 s, not {tick!r}")
    counts = [("days", 1000, 4), ("days", 100, 10), ("days", 10, 10), ("days", 1, 10)]
    counts += [("hours", 1, 24), ("minutes", 1, 60), ("seconds", 1, 60)]
    counts += [("ms", multiple, 10) for multiple in (100, 10, 1) if multiple >= tick_ms]
    return Layout("clock", tuple(Level(*count, UNITS[count[0]]) for count in counts), zeros)


def binary(tick: Delay = 0.1, levels: int = 28, zeros: Zeros = "bind") -> Layout:
    """Levels of one bit each, as in NServiceBus; the lowest is worth ``tick`` seconds."""
    return _uniform("binary", tick, 2, levels, zeros)


def geometric(
    tick: Delay = 0.1, factor: int = 10, levels: int = 9, zeros: Zeros = "bind"
) -> Layout:
    """Levels of base ``factor`` each; one count of the lowest is worth ``tick`` seconds."""
    return _uniform("geometric", tick, factor, levels, zeros)


#: The layouts that are made by a name and some options, ``tick`` first.
NAMED: Final[Mapping[str, Callable[..., Layout]]] = {
    "clock": clock,
    "binary": binary,
    "geometric": geometric,
}


def custom(levels: Iterable[tuple[str, int, Delay]], zeros: Zeros = "bind") -> Layout:
    """Levels of your own, highest first, each a (name, base, unit).

    name: unit of the queue names; base: number of digit values; unit: value of one count, in
    seconds or as a timedelta. A level named "days" with a unit of ten days has the exchange
    ``days.x10``.
    """
    return Layout("custom", tuple(map(_custom_level, levels)), zeros)


def _custom_level(triple: tuple[str, int, Delay]) -> Level:
    if len(triple) != 3:
        raise InvalidLayout(f"level {triple!r}: takes a (name, base, unit)")
    name, base, unit = triple
    if not isinstance(name, str) or not _UNIT_NAME.fullmatch(name):
        raise InvalidLayout(f"level {name!r}: takes a name of up to 50 letters, digits, - and _")
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
