"""Celery's private parts by which the end of a run is noticed; and the place in the queue."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from celery.worker import state
from celery.worker.consumer.consumer import Consumer
from kombu.utils.limits import TokenBucket

from celery_rabbitdelay.schedules import runs
from celery_rabbitdelay.schedules.arrivals import Arrivals
from celery_rabbitdelay.schedules.record import Decided
from celery_rabbitdelay.schedules.recurrence import ALL, Occurrence, Recurrence
from celery_rabbitdelay.worker.celery_internals import Delivery


def test_a_task_that_its_rate_limit_holds_is_in_a_bucket_of_the_consumer() -> None:
    consumer: Any = Consumer.__new__(Consumer)
    consumer.task_buckets = {"limited": TokenBucket(1), "other": None}
    consumer._limit_order, consumer.timer = 0, mock.Mock()
    consumer.on_task_request = mock.Mock()

    def waits(task_id: str, task: str = "limited") -> bool:
        message: Any = mock.Mock(headers={"id": task_id})
        delivery = Delivery(message, None, mock.Mock(), mock.Mock(), task, False)
        return runs.waits_for_rate(consumer, delivery)

    for each in ("first", "second"):
        request = mock.Mock(id=each)
        consumer._limit_task(request, consumer.task_buckets["limited"], 1)
        state.reserved_requests.discard(request)
        state.requests.pop(each, None)
    found = (waits("first"), waits("second"), waits("second", "other"))
    assert found == (False, True, False)


def test_a_copy_that_is_dropped_leaves_the_place_to_the_message_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrivals: Any = Arrivals.__new__(Arrivals)
    arrivals._registry, arrivals.act = mock.Mock(), mock.Mock()
    queue = mock.Mock()
    monkeypatch.setattr(runs, "queue", queue)
    hourly = Recurrence(("every 3600000",))
    occurrence = Occurrence("a", 1000, hourly, ALL, overlap="queue-one", turns=1)
    came: Any = mock.Mock(occurrence=occurrence, decided=Decided(False, None))
    arrivals._leave_out(came)
    assert not queue.called
    came.decided = Decided(True, None)
    arrivals._leave_out(came)
    queue.assert_called_once_with(arrivals._registry, occurrence, 0)
