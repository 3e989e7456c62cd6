"""Delays where nothing can wait in RabbitMQ: in eager mode and on other brokers; wrong ones."""

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kombu import Connection

from celery_rabbitdelay import Celery, InvalidDelay, InvalidDelayType

WARNING = "treated as Celery's own countdown"


@pytest.mark.parametrize("delay", [True, datetime(2030, 1, 1, tzinfo=UTC), float("nan")])
def test_an_eager_task_with_a_delay_runs_at_once_and_one_warning_says_so(
    caplog: pytest.LogCaptureFixture, delay: Any
) -> None:
    app: Any = Celery("shop", broker="amqp://127.0.0.1:1", set_as_current=False)
    app.conf.task_always_eager = True

    @app.task(name="remind", bind=True, shared=False, max_retries=1)
    def remind(self: Any, options: dict[str, Any] | None = None) -> int:
        if options and self.request.retries == 0:
            raise self.retry(**options)
        return int(self.request.retries)

    with pytest.raises((InvalidDelay, InvalidDelayType)):
        remind.apply_async(delay=delay)
    assert WARNING not in caplog.text
    with caplog.at_level(logging.WARNING):
        assert remind.apply_async(delay=timedelta(days=3)).get() == 0
        assert remind.s().set(delay=3600).apply_async().get() == 0
        for options in ({"delay": 3600}, {"countdown": 3600}):
            assert remind.apply_async((options,)).get() == 1
    assert caplog.text.count(WARNING) == 1
    assert "task_always_eager" in caplog.text


def test_a_caller_s_connection_decides_who_holds_the_task(caplog: pytest.LogCaptureFixture) -> None:
    app: Any = Celery("shop", broker="amqp://127.0.0.1:1", set_as_current=False)
    app.conf.task_default_queue = "of-a-caller"
    with Connection("memory://") as connection, connection.SimpleQueue("of-a-caller") as found:
        for no_delay in ({}, {"delay": 0}, {"delay": -5}):
            app.send_task("remind", connection=connection, **no_delay)
            assert found.get_nowait().headers["eta"] is None
        assert WARNING not in caplog.text
        app.send_task("remind", delay=3600, connection=connection)
        rows = [{"args": (number,), "delay": 3600} for number in range(3)]
        report = app.rabbitdelay.send_many("remind", rows, tolerance=60, connection=connection)
        assert (found.qsize(), report.confirmed) == (4, 3)
        for _ in range(4):
            due = datetime.fromisoformat(found.get_nowait().headers["eta"])
            assert timedelta(minutes=50) < due - datetime.now(UTC) <= timedelta(hours=1)
    assert caplog.text.count(WARNING) == 1
