"""The metrics: name, kind, labels and meaning of each. Pure.

Labels have few values by design: task names, queue names and, on one gauge, level names. A worker
takes task and queue names from its own tables, never from a message alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

#: The prefix of each name; Prometheus puts ``_`` behind it, OpenTelemetry ``.``.
PREFIX: Final = "celery_rabbitdelay"

InstrumentKind: TypeAlias = Literal["counter", "gauge", "histogram"]

#: The values of the labels of a metric, in their order.
Labels: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Instrument:
    """A metric.

    Attributes:
        name: Its name without :data:`PREFIX`, and without the ``_total`` of Prometheus's counters.
        kind: Its kind.
        help: Its meaning, in one sentence.
        labels: The names of its labels.
        buckets: The upper bounds of a histogram's buckets, in seconds, without infinity.
        is_observed: Whether its value is looked up at each collection, and not recorded by events.
    """

    name: str
    kind: InstrumentKind
    help: str
    labels: Labels = ("task", "queue")
    buckets: tuple[float, ...] = ()
    is_observed: bool = False

    @property
    def metric(self) -> str:
        """The whole name in Prometheus."""
        return f"{PREFIX}_{self.name}{'_total' if self.kind == 'counter' else ''}"

    def named(self, labels: Labels) -> dict[str, str]:
        """Return the values of labels by their names."""
        return dict(zip(self.labels, labels, strict=True))


#: The present value of a metric that is looked up at each collection, with its labels.
Sample: TypeAlias = tuple[Instrument, Labels, float]


def _counter(name: str, text: str, labels: Labels = ("task", "queue")) -> Instrument:
    return Instrument(name, "counter", text, labels)


def _observed_counter(name: str, text: str, label: str = "queue") -> Instrument:
    return Instrument(name, "counter", text, (label,), is_observed=True)


def _gauge(name: str, text: str, *labels: str) -> Instrument:
    return Instrument(name, "gauge", text, labels, is_observed=True)


SENT: Final = _counter("sent", "Delayed tasks for which publishing into the levels was attempted.")
CONFIRMED: Final = _counter("confirmed", "Sent tasks that the broker confirmed.")
REFUSED: Final = _counter("refused", "Sent tasks whose publishing ended without a confirm.")
RESENT: Final = _counter(
    "resent", "How often a message was published again, after a nack for example."
)
LATENESS: Final = Instrument(
    "lateness_seconds",
    "histogram",
    "Seconds from the due time of a delayed task until a worker gave it to Celery to run; what it "
    "was held for does not count.",
    buckets=(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0),
)
EARLY: Final = _counter(
    "early", "Messages that left the levels before they were due, and went back."
)
TAKEN_OVER: Final = _counter(
    "taken_over",
    "Tasks with a future eta, of producers without this package: put into the levels, or held.",
)
RETURNED: Final = _counter(
    "returned",
    "Due tasks that went back to wait, once each: postponed, paused, job open, or Redis away.",
)
CANCELLED: Final = _counter(
    "cancelled", "Due tasks that a worker discarded because they were cancelled."
)
SUPERSEDED: Final = _counter(
    "superseded", "Due tasks that a worker discarded for a newer one under their key."
)
EXPIRED: Final = _counter(
    "expired", "Due tasks that a worker discarded: job aborted, or not committed in time."
)
DUPLICATES: Final = _counter(
    "duplicates", "Messages that a worker discarded because another message of the same task runs."
)
OCCURRENCES: Final = _counter(
    "occurrences",
    "Occurrences of schedules that came, by what became of them: ran, cancelled, late, paused, "
    "overlapped; and those that did not come: sent again.",
    labels=("task", "fate"),
)
SCHEDULES_OVERDUE: Final = _gauge(
    "schedules_overdue_seconds",
    "Seconds since the next occurrence of a schedule was due that has not come; of the schedule "
    "where that is longest.",
)
JOBS_EXPIRED: Final = _counter(
    "jobs_expired", "Jobs found not to have been committed in time.", labels=()
)
REGISTRY: Final = Instrument(
    "registry_seconds",
    "histogram",
    "Seconds that a round trip to Redis took.",
    labels=(),
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
)
REGISTRY_FAILURES: Final = _counter(
    "registry_failures", "Round trips to Redis that failed or took too long.", labels=()
)
BREAKER_OPEN: Final = _gauge(
    "registry_breaker_open",
    "Whether the worker asks Redis nothing at the moment, because it did not answer: 1 or 0.",
)
MODULE_RECEIVED: Final = _observed_counter(
    "module_received", "Messages that the worker's module received from its queue."
)
MODULE_PUBLISHED: Final = _observed_counter(
    "module_published", "Confirmed messages that the worker's module published."
)
MODULE_REDELIVERED: Final = _observed_counter(
    "module_redelivered",
    "Messages that the worker's module put into the levels: their destination did not take them.",
)
UNDELIVERABLE: Final = _observed_counter(
    "undeliverable", "Messages that the worker's module put into undeliverable, by its queue."
)
BACKLOG: Final = _gauge(
    "backlog",
    "Messages that are ready in the queue of a module, of meditation, of undeliverable or of "
    "paused tasks.",
    "queue",
)
PROBE_LATE: Final = _gauge(
    "probe_late_seconds",
    "Seconds that the last probe through a level was late; negative if early; while it is missing, "
    "how late it is at least.",
    "level",
)
PROBE_MISSING: Final = _observed_counter(
    "probe_missing",
    "Probes through a level that did not come within a minute of their time.",
    "level",
)
PENDING: Final = _gauge("pending", "Messages that wait in a level.", "level")
MISSING_QUEUES: Final = _gauge(
    "missing_queues", "Queues of the topology that the broker does not have."
)

#: All metrics, in the order in which they are shown: that of their definitions.
INSTRUMENTS: Final = tuple(each for each in vars().values() if isinstance(each, Instrument))
