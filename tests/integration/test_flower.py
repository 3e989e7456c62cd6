"""The real Flower, beside a worker, while tracked tasks wait in the levels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests import CACHE
from tests.integration.management import node
from tests.integration.notes import Notes
from tests.integration.shop import PATIENCE, named
from tests.integration.worker import ShopProcess, Worker

__all__ = ["node"]


class Flower(ShopProcess):
    """``celery -A tests.integration.shop flower``.

    Args:
        settings: What :func:`tests.integration.shop.make_app` takes.
        api: The URL of the broker's management API.
    """

    package = "flower"

    def __init__(self, settings: dict[str, Any], api: str) -> None:
        super().__init__(settings)
        self._api = api

    def ask(self, path: str, method: str = "GET") -> str:
        """Return what a page, or the API, answers with the status 200."""
        request = Request(f"http://127.0.0.1:{self.port}/{path}", method=method)
        with urlopen(request, timeout=PATIENCE) as answer:
            return str(answer.read().decode())

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
        try:
            return self.ask("healthcheck") == "OK"
        except (URLError, OSError):
            return False


@pytest.fixture
def configuration(configuration: dict[str, Any], redis_url: str) -> dict[str, Any]:
    return {
        **configuration,
        "rabbitdelay_registry_url": redis_url,
        "rabbitdelay_registry_options": {"socket_timeout": PATIENCE},
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

    page = flower.ask(f"worker/{worker.name}")
    for shown in (waits.id, other.id, "waits &amp; sees", noted.key):
        assert shown in page
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


def test_tasks_in_the_levels_have_the_form_of_those_that_a_worker_holds(
    serve: Callable[..., Any], noted: Notes
) -> None:
    noted.shop = shop = serve(queue_type="classic")
    held = shop.tasks["celery-own"].apply_async(countdown=3600)
    waits = noted.send(7, delay=3600, track=True)
    long = noted.send([f"{number:04}" for number in range(90_000)], delay=3600, track=True)
    inspect = shop.control.inspect([shop.worker.name], timeout=PATIENCE, limit=1)
    found: dict[str, Any] = {}

    def are_shown() -> bool:
        (scheduled,) = inspect.scheduled().values()
        found.update((each["request"]["id"], each) for each in scheduled)
        return {held.id, waits.id, long.id} <= set(found)

    wait_for(are_shown, "all three", PATIENCE)
    celerys, ours = found[held.id], found[waits.id]
    assert set(ours) == set(celerys)
    assert set(ours["request"]) - set(celerys["request"]) == {"eta", "key", "job"}
    for each in ("args", "kwargs", "hostname", "delivery_info"):
        assert ours["request"][each].__class__ is celerys["request"][each].__class__
    assert datetime.fromisoformat(ours["eta"]) > datetime.now(UTC) + timedelta(minutes=30)
    assert ours["request"]["args"] == "(7,)"
    # Many long messages would hold up the worker.
    assert found[long.id]["request"]["args"] is None
    (asked,) = inspect.query_task(waits.id).values()
    assert asked[waits.id] == ["scheduled", ours["request"]]
