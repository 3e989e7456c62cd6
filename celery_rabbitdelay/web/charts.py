"""Pictures that need no script: where bars, lines and labels stand, in percent of a plot.

``charts.html`` draws them as SVG. Percentages keep texts unscaled at any width, and the colours are
classes of ``style.css``, because the policy of the page allows no styles in attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import accumulate, pairwise
from math import ceil, log10
from typing import Final, NamedTuple, TypeAlias

#: A length of time, or a number of months.
Step: TypeAlias = timedelta | int

#: The steps that an axis of times may have, from fine to coarse: seconds, then months.
_SECONDS: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800)
_HOURS: Final = (1, 2, 3, 6, 12, 24, 48, 168, 336)
STEPS: Final[Sequence[Step]] = (
    *(timedelta(seconds=each) for each in _SECONDS),
    *(timedelta(hours=each) for each in _HOURS),
    *(1, 2, 3, 6, 12, 24, 60, 120),
)

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)

#: The most labels on the axis of times, and gridlines above the base.
MOST_TIMES, MOST_LINES = 7, 4

#: How much of its column a bar takes.
FILLED: Final = 0.86


class Tick(NamedTuple):
    """A label on an axis.

    Attributes:
        at: Where, in percent from the left or from the top.
        label: Its text.
    """

    at: float
    label: str


class Bar(NamedTuple):
    """A bar, or its part of one series.

    Attributes:
        x: Its left edge, in percent.
        y: Its upper edge, in percent from the top.
        width: Its width, in percent.
        height: Its height, in percent.
        series: Of which series, from 1.
    """

    x: float
    y: float
    width: float
    height: float
    series: int


class Column(NamedTuple):
    """What stands above a step of time.

    Attributes:
        x: Its left edge, in percent.
        width: Its width, in percent.
        span: From when to when.
        values: The value of each series.
    """

    x: float
    width: float
    span: str
    values: list[float]


class Plot(NamedTuple):
    """A plot.

    Attributes:
        columns: All steps of time.
        bars: The bars, without the empty ones.
        path: The line, as the data of an SVG path in a square of 100 by 100.
        scale: The gridlines and their labels, the base first.
        times: The labels of times.
    """

    columns: list[Column]
    bars: list[Bar]
    path: str
    scale: list[Tick]
    times: list[Tick]


def plot(
    edges: Sequence[datetime],
    series: Sequence[Sequence[float]],
    zone: tzinfo,
    line: Sequence[tuple[datetime, float]] = (),
    unit: str = "",
) -> Plot:
    """Return a plot of stacked bars, and of a line.

    Args:
        edges: The instants at which the steps of time begin; and the end of the last one.
        series: For each series, its value in each step; the first one stands on the base.
        zone: The zone of the labels.
        line: The instants and values of the line.
        unit: The unit of the values, for the labels; without one, they are whole numbers.
    """
    start, end = edges[0], edges[-1]
    stacks = [list(each) for each in zip(*series, strict=True)] or [[] for _ in edges[1:]]
    values = [*map(sum, stacks), *(value for _, value in line)]
    grid = scale(max(values, default=0), whole=not unit)
    top = grid[-1]

    def x(instant: datetime) -> float:
        return round((instant - start) / (end - start) * 100, 3)

    columns, bars = list[Column](), list[Bar]()
    for stack, (begin, until) in zip(stacks, pairwise(edges), strict=True):
        left, width = x(begin), round(x(until) - x(begin), 3)
        columns.append(Column(left, width, span(begin, until, zone), stack))
        for number, (value, below) in enumerate(zip(stack, accumulate(stack), strict=True), 1):
            if value:
                y, height = round(100 - below / top * 100, 3), round(value / top * 100, 3)
                bars.append(Bar(left, y, round(width * FILLED, 3), height, number))
    return Plot(
        columns,
        bars,
        " L".join(f"{x(at)} {round(100 - value / top * 100, 3)}" for at, value in line),
        [Tick(round(100 - each / top * 100, 3), number_label(each, unit)) for each in grid],
        [Tick(x(at), label) for at, label in times(start, end, zone)],
    )


def scale(most: float, *, whole: bool = True) -> list[float]:
    """Return the values of gridlines from 0 to the first nice number that is not exceeded.

    Args:
        most: The largest value.
        whole: Whether they are whole numbers.
    """
    least = most / MOST_LINES if most > 0 else 1 / MOST_LINES
    step = min(
        each
        for power in (-1, 0, 1)
        for nice in (1, 2, 5)
        if (each := nice * 10.0 ** (ceil(log10(least)) + power)) >= least * (1 - 1e-9)
    )
    step = max(step, 1.0) if whole else step
    lines = max(ceil(most / step - 1e-9), 1)
    return [round(step * each, 9) for each in range(lines + 1)]


def number_label(value: float, unit: str = "") -> str:
    """Return a number as an axis shows it: 1,200, 25k, 3M, 0.5 s."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= max(size, 1e4) and not unit:
            return f"{value / size:g}{letter}"
    return f"{value:,g} {unit}".strip()


