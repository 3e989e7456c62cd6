"""Lay out charts without scripts: positions of bars, lines and labels, in percent of the plot.

``charts.html`` draws them as SVG. Positions in percent fit any width and do not scale the text.
Colors are classes of ``style.css``, because the page's content security policy forbids style
attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import accumulate, pairwise
from math import ceil, log10
from typing import Final, NamedTuple

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)

#: The possible steps of a time axis, in seconds, minutes, hours and weeks.
STEPS: Final = (
    *(timedelta(seconds=each) for each in (1, 2, 5, 10, 15, 30)),
    *(timedelta(minutes=each) for each in (1, 2, 5, 10, 15, 30)),
    *(timedelta(hours=each) for each in (1, 2, 3, 6, 12, 24, 48)),
    *(timedelta(weeks=each) for each in (1, 2, 4, 8)),
)

#: The maximum number of labels on the time axis, and of gridlines above the base.
MOST_TIMES, MOST_LINES = 7, 4

#: The share of its column that a bar fills.
FILLED: Final = 0.86


class Tick(NamedTuple):
    """A label on an axis.

    Attributes:
        at: Its position, in percent from the left or from the top.
        label: Its text.
    """

    at: float
    label: str


class Bar(NamedTuple):
    """A bar, or one series' part of a stacked bar. Positions and sizes are in percent.

    Attributes:
        x: The left edge.
        y: The upper edge, from the top.
        width: The width.
        height: The height.
        series: The number of its series, from 1.
    """

    x: float
    y: float
    width: float
    height: float
    series: int


class Column(NamedTuple):
    """The column of one step of time.

    Attributes:
        x: Its left edge, in percent.
        width: Its width, in percent.
        span: The label of the step, from its start to its end.
        values: The value of each series.
    """

    x: float
    width: float
    span: str
    values: list[float]


class Plot(NamedTuple):
    """A plot.

    Attributes:
        columns: One column per time step.
        bars: The bars that are not empty.
        path: The line, as the data of an SVG path in a square of 100 by 100.
        scale: The gridlines and their labels, the base first.
        times: The labels of the time axis.
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
    """Return a plot of stacked bars and a line.

    Args:
        edges: The instants at which the steps begin, and the end of the last step.
        series: The values of each series, one per step; the first series stands on the base.
        zone: The time zone of the labels.
        line: The points of the line, as instants and values.
        unit: The unit of the values, for the labels; without a unit, values are whole numbers.
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
        [
            Tick(round(100 - each / top * 100, 3), label)
            for each, label in zip(grid, number_labels(grid, unit), strict=True)
        ],
        [Tick(x(at), label) for at, label in times(start, end, zone)],
    )


def scale(most: float, *, whole: bool = True) -> list[float]:
    """Return the values of the gridlines, from 0 to the first round number that is high enough.

    Args:
        most: The largest value of the plot.
        whole: Whether the gridlines are whole numbers.
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


def number_labels(grid: Sequence[float], unit: str = "") -> list[str]:
    """Format the numbers of an axis, with one prefix for all: ``0``, ``5k``, ``10k``."""
    sizes = () if unit else ((1e9, "G"), (1e6, "M"), (1e3, "k"))
    size, letter = next((each for each in sizes if grid[-1] >= max(each[0], 1e4)), (1, ""))
    return [f"{each / size:,g}{letter if each else ''} {unit}".strip() for each in grid]


def aligned(start: datetime, end: datetime, step: timedelta, zone: tzinfo) -> list[datetime]:
    """Return evenly spaced instants that enclose a span of time, such as every full hour.

    Args:
        start: The start of the span.
        end: The end of the span.
        step: A divisor of an hour, a day or a week, or a number of weeks.
        zone: The time zone of the clock.
    """
    local = start.astimezone(zone)
    at = local.replace(minute=0, second=0, microsecond=0)
    if step < HOUR:  # clock changes do not shift full minutes; hours follow the clock
        local, at = local.astimezone(UTC), at.astimezone(UTC)
    else:
        at = at.replace(hour=0, fold=0) - (local.weekday() * DAY if step > 2 * DAY else 0 * DAY)
    at += (local - at) // step * step
    found = [at.astimezone(UTC)]
    while found[-1] < end:
        at += step
        if (instant := at.astimezone(UTC)) > found[-1]:  # leave out an hour that the clock skips
            found.append(instant)
    return found


def times(start: datetime, end: datetime, zone: tzinfo) -> list[tuple[datetime, str]]:
    """Return the instants that a time axis labels, with their labels."""
    step = next((each for each in STEPS if (end - start) / each <= MOST_TIMES), STEPS[-1])
    found = aligned(start, end, step, zone)
    if step != DAY:
        return [(at, _label(at.astimezone(zone), step)) for at in found if start <= at <= end]
    days = [(max(day, start), min(after, end)) for day, after in pairwise(found)]
    return [  # a day's label stands in the middle of the day
        (day + (after - day) / 2, "Today" if day == start else _label(day.astimezone(zone), step))
        for day, after in days
        if after - day >= DAY / 2
    ]


def _label(local: datetime, step: timedelta) -> str:
    if step > 2 * DAY:
        return f"{local.day} {local:%b}"
    if step >= DAY or (step >= HOUR and not local.hour):
        return f"{local:%a} {local.day}"
    return f"{local:%H:%M:%S}" if step < MINUTE else f"{local:%H:%M}"


def span(begin: datetime, until: datetime, zone: tzinfo) -> str:
    """Describe a step of time: ``Mon 30 Nov, 06:00 to 12:00``."""
    first, last = begin.astimezone(zone), until.astimezone(zone)
    if until - begin < MINUTE:
        return f"{first:%H:%M:%S} to {last:%H:%M:%S}"
    day = f"{first:%a} {first.day} {first:%b}"
    if until - begin > DAY:
        return f"{day} to {last:%a} {last.day} {last:%b}"
    return f"{day}, {first:%H:%M} to {last:%H:%M}"
