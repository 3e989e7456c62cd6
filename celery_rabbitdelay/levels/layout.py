"""Layouts: which levels a delay is written in. Pure description; opens no connection.

A layout is a list of levels, highest first, and the way a zero digit is passed. Each level follows
from a (unit, base, multiple): everything else, such as times to live, queues and capacity, follows
from that. Four of them have names::

    clock()                                        days, hours, minutes, seconds, tenths
    binary()                                       28 levels of one bit
    geometric(factor=10, levels=9)                 levels of factor N
    custom([("hours", 24, 3600), ("minutes", 60, 60), ("seconds", 60, 1)])
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, TypeAlias, get_args

from celery_rabbitdelay.exceptions import DelayTooLong, InvalidLayout
from celery_rabbitdelay.levels.place_value import (
    Delay,
    digits,
    fewest_digits,
    milliseconds,
    place_values,
    roundest,
)

__all__ = ["Layout", "Level", "Zeros", "binary", "clock", "custom", "geometric"]

#: How a zero digit is passed: ``bind`` (exchange to exchange), ``skip`` (each exchange is bound to
#: the queues of every lower level), ``queue`` (a pass-through queue, for brokers without
#: exchange-to-exchange bindings).
Zeros: TypeAlias = Literal["bind", "skip", "queue"]

#: Milliseconds of the units that levels and queues are counted in.
UNITS: Final[dict[str, int]] = {
    "days": 86_400_000,
    "hours": 3_600_000,
    "minutes": 60_000,
    "seconds": 1_000,
    "ms": 1,
}

_UNIT_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,50}")

#: RabbitMQ refuses an ``x-message-ttl`` above ten years, in milliseconds (measured on 3.10 to 4.3).
MAX_TTL: Final = 315_360_000_000

#: Bytes of a routing key that digits may take; the destination needs the rest of AMQP's 255.
MAX_DIGITS_LENGTH: Final = 120


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
        """The level's name without prefix, ``days.x10``: its exchange is called so."""
        return f"{self.unit}.x{self.multiple}"

    def queue_name(self, digit: int) -> str:
        """The name without prefix of a digit's queue: ``days.70``, or ``days.x10.0`` for zero."""
        return f"{self.unit}.{digit * self.multiple}" if digit else f"{self.name}.0"


