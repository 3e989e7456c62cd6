"""Pauses, without waiting for what is paused; see also ``test_pause.py``.

Pauses of names and queues among all other decisions are in ``test_recorded_sequences.py``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from celery_rabbitdelay import Outcome
from celery_rabbitdelay.testing import Travel
from celery_rabbitdelay.testing.session import Worker
from tests.integration.notes import Notes
from tests.integration.shop import PATIENCE
from tests.integration.travelling_shop import rabbitdelay_celery_app, shop, worker

__all__ = ["rabbitdelay_celery_app", "shop", "worker"]

#: Seconds until the tasks are due.
DELAY = 1.0


def test_what_is_cancelled_while_it_is_paused_does_not_wait_for_the_resume(
    shop: Any, worker: Worker, noted: Notes, travel: Travel
) -> None:
    shop.rabbitdelay.pause(task="note")
    cancelled, revoked, untracked, kept = (
        noted.send(name, delay=DELAY, track=name != "untracked")
        for name in ("cancelled", "revoked", "untracked", "kept")
    )
    older = noted.send("older", delay=DELAY, key="order")
    shop.rabbitdelay.open_job("import", expires=3600)
    aborted = noted.send("aborted", delay=DELAY, job="import")
    travel(seconds=4)
    assert shop.rabbitdelay.cancel(cancelled) is Outcome.DONE
    revoked.revoke()
    assert shop.rabbitdelay.cancel(untracked) is Outcome.NOTED
    noted.send("newer", delay=DELAY, key="order")
    shop.rabbitdelay.abort_job("import")
    travel(seconds=10)
    for result in (cancelled, revoked, untracked, older, aborted):
        with pytest.raises(TaskRevokedError):
            result.get(timeout=PATIENCE)
    assert (noted(), kept.state) == ([], "DELAYED")
    shop.rabbitdelay.resume(task="note")
    travel.until(travel.nothing_waits)
    assert Counter(noted()) == Counter({"kept", "newer"})


def test_a_day_past_a_pause_has_few_stops_and_what_is_resumed_runs_at_once(
    shop: Any, worker: Worker, noted: Notes, travel: Travel
) -> None:
    shop.rabbitdelay.pause(task="note")
    noted.send("held", delay=DELAY)
    shop.rabbitdelay.open_job("late", expires=86_000)
    expired = noted.send("expired", delay=DELAY, job="late")
    travel(seconds=86_010)
    assert noted() == []
    with pytest.raises(TaskRevokedError):
        expired.get(timeout=PATIENCE)
    assert shop.rabbitdelay.resume(task="note")
    travel(seconds=1)
    assert noted() == ["held"]
