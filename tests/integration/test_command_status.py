"""``celery rabbitdelay status`` with digits, reasons, the next due time, and ``--watch``."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from celery.platforms import EX_UNAVAILABLE
from kombu import Connection

from celery_rabbitdelay.kombu import declare
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.integration.arrivals import count
from tests.integration.shop import PATIENCE
from tests.integration.worker import run_celery, start_celery
from tests.json_schemas import checked

HOURS = [("hours", 6, 3600), ("tenths", 10, 360)]


def test_the_status_counts_each_digit_and_bounds_the_next_due_time(
    configuration: dict[str, Any], make_shop: Callable[..., Any]
) -> None:
    settings: dict[str, Any] = {"rabbitdelay_layout": HOURS, "rabbitdelay_shards": 2}
    shop = make_shop(**settings)
    for delay in (3600, 3600, 2 * 3600, 20 * 3600):
        shop.tasks["look"].apply_async(delay=delay)

    own = {**configuration, **settings}
    told = run_celery(own, "rabbitdelay status --timeout 0.1 --digits")
    found = checked("status", run_celery(own, "rabbitdelay status -t 0.1 --json").stdout)

    assert told.returncode == 0, told.stderr
    assert found["digits"]["hours.x1"] == {"1": 2, "2": 1, "3": 0, "4": 0, "5": 0}
    assert found["levels"]["hours.x1"] == 3
    assert found["undeliverable"] is None
    assert found["next_due"] == {
        "tracked": None,
        "within_ms": (2 * 3600 - 360) * 1000,
        "registry_error": None,
    }
    assert "next due: within 1:54:00, by what waits in the levels" in told.stdout
    assert f"    {'hours.1':14} {2:10,}\n" in told.stdout


def test_the_status_says_when_the_next_tracked_task_is_due(
    configuration: dict[str, Any], make_shop: Callable[..., Any], redis_url: str
) -> None:
    settings: dict[str, Any] = {
        "rabbitdelay_layout": HOURS,
        "rabbitdelay_registry_url": redis_url,
        "rabbitdelay_track": "all",
    }
    shop, since = make_shop(**settings), time.time()
    for delay in (4 * 3600, 3600, 7200):
        shop.tasks["look"].apply_async(delay=delay)
    own = {**configuration, **settings}

    found = checked("status", run_celery(own, "rabbitdelay status -t 0.1 -j").stdout)
    due = datetime.fromisoformat(found["next_due"]["tracked"]).timestamp()
    assert since + 3599 < due < time.time() + 3601
    told = run_celery(own, "rabbitdelay status -t 0.1")
    assert "of the tracked tasks" in told.stdout

    away = {**own, "rabbitdelay_registry_url": "redis://127.0.0.1:1/0"}
    lost = run_celery(away, "rabbitdelay status -t 0.1 -j")
    assert lost.returncode == 0, lost.stderr
    assert checked("status", lost.stdout)["next_due"]["registry_error"]


def test_the_reasons_of_undeliverable_messages_are_counted_and_the_messages_stay(
    configuration: dict[str, Any], make_shop: Callable[..., Any], connection: Connection
) -> None:
    shop = make_shop()
    topology = shop.rabbitdelay.topology
    declare(connection, topology)
    channel: Any
    with connection.channel() as channel:
        # Of all tenths of a second: a busy machine sends with less than the whole delay left.
        for queue in topology.level_queues["ms.x100"]:
            queue(channel).delete()
    for delay in (0.9, 0.9, 1.9):
        shop.tasks["look"].apply_async(delay=delay)
    name = topology.module_queues.undeliverable.name
    wait_for(lambda: count(connection, name) == 3, "undeliverable messages", PATIENCE)

    answer = run_celery(configuration, "rabbitdelay status -t 0.1 --reasons --json")
    limited = run_celery(configuration, "rabbitdelay status -t 0.1 --reasons 1")

    found = checked("status", answer.stdout)["undeliverable"]
    assert found["read"] == 3
    assert sum(found["counts"].values()) == 3
    reasons = [re.search("had no binding for digit [1-9]", each) for each in found["counts"]]
    assert all(reasons)
    assert "undeliverable, 1 messages read:" in limited.stdout
    wait_for(lambda: count(connection, name) == 3, "the messages stay", PATIENCE)


def test_reasons_of_levels_that_do_not_stand_are_none(configuration: dict[str, Any]) -> None:
    answer = run_celery(configuration, "rabbitdelay status -t 0.1 --reasons -j")
    assert answer.returncode == 1
    found = checked("status", answer.stdout)
    assert found["undeliverable"] is None
    assert found["next_due"]["within_ms"] is None


def test_watch_shows_rates_from_the_second_look_on_until_ctrl_c(
    configuration: dict[str, Any], make_shop: Callable[..., Any]
) -> None:
    shop = make_shop(rabbitdelay_layout=HOURS)
    shop.tasks["look"].apply_async(delay=3600)
    own = {**configuration, "rabbitdelay_layout": HOURS}
    command = "rabbitdelay status --timeout 0.1 --watch 0.1"
    pipe = subprocess.PIPE
    with start_celery(own, command, stdout=pipe, stderr=pipe) as watching:
        assert watching.stdout is not None
        seen: list[str] = []
        while not any(line.startswith("delayed tasks that workers") for line in seen):
            seen.append(watching.stdout.readline())
            assert watching.poll() is None
        first = seen.index(f"  {'hours.x1':16} {1:10,} waiting\n")
        assert f"  {'hours.x1':16} {1:10,} waiting {'+0.0':>10}/s\n" in seen[first:]
        shop.tasks["look"].apply_async(delay=3600)
        while not watching.stdout.readline().startswith(f"  {'hours.x1':16} {2:10,} waiting"):
            assert watching.poll() is None
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate(timeout=PATIENCE)
    assert watching.returncode == 0, errors
    assert not errors


def test_watch_ends_with_a_line_when_the_broker_goes_away(
    configuration: dict[str, Any], shop: Any, private_rabbitmq: RabbitMQServer
) -> None:
    command = "rabbitdelay status --timeout 0.1 --watch 0.1"
    pipe = subprocess.PIPE
    own = {**configuration, "broker_url": private_rabbitmq.url}
    with start_celery(own, command, stdout=pipe, stderr=pipe) as watching:
        assert watching.stdout is not None
        while not watching.stdout.readline().startswith("no worker"):
            assert watching.poll() is None
        private_rabbitmq.kill()
        try:
            _, errors = watching.communicate(timeout=PATIENCE)
        finally:
            private_rabbitmq.start()
    assert watching.returncode == EX_UNAVAILABLE
    (line,) = errors.splitlines()
    assert line.startswith("Error: cannot ask the broker ")


def test_watch_is_not_for_json(configuration: dict[str, Any]) -> None:
    told = run_celery(configuration, "rabbitdelay status --watch --json")
    assert told.returncode == 2
    assert "cannot be used with --watch" in told.stderr