@dataclass(frozen=True)
class Layout:
    """The levels of a delay, highest first, checked.

    Attributes:
        name: What the layout is called in errors and in its fingerprint: "clock", "binary", ...
        levels: The levels, highest first.
        zeros: How a zero digit is passed.

    Raises:
        InvalidLayout: No level; a base below 2; place values that do not follow from each other;
            two levels whose queues would share a name; a time to live above ten years.
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
                yield (
                    f"level {level.name}: takes a base of at least 2 and a place value of at "
                    "least 1 ms"
                )
            if (level.base - 1) * level.place_ms > MAX_TTL:
                yield (
                    f"level {level.name}: its highest queue would hold messages for "
                    f"{(level.base - 1) * level.place_ms} ms, RabbitMQ's bound is {MAX_TTL} ms"
                )
        for higher, lower in zip(self.levels, self.levels[1:], strict=False):
            if higher.place_ms != lower.place_ms * lower.base:
                yield (
                    f"one {higher.name} is {higher.place_ms} ms, but {lower.base} counts of "
                    f"{lower.name} are {lower.place_ms * lower.base} ms; they have to be equal"
                )
        names = [level.queue_name(digit) for level in self.levels for digit in range(1, level.base)]
        if len(set(names)) != len(names):
            yield "two levels have queues of the same name; give the units different names"
        if sum(len(str(base - 1)) + 1 for base in self.bases) > MAX_DIGITS_LENGTH:
            yield f"its digits take more than {MAX_DIGITS_LENGTH} characters of the routing key"

    @cached_property
    def bases(self) -> tuple[int, ...]:
        """The base of each level, highest first."""
        return tuple(level.base for level in self.levels)

    @cached_property
    def tick_ms(self) -> int:
        """The resolution in milliseconds: what one count of the lowest level is worth."""
        return self.levels[-1].place_ms

    @cached_property
    def capacity_ms(self) -> int:
        """The largest delay that one pass through the levels can express, in milliseconds."""
        highest = self.levels[0]
        return highest.place_ms * highest.base - self.tick_ms

    @cached_property
    def fingerprint(self) -> str:
        """A short word that is the same for two layouts if, and only if, they are the same."""
        levels = [(level.unit, level.multiple, level.base, level.unit_ms) for level in self.levels]
        text = json.dumps([levels, self.zeros])
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    def digits(self, delay: Delay) -> tuple[int, ...]:
        """Write a delay in this layout, rounded up to ticks; zero or less is all zeros.

        Raises:
            DelayTooLong: The delay is above the capacity.
            InvalidDelay: It is not a finite number.
            InvalidDelayType: It is not a number and not a timedelta.
        """
        return self.digits_of_milliseconds(milliseconds(delay))

    def digits_of_milliseconds(self, delay_ms: int) -> tuple[int, ...]:
        """The same for a whole number of milliseconds."""
        self.check(delay_ms)
        return digits(-(-max(delay_ms, 0) // self.tick_ms), self.bases)

    def eased(self, delay_ms: int, tolerance_ms: int, *, shared: bool = False) -> int:
        """Return the delay with the fewest stops, of those that are at most so much longer.

        Args:
            delay_ms: A delay in milliseconds; one that is negative or above the capacity stays.
            tolerance_ms: How much longer it may be, in milliseconds.
            shared: Whether, of several, it is the one that most other delays become as well, and
                not the shortest.
        """
        lowest = -(-delay_ms // self.tick_ms)
        highest = (delay_ms + tolerance_ms) // self.tick_ms
        if highest <= lowest or not 0 < delay_ms <= self.capacity_ms:
            return delay_ms
        choose = roundest if shared else fewest_digits
        return choose(lowest, highest, self.bases) * self.tick_ms

    def check(self, delay_ms: int) -> None:
        """Refuse a delay that does not fit.

        Raises:
            DelayTooLong: The delay is above the capacity.
        """
        if delay_ms > self.capacity_ms:
            raise DelayTooLong(delay_ms, self.capacity_ms)


def clock(tick: Delay = 0.1, zeros: Zeros = "bind") -> Layout:
    """Days, hours, minutes, seconds and ticks: 180 queues and 4,000 days at the default tick.

    Args:
        tick: The resolution: 1, 0.1, 0.01 or 0.001 seconds.
        zeros: How a zero digit is passed.
    """
    tick_ms = milliseconds(tick)
    if tick_ms not in (1, 10, 100, 1000):
        raise InvalidLayout(f"the clock takes a tick of 1, 0.1, 0.01 or 0.001 s, not {tick!r}")
    thousands_of_days = Level("days", 1000, 4, UNITS["days"])
    days = [Level("days", multiple, 10, UNITS["days"]) for multiple in (100, 10, 1)]
    hours = Level("hours", 1, 24, UNITS["hours"])
    minutes = Level("minutes", 1, 60, UNITS["minutes"])
    seconds = Level("seconds", 1, 60, UNITS["seconds"])
    fractions = [Level("ms", multiple, 10, 1) for multiple in (100, 10, 1) if multiple >= tick_ms]
    return Layout("clock", (thousands_of_days, *days, hours, minutes, seconds, *fractions), zeros)


def binary(tick: Delay = 0.1, levels: int = 28, zeros: Zeros = "bind") -> Layout:
    """Levels of one bit each, as in NServiceBus and in Celery's native delayed delivery.

    Args:
        tick: The resolution: what the lowest bit is worth, in seconds.
        levels: How many bits.
        zeros: How a zero digit is passed.
    """
    return _uniform("binary", tick, base=2, count=levels, zeros=zeros)


def geometric(
    tick: Delay = 0.1, factor: int = 10, levels: int = 9, zeros: Zeros = "bind"
) -> Layout:
    """Levels of factor N: a number in base ``factor``.

    Args:
        tick: The resolution: what the lowest digit's one is worth, in seconds.
        factor: The base of every digit.
        levels: How many digits.
        zeros: How a zero digit is passed.
    """
    return _uniform("geometric", tick, base=factor, count=levels, zeros=zeros)


def custom(levels: Iterable[tuple[str, int, Delay]], zeros: Zeros = "bind") -> Layout:
    """Levels of your own, highest first.

    Args:
        levels: A (name, base, unit) each: what the level's queues are counted in, how many values
            its digit takes, and what one count is worth, in seconds or as a timedelta. A unit of
            ten days may be called "days": it is then the level ``days.x10``.
        zeros: How a zero digit is passed.
    """
    triples = list(levels)
    for triple in triples:
        if len(triple) != 3:
            raise InvalidLayout(f"level {triple!r}: takes a (name, base, unit)")
    return Layout("custom", tuple(_custom_level(*triple) for triple in triples), zeros)


def _custom_level(name: str, base: int, unit: Delay) -> Level:
    place_ms = milliseconds(unit)
    if not isinstance(name, str) or not _UNIT_NAME.fullmatch(name):
        raise InvalidLayout(f"level {name!r}: takes a name of up to 50 letters, digits, - and _")
    unit_ms = UNITS.get(name, place_ms)
    if place_ms < 1 or place_ms % unit_ms:
        raise InvalidLayout(f"level {name!r}: {unit!r} is not a whole number of {name}")
    return Level(name, place_ms // unit_ms, base, unit_ms)


def _uniform(name: str, tick: Delay, base: int, count: int, zeros: Zeros) -> Layout:
    tick_ms = milliseconds(tick)
    unit = "seconds" if tick_ms % UNITS["seconds"] == 0 else "ms"
    return Layout(
        name,
        tuple(
            Level(unit, value * tick_ms // UNITS[unit], base, UNITS[unit])
            for value in place_values([base] * count)
        ),
        zeros,
    )
