"""What ends a worker: a wrong setting, and what follows the crash of a node."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.testing import ServerNotStarted, wait_for
from tests.integration.shop import PATIENCE
from tests.integration.worker import Worker, run_celery

REFUSED = "RESOURCE_LOCKED"


@pytest.fixture
def holder(broker_url: str) -> Iterator[Connection]:
    """A connection that a worker has lost, and that the broker still takes for alive."""
    with Connection(broker_url) as connection:
        yield connection


def hold_control_queue(holder: Connection, worker: Worker) -> None:
    """Declare the queue of a worker's remote control, as a former connection of its own has."""
    name = f"{worker.name}.celery.pidbox"
    queue = Queue(name, durable=False, exclusive=True, auto_delete=True)
    queue(holder.default_channel).queue_declare()


@pytest.mark.parametrize(
    ("settings", "options", "told"),
    [
        ({"rabbitdelay_prefixx": "a"}, "", "did you mean rabbitdelay_prefix?"),
        ({"rabbitdelay_tick": 0}, "", "rabbitdelay_tick = 0: takes a positive number"),
        ({}, "--rabbitdelay-modules chek", "takes a list of any of check-in, distribution, probe"),
    ],
)
def test_a_wrong_setting_ends_the_command_with_one_line(
    configuration: dict[str, Any], settings: dict[str, Any], options: str, told: str
) -> None:
    ended = run_celery({**configuration, **settings}, f"worker -P solo {options}")
    assert ended.returncode == 1
    assert told in ended.stderr
    (line,) = (line for line in ended.stderr.splitlines() if "rabbitdelay_" in line)
    assert line.startswith("Error: ")
    assert "Traceback" not in ended.stderr + ended.stdout


def test_a_worker_whose_control_queue_is_held_ends(
    shop: Any, configuration: dict[str, Any], holder: Connection
) -> None:
    worker = Worker(configuration)
    hold_control_queue(holder, worker)
    try:
        with pytest.raises(ServerNotStarted):
            worker.start()
        assert "Unrecoverable error" in worker.log
        assert REFUSED in worker.log
    finally:
        worker.stop()


def test_with_channel_errors_retried_it_waits_for_its_control_queue_and_works(
    shop: Any, configuration: dict[str, Any], holder: Connection
) -> None:
    worker = Worker({**configuration, "broker_channel_error_retry": True})
    hold_control_queue(holder, worker)

    def release() -> None:
        wait_for(lambda: worker.log.count(REFUSED) >= 2, "the second attempt")
        holder.release()

    broker = Thread(target=release)
    broker.start()
    try:
        worker.start()
        assert shop.tasks["look"].apply_async(delay=0.5).get(timeout=PATIENCE)
        assert shop.control.ping(destination=[worker.name], timeout=PATIENCE, limit=1)
    finally:
        worker.stop()
        broker.join()
