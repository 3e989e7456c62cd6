"""``celery rabbitdelay``, run as a user does."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kombu import Connection, Queue

from celery_rabbitdelay.backlog import backlog_of
from tests.integration.worker import run_celery


def test_the_status_says_what_waits_where_and_what_the_workers_do(
    served_shop: Any, configuration: dict[str, Any], make_shop: Callable[..., Any]
) -> None:
    hours = {"rabbitdelay_layout": [("hours", 6, 3600), ("tenths", 10, 360)]}
    shop = make_shop(**hours)
    for delay in (3600, 3700, 7200, 20 * 3600):
        shop.tasks["look"].apply_async(delay=delay)

    told = run_celery({**configuration, **hours}, "rabbitdelay status")
    answer = run_celery({**configuration, **hours}, "rabbitdelay status --json")
    data = json.loads(answer.stdout)

    assert told.returncode == 0, told.stderr
    assert f"  {'hours.x1':16} {3:10,} waiting" in told.stdout
    assert data["levels"] == {"hours.x1": 3, "tenths.x1": 0}
    assert data["others"]["check-in"] == {"messages": 0, "consumers": 0}
    assert data["others"]["meditation"] == {"messages": 1, "consumers": 0}
    assert data["missing"] == []
    ((worker, modules),) = data["workers"].items()
    assert set(modules) == {"check-in", "distribution"}
    assert worker in told.stdout
    assert "received" in told.stdout


def test_the_status_of_levels_that_do_not_stand_names_their_queues(
    configuration: dict[str, Any],
) -> None:
    told = run_celery(configuration, "rabbitdelay status --timeout 0.1")

    assert told.returncode == 0, told.stderr
    assert "queues are missing: " in told.stdout


def test_the_status_of_an_application_without_levels_says_what_to_do(
    configuration: dict[str, Any],
) -> None:
    told = run_celery({**configuration, "broker_url": "memory://"}, "rabbitdelay status")

    assert told.returncode == 2
    assert "is not RabbitMQ" in told.stderr


def test_the_backlog_counts_every_shard(
    connection: Connection, make_topology: Callable[..., Any], queue: Queue
) -> None:
    topology = make_topology(shards=2)
    backlog = backlog_of(connection, topology)
    assert len(backlog.missing) == len(topology.queues)
    assert not any(backlog.levels.values())
    assert not backlog.others
