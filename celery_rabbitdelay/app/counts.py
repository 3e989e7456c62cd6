"""The present values of recorded metrics, and how they travel from one process to another."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator
from threading import RLock
from typing import Final, TypeAlias

from celery_rabbitdelay.app.instruments import INSTRUMENTS, Instrument

#: Combinations of label values that one metric has at most. Further ones count as :data:`OTHER`, so
#: that an application with a queue for each of its users fills neither its memory nor Prometheus.
MAX_SERIES: Final = 2000

#: The value of every label of a combination that is one too many, or that is too long.
OTHER: Final = "(other)"

#: The values of the labels, in their order.
Labels: TypeAlias = tuple[str, ...]

#: A metric, the values of its labels, and its values; see :class:`Counts`.
Series: TypeAlias = tuple[Instrument, Labels, list[float]]

_BY_NAME: Final = {instrument.name: instrument for instrument in INSTRUMENTS}


class Counts:
    """The values of recorded metrics, by metric and labels. For any number of threads.

    The value of a counter is one number. A histogram has one for each bucket (the values that fall
    into it alone), one for values above the last bound, and the sum of all values.
    """

    def __init__(self) -> None:
        # The handler of a signal may interrupt whoever holds it, and record something itself.
        self._lock = RLock()
        self._series: dict[tuple[Instrument, Labels], list[float]] = {}
        self._numbers: dict[Instrument, int] = {}

    def record(self, instrument: Instrument, value: float, labels: Labels) -> None:
        """Add to a counter, or note a value in a histogram."""
        with self._lock:
            numbers = self._of(instrument, labels)
            if instrument.buckets:
                numbers[bisect_left(instrument.buckets, value)] += 1
                numbers[-1] += value
            else:
                numbers[0] += value

    def merge(self, instrument: Instrument, labels: Labels, numbers: list[float]) -> None:
        """Add the values of another process, or of an earlier time."""
        with self._lock:
            own = self._of(instrument, labels)
            for place, number in enumerate(numbers):
                own[place] += number

    def all(self) -> list[Series]:
        """Return all values."""
        with self._lock:
            return [(*key, [*numbers]) for key, numbers in self._series.items()]

    def take(self) -> list[Series]:
        """Return all values, and forget them."""
        with self._lock:
            taken = self.all()
            self._series.clear()
            self._numbers.clear()
            return taken

    def _of(self, instrument: Instrument, labels: Labels) -> list[float]:
        numbers = self._series.get((instrument, labels))
        if numbers is None:
            known = self._numbers.get(instrument, 0)
            if known >= MAX_SERIES:
                labels = (OTHER,) * len(labels)
            else:
                self._numbers[instrument] = known + 1
            numbers = self._series.setdefault((instrument, labels), zeros(instrument))
        return numbers


def zeros(instrument: Instrument) -> list[float]:
    """Return the values of a metric that nothing was recorded for."""
    return [0.0] * (len(instrument.buckets) + 2 if instrument.buckets else 1)


def encoded(instrument: Instrument, labels: Labels, numbers: list[float], maximum: int) -> bytes:
    """Return values as a line of at most so many bytes; labels that are too long become others."""
    line = _line(instrument, labels, numbers)
    return line if len(line) <= maximum else _line(instrument, (OTHER,) * len(labels), numbers)


def decoded(lines: bytes) -> Iterator[Series]:
    """Read whole lines; those that :func:`encoded` has not written are left out."""
    for line in lines.splitlines():
        try:
            name, labels, numbers = json.loads(line)
            instrument = _BY_NAME[name]
            values = [float(number) for number in numbers]
        except (ValueError, TypeError, KeyError):
            continue
        if len(values) == len(zeros(instrument)) and len(labels) == len(instrument.labels):
            yield instrument, tuple(map(str, labels)), values


def _line(instrument: Instrument, labels: Labels, numbers: list[float]) -> bytes:
    return json.dumps([instrument.name, labels, numbers], separators=(",", ":")).encode() + b"\n"
