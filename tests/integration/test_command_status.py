"""``celery rabbitdelay status``: what waits, why, until when, the workers, and ``--watch``."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from kombu import Connection

from celery_rabbitdelay.kombu import declare
from celery_rabbitdelay.testing import wait_for
from tests.integration.arrivals import count
from tests.integration.modules import MODULES
from tests.integration.shop import PATIENCE
from tests.integration.waited import put_into
from tests.integration.worker import PlainWorker, answer, run_celery, run_command, start_celery
from tests.json_schemas import checked
from tests.unit.clock import frozen

HOURS = [("hours", 6, 3600), ("tenths", 10, 360)]

#: Without waiting for workers.
STATUS = "status --timeout 0.1"


def with_worker(configuration: dict[str, Any], command: str, name: str = "@localhost") -> Any:
    """Run a command until a worker has answered within its two seconds; return its result."""
    told: list[Any] = []

    def has_answered() -> bool:
        told[:] = [run_celery(configuration, f"{command} --timeout 2")]
        return name in told[0].stdout

    wait_for(has_answered, "the answer of a worker", PATIENCE)
    return told[0]


def test_the_status_counts_each_level_and_digit_and_says_what_the_workers_do(
    served_shop: Any, configuration: dict[str, Any], make_shop: Callable[..., Any]
) -> None:
    settings: dict[str, Any] = {"rabbitdelay_layout": HOURS, "rabbitdelay_shards": 2}
    shop = make_shop(**settings)
    for delay in (3600, 3600, 2 * 3600, 20 * 3600):
        shop.tasks["look"].apply_async(delay=delay)

    own = {**configuration, **settings}
    told = with_worker(own, "rabbitdelay status --digits")
    found = checked("status", with_worker(own, "rabbitdelay status --json").stdout)

    assert told.returncode == 0, told.stderr
    assert found["digits"]["hours.x1"] == {"1": 2, "2": 1, "3": 0, "4": 0, "5": 0}
    assert found["levels"] == {"hours.x1": 3, "tenths.x1": 0}
    assert f"  {'hours.x1':16} {3:10,} waiting" in told.stdout
    assert f"    {'hours.1':14} {2:10,}\n" in told.stdout
    assert found["others"]["check-in"] == {"messages": 0, "consumers": 0}
    assert found["others"]["meditation"] == {"messages": 1, "consumers": 0}
    assert found["undeliverable"] is None
    assert found["missing"] == []
    assert found["next_due"] == {
        "tracked": None,
        "within_ms": (2 * 3600 - 360) * 1000,
        "registry_error": None,
    }
    assert "next due: within 1:54:00, by what waits in the levels" in told.stdout
    ((worker, modules),) = found["workers"].items()
    assert set(modules) == {*MODULES, "tasks"}
    assert worker in told.stdout
    assert "received" in told.stdout


def test_the_status_of_levels_that_do_not_stand_names_their_queues(
    configuration: dict[str, Any],
) -> None:
    shards = {**configuration, "rabbitdelay_shards": 2}
    told = run_command(shards, STATUS)
    found = answer(shards, f"{STATUS} --reasons", "status", 1)

    assert told.returncode == 1, told.stderr
    assert "queues are missing: " in told.stdout
    assert not told.stderr
    first = f"{configuration['prefix']}.seconds.1"
    assert {f"{first}.s0", f"{first}.s1"} <= set(found["missing"])
    assert found["undeliverable"] is None
    assert found["next_due"]["within_ms"] is None


def test_the_status_is_that_of_the_broker_that_tasks_are_sent_to(
    configuration: dict[str, Any], shop: Any
) -> None:
    shop.tasks["look"].apply_async(delay=5)
    urls = {
        "broker_read_url": "amqp://guest:guest@127.0.0.1:1//",
        "broker_write_url": configuration["broker_url"],
    }
    told = run_command({**configuration, **urls}, STATUS)
    assert told.returncode == 0, told.stderr


def test_the_status_says_which_workers_are_of_plain_celery(
    configuration: dict[str, Any], shop: Any
) -> None:
    with PlainWorker(configuration):
        told = with_worker(configuration, "rabbitdelay status", "plain@localhost")

    assert "plain@localhost: cannot answer: " in told.stdout
    assert "Traceback" not in told.stderr


def test_celery_inspect_knows_the_status_of_the_modules(
    served_configuration: dict[str, Any],
) -> None:
    listed = run_celery(served_configuration, "inspect --list")
    told = with_worker(served_configuration, "inspect rabbitdelay_status --json")

    assert "Rates and backlog of the modules" in listed.stdout
    assert told.returncode == 0, told.stderr
    (modules,) = json.loads(told.stdout.splitlines()[0]).values()
    assert set(modules) == {*MODULES, "tasks"}


def test_the_status_says_how_late_delayed_tasks_arrive(
    connection: Connection, served_shop: Any, served_configuration: dict[str, Any]
) -> None:
    queue = served_shop.conf.task_default_queue
    task_id = put_into(connection, served_shop, time.time() - 90_000, routing_key=queue)
    served_shop.AsyncResult(task_id).get(timeout=PATIENCE)

    told = with_worker(served_configuration, "rabbitdelay status")

    assert re.search(r"tasks .* received, at most 90,\d\d\d\.\d s late", told.stdout)


def test_the_status_of_an_application_without_levels_says_what_to_do(
    configuration: dict[str, Any],
) -> None:
    told = run_command({**configuration, "broker_url": "memory://"}, "status")

    assert told.returncode == 2
    assert "is not RabbitMQ" in told.stderr


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

    found = answer(own, STATUS, "status")
    due = datetime.fromisoformat(found["next_due"]["tracked"]).timestamp()
    assert since + 3599 < due < time.time() + 3601
    assert "of the tracked tasks" in run_command(own, STATUS).stdout

    away = {**own, "rabbitdelay_registry_url": "redis://127.0.0.1:1/0"}
    assert answer(away, STATUS, "status")["next_due"]["registry_error"]


def test_the_reasons_of_undeliverable_messages_are_counted_and_the_messages_stay(
    configuration: dict[str, Any], shop: Any, connection: Connection
) -> None:
    topology = shop.rabbitdelay.topology
    declare(connection, topology)
    channel: Any = connection.default_channel
    channel.queue_delete(f"{topology.prefix}.ms.900")
    with frozen():
        for delay in (0.9, 0.9, 1.9):
            shop.tasks["look"].apply_async(delay=delay)
    name = topology.module_queues.undeliverable.name
    wait_for(lambda: count(connection, name) == 3, "undeliverable messages", PATIENCE)

    found = answer(configuration, f"{STATUS} --reasons", "status", 1)["undeliverable"]
    limited = run_command(configuration, f"{STATUS} --reasons 1")

    assert found["read"] == 3
    assert sum(found["counts"].values()) == 3
    reasons = [re.search("had no binding for digit [1-9]", each) for each in found["counts"]]
    assert all(reasons)
    assert "undeliverable, 1 messages read:" in limited.stdout
    wait_for(lambda: count(connection, name) == 3, "the messages stay", PATIENCE)


def test_watch_shows_rates_from_the_second_look_on_until_ctrl_c(
    configuration: dict[str, Any], make_shop: Callable[..., Any]
) -> None:
    shop = make_shop(rabbitdelay_layout=HOURS)
    shop.tasks["look"].apply_async(delay=3600)
    own = {**configuration, "rabbitdelay_layout": HOURS}
    command, pipe = f"rabbitdelay {STATUS} --watch 0.1", subprocess.PIPE
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


def test_watch_is_not_for_json(configuration: dict[str, Any]) -> None:
    told = run_command(configuration, "status --watch --json")
    assert told.returncode == 2
    assert "cannot be used with --watch" in told.stderr
