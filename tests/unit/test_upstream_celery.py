"""The private parts of Celery that the two files celery_internals.py use are where they look.

A test that fails names the part that a new version of Celery has moved. What every send, worker and
canvas of the integration tests needs is not repeated here.
"""

from __future__ import annotations

import inspect
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from unittest import mock

import celery
import pytest
from celery.app.task import Task
from celery.exceptions import InvalidTaskError, Reject
from celery.worker import state
from celery.worker.consumer.consumer import Consumer
from kombu.exceptions import DecodeError
from kombu.utils.limits import TokenBucket

from celery_rabbitdelay.app import celery_internals as of_app
from celery_rabbitdelay.worker import celery_internals as of_worker
from celery_rabbitdelay.worker import celery_requests


def moved(name: str, file: str = "app/celery_internals.py") -> str:
    return f"Celery {celery.__version__} has moved or changed {name}: mend {file}"


@pytest.fixture
def app() -> Any:
    app: Any = celery.Celery("shop", broker="memory://", set_as_current=False)

    @app.task(name="remind", shared=False)
    def remind(order: int) -> None: ...

    return app


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (
            celery.Celery.send_task,
            "self name args kwargs countdown eta task_id producer",
        ),
        (Task.retry, "self args kwargs exc throw eta countdown max_retries"),
        (Consumer.on_invalid_task, "self body message exc"),
        (Consumer.on_decode_error, "self message exc"),
    ],
)
def test_these_take_their_first_arguments_in_our_order(function: Any, names: str) -> None:
    order = [*inspect.signature(function).parameters]
    assert order[: len(names.split())] == names.split(), moved(f"the arguments of {function}")


def test_a_retry_rejects_what_it_cannot_send() -> None:
    assert "raise Reject(exc, requeue=False)" in inspect.getsource(Task.retry), moved(
        "what Task.retry raises when it cannot send", "app/task.py"
    )
    unsent = ValueError("x")
    assert Reject(unsent).args[0] is unsent, moved("Reject.args", "app/task.py")


def test_a_task_is_found_without_finalizing_the_application(app: Any) -> None:
    assert of_app.registered_task(app, "unknown") is None
    assert not app.finalized, moved("Celery._tasks, which finalizes the application now")
    app.finalize()
    assert of_app.registered_task(app, "remind") is not None, moved("Celery._tasks")


def test_a_task_that_its_rate_limit_holds_is_in_a_bucket_of_the_consumer() -> None:
    consumer: Any = Consumer.__new__(Consumer)
    consumer.task_buckets = {"limited": TokenBucket(1), "other": None}
    consumer._limit_order, consumer.timer = 0, mock.Mock()
    consumer.on_task_request = mock.Mock()

    def waits(task_id: str, task: str = "limited") -> bool:
        message: Any = mock.Mock(headers={"id": task_id})
        delivery = of_worker.Delivery(message, None, mock.Mock(), mock.Mock(), task, False)
        return of_worker.waits_for_rate(consumer, delivery)

    for each in ("first", "second"):
        request = mock.Mock(id=each)
        consumer._limit_task(request, consumer.task_buckets["limited"], 1)
        state.reserved_requests.discard(request)
        state.requests.pop(each, None)
    found = (waits("first"), waits("second"), waits("second", "other"))
    assert found == (False, True, False), moved("task_buckets", "worker/celery_internals.py")


@pytest.mark.parametrize(
    ("error", "handler"),
    [
        (InvalidTaskError("x"), "on_invalid_task"),
        (DecodeError("x"), "on_decode_error"),
        (TypeError("x"), "undeliverable"),
    ],
)
def test_errors_of_a_strategy_go_to_the_consumer(error: Exception, handler: str) -> None:
    called: list[str] = []
    consumer = mock.Mock(connection_errors=(), channel_errors=())
    for name in ("on_invalid_task", "on_decode_error"):
        getattr(consumer, name).side_effect = lambda *_, name=name: called.append(name)
    message: Any = None
    strategy = mock.Mock(side_effect=error)
    delivery = of_worker.Delivery(message, None, print, strategy, "task", False)
    celery_requests.run_strategy(consumer, delivery, lambda *_: called.append("undeliverable"))
    assert called == [handler]


def test_an_eta_is_read_as_celery_reads_it() -> None:
    instant, tokyo = datetime(2030, 1, 2, tzinfo=UTC), timezone(timedelta(hours=9))
    for value in (instant, instant.isoformat(), "2030-01-02T00:00:00"):
        assert of_app.eta_of(value, tokyo) == instant, moved("utils.time")
    wrong: list[Any] = [None, "tomorrow", 5]
    assert [of_app.eta_of(each, tokyo) for each in wrong] == [None] * 3
