"""``app.rabbitdelay.metrics``: the metrics of one process, for Prometheus."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from select import PIPE_BUF
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from celery_rabbitdelay.app.delays import Delays
from celery_rabbitdelay.app.instruments import PREFIX, Instrument, Labels
from celery_rabbitdelay.metrics.instruments import INSTRUMENTS

if TYPE_CHECKING:
    from prometheus_client.core import Metric

#: The present value of an instrument that is observed, with its labels.
Sample: TypeAlias = tuple[Instrument, Labels, float]

#: Returns the present values of all observed instruments.
Observe: TypeAlias = Callable[[], Iterable[Sample]]

#: The maximum number of combinations of label values of one metric. More combinations count as
#: :data:`OTHER`, so that an application with a queue per user does not fill its memory or
#: Prometheus.
MAX_SERIES: Final = 2000

#: The value of all labels in a combination beyond the maximum, or too long for a pipe.
OTHER: Final = "(other)"

#: The maximum size of a message, without its length prefix, that a pipe accepts atomically: the
#: bytes do not mix with the bytes of another process.
MAX_BYTES: Final = PIPE_BUF - 4

#: Seconds that a stopping worker waits for the counts that are still in the pipe.
PATIENCE: Final = 1.0


class Metrics:
    """The metrics of this process, counted from the first use of ``app.rabbitdelay.metrics``.

    The object is a collector of ``prometheus_client``:
    ``REGISTRY.register(app.rabbitdelay.metrics)`` adds it to the metrics that a process already
    serves. A worker needs only ``rabbitdelay_metrics_port``.

    A forked process starts at zero and counts for itself. If a worker serves metrics, the processes
    of its pool send their counts to the worker.

    Attributes:
        children: Receives the counts of processes that are forked from now on; None if each process
            counts for itself.

    Raises:
        ImportError: The package ``prometheus-client`` is missing.
    """

    def __init__(self) -> None:
        self._source: Observe = tuple
        #: Counters and histograms of ``prometheus_client``.
        self._prometheus: dict[Instrument, Any] = _prometheus_metrics()
        self._series: defaultdict[Instrument, set[Labels]] = defaultdict(set)
        self.children: ChildCounts | None = None
        self._parent: ChildCounts | None = None
        # This hook is never unregistered: an application lives as long as its process.
        os.register_at_fork(after_in_child=self._after_fork)

    def __call__(self, values: Mapping[Instrument, float], *labels: str) -> None:
        """Add to counters, or record in histograms; a listener of :class:`.Recorder`.

        Args:
            values: The values by metric; all metrics have the same labels.
            *labels: The values of the labels.
        """
        if self._parent is not None:
            self._parent.send(values, labels)
        else:
            self.count(values, labels)

    def count(self, values: Mapping[Instrument, float], labels: Labels) -> None:
        """Add to Prometheus's counters, or record in its histograms."""
        for instrument, value in values.items():
            metric = self._prometheus[instrument]
            if labels:
                metric = metric.labels(*self._bounded(instrument, labels))
            if instrument.buckets:
                metric.observe(value)
            else:
                metric.inc(value)

    def observe(self, source: Observe = tuple) -> None:
        """Set the function that returns observed metrics; it is called at every collection."""
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics in the form that ``prometheus_client`` serves."""
        from prometheus_client.core import Metric  # an extra

        samples = [*self._source()]
        for each in INSTRUMENTS:
            if each.is_observed:
                family = Metric(f"{PREFIX}_{each.name}", each.help, each.kind)
                for instrument, labels, value in samples:
                    if instrument is each:
                        family.add_sample(each.metric, each.named(labels), value)
            else:
                (family,) = self._prometheus[each].collect()
                # The creation times would double the number of series.
                family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family

    def _bounded(self, instrument: Instrument, labels: Labels) -> Labels:
        series = self._series[instrument]
        if labels not in series:
            if len(series) >= MAX_SERIES:
                return (OTHER,) * len(labels)
            series.add(labels)
        return labels

    def _after_fork(self) -> None:
        # The counts and the source still belong to the parent process.
        self._source = tuple
        self._series.clear()
        self._prometheus = _prometheus_metrics()
        if self.children is not None:
            self.children.after_fork()
            self._parent, self.children = self.children, None


class ChildCounts:
    """A pipe through which the processes of a worker's pool send their counts to the worker.

    A count is written at once and in one piece, so that nothing is lost when a process is killed. A
    pipe leaves no file behind. The multiprocess mode of ``prometheus_client`` needs a folder and an
    environment variable that is set before its import, and would also write the user's own metrics
    to files.

    A full pipe blocks the process until the worker reads, like the pipe with the pool's results.
    Make the pipe before the processes are forked.

    Args:
        count: Called in the worker, in a separate thread, with the counts of a process.
    """

    def __init__(self, count: Callable[[Mapping[Instrument, float], Labels], None]) -> None:
        self._count = count
        self._reading, self._writing = Pipe(duplex=False)
        self._thread = Thread(target=self._read, name="rabbitdelay-counts", daemon=True)

    def start(self) -> None:
        """Start reading the pipe, in the worker."""
        self._thread.start()

    def stop(self) -> None:
        """Read the remaining counts, and close the pipe."""
        self._writing.send_bytes(b"")
        self._thread.join(PATIENCE)
        self._writing.close()
        self._reading.close()

    def after_fork(self) -> None:
        """Close the parent's end in a child, so that the child notices when the parent ends."""
        self._reading.close()

    def send(self, values: Mapping[Instrument, float], labels: Labels) -> None:
        """Write the counts of a child; labels that are too long become :data:`OTHER`."""
        numbered = [(INSTRUMENTS.index(each), value) for each, value in values.items()]
        message = json.dumps((numbered, labels)).encode()
        if len(message) > MAX_BYTES:
            message = json.dumps((numbered, (OTHER,) * len(labels))).encode()
        with suppress(OSError):  # the parent has ended
            self._writing.send_bytes(message)

    def _read(self) -> None:
        while message := self._reading.recv_bytes():
            numbered, labels = json.loads(message)
            self._count({INSTRUMENTS[number]: value for number, value in numbered}, tuple(labels))


def _prometheus_metrics() -> dict[Instrument, object]:
    import prometheus_client  # an extra

    metrics: dict[Instrument, object] = {}
    for each in INSTRUMENTS:
        described = each.metric, each.help, each.labels
        if each.buckets:
            buckets = each.buckets
            metrics[each] = prometheus_client.Histogram(*described, buckets=buckets, registry=None)
        elif not each.is_observed:
            metrics[each] = prometheus_client.Counter(*described, registry=None)
    return metrics


#: Threads that use the metrics of an application first share them.
_FIRST_USE: Final = Lock()


class HasMetrics:
    """Adds ``metrics`` to ``app.rabbitdelay``.

    Args:
        delays: The application's delay levels.
    """

    def __init__(self, delays: Delays) -> None:
        self._delays = delays

    @property
    def metrics(self) -> Metrics:
        """The metrics of this process, counted from now on, as a ``prometheus_client`` collector.

        Raises:
            ImportError: The package ``prometheus-client`` is missing.
        """
        listeners = self._delays.recorder.listeners  # unlike this object, listeners outlive a reset
        with _FIRST_USE:
            found = next((each for each in listeners if isinstance(each, Metrics)), None)
            if found is None:
                found = Metrics()
                listeners.append(found)
        return found
