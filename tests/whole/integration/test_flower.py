"""The real Flower, beside a worker, while tracked tasks wait in the levels."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests import CACHE
from tests.kernel.integration.notes import Notes
from tests.kernel.integration.shop import PATIENCE, named
from tests.kernel.integration.worker import ShopProcess, Worker, answers
from tests.operations.integration.management import node

__all__ = ["node"]


class Flower(ShopProcess):
    """``celery -A tests.kernel.integration.shop flower``.

    Args:
        settings: What :func:`tests.kernel.integration.shop.make_app` takes.
        api: The URL of the broker's management API.
    """

    package = "flower"

    def __init__(self, settings: dict[str, Any], api: str) -> None:
        super().__init__(settings)
        self._api = api

    def ask(self, path: str, method: str = "GET") -> str:
        """Return what a page, or the API, answers with the status 200."""
        answer = httpx.request(method, f"http://127.0.0.1:{self.port}/{path}", timeout=PATIENCE)
        return answer.raise_for_status().text

    def _command(self) -> list[str]:
        served = f"--address=127.0.0.1 --port={self.port} --broker-api={self._api}"
        return self.celery(f"flower {served} --inspect-timeout=10000")

    def _environment(self) -> dict[str, str]:
        environment = super()._environment()
        return {
            **environment,
            "PYTHONPATH": f"{environment['PYTHONPATH']}:{CACHE / 'flower'}",
            "FLOWER_UNAUTHENTICATED_API": "true",
        }

    def _ready(self) -> bool:
        return answers(f"http://127.0.0.1:{self.port}/healthcheck")


@pytest.fixture
def configuration(configuration: dict[str, Any], redis_url: str) -> dict[str, Any]:
    return {
        **configuration,
        "rabbitdelay_registry_url": redis_url,
        "task_send_sent_event": True,
        "worker_send_task_events": True,
    }


@pytest.fixture
def flower(configuration: dict[str, Any], node: RabbitMQServer) -> Iterator[Flower]:
    with Flower(configuration, f"{node.management_url}/api/") as flower:
        yield flower


def test_each_page_of_flower_answers_while_tasks_wait_and_its_revoke_cancels_one(
    shop: Any, worker: Worker, flower: Flower, noted: Notes
) -> None:
    wait_for(lambda: worker.name in flower.ask("workers?json=1"), "the worker's events", PATIENCE)
    waits = noted.send("waits & sees", delay=3600, track=True, key=noted.key)
    other = noted.send("other", delay=3600, track=True)

    assert worker.name in flower.ask(f"worker/{worker.name}")
    wait_for(lambda: waits.id in flower.ask("api/tasks"), "the events of the tasks", PATIENCE)
    assert "waits &amp; sees" in flower.ask(f"task/{waits.id}")
    for path in ("", "workers", "tasks", "metrics"):
        assert flower.ask(path), path
    assert named(shop, "default") in flower.ask("broker")

    revoked = noted.send("revoked", delay=15, track=True)
    assert "Revoked" in flower.ask(f"api/task/revoke/{revoked.id}", "POST")
    assert {each.task_id for each in shop.rabbitdelay.pending()} == {waits.id, other.id}
    assert noted.until(15) == []
    wait_for(lambda: revoked.state == "REVOKED", "its result", PATIENCE)
    assert "Traceback" not in flower.log
