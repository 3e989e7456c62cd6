"""``celery rabbitdelay undeliverable``, run as a user does."""

import base64
import json
import time
from typing import Any

import amqp
import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.headers import ENVELOPE
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.envelope import Item, OpenedEnvelope, packed
from celery_rabbitdelay.publishing.message import Content, body_of
from tests.json_schemas import checked
from tests.kernel.integration.arrivals import count, take, wait_until_waiting
from tests.kernel.integration.shop import named
from tests.kernel.integration.worker import answer, run_command
from tests.operations.integration.undeliverable_messages import (
    FAR_TIMESTAMP,
    Raw,
    declare_with,
    message,
    put,
    straight,
)


@pytest.fixture
def name(connection: Connection, shop: Any) -> str:
    """``undeliverable`` with six messages of five kinds."""
    topology: Topology = shop.rabbitdelay.topology
    queue, now_ms = named(shop, "default"), int(time.time() * 1000)
    declare_with(connection, topology, shop.amqp.queues[queue])

    def failed(seconds: int, reason: str, **more: Any) -> dict[str, Any]:
        failures = {
            header_names.ATTEMPTS: 7,
            header_names.FAILED_SINCE: now_ms - seconds * 1000,
            header_names.FIRST_REASON: "gone",
        }
        return straight(queue, **failures, **{header_names.REASON: reason}, **more)

    tried = "the queue is full ({} attempts since 2026-11-22 10:00:00 UTC; the first time: gone)"
    item = Item(b"[]", {"task": "inner", "id": "id-inner"})
    return put(
        connection,
        topology,
        message("one", failed(60, tried.format(7), task="look", id="id-1")),
        message("two", failed(7200, tried.format(12), task="note", id="id-2")),
        message(
            "three", failed(200_000, "no [way] to \x1b[31mit\n9 forged", task="note", id="id-3")
        ),
        amqp.Message(
            packed((item, item)),
            application_headers=straight("elsewhere", own=b"\xff"),
            content_type=ENVELOPE,
            delivery_mode=2,
        ),
        message("stranger", {header_names.QUEUE: "secret"}),
        Raw("unreadable", FAR_TIMESTAMP),
    )


def run(configuration: dict[str, Any], command: str, given: str = "") -> Any:
    return run_command(configuration, f"undeliverable {command}", given)


def answers(configuration: dict[str, Any], command: str) -> dict[str, Any]:
    name = command.split()[0]
    return answer(configuration, f"undeliverable {command}", f"undeliverable_{name}")


def test_messages_are_listed_by_reason_and_one_by_one(
    configuration: dict[str, Any], name: str
) -> None:
    told = run(configuration, "list")
    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()
    assert lines[0].startswith("        2  the queue is full (since ")
    assert lines[-1] == "6 undeliverable messages"
    # A terminal would obey it.
    assert "\x1b" not in told.stdout
    assert r"no [way] to \x1b[31mit\n9 forged" in told.stdout

    data = answers(configuration, "list -n 4")
    assert (data["examined"], data["count"], len(data["reasons"])) == (6, 6, 4)
    first, *_, last = data["messages"]
    assert (first["number"], last["number"], last["envelope"]) == (1, 4, 2)
    assert (first["task_id"], first["size"]) == ("id-1", 3)
    assert "an envelope of 2 tasks to elsewhere" in run(configuration, "list -n 4").stdout


def test_messages_are_redriven_and_the_others_named_with_the_reason(
    configuration: dict[str, Any], connection: Connection, shop: Any, name: str
) -> None:
    data = answers(configuration, "redrive --task look --dry-run")
    assert (data["moved"], data["dry_run"]) == (1, True)
    assert count(connection, name) == 6

    told = run(configuration, "redrive")

    assert told.returncode == 1
    assert told.stdout.startswith("3 of 6 messages redriven in ")
    why = "is not a destination that the application allows: name it with --allow\n"
    assert f"stay: the queue 'secret' {why}" in told.stderr
    assert "1 stay: the queue 'elsewhere' is not a destination" in told.stderr
    assert "1 stay: it cannot be read: " in told.stderr
    queue = shop.amqp.queues[named(shop, "default")]
    assert [each.body for each in take(connection, [queue], 3)] == ["one", "two", "three"]
    wait_until_waiting(connection, name, 3)


def test_messages_are_deleted_only_after_a_yes(
    configuration: dict[str, Any], connection: Connection, name: str
) -> None:
    refused = run(configuration, "purge --task note", "n\n")
    assert refused.returncode == 1
    assert "Delete 2 undeliverable messages?" in refused.stdout
    assert answers(configuration, "purge --dry-run")["moved"] == 6
    assert count(connection, name) == 6
    agreed = run(configuration, "purge --task note", "y\n")
    assert agreed.returncode == 0, agreed.stderr
    assert "2 of 2 messages deleted" in agreed.stdout
    wait_until_waiting(connection, name, 4)


def test_messages_are_exported_with_all_that_they_are_made_of(
    configuration: dict[str, Any], connection: Connection, name: str
) -> None:
    told = run(configuration, "export")
    assert told.stderr == "6 undeliverable messages exported\n"
    records = [checked("undeliverable_export_line", line) for line in told.stdout.splitlines()]
    made = [
        Content(
            base64.b64decode(each["amqp_properties"]),
            base64.b64decode(each["body"]["base64"] or "") or each["body"]["text"].encode(),
        )
        for each in records
    ]
    # Published again, they are the same messages.
    *readable, unreadable = made
    first, *_, envelope, _ = (each.message() for each in readable)
    assert first.properties["application_headers"]["id"] == "id-1"
    assert envelope.properties["application_headers"]["own"] == b"\xff"
    assert len(tuple(OpenedEnvelope(body_of(envelope)))) == 2
    assert (unreadable.properties, unreadable.body) == (FAR_TIMESTAMP, b"unreadable")
    assert count(connection, name) == 6

    printed = run(configuration, "export --task look")
    assert json.loads(printed.stdout)["task_id"] == "id-1"


def test_a_queue_to_redrive_to_has_to_exist_and_is_bound_to_the_levels(
    configuration: dict[str, Any], name: str, connection: Connection, target: Queue
) -> None:
    """Nobody else binds it, and distribution publishes to no queue that it does not know."""
    told = run(configuration, "redrive --to nowhere-at-all")
    assert told.returncode == 2
    assert "the queue 'nowhere-at-all' does not exist: declare it first" in told.stderr

    told = run(configuration, f"redrive --to {target.name} --queue secret --queue elsewhere")
    assert "2 of 2 messages redriven" in told.stdout
    # The envelope is on its way to distribution.
    wait_until_waiting(connection, target.name, 1)
