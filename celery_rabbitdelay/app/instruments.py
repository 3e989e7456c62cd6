"""The metrics: name, kind, labels and meaning of each. Pure.

Labels have few values by design: task names, queue names and, on one gauge, level names. A worker
takes task and queue names from its own tables, never from a message alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

#: The prefix of each name; Prometheus puts ``_`` behind it, OpenTelemetry ``.``.
PREFIX: Final = "celery_rabbitdelay"

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, eq=False)
class Instrument:
    """A metric.

    Attributes:
        name: Its name without :data:`PREFIX`, and without the ``_total`` of Prometheus's counters.
        kind: Its kind.
        help: Its meaning, in one sentence.
        labels: The names of its labels.
        unit: Its unit; empty for a count.
        buckets: The upper bounds of a histogram's buckets, without infinity.
        is_observed: Whether its value is looked up at each collection, and not recorded by events.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ("task", "queue")
    unit: str = ""
    buckets: tuple[float, ...] = ()
    is_observed: bool = False

    @property
    def metric(self) -> str:
        """The whole name in Prometheus."""
        ending = "_total" if self.kind == "counter" else ""
        return f"{PREFIX}_{self.name}{ending}"


class Sample(NamedTuple):
    """The present value of a metric that is looked up at each collection.

    Attributes:
        instrument: The metric.
        labels: The values of its labels.
        value: Its value.
    """

    instrument: Instrument
    labels: tuple[str, ...]
    value: float


def _of_queue(name: str, kind: Kind, text: str) -> Instrument:
    return Instrument(name, kind, text, ("queue",), is_observed=True)


SENT: Final = Instrument(
    "sent", "counter", "Delayed tasks for which publishing into the levels was attempted."
)
CONFIRMED: Final = Instrument("confirmed", "counter", "Sent tasks that the broker confirmed.")
REFUSED: Final = Instrument(
    "refused", "counter", "Sent tasks whose publishing ended without a confirm."
)
RESENT: Final = Instrument(
    "resent", "counter", "How often a message was published again, after a nack for example."
)
LATENESS: Final = Instrument(
    "lateness_seconds",
    "histogram",
    "Seconds from the due time of a delayed task until a worker gave it to Celery to run.",
    unit="s",
    buckets=(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0),
)
EARLY: Final = Instrument(
    "early", "counter", "Messages that left the levels before they were due, and went back."
)
TAKEN_OVER: Final = Instrument(
    "taken_over",
    "counter",
    "Tasks with a future eta, of producers without this package, that a worker put into the levels "
    "or held.",
)
RETURNED: Final = Instrument(
    "returned",
    "counter",
    "Due tasks that went back into the levels: postponed, their job open, or Redis away.",
)
CANCELLED: Final = Instrument(
    "cancelled", "counter", "Due tasks that a worker discarded because they were cancelled."
)
SUPERSEDED: Final = Instrument(
    "superseded", "counter", "Due tasks that a worker discarded for a newer one under their key."
)
EXPIRED: Final = Instrument(
    "expired",
    "counter",
    "Due tasks that a worker discarded because their job was aborted or not committed in time.",
)
DUPLICATES: Final = Instrument(
    "duplicates",
    "counter",
    "Messages that a worker discarded because another message of the same task runs.",
)
JOBS_EXPIRED: Final = Instrument(
    "jobs_expired", "counter", "Jobs found not to have been committed in time.", labels=()
)
REGISTRY: Final = Instrument(
    "registry_seconds",
    "histogram",
    "Seconds that a round trip to Redis took.",
    labels=(),
    unit="s",
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
)
REGISTRY_FAILURES: Final = Instrument(
    "registry_failures", "counter", "Round trips to Redis that failed or took too long.", labels=()
)

BREAKER_OPEN: Final = Instrument(
    "registry_breaker_open",
    "gauge",
    "Whether the worker asks Redis nothing at the moment, because it did not answer: 1 or 0.",
    labels=(),
    is_observed=True,
)
MODULE_RECEIVED: Final = _of_queue(
    "module_received", "counter", "Messages that the worker's module received from its queue."
)
MODULE_PUBLISHED: Final = _of_queue(
    "module_published", "counter", "Confirmed messages that the worker's module published."
)
MODULE_REDELIVERED: Final = _of_queue(
    "module_redelivered",
    "counter",
    "Messages that the worker's module put into the levels, because their destination did not take "
    "them.",
)
UNDELIVERABLE: Final = _of_queue(
    "undeliverable",
    "counter",
    "Messages that the worker's module put into undeliverable, by the queue that it received them "
    "from.",
)
BACKLOG: Final = _of_queue(
    "backlog",
    "gauge",
    "Messages that are ready in the queue of a module, of meditation or of undeliverable.",
)
PENDING: Final = Instrument(
    "pending",
    "gauge",
    "Messages that wait in a level.",
    labels=("level",),
    is_observed=True,
)
MISSING_QUEUES: Final = Instrument(
    "missing_queues",
    "gauge",
    "Queues of the topology that the broker does not have.",
    labels=(),
    is_observed=True,
)

#: All metrics, in the order in which they are shown.
INSTRUMENTS: Final = (
    SENT,
    CONFIRMED,
    REFUSED,
    RESENT,
    LATENESS,
    EARLY,
    TAKEN_OVER,
    RETURNED,
    CANCELLED,
    SUPERSEDED,
    EXPIRED,
    DUPLICATES,
    JOBS_EXPIRED,
    REGISTRY,
    REGISTRY_FAILURES,
    BREAKER_OPEN,
    MODULE_RECEIVED,
    MODULE_PUBLISHED,
    MODULE_REDELIVERED,
    UNDELIVERABLE,
    BACKLOG,
    PENDING,
    MISSING_QUEUES,
)
