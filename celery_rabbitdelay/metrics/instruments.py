"""The instruments that only a worker observes, and the table of all instruments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import Final

from celery_rabbitdelay.app.instruments import Instrument, gauge


def _observed_counter(name: str, text: str, label: str = "queue") -> Instrument:
    return Instrument(name, "counter", text, (label,), is_observed=True)


MODULE_RECEIVED: Final = _observed_counter(
    "module_received", "Messages that the worker's module received from its queue."
)
MODULE_PUBLISHED: Final = _observed_counter(
    "module_published", "Confirmed messages that the worker's module published."
)
MODULE_REDELIVERED: Final = _observed_counter(
    "module_redelivered",
    "Messages that the worker's module put back into the levels: their destination refused them.",
)
UNDELIVERABLE: Final = _observed_counter(
    "undeliverable", "Messages that the worker's module moved from its queue into undeliverable."
)
BACKLOG: Final = gauge(
    "backlog",
    "Ready messages in the queues of modules, meditation, undeliverable messages and paused tasks.",
    "queue",
)
PROBE_LATE: Final = gauge(
    "probe_late_seconds",
    "Lateness of the last probe through a level, negative if early; or the lateness so far of a "
    "missing probe.",
    "level",
)
PROBE_MISSING: Final = _observed_counter(
    "probe_missing",
    "Probes through a level that were missing a minute after their due time.",
    "level",
)
PENDING: Final = gauge("pending", "Messages that wait in a level.", "level")
MISSING_QUEUES: Final = gauge(
    "missing_queues", "Queues of the topology that the broker does not have."
)

#: The files that define instruments.
DEFINED_IN: Final = (
    "celery_rabbitdelay.app.instruments",
    "celery_rabbitdelay.registry.application",
    "celery_rabbitdelay.schedules.recurrence",
    __name__,
)


def defined() -> Iterator[Instrument]:
    """Yield the instruments of all additions that are installed."""
    for name in DEFINED_IN:
        with suppress(ModuleNotFoundError):  # an addition that was removed
            yield from (v for v in vars(import_module(name)).values() if isinstance(v, Instrument))


#: All instruments, in the order of their output.
INSTRUMENTS: Final = tuple(defined())
