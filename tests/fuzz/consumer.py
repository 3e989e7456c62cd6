"""Celery's own consumer and strategy, as in a worker, around a pool that runs nothing."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from types import SimpleNamespace
from typing import Any, Final

import celery
import kombu
from celery.exceptions import TaskRevokedError
from celery.worker.consumer import Consumer
from celery.worker.strategy import default
from kombu.asynchronous.timer import Timer


def _nothing(*_: Any, **__: Any) -> None:
    pass


class _Pool:
    """Sets the timers of the time limits, as the prefork pool does once a task has started."""

    def apply_async(self, *_: Any, soft_timeout: Any, timeout: Any, **__: Any) -> None:
        for seconds in filter(None, (soft_timeout, timeout)):
            timer = Timer()
            timer.call_after(seconds, _nothing)
            assert isfinite(timer.queue[0].eta), seconds


class _AnyTask(dict[str, Any]):
    """The same strategy for each name of a task."""

    def __missing__(self, name: str) -> Any:
        return self["any"]


def _on_task_received() -> Callable[[kombu.Message], None]:
    app: Any = celery.Celery("fuzzed", set_as_current=False)
    pool: Any = _Pool()

    def process(request: Any) -> None:
        try:
            request.execute_using_pool(pool)
        except TaskRevokedError:
            return
        request.on_accepted(1, 1.0)
        request.on_success((0, None, 0.0))

    consumer: Any = SimpleNamespace(
        **dict.fromkeys(("on_unknown_message", "on_unknown_task", "on_invalid_task"), _nothing),
        **dict.fromkeys(("on_decode_error", "apply_eta_task", "call_soon_ack"), _nothing),
        **dict.fromkeys(("_limit_task", "_limit_post_eta"), _nothing),
        _restore_prefetch_count_after_connection_restart=_nothing,
        app=app,
        hostname="fuzzed",
        connection_errors=(),
        event_dispatcher=None,
        timer=SimpleNamespace(call_at=_nothing),
        disable_rate_limits=True,
        task_buckets={},
        pool=pool,
        on_task_request=process,
        controller=SimpleNamespace(state=SimpleNamespace(revoked=set())),
        qos=SimpleNamespace(increment_eventually=_nothing),
        on_task_message=set(),
        _maximum_prefetch_restored=True,
    )
    task: Any = app.task(name="any", shared=False)(_nothing)
    consumer.strategies = _AnyTask(any=default(task, app, consumer))
    handler: Any = Consumer.create_task_handler
    received: Callable[[kombu.Message], None] = handler(consumer)
    return received


#: What a worker does with each message that it receives; see ``Consumer.create_task_handler``.
on_task_received: Final = _on_task_received()
