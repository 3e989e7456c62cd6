"""An occurrence of a schedule runs although others have long gone on when it may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_rabbitdelay.testing import wait_for
from tests.integration.notes import Notes, instants
from tests.integration.shop import PATIENCE
from tests.integration.test_schedules import (
    put,
    settings,
    shop,
    wait_until_none_is_missing,
    wait_until_ran,
)
from tests.integration.worker import Worker

__all__ = ["put", "settings", "shop"]


def test_an_occurrence_runs_although_its_confirm_comes_after_ten_others(
    settings: dict[str, Any], shop: Any, put: Callable[..., Any], noted: Notes
) -> None:
    late = {"imports": ["tests.integration.late_confirm"], "worker_prefetch_multiplier": 1}
    with Worker({**settings, "task_acks_late": True, **late}) as waits:
        first = int(put("a").next_at.timestamp())
        records = shop.rabbitdelay.schedules._records
        wait_for(lambda: records.get(["a"])[0].done_ms > 0, "the first decision", PATIENCE)
        with Worker(settings):
            wait_until_ran(noted, 10)
            wait_for(lambda: "waits, as the next is not published" in waits.log, "it", PATIENCE)
            wait_for(lambda: first in instants(noted, "a"), "the first occurrence", PATIENCE)
            wait_until_none_is_missing(noted)
    found = instants(noted, "a")
    assert found[0] == first
    assert len(set(found)) == len(found)
