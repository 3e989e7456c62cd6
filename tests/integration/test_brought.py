"""The classes that an application brings do what they do in plain Celery, and know our options."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay import Celery
from celery_rabbitdelay.publishing.declaration import delete
from tests.integration.brought_shop import TASKS, BroughtWorker, make_app
from tests.integration.conftest import delete_queue, small_configuration
from tests.integration.shop import PATIENCE


@pytest.fixture(scope="module")
def apps(module_broker_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """The application without this package and with it, each with a worker."""
    apps: dict[str, Any] = {}
    with ExitStack() as stack:
        for name, installs in (("plain", False), ("ours", True)):
            settings = small_configuration(module_broker_url, redis_url, f"test-{uuid4().hex[:8]}")
            prefix = settings.pop("prefix")
            # Plain Celery holds what is delayed: it does so in a classic queue only.
            settings |= {"task_default_queue": f"{prefix}-brought", "installs": installs}
            stack.enter_context(BroughtWorker(settings))
            apps[name] = make_app(settings)
            stack.callback(apps[name].close)
        yield apps
        with Connection(module_broker_url) as connection:
            delete(connection, apps["ours"].rabbitdelay.topology, force=True)
            for app in apps.values():
                delete_queue(connection, Queue(app.conf.task_default_queue))


@pytest.mark.parametrize("retry", [{}, {"countdown": 0.2}], ids=str)
@pytest.mark.parametrize("name", TASKS)
def test_a_class_of_the_application_s_own_does_what_it_does_in_plain_celery(
    apps: dict[str, Any], name: str, retry: dict[str, Any]
) -> None:
    sends: dict[str, Callable[[Any], Any]] = {
        "apply_async": lambda app: app.tasks[name].apply_async((retry,)),
        "countdown": lambda app: app.tasks[name].apply_async((retry,), countdown=0.2),
        "no arguments": lambda app: app.tasks[name].apply_async(),
        "name alone": lambda app: app.send_task(name),
        "send_task": lambda app: app.send_task(name, kwargs={"options": retry}),
        "signature": lambda app: app.tasks[name].s(retry).apply_async(countdown=0.2),
    }
    plain, ours = (
        {how: send(app) for how, send in sends.items()} for app in (apps["plain"], apps["ours"])
    )
    for how, result in plain.items():
        expected, seen = result.get(timeout=PATIENCE), ours[how].get(timeout=PATIENCE)
        assert seen == expected, how
        assert type(ours[how]).__name__ == type(result).__name__


@pytest.mark.parametrize("name", TASKS)
def test_a_task_of_any_class_takes_our_options(apps: dict[str, Any], name: str) -> None:
    app = apps["ours"]
    assert issubclass(type(app), Celery)
    for options in ({"delay": 0.2}, {"delay": 0.2, "tolerance": 0.1}):
        before = time.time()
        result = app.tasks[name].apply_async((options,), delay=0.2)
        seen = result.get(timeout=PATIENCE)
        assert 1 in seen  # retried
        assert time.time() - before >= 0.4
