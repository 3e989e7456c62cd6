"""The Celery application of the integration tests, in the tests' process and in workers'.

A worker is started with ``-A tests.integration.shop`` and gets its configuration as JSON in the
environment variable ``SHOP``; a test calls :func:`make_app` itself.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from kombu import Exchange, Queue

from celery_rabbitdelay import Celery
from celery_rabbitdelay.testing.servers import wait_for

#: Seconds until a result has to be there.
PATIENCE = 30

QUEUES = ("default", "second", "topic.reports", "topic.daily.reports", "mirror")


def make_app(configuration: dict[str, Any]) -> Celery:
    """Create the application.

    Args:
        configuration: Celery's settings, and ``prefix`` and ``queue_type`` for its queues.
    """
    settings = dict(configuration)
    prefix, queue_type = settings.pop("prefix"), settings.pop("queue_type", "quorum")
    app = Celery("shop", set_as_current=False)
    topic = Exchange(f"{prefix}.topic", type="topic")
    arguments = {"x-queue-type": queue_type}
    app.conf.update(
        task_default_queue=f"{prefix}.default",
        task_default_exchange_type="direct",
        task_queues=[
            Queue(f"{prefix}.default", queue_arguments=arguments),
            Queue(
                f"{prefix}.second",
                Exchange(f"{prefix}.direct", type="direct"),
                "second",
                queue_arguments=arguments,
            ),
            *(
                Queue(f"{prefix}.{name}", topic, name, queue_arguments=arguments)
                for name in ("topic.reports", "topic.daily.reports")
            ),
            Queue(
                f"{prefix}.mirror",
                Exchange(f"{prefix}.fanout", type="fanout"),
                queue_arguments=arguments,
            ),
        ],
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        **settings,
    )
    _add_tasks(app)
    return app


def _add_tasks(app: Celery) -> None:
    def seen(task: Any) -> dict[str, Any]:
        """What a task can see of its message, and when it ran."""
        info = task.request.delivery_info
        return {
            "at": time.time(),
            "exchange": info["exchange"],
            "routing_key": info["routing_key"],
            "priority": info["priority"],
            "retries": task.request.retries,
            "headers": task.request.headers or {},
            "eta": task.request.eta,
        }

    @app.task(bind=True, name="look", shared=False)
    def look(self: Any) -> dict[str, Any]:
        return seen(self)

    @app.task(bind=True, name="retry", shared=False, max_retries=5)
    def retry(self: Any, past: list[Any], times: int, options: dict[str, Any]) -> list[Any]:
        past = [*past, seen(self)]
        if self.request.retries < times:
            raise self.retry(args=(past, times, options), **options)
        return past

    @app.task(
        bind=True,
        name="autoretry",
        shared=False,
        autoretry_for=(ConnectionError,),
        retry_backoff=1,
        retry_jitter=False,
        max_retries=2,
    )
    def autoretry(self: Any) -> dict[str, Any]:
        if self.request.retries < 1:
            raise ConnectionError("the mail gateway does not answer")
        return seen(self)

    @app.task(bind=True, name="retry-when", shared=False)
    def retry_when(self: Any, key: str) -> str:
        """Retry as soon as the test says so, once; say when the message came a second time."""
        if self.request.retries:
            return "done"
        redis: Any = app.backend.client  # type: ignore[attr-defined]
        redis.set(key, "again" if redis.get(key) else "first")
        wait_for(lambda: redis.get(key) != b"first", "the test's word")
        raise self.retry(countdown=0.2)

    @app.task(name="celery-own", shared=False, rabbitdelay=False)
    def celery_own() -> None: ...


if "SHOP" in os.environ:
    app = make_app(json.loads(os.environ["SHOP"]))
