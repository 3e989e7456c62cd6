"""What tools such as Flower ask a worker for: tasks in the levels have the form of Celery's own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from celery_rabbitdelay.testing import wait_for
from tests.integration.notes import Notes
from tests.integration.shop import PATIENCE, named


@pytest.fixture
def configuration(configuration: dict[str, Any], redis_url: str) -> dict[str, Any]:
    return {
        **configuration,
        "rabbitdelay_registry_url": redis_url,
        "rabbitdelay_registry_options": {"socket_timeout": PATIENCE},
    }


def test_tasks_in_the_levels_have_the_form_of_those_that_a_worker_holds(
    serve: Callable[..., Any], noted: Notes
) -> None:
    noted.shop = shop = serve(queue_type="classic")
    held = shop.tasks["celery-own"].apply_async(countdown=3600)
    direct = {"exchange": named(shop, "direct"), "routing_key": "second"}
    waits = noted.send(7, delay=3600, track=True, **direct)
    inspect = shop.control.inspect([shop.worker.name], timeout=PATIENCE, limit=1)
    found: dict[str, Any] = {}

    def are_shown() -> bool:
        (scheduled,) = inspect.scheduled().values()
        found.update((each["request"]["id"], each) for each in scheduled)
        return {held.id, waits.id} <= set(found)

    wait_for(are_shown, "both", PATIENCE)
    celerys, ours = found[held.id], found[waits.id]
    assert set(ours) == set(celerys)
    assert set(ours["request"]) - set(celerys["request"]) == {"eta", "key", "job"}
    assert set(celerys["request"]) <= set(ours["request"])
    delivery = ours["request"]["delivery_info"]
    assert set(delivery) == set(celerys["request"]["delivery_info"])
    assert direct.items() <= delivery.items()
    assert datetime.fromisoformat(ours["eta"]) > datetime.now(UTC) + timedelta(minutes=30)
    assert ours["request"]["args"] == "(7,)"
    assert ours["request"]["kwargs"] == repr({"key": noted.key})
    assert ours["request"]["hostname"] == shop.worker.name
    (asked,) = inspect.query_task(waits.id).values()
    assert asked[waits.id] == ["scheduled", ours["request"]]
