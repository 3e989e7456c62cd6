"""Tasks whose bodies are encrypted take every route that others take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import amqp
import pytest
from cryptography.fernet import Fernet
from kombu import Connection

from celery_rabbitdelay.testing import RedisServer, wait_for
from tests.integration.shop import PATIENCE
from tests.integration.worker import ShopProcess, Worker

#: An argument of each task, which an encrypting serializer hides.
SECRET = "opensesame"


class SealedProcess(ShopProcess):
    """A process of the application that :mod:`tests.integration.sealed_shop` makes."""

    module = "tests.integration.sealed_shop"


class SealedWorker(SealedProcess, Worker):
    """Its worker.

    Args:
        configuration: That of the shop.
        variables: Those that say how messages are sealed.
    """

    def __init__(self, configuration: dict[str, Any], variables: dict[str, str]) -> None:
        super().__init__(configuration)
        self._variables = variables

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), **self._variables}


class Sealed:
    """An application whose messages are sealed, used from processes of its own.

    Args:
        configuration: That of the shop.
        variables: Those that say how messages are sealed.
    """

    def __init__(self, configuration: dict[str, Any], variables: dict[str, str]) -> None:
        self._configuration = configuration
        self._variables = variables

    def send(self, *calls: tuple[Any, ...]) -> list[Any]:
        """Call functions of the module in one process; return what they return."""
        module, given = SealedProcess.module, json.dumps(calls)
        done = SealedProcess.run_module(module, self._configuration, given, **self._variables)
        assert done.returncode == 0, done.stderr
        return list(json.loads(done.stdout))

    def command(self, command: str) -> Any:
        """Run ``celery rabbitdelay COMMAND --json``; return what it prints."""
        whole = f"rabbitdelay {command} --json"
        done = SealedProcess.run(self._configuration, whole, **self._variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def registry() -> Iterator[RedisServer]:
    """The Redis of the registry, where nothing else is stored."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def seal() -> dict[str, str]:
    """The environment variable with the key that messages are encrypted with."""
    return {"SEAL_KEY": Fernet.generate_key().decode()}


def test_sealed_tasks_take_every_route(
    make_shop: Any,
    configuration: dict[str, Any],
    registry: RedisServer,
    seal: dict[str, str],
    tmp_path: Path,
) -> None:
    settings = {
        **configuration,
        "rabbitdelay_registry_url": registry.url,
        "rabbitdelay_retry_for": 0,
    }
    shop = make_shop(**settings)
    prefix, redis = settings["prefix"], shop.backend.client
    key = f"notes-{prefix}"
    sealed = Sealed(settings, seal)
    told = {"key": key}

    def noted() -> list[Any]:
        notes = [json.loads(note) for note in redis.lrange(key, 0, -1)]
        return sorted(note["given"][0] for note in notes if note["given"][1] == SECRET)

    # Without a worker, all of them wait: what the broker and Redis hold can be looked at.
    nowhere = f"{prefix}.nowhere"
    options: dict[str, Any] = {
        "levels": {"delay": 0.5},
        "former": {"delay": 4, "key": "order:1"},
        "newest": {"delay": 4, "key": "order:1"},
        "tracked": {"delay": 300, "track": True},
        "overflow": {"delay": 6.5},
        # Through the overflow loop, so that its queue is gone before it is due.
        "lost": {"delay": 12, "queue": nowhere, "routing_key": nowhere},
        "linked": {"delay": 0.5, "link": ["note", ["callback", SECRET], told]},
    }
    calls = [("apply", "note", [name, SECRET], told, each) for name, each in options.items()]
    ids = dict(zip(options, sealed.send(*calls), strict=True))
    with Connection(settings["broker_url"]) as connection:
        channel: Any = connection.default_channel
        channel.queue_delete(nowhere)
        held = first_of(channel, f"{prefix}.default")
    assert SECRET not in f"{held.headers}"
    assert SECRET.encode() not in held.body
    assert ids["tracked"] in [each.task_id for each in shop.rabbitdelay.pending()]
    rows = [{"args": [f"row {n}", SECRET], "kwargs": told} for n in range(3)]
    with SealedWorker(settings, seal) as worker:
        messages, _, postponed = sealed.send(
            ("send_many", "note", rows, 1.0),
            ("apply", "retry", [[], 1, {"countdown": 0.3}], {}, {"delay": 0.5}),
            ("postpone", ids["tracked"], 0.5),
        )
        assert messages < len(rows)  # a slow machine fills two envelopes
        assert postponed == "Outcome.DONE"
        wait_for(
            lambda: sealed.command("undeliverable list")["count"] == 1, "the lost one", PATIENCE, 1
        )
        [shown] = sealed.command(f"undeliverable list --full --id {ids['lost']}")["messages"]
        sealed.command(f"undeliverable export {tmp_path}/messages.jsonl")
        exported = (tmp_path / "messages.jsonl").read_text()
        sealed.command(f"undeliverable redrive --to {prefix}.second")
        wait_for(lambda: "lost" in noted(), "the redriven task", PATIENCE)
        wait_for(lambda: "overflow" in noted(), "the one of the overflow loop", PATIENCE)
        assert sealed.command("status -t 10")["workers"]
        # The task "retry" runs twice.
        wait_for(lambda: worker.log.count(" succeeded in ") >= 11, "all tasks", PATIENCE)
    assert noted() == [
        *("callback", "levels", "linked", "lost", "newest", "overflow"),
        *("row 0", "row 1", "row 2", "tracked"),
    ]
    assert shown["task"] == "note"
    assert shown["body"]["base64"] is not None
    assert SECRET not in f"{shown} {exported} {worker.log}"


def first_of(channel: Any, queue: str) -> amqp.Message:
    """Wait for the first message of a queue, and return a copy of it."""
    found: list[amqp.Message] = []

    def has_come() -> bool:
        message = channel.basic_get(queue, no_ack=False)
        if message is not None:
            channel.basic_reject(message.delivery_tag, requeue=True)
            found.append(message)
        return bool(found)

    wait_for(has_come, f"a message in {queue}", PATIENCE)
    return found[0]
