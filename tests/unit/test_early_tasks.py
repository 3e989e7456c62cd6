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
from celery_rabbitdelay.worker.early_tasks import Early, EarlyTasks


def test_one_that_waits_takes_no_place_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    app: Any = Celery("later", broker="amqp://", set_as_current=False)
    # Without an event loop, the thread runs its actions itself.
    consumer: Any = SimpleNamespace(
        app=app,
        hub=None,
        connection_errors=(),
        qos=QoS(lambda prefetch_count: None, 4),
        perform_pending_operations=int,
    )
    thread, held, acknowledged = EarlyTasks(consumer), [], []
    now, destination = Due.after(0), Destination(Queue("q"), "", "q")

    def early(number: int) -> Early:
        return Early(
            Message(""),
            destination,
            now,
            now.at_ms,
            None,
            lambda *errors: acknowledged.append(number),
            lambda: held.append(number),
            "it is of a later version",
        )

    tasks = [early(0), early(1)]
    error = ConfirmTimeout("levels", "key", "no confirm in time")
    with caplog.at_level(logging.WARNING):
        for each in [*tasks, *tasks]:
            thread._settled(each, error)
    assert (held, consumer.qos.value, len(caplog.records)) == ([0, 1, 0, 1], 6, 1)
    for each in tasks:
        thread._settled(each, None)
    assert (acknowledged, consumer.qos.value) == ([0, 1], 4)
