"""What is counted and measured about the registry."""

from __future__ import annotations

from typing import Final

from celery_rabbitdelay.app.instruments import Instrument, counter, gauge

RETURNED: Final = counter(
    "returned",
    "Due tasks that went back to wait, once each: postponed, paused, job open, or Redis away.",
)
CANCELLED: Final = counter(
    "cancelled", "Due tasks that a worker discarded because they were cancelled."
)
SUPERSEDED: Final = counter(
    "superseded", "Due tasks that a worker discarded for a newer one under their key."
)
EXPIRED: Final = counter(
    "expired", "Due tasks that a worker discarded: job aborted, or not committed in time."
)
DUPLICATES: Final = counter(
    "duplicates", "Messages that a worker discarded because another message of the same task runs."
)
JOBS_EXPIRED: Final = counter(
    "jobs_expired", "Jobs found not to have been committed in time.", labels=()
)
REGISTRY: Final = Instrument(
    "registry_seconds",
    "histogram",
    "Seconds that a round trip to Redis took.",
    labels=(),
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
)
REGISTRY_FAILURES: Final = counter(
    "registry_failures", "Round trips to Redis that failed or took too long.", labels=()
)
BREAKER_OPEN: Final = gauge(
    "registry_breaker_open",
    "Whether the worker asks Redis nothing at the moment, because it did not answer: 1 or 0.",
)
