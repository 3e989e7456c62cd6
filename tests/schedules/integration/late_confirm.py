"""What a worker imports to learn too late that what follows an occurrence was published.

Celery's setting ``imports`` names it. The first of them is published and counts as not confirmed
once ten more occurrences were decided, by other workers.
"""

from collections.abc import Callable, Sequence
from typing import Any

from celery_rabbitdelay.exceptions import ConfirmTimeout
from celery_rabbitdelay.registry.application import registry_of
from celery_rabbitdelay.schedules import record
from celery_rabbitdelay.testing import wait_for
from tests.kernel.integration.shop import PATIENCE

AHEAD_MS = 10_000

publish_each = vars(record)["publish_each"]


def publish_late(
    delays: Any,
    items: Sequence[Any],
    made: Callable[..., Any],
    settled: Callable[[Any, Exception | None], None],
    resends: int | None,
) -> None:
    """Publish what follows, and say later that it was not confirmed."""
    vars(record)["publish_each"] = publish_each
    publish_each(delays, items, made, lambda *_: None, resends)
    records, (came,) = record.Records(registry_of(delays)), items

    def is_far_behind() -> bool:
        (noted,) = records.get([came.occurrence.name])
        return noted is not None and noted.done_ms >= came.occurrence.instant_ms + AHEAD_MS

    wait_for(is_far_behind, "ten more occurrences", PATIENCE)
    settled(came, ConfirmTimeout("", "", "the broker did not confirm in time"))


vars(record)["publish_each"] = publish_late
