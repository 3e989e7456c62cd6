"""The Celery application of the integration tests, in the tests' process and in workers'.

A worker is started with ``-A tests.kernel.integration.shop`` and gets its configuration as JSON in
the environment variable ``SHOP``; a test calls :func:`make_app` itself.
"""

import json
import os
import signal
import time
from typing import Any, Final

import celery
from kombu import Exchange, Queue
from kombu.common import Broadcast

from celery_rabbitdelay import Celery
from celery_rabbitdelay.testing import servers, wait_for

#: Seconds until a result has to be there.
PATIENCE: Final = servers.PATIENCE

QUEUES = ("default", "second", "topic.reports", "topic.daily.reports", "mirror")

#: Tasks that note that they ran, and their options.
NOTES: dict[str, dict[str, Any]] = {
    "note": {},
    "compressed-note": {"compression": "gzip"},
    "tracked-note": {"track": True},
    "late-note": {"acks_late": True},
}

#: Tasks that kill the process that runs them, by what Celery then does with them; to send them
#: anew is new in Celery 5.7.
LOST = ["lost", *(["lost-retry"] if hasattr(celery.Task, "retry_on_worker_lost") else [])]

#: Tasks that fail once: options of Celery's ``autoretry_for``.
AUTORETRIES: dict[str, dict[str, Any]] = {
    "autoretry": {"retry_backoff": 1},
    "autoretry-delay": {"retry_kwargs": {"delay": 0.4}},
    "autoretry-both": {"retry_kwargs": {"delay": 1000}, "retry_backoff": 1},
    "autoretry-wrong": {"retry_kwargs": {"delay": "soon"}},
}


def make_app(configuration: dict[str, Any]) -> Celery:
    """Create the application.

    Args:
        configuration: Celery's settings, ``prefix`` and ``queue_type`` for its queues,
            ``passing_queue``, ``exclusive_queue`` and ``broadcast_queue``: True for one more, which
            goes with its worker, and ``knows_tasks``: False for a producer that knows the tasks by
            name only.
    """
    settings = dict(configuration)
    knows_tasks = settings.pop("knows_tasks", True)
    prefix, queue_type = settings.pop("prefix"), settings.pop("queue_type", "quorum")
    passing = settings.pop("passing_queue", False)
    exclusive = settings.pop("exclusive_queue", False)
    broadcast = settings.pop("broadcast_queue", False)
    app = Celery("shop", set_as_current=False)
    topic = Exchange(f"{prefix}.topic", type="topic")

    def queue(name: str, *args: Any) -> Queue:
        arguments = {"x-queue-type": queue_type}
        return Queue(f"{prefix}.{name}", *args, queue_arguments=arguments)

    app.conf.update(
        task_default_queue=settings.pop("task_default_queue", f"{prefix}.default"),
        task_default_exchange_type="direct",
        task_queues=[
            queue("default"),
            queue("second", Exchange(f"{prefix}.direct", type="direct"), "second"),
            *(queue(name, topic, name) for name in ("topic.reports", "topic.daily.reports")),
            queue("mirror", Exchange(f"{prefix}.fanout", type="fanout")),
            *([Queue(f"{prefix}.passing", auto_delete=True)] if passing else []),
            *([Queue(f"{prefix}.exclusive", exclusive=True)] if exclusive else []),
            *([Broadcast(f"{prefix}.everybody", queue=f"{prefix}.one")] if broadcast else []),
        ],
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        **settings,
    )
    if knows_tasks:
        _add_tasks(app)
        _add_tasks_that_send(app)
        _add_tasks_that_fail(app)
    return app


def named(app: Any, name: str) -> str:
    """Return the whole name of one of :data:`QUEUES`."""
    return f"{app.rabbitdelay.topology.prefix}.{name}"


def seen(task: Any, *given: Any) -> dict[str, Any]:
    """What a task can see of its message, when it ran, and what it was given."""
    info = task.request.delivery_info
    return {
        "at": time.time(),
        "exchange": info["exchange"],
        "routing_key": info["routing_key"],
        "priority": info["priority"],
        "correlation_id": task.request.correlation_id,
        "reply_to": task.request.reply_to,
        "retries": task.request.retries,
        "headers": task.request.headers or {},
        "eta": task.request.eta,
        "given": given,
    }


@celery.shared_task(bind=True, name="shared-retry", max_retries=1)
def shared_retry(self: Any, options: dict[str, Any]) -> dict[str, Any]:
    """A task of no application in particular, as reusable packages have them."""
    if self.request.retries < 1:
        raise self.retry(**options)
    return seen(self)


