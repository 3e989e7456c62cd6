"""A delayed task reaches the queue that it would have reached without a delay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from kombu import Connection, Exchange, Queue

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.worker.restore import restore
from tests.integration.arrivals import take


class Way(NamedTuple):
    """A way to say where a task goes: settings, the caller's options, and the queue in question."""

    to: str
    settings: Callable[[str], dict[str, Any]]
    options: Callable[[str], dict[str, Any]]


def _nothing(prefix: str) -> dict[str, Any]:
    return {}


def _default_topic(prefix: str) -> dict[str, Any]:
    """The default queue's exchange is a topic exchange, where a routing key alone decides."""
    return {"task_default_queue": f"{prefix}.topic.reports"}


WAYS = {
    "nothing": Way("default", _nothing, _nothing),
    "queue by name": Way("second", _nothing, lambda prefix: {"queue": f"{prefix}.second"}),
    "queue as an object": Way(
        "topic.daily.reports",
        _nothing,
        lambda prefix: {
            "queue": Queue(
                f"{prefix}.topic.daily.reports",
                Exchange(f"{prefix}.topic", type="topic"),
                "topic.daily.reports",
                queue_arguments={"x-queue-type": "quorum"},
            )
        },
    ),
    "exchange by name": Way(
        "second", _nothing, lambda prefix: {"exchange": f"{prefix}.direct", "routing_key": "second"}
    ),
    "exchange as an object": Way(
        "topic.reports",
        _nothing,
        lambda prefix: {
            "exchange": Exchange(f"{prefix}.topic", type="topic"),
            "routing_key": "topic.reports",
        },
    ),
    # Celery does not let the routing key decide here, but its default queue.
    "default exchange": Way(
        "default", _nothing, lambda prefix: {"exchange": "", "routing_key": f"{prefix}.second"}
    ),
    "routing key alone": Way(
        "topic.daily.reports", _default_topic, lambda prefix: {"routing_key": "topic.daily.reports"}
    ),
    "route to a queue": Way(
        "second", lambda prefix: {"task_routes": {"look": {"queue": f"{prefix}.second"}}}, _nothing
    ),
    "route to an exchange": Way(
        "topic.reports",
        lambda prefix: {
            "task_routes": {"look": {"exchange": f"{prefix}.topic", "routing_key": "topic.reports"}}
        },
        _nothing,
    ),
    "route with only a routing key": Way(
        "topic.daily.reports",
        lambda prefix: {
            **_default_topic(prefix),
            "task_routes": {"look": {"routing_key": "topic.daily.reports"}},
        },
        _nothing,
    ),
    "route that is a function": Way(
        "second",
        lambda prefix: {"task_routes": [lambda *call, **more: {"queue": f"{prefix}.second"}]},
        _nothing,
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_task_goes_where_it_would_go_without_a_delay(
    make_shop: Callable[..., Any], connection: Connection, prefix: str, way: str
) -> None:
    to, settings, options = WAYS[way]
    shop = make_shop(**settings(prefix))
    queues = list(shop.amqp.queues.values())
    for queue in queues:
        queue(connection.default_channel).declare()
    given = options(prefix)

    shop.tasks["look"].apply_async(**given)
    shop.tasks["look"].apply_async(**given, delay=0.2)
    undelayed, delayed = take(connection, queues, 2)

    assert undelayed.queue == delayed.queue == f"{prefix}.{to}"
    assert headers.DUE not in undelayed.message.headers
    assert delayed.message.headers[headers.QUEUE] == f"{prefix}.{to}"
    restore(delayed.message)
    for name in ("exchange", "routing_key"):
        assert delayed.message.delivery_info[name] == undelayed.message.delivery_info[name]
    assert delayed.body == undelayed.body
