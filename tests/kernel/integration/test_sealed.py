"""Tasks whose bodies are encrypted take every route that others take."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kombu import Connection
from kombu.serialization import unregister

from celery_rabbitdelay import Outcome
from celery_rabbitdelay.testing import wait_for
from tests.kernel.integration.arrivals import count
from tests.kernel.integration.sealed_shop import SealedProcess, SealedWorker, sealed
from tests.kernel.integration.shop import PATIENCE

#: An argument of each task, which encryption hides.
SECRET = "opensesame"


@pytest.fixture
def settings(configuration: dict[str, Any], redis_url: str) -> dict[str, Any]:
    """Settings with a registry."""
    return {**configuration, "rabbitdelay_registry_url": redis_url, "rabbitdelay_retry_for": 0}


@pytest.fixture
def shop(make_shop: Any, settings: dict[str, Any]) -> Iterator[Any]:
    """The application, in the test's process."""
    yield sealed(make_shop(**settings))
    unregister("encrypted")


def command(settings: dict[str, Any], command: str) -> Any:
    """Run ``celery rabbitdelay COMMAND --json``; return what it prints."""
    done = SealedProcess.run(settings, f"rabbitdelay {command} --json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_encrypted_tasks_take_every_route(
    shop: Any, settings: dict[str, Any], connection: Connection
) -> None:
    prefix, redis, delays = settings["prefix"], shop.backend.client, shop.rabbitdelay
    note, told = shop.tasks["note"], {"key": f"notes-{settings['prefix']}"}

    def noted() -> list[Any]:
        notes = [json.loads(each) for each in redis.lrange(told["key"], 0, -1)]
        return sorted(each["given"][0] for each in notes if each["given"][1] == SECRET)

    # Without a worker, all of them wait: what the broker holds can be looked at.
    nowhere = f"{prefix}.nowhere"
    options: dict[str, Any] = {
        "levels": {"delay": 0.5},
        "former": {"delay": 4, "key": f"{prefix}:1"},
        "newest": {"delay": 4, "key": f"{prefix}:1"},
        "tracked": {"delay": 300, "track": True},
        "overflow": {"delay": 6.5},
        # Through the overflow loop, so that its queue is gone before it is due.
        "lost": {"delay": 12, "queue": nowhere, "routing_key": nowhere},
        "linked": {"delay": 0.5, "link": note.si("callback", SECRET, **told)},
    }
    sent = {name: note.apply_async((name, SECRET), told, **each) for name, each in options.items()}
    channel: Any = connection.default_channel
    channel.queue_delete(nowhere)
    wait_for(lambda: count(connection, f"{prefix}.default") >= 1, "a message")
    held = channel.basic_get(f"{prefix}.default")
    channel.basic_reject(held.delivery_tag, requeue=True)
    assert SECRET not in f"{held.headers}"
    assert SECRET.encode() not in held.body
    assert sent["tracked"].id in [each.task_id for each in delays.pending()]
    with SealedWorker(settings) as worker:
        soon = datetime.now(UTC) + timedelta(seconds=1)
        rows = [{"args": [f"row {n}", SECRET], "kwargs": told, "eta": soon} for n in range(3)]
        assert delays.send_many(note, rows).messages < len(rows)
        shop.tasks["retry"].apply_async(([], 1, {"countdown": 0.3}), delay=0.5).get(
            timeout=PATIENCE
        )
        assert delays.postpone(sent["tracked"], delay=0.5) is Outcome.DONE
        listing = f"undeliverable list -n 1 --id {sent['lost'].id}"
        wait_for(lambda: command(settings, listing)["messages"], "the lost one", PATIENCE, 1)
        exported = f"undeliverable export --id {sent['lost'].id}"
        shown = json.loads(SealedProcess.run(settings, f"rabbitdelay {exported}").stdout)
        command(settings, f"undeliverable redrive --to {prefix}.second")
        expected = ["callback", "levels", "linked", "lost", "newest", "overflow"]
        expected += ["row 0", "row 1", "row 2", "tracked"]
        wait_for(lambda: noted() == expected, "all tasks", PATIENCE)
    assert shown["task"] == "note"
    assert shown["body"]["base64"] is not None
    assert SECRET not in f"{shown} {worker.log}"