def aligned(start: datetime, end: datetime, step: Step, zone: tzinfo) -> list[datetime]:
    """Return the instants of a clock or calendar from before a time until after its end.

    Args:
        start: The time.
        end: When it ends.
        step: The step, which divides an hour, a day, a week or a year.
        zone: The zone of the clock.
    """
    found = list[datetime]()
    for instant in _aligned(start.astimezone(zone), step):
        if not found or instant > found[-1]:  # where a clock is set forward, two may be the same
            found.append(instant)
        if instant >= end:
            break
    return found


def _aligned(local: datetime, step: Step) -> Iterator[datetime]:
    """Yield them without an end, in UTC."""
    midnight = local.replace(hour=0, minute=0, second=0, microsecond=0, fold=0)
    if isinstance(step, int):
        month = local.year * 12 + local.month - 1
        month -= month % step
        while True:
            yield midnight.replace(month // 12, month % 12 + 1, 1).astimezone(UTC)
            month += step
    # Steps of minutes pass evenly, also while the clock is set; those of hours follow the clock.
    if step < HOUR:
        at = local.replace(minute=0, second=0, microsecond=0).astimezone(UTC)
        local = local.astimezone(UTC)
    else:
        at = midnight - (timedelta(days=local.weekday()) if step >= 7 * DAY else timedelta())
    at += (local - at) // step * step
    while True:
        yield at.astimezone(UTC)
        at += step


def times(start: datetime, end: datetime, zone: tzinfo) -> list[tuple[datetime, str]]:
    """Return the instants that an axis names, and their names."""
    length = end - start
    step = next((each for each in STEPS if length / _length(each) <= MOST_TIMES), STEPS[-1])
    return [
        (at, _label(at.astimezone(zone), step))
        for at in aligned(start, end, step, zone)
        if start <= at <= end
    ]


def _length(step: Step) -> timedelta:
    return step * 30 * DAY if isinstance(step, int) else step


def _label(local: datetime, step: Step) -> str:
    length = _length(step)
    if isinstance(step, int):
        return f"{local:%Y}" if step >= 12 or local.month == 1 else f"{local:%b}"
    if length >= 7 * DAY:
        return f"{local.day} {local:%b}"
    if length >= DAY or (length >= HOUR and not local.hour and not local.minute):
        return f"{local:%a} {local.day}"
    return f"{local:%H:%M:%S}" if length < MINUTE else f"{local:%H:%M}"


def span(begin: datetime, until: datetime, zone: tzinfo) -> str:
    """Return a step of time in words: ``Mon 30 Nov, 06:00 to 12:00``."""
    first, last = begin.astimezone(zone), until.astimezone(zone)
    length = until - begin
    if length > 27 * DAY:
        return f"{first:%B %Y}"
    if length < MINUTE:
        return f"{first:%H:%M:%S} to {last:%H:%M:%S}"
    return f"{first:%a} {first.day} {first:%b}, {first:%H:%M} to {last:%H:%M}"
