"""``app.rabbitdelay.metrics``: the metrics of one process, for Prometheus and for OpenTelemetry."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from weakref import WeakSet

from celery_rabbitdelay.app.child_counts import ChildCounts
from celery_rabbitdelay.app.counts import Counts, Labels, zeros
from celery_rabbitdelay.app.instruments import INSTRUMENTS, PREFIX, Instrument, Sample

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from celery_rabbitdelay.app.opentelemetry_meter import OpenTelemetryMeter

#: Looks up the metrics that are not recorded by events.
Source: TypeAlias = Callable[[], Iterable[Sample]]

#: While this module is not imported, nobody can have set OpenTelemetry's SDK up.
_SDK: Final = "opentelemetry.sdk.metrics"
_API: Final = "opentelemetry.metrics"


class Metrics:
    """The metrics of this process, counted from the moment when they are first read.

    It is a collector of ``prometheus_client``: ``REGISTRY.register(app.rabbitdelay.metrics)`` adds
    it to the metrics that a process already serves. A worker needs only
    ``rabbitdelay_metrics_port``. If OpenTelemetry's SDK is set up, all metrics are recorded there
    as well, without any call.

    A forked process begins with zero and counts for itself. A process of a worker's pool sends its
    counts to the worker, if that serves metrics.
    """

    def __init__(self) -> None:
        self._counts = Counts()
        self._sources: list[Source] = []
        self._children: ChildCounts | None = None
        self._is_child = False
        self._meter: OpenTelemetryMeter | None = None
        _all.add(self)

    def record(self, instrument: Instrument, value: float = 1, *labels: str) -> None:
        """Add a value to a counter, or record it in a histogram.

        Args:
            instrument: The metric.
            value: The value.
            *labels: The values of its labels.
        """
        self.record_all({instrument: value}, *labels)

    def record_all(self, values: Mapping[Instrument, float], *labels: str) -> None:
        """Add values to several metrics with the same labels; see :meth:`record`."""
        for instrument, value in values.items():
            self._counts.record(instrument, value, labels)
        if self._children is not None and self._is_child:
            self._children.tell(self._counts)
        if self._meter is None and opentelemetry_is_set_up():
            self._meter = _meter(self)
        if self._meter is not None:
            for instrument, value in values.items():
                self._meter.record(instrument, value, labels)

    def observe(self, source: Source) -> None:
        """Add a source of metrics that are looked up at each collection."""
        self._sources.append(source)
        if self._meter is None and opentelemetry_is_set_up():
            self._meter = _meter(self)

    def forget_sources(self) -> None:
        """Remove all sources."""
        self._sources.clear()

    def observed(self) -> list[Sample]:
        """Return the present values of the sources' metrics."""
        return [sample for source in tuple(self._sources) for sample in source()]

    def prepare_for_children(self) -> None:
        """Let processes that are forked from now on send their counts to this process."""
        if self._children is None:
            self._children = ChildCounts(self._merge)

    def hear_children(self) -> None:
        """Begin to read the counts of forked processes."""
        if self._children is not None:
            self._children.start()

    def leave_children(self) -> None:
        """Read the remaining counts of forked processes, and stop."""
        if self._children is not None:
            self._children.stop()
            self._children = None

    def describe(self) -> Iterator[Metric]:
        """Yield all metrics without values, by which ``prometheus_client`` finds conflicts."""
        for instrument in INSTRUMENTS:
            yield _family(instrument)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics in the form that ``prometheus_client`` serves."""
        series: defaultdict[Instrument, dict[Labels, list[float]]] = defaultdict(dict)
        for instrument in INSTRUMENTS:
            if not instrument.labels and not instrument.is_observed:
                series[instrument][()] = zeros(instrument)
        for instrument, labels, numbers in self._counts.all():
            series[instrument][labels] = numbers
        for sample in self.observed():
            series[sample.instrument][sample.labels] = [sample.value]
        for instrument in INSTRUMENTS:
            family: Any = _family(instrument)
            for labels, numbers in series[instrument].items():
                if instrument.buckets:
                    bounds = [*map(str, instrument.buckets), "+Inf"]
                    buckets = [*zip(bounds, accumulate(numbers[:-1]), strict=True)]
                    family.add_metric(labels, buckets, numbers[-1])
                else:
                    family.add_metric(labels, numbers[0])
            yield family

    def _merge(self, instrument: Instrument, labels: Labels, numbers: list[float]) -> None:
        self._counts.merge(instrument, labels, numbers)

    def _after_fork(self) -> None:
        # The parent's counts and sources remain the parent's.
        self._counts = Counts()
        self._sources = []
        self._meter = None
        self._is_child = True
        if self._children is not None:
            self._children.after_fork()


def opentelemetry_is_set_up() -> bool:
    """Return whether this process has set up OpenTelemetry's SDK for metrics."""
    # There is no such class while another thread is importing the module.
    provider_class = getattr(sys.modules.get(_SDK), "MeterProvider", None)
    if provider_class is None:
        return False
    # Others may have imported the SDK without setting it up, as redis-py does.
    return isinstance(sys.modules[_API].get_meter_provider(), provider_class)


def _meter(metrics: Metrics) -> OpenTelemetryMeter:
    from celery_rabbitdelay.app.opentelemetry_meter import OpenTelemetryMeter

    return OpenTelemetryMeter(metrics.observed)


def _family(instrument: Instrument) -> Metric:
    from prometheus_client import core  # an extra

    families: dict[str, Any] = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    family: Metric = families[instrument.kind](
        f"{PREFIX}_{instrument.name}", instrument.help, labels=instrument.labels
    )
    return family


_all: WeakSet[Metrics] = WeakSet()


def _begin_with_nothing() -> None:
    for metrics in _all:
        metrics._after_fork()


os.register_at_fork(after_in_child=_begin_with_nothing)