def _add_tasks(app: Celery) -> None:
    @app.task(bind=True, name="look", shared=False)
    def look(self: Any, *given: Any) -> dict[str, Any]:
        return seen(self, *given)

    @app.task(name="at", shared=False)
    def at(*given: Any) -> dict[str, Any]:
        """When it ran, for tasks without a message of their own (map, starmap, chunks)."""
        return {"at": time.time(), "given": given}

    @app.task(bind=True, name="request", shared=False)
    def request(self: Any) -> Any:
        """Everything that a task can see of its message."""
        return json.loads(json.dumps(vars(self.request), default=repr))

    @app.task(bind=True, name="request-again", shared=False)
    def request_again(self: Any, options: dict[str, Any]) -> Any:
        """Retry once; then tell the same as ``request``."""
        if not self.request.retries:
            raise self.retry(**{"countdown": 0, **options} if "delay" not in options else options)
        return json.loads(json.dumps(vars(self.request), default=repr))

    def note(self: Any, *given: Any, key: str) -> None:
        """Note in Redis that it ran and what it saw, for tasks without a result."""
        redis: Any = app.backend.client  # type: ignore[attr-defined]
        redis.rpush(key, json.dumps(seen(self, *given)))

    for name, options in NOTES.items():
        register: Any = app.task(bind=True, name=name, shared=False, **options)
        register(note)

    @app.task(name="celery-own", shared=False, rabbitdelay=False)
    def celery_own() -> None: ...


def _add_tasks_that_send(app: Celery) -> None:
    @app.task(bind=True, name="replace", shared=False)
    def replace(self: Any, *signature: dict[str, Any]) -> None:
        """Be replaced with another task."""
        raise self.replace(app.signature(signature[-1]))

    @app.task(name="send", shared=False)
    def send(name: str, options: dict[str, Any]) -> str:
        """Send another task; return its id."""
        return str(app.send_task(name, **options).id)

    @app.task(name="send-shared", shared=False)
    def send_shared(*args: Any) -> str:
        """Send the shared task, which takes whichever application is the current one."""
        options: dict[str, Any] = {"delay": 0.3}
        return str(shared_retry.apply_async(args, **options).id)


def _add_tasks_that_fail(app: Any) -> None:
    @app.task(name="fail", shared=False)
    def fail() -> None:
        raise ValueError("this task fails")

    @app.task(bind=True, name="retry", shared=False, max_retries=5)
    def retry(self: Any, past: list[Any], times: int, options: dict[str, Any]) -> list[Any]:
        past = [*past, seen(self)]
        if self.request.retries < times:
            raise self.retry(args=(past, times, options), **options)
        return past

    @app.task(bind=True, name="continue", shared=False, max_retries=5)
    def go_on(self: Any, past: list[Any], steps: list[dict[str, Any]]) -> list[Any]:
        """Retry, or be replaced by itself, as each step says."""
        past = [*past, seen(self)]
        if not steps:
            return past
        step, args = steps[0], (past, steps[1:])
        if word := step.pop("after", None):
            redis: Any = app.backend.client
            redis.set(word, "asked")
            wait_for(lambda: redis.get(word) == b"go on", "the test's word")
        if "replace" in step:
            raise self.replace(self.si(*args).set(**step["replace"]))
        raise self.retry(args=args, **step)

    def autoretry(self: Any) -> dict[str, Any]:
        if self.request.retries < 1:
            raise ConnectionError("the mail gateway does not answer")
        return seen(self)

    for name, own in AUTORETRIES.items():
        options = {"autoretry_for": (Exception,), "retry_jitter": False, **own}
        fail_once: Any = app.task(bind=True, name=name, shared=False, **options)
        fail_once(autoretry)

    far = {"retry_backoff": 9000, "retry_backoff_max": 4000, "retry_jitter": False}
    app.task(bind=True, name="backoff", shared=False, autoretry_for=(Exception,), **far)(autoretry)

    for name, option in (("lost", "reject_on_worker_lost"), ("lost-retry", "retry_on_worker_lost")):
        late = {"acks_late": True, "default_retry_delay": 1, option: True}

        @app.task(bind=True, name=name, shared=False, **late)
        def lost(self: Any, key: str) -> dict[str, Any]:
            """Kill the process that runs it, the first time."""
            redis: Any = app.backend.client
            if redis.rpush(key, json.dumps(seen(self))) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return seen(self)

    @app.task(bind=True, name="retry-when", shared=False)
    def retry_when(self: Any, key: str) -> str:
        """Retry as soon as the test says so, once; say when the message came a second time."""
        if self.request.retries:
            return "done"
        redis: Any = app.backend.client
        redis.set(key, "again" if redis.get(key) else "first")
        wait_for(lambda: redis.get(key) != b"first", "the test's word")
        raise self.retry(countdown=0.2)

    @app.task(bind=True, name="hold", shared=False)
    def hold(self: Any, *given: Any, key: str) -> None:
        """Note that it runs, and end when the test says so."""
        redis: Any = app.backend.client
        redis.rpush(key, json.dumps(seen(self, *given)))
        wait_for(lambda: redis.get(f"{key}:ends"), "the test's word", 3600)

    @app.task(bind=True, name="retry-together", shared=False)
    def retry_together(self: Any, past: list[Any], key: str, size: int) -> list[Any]:
        """Retry once, in the same moment as the others of a group of ``size`` tasks."""
        past = [*past, seen(self)]
        if self.request.retries:
            return past
        redis: Any = app.backend.client
        last_of_the_group = -(-redis.incr(key) // size) * size
        wait_for(lambda: int(redis.get(key)) >= last_of_the_group, "the others of the group")
        raise self.retry(args=(past, key, size), countdown=0.5)


if "SHOP" in os.environ:
    app = make_app(json.loads(os.environ["SHOP"]))
