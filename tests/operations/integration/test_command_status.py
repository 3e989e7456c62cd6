"""``celery rabbitdelay status``: what waits, until when, and the workers."""

import re
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from kombu import Connection, Producer

from celery_rabbitdelay.testing import wait_for
from tests.json_schemas import checked, invoke
from tests.kernel.integration.modules import MODULES
from tests.kernel.integration.shop import PATIENCE
from tests.kernel.integration.waited import put_into
from tests.kernel.integration.worker import answer, run_celery

HOURS = [("hours", 6, 3600), ("tenths", 10, 360)]

#: Without waiting for workers.
STATUS = "status --timeout 0.1"


def with_worker(configuration: dict[str, Any], command: str) -> str:
    """Run a command until a worker has answered within its two seconds; return what it printed."""
    told: list[Any] = []

    def has_answered() -> bool:
        told[:] = [run_celery(configuration, f"{command} --timeout 2")]
        return "@localhost" in told[0].stdout

    wait_for(has_answered, "the answer of a worker", PATIENCE)
    assert told[0].returncode == 0, told[0].stderr
    return str(told[0].stdout)


def test_the_status_counts_each_level_and_digit_and_says_what_the_workers_do(
    connection: Connection,
    served_shop: Any,
    configuration: dict[str, Any],
    make_shop: Callable[..., Any],
) -> None:
    settings: dict[str, Any] = {"rabbitdelay_layout": HOURS, "rabbitdelay_shards": 2}
    shop = make_shop(**settings)
    for delay in (3600, 3600, 2 * 3600, 20 * 3600):
        shop.tasks["look"].apply_async(delay=delay)
    queue = served_shop.conf.task_default_queue
    late = put_into(connection, served_shop, time.time() - 90_000, routing_key=queue)
    served_shop.AsyncResult(late).get(timeout=PATIENCE)

    own = {**configuration, **settings}
    told = with_worker(own, "rabbitdelay status --digits")
    found = checked("status", with_worker(own, "rabbitdelay status --json"))

    assert f"  {'hours.x1':16} {3:10,} waiting" in told
    assert f"    {'hours.1':14} {2:10,}\n" in told
    assert "next due: within 1:54:00 (computed from queue depths)" in told
    assert re.search(r"tasks .* received, 90,\d\d\d\.\d latest", told)
    assert found["digits"]["hours.x1"] == {"1": 2, "2": 1, "3": 0, "4": 0, "5": 0}
    assert found["levels"] == {"hours.x1": 3, "tenths.x1": 0}
    assert found["others"]["meditation"] == {"messages": 1, "consumers": 0}
    assert found["next_due"]["within_ms"] == (2 * 3600 - 360) * 1000
    assert found["missing"] == []
    # Workers of other tests may still be there.
    answers = found["workers"].values()
    (modules,) = (each for each in answers if each.get("tasks", {}).get("latest", 0) > 90_000)
    assert set(modules) == {*MODULES, "tasks"}


def test_the_status_of_levels_that_do_not_stand_names_their_queues(
    configuration: dict[str, Any],
) -> None:
    urls = {
        "broker_read_url": "amqp://guest:guest@127.0.0.1:1//",
        # Asked is the broker that tasks are sent to.
        "broker_write_url": configuration["broker_url"],
    }
    found = answer({**configuration, **urls}, STATUS, "status", 1)
    assert f"{configuration['prefix']}.seconds.1" in found["missing"]
    assert found["next_due"]["within_ms"] is None


def test_the_status_exits_with_1_if_no_worker_serves_a_module_that_has_messages(
    connection: Connection, shop: Any
) -> None:
    shop.tasks["look"].apply_async(delay=3600)  # declares the levels
    assert invoke(shop, STATUS.split()).exit_code == 0
    queue = shop.rabbitdelay.topology.module_queues.distribution.name
    Producer(connection).publish("", routing_key=queue)
    # RabbitMQ counts nothing in a queue whose leader is slow to answer.
    wait_for(lambda: invoke(shop, STATUS.split()).exit_code == 1, "the message", PATIENCE)


def test_the_status_says_when_the_next_tracked_task_is_due(
    configuration: dict[str, Any], make_shop: Callable[..., Any], redis_url: str
) -> None:
    settings: dict[str, Any] = {"rabbitdelay_registry_url": redis_url, "rabbitdelay_track": "all"}
    shop, since = make_shop(**settings), time.time()
    for delay in (4 * 3600, 3600, 7200):
        shop.tasks["look"].apply_async(delay=delay)
    own = {**configuration, **settings}

    due = datetime.fromisoformat(answer(own, STATUS, "status")["next_due"]["tracked"])
    assert since + 3599 < due.timestamp() < time.time() + 3601

    away = {**own, "rabbitdelay_registry_url": "redis://127.0.0.1:1/0"}
    assert answer(away, STATUS, "status")["next_due"]["registry_error"]
