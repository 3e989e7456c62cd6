"""The counters, gauges and histograms of this package, and the recorder of their values.

An addition defines its own instruments. Labels have few values by design: task names, queue names
and, on some gauges, level names. A worker takes task and queue names from its own tables, never
from a message alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from celery_rabbitdelay.publishing.producer import Delayed

#: The prefix of all names of metrics, before an underscore.
PREFIX: Final = "celery_rabbitdelay"

#: The values of the labels of an instrument, in their order.
Labels: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Instrument:
    """An instrument, which Prometheus calls a metric.

    Attributes:
        name: The metric's name without :data:`PREFIX`, and without the ``_total`` of Prometheus's
            counters.
        kind: The kind of instrument.
        help: The metric's meaning, in one sentence.
        labels: The names of its labels.
        buckets: The upper bounds of a histogram's buckets, in seconds, without infinity.
        is_observed: Whether the value is looked up at each collection, and not recorded by events.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: Labels = ("task", "queue")
    buckets: tuple[float, ...] = ()
    is_observed: bool = False

    @property
    def metric(self) -> str:
        """The full name in Prometheus."""
        return f"{PREFIX}_{self.name}{'_total' if self.kind == 'counter' else ''}"

    def named(self, labels: Labels) -> dict[str, str]:
        """Return the values of labels by their names."""
        return dict(zip(self.labels, labels, strict=True))


def counter(name: str, text: str, labels: Labels = ("task", "queue")) -> Instrument:
    """Return a counter of events."""
    return Instrument(name, "counter", text, labels)


def gauge(name: str, text: str, *labels: str) -> Instrument:
    """Return a gauge; its value is looked up at each collection."""
    return Instrument(name, "gauge", text, labels, is_observed=True)


SENT: Final = counter("sent", "Delayed tasks for which publishing into the levels was attempted.")
CONFIRMED: Final = counter("confirmed", "Sent tasks that the broker confirmed.")
REFUSED: Final = counter("refused", "Sent tasks whose publishing ended without a confirm.")
RESENT: Final = counter(
    "resent", "How often a message was published again, after a nack for example."
)
LATENESS: Final = Instrument(
    "lateness_seconds",
    "histogram",
    "Seconds from the due time of a delayed task until a worker gave it to Celery to run, without "
    "the time for which workers put it back.",
    buckets=(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0),
)
EARLY: Final = counter(
    "early", "Messages that left the levels before they were due, and went back."
)
TAKEN_OVER: Final = counter(
    "taken_over",
    "Tasks with a future eta from producers without this package, put into the levels or held.",
)


#: Called with values by their instruments, and the values of the labels.
Listener: TypeAlias = Callable[..., None]


class Recorder:
    """Passes recorded values to its listeners; without a listener, it does nothing.

    Attributes:
        listeners: Functions of additions, which must not raise.
        gauges: For each gauge without labels, a function that returns its present value. A worker
            that serves metrics calls the functions at each collection.
    """

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.gauges: dict[Instrument, Callable[[], float]] = {}

    def record(self, values: Mapping[Instrument, float], *labels: str) -> None:
        """Add values to counters, or record values in histograms.

        Args:
            values: The values by their instruments, all of which have the same labels.
            *labels: The values of the labels.
        """
        for listener in self.listeners:
            listener(values, *labels)

    def record_send(self, task: str, queue: str, is_confirmed: bool, resent: int) -> None:
        """Count one send, with its outcome.

        Args:
            task: The task's name.
            queue: The label of its queue.
            is_confirmed: Whether the broker has confirmed the message.
            resent: How often its message was published again.
        """
        values = {SENT: 1, CONFIRMED if is_confirmed else REFUSED: 1}
        if resent:
            values[RESENT] = resent
        self.record(values, task, queue)


def queue_label(delayed: Delayed) -> str:
    """Return the name of a message's queue; empty if the queue depends on the exchange."""
    return "" if delayed.queue is None else str(delayed.queue.name)
