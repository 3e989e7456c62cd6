"""Tasks of a later version that the levels do not take at the moment."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from kombu import Message, Queue
from kombu.common import QoS

from celery_rabbitdelay import Celery, ConfirmTimeout
from celery_rabbitdelay.kombu import Destination, Due
from celery_rabbitdelay.worker import batch_thread
from celery_rabbitdelay.worker.early_tasks import TRY_AGAIN, Early, EarlyTasks
from tests.unit.clock import Clock


def test_one_that_waits_takes_no_place_and_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_thread, "time", Clock(1000))
    app: Any = Celery("later", broker="amqp://", set_as_current=False)
    # Without an event loop, the thread runs its actions itself.
    consumer: Any = SimpleNamespace(
        app=app,
        hub=None,
        connection_errors=(),
        qos=QoS(lambda prefetch_count: None, 4),
        perform_pending_operations=int,
    )
    thread, acknowledged = EarlyTasks(consumer), []
    now, destination = Due.after(0), Destination(Queue("q"), "", "q")

    def early(number: int) -> Early:
        return Early(
            Message(""),
            destination,
            now,
            now.at_ms,
            None,
            lambda *errors: acknowledged.append(number),
            later_version="it is of a later version",
        )

    tasks = [early(0), early(1)]
    error = ConfirmTimeout("levels", "key", "no confirm in time")
    with caplog.at_level(logging.WARNING):
        for each in [*tasks, *tasks]:
            thread._settled(each, error)
    assert (consumer.qos.value, len(caplog.records)) == (6, 1)
    given = [thread._given.get() for _ in range(4)]
    assert given == [(1000 + TRY_AGAIN, each) for each in (*tasks, *tasks)]
    for each in tasks:
        thread._settled(each, None)
    assert (acknowledged, consumer.qos.value) == ([0, 1], 4)
