"""An occurrence of a schedule runs although others have long gone on when it may."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from celery_rabbitdelay.testing import wait_for
from tests.integration.shop import PATIENCE
from tests.integration.test_schedules import Stage, redis_setup, settings, shop, stage
from tests.integration.worker import Worker

__all__ = ["redis_setup", "settings", "shop", "stage"]


def test_an_occurrence_runs_although_its_confirm_comes_after_ten_others(stage: Stage) -> None:
    late = {"imports": ["tests.integration.late_confirm"], "worker_prefetch_multiplier": 1}
    with Worker({**stage.settings, "task_acks_late": True, **late}) as waits:
        first = int(time.time()) + 5
        stage.put("a", start=datetime.fromtimestamp(first, UTC))
        records = stage.shop.rabbitdelay.schedules._records
        wait_for(lambda: records.get(["a"])[0].done_ms > 0, "the first decision", PATIENCE)
        with Worker(stage.settings):
            stage.until_ran(10)
            wait_for(lambda: "waits, as the next is not published" in waits.log, "it", PATIENCE)
            wait_for(lambda: first in stage.instants(), "the first occurrence", PATIENCE)
            stage.until_none_is_missing()
    found = stage.instants()
    assert found[0] == first
    assert len(set(found)) == len(found)
