"""What ends a worker: a wrong setting, and a control queue that a node's crash has left behind."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.testing import wait_for
from tests.integration.shop import PATIENCE
from tests.integration.worker import Worker, run_celery

REFUSED = "RESOURCE_LOCKED"


@pytest.mark.parametrize(
    ("settings", "options", "told"),
    [
        ({"rabbitdelay_prefixx": "a"}, "", "did you mean rabbitdelay_prefix?"),
        ({}, "--rabbitdelay-modules chek", "takes a list of any of check-in, distribution, probe"),
    ],
)
def test_a_wrong_setting_ends_the_command_with_one_line(
    configuration: Any, settings: dict[str, Any], options: str, told: str
) -> None:
    ended = run_celery({**configuration, **settings}, f"worker -P solo {options}")
    assert ended.returncode == 1
    assert told in ended.stderr
    (line,) = (line for line in ended.stderr.splitlines() if "rabbitdelay_" in line)
    assert line.startswith("Error: ")
    assert "Traceback" not in ended.stderr + ended.stdout


def test_with_channel_errors_retried_it_waits_for_its_control_queue_and_works(
    shop: Any, configuration: Any, connection: Connection
) -> None:
    """A former connection of its own has the queue, which the broker still takes for alive."""
    worker = Worker({**configuration, "broker_channel_error_retry": True})
    name = f"{worker.name}.celery.pidbox"
    queue = Queue(name, durable=False, exclusive=True, auto_delete=True)
    holder = connection.clone()
    queue(holder.default_channel).queue_declare()

    def release() -> None:
        wait_for(lambda: worker.log.count(REFUSED) >= 2, "the second attempt")
        holder.release()

    broker = Thread(target=release)
    broker.start()
    try:
        worker.start()
        assert shop.tasks["look"].apply_async(delay=0.5).get(timeout=PATIENCE)
    finally:
        worker.stop()
        broker.join()
