"""The classes that an application brings do what they do in plain Celery, and know our options."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.publishing.declaration import delete
from tests.kernel.integration.brought_shop import TASKS, BroughtWorker, make_app
from tests.kernel.integration.conftest import delete_queue, small_configuration
from tests.kernel.integration.shop import PATIENCE


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


@pytest.mark.parametrize("name", TASKS)
def test_a_class_of_the_application_s_own_does_what_it_does_in_plain_celery(
    apps: dict[str, Any], name: str
) -> None:
    retry = {"countdown": 0.2}
    sends: dict[str, Callable[[Any], Any]] = {
        "apply_async": lambda app: app.tasks[name].apply_async((retry,)),
        "no arguments": lambda app: app.tasks[name].apply_async(),
        "send_task": lambda app: app.send_task(name, kwargs={"options": {}}),
        "signature": lambda app: app.tasks[name].s(retry).apply_async(countdown=0.2),
    }
    plain, ours = (
        {how: send(app) for how, send in sends.items()} for app in (apps["plain"], apps["ours"])
    )
    for how, result in plain.items():
        expected, seen = result.get(timeout=PATIENCE), ours[how].get(timeout=PATIENCE)
        assert seen == expected, how
        assert type(ours[how]).__name__ == type(result).__name__
    # And it takes our options.
    before, options = time.time(), {"delay": 0.2, "tolerance": 0.1}
    result = apps["ours"].tasks[name].apply_async((options,), delay=0.2)
    assert 1 in result.get(timeout=PATIENCE)  # retried
    assert time.time() - before >= 0.4
