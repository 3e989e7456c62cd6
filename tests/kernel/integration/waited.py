"""Tasks that have waited in the levels: how they are told, and how they are made."""

import json
from typing import Any
from uuid import uuid4

from kombu import Connection

from celery_rabbitdelay.levels import headers

#: Seconds that a delayed task may be late on a slow machine.
SLACK = 60


def assert_waited(seen: dict[str, Any], since: float, delay: float) -> None:
    """Assert that a task waited in the levels for ``delay`` seconds from ``since`` on."""
    assert headers.DUE in seen["headers"], "it did not wait in the levels"
    due = seen["headers"][headers.DUE] / 1000
    # The header has whole milliseconds, rounded down.
    assert since + delay - 0.001 <= due <= seen["at"]
    assert since + delay <= seen["at"] < since + delay + SLACK
    assert seen["eta"] is None


def assert_not_delayed(seen: dict[str, Any]) -> None:
    """Assert that a task had no delay, neither in the levels nor in the worker."""
    assert headers.DUE not in seen["headers"]
    assert seen["eta"] is None


def put_into(connection: Connection, shop: Any, due: float, name: str = "look", **to: Any) -> str:
    """Publish a task as distribution does, with its due time alone; return its id."""
    task = shop.amqp.create_task_message(uuid4().hex, name, (), {})
    own = {**task.headers, headers.DUE: int(due * 1000)}
    properties = {**task.properties, "reply_to": shop.thread_oid}
    body = {"content_type": "application/json", "content_encoding": "utf-8"}
    options = {**properties, **body, **to}
    connection.Producer().publish(json.dumps(task.body), headers=own, **options)
    task_id: str = task.headers["id"]
    return task_id
