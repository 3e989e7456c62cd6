"""This version takes what each recorded version has left on a broker: all once, none early."""

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from kombu import Connection

import celery_rabbitdelay
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.layout import custom
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.kernel.integration.notes import Notes
from tests.kernel.integration.shop import PATIENCE, make_app
from tests.kernel.integration.trouble import virtual_host
from tests.kernel.integration.worker import Worker, run_celery
from tests.upgrade import record

VERSIONS = sorted(record.FOLDER.iterdir())


def test_this_version_has_a_recording() -> None:
    assert record.FOLDER / celery_rabbitdelay.__version__ in VERSIONS


def declare_recorded(channel: Any, definitions: dict[str, Any]) -> None:
    """Declare a topology as it was recorded, without a line of the package."""
    kept: dict[str, Any] = {"durable": True, "auto_delete": False}
    for each in definitions["exchanges"]:
        arguments = each["arguments"]
        channel.exchange_declare(each["name"], each["type"], arguments=arguments, **kept)
    for each in definitions["queues"]:
        channel.queue_declare(each["name"], arguments=each["arguments"], **kept)
    for each in definitions["bindings"]:
        bind = channel.queue_bind if each["destination_type"] == "queue" else channel.exchange_bind
        bind(each["destination"], each["source"], each["routing_key"])


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda folder: folder.name)
def test_every_recorded_message_arrives_once_and_none_early(
    private_rabbitmq: RabbitMQServer, redis_url: str, folder: Path
) -> None:
    messages = [record.Recorded(**each) for each in record.read(folder, "messages")]
    numbers = {number for each in messages for number in each.numbers}
    undeliverable = {n for each in messages if "undeliverable" in each.queue for n in each.numbers}
    with virtual_host(private_rabbitmq, record.PREFIX) as url, Connection(url) as connection:
        # Its registry knows of no task that another test has run.
        own = {"rabbitdelay_registry_prefix": f"{record.PREFIX}-{uuid4().hex}"}
        settings = {**record.configuration(url, redis_url), **own}
        shop, channel = make_app(settings), connection.default_channel
        notes = Notes(shop)
        notes.key = record.NOTES_KEY
        notes.forget()
        declare_recorded(channel, record.read(folder, "definitions")[0])
        any_channel: Any = channel
        for queue in shop.amqp.queues.values():
            queue(channel).declare()
            pattern = shop.rabbitdelay.topology.keys.destination_pattern(queue.name)
            any_channel.queue_bind(queue.name, f"{record.PREFIX}.delivery", pattern)
        due: dict[int, int] = {}
        for message in messages:
            content = message.due_from_now()
            record.publish_raw(connection, message.exchange, message.routing_key, content)
            headers = content.message().properties["application_headers"]
            due |= dict.fromkeys(message.numbers, headers.get(header_names.DUE, 0))
        with Worker(settings):
            wanted = numbers - undeliverable
            wait_for(lambda: wanted <= set(notes()), "all tasks", PATIENCE)
            notes.wait(0)
            assert sorted(notes()) == sorted(wanted)
            told = run_celery(settings, "rabbitdelay undeliverable redrive")
            assert told.returncode == 0, told.stderr
            wait_for(lambda: numbers <= set(notes()), "the redriven ones", PATIENCE)
            runs = notes.wait(0)
    assert sorted(run["given"][0] for run in runs) == sorted(numbers)
    for run in runs:
        assert run["at"] * 1000 >= max(due[run["given"][0]], run["headers"][header_names.DUE])
    notes.forget()
    shop.close()


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda folder: folder.name)
def test_what_each_version_has_declared_is_declared_by_this_one(folder: Path) -> None:
    """RabbitMQ refuses any difference, and every worker would end.

    Only the queue of paused tasks may be lacking.
    """
    for recorded in record.read(folder, "definitions"):
        topology = Topology(record.PREFIX, custom(record.LEVELS), **recorded["topology"])
        identity, paused = topology.identity, topology.module_queues.paused.name
        ours = {
            each.name: (each.type, each.arguments or {})
            for each in (*topology.exchanges, identity.guard, identity.marker)
            if each.name != paused
        }
        assert ours == {
            each["name"]: (each["type"], each["arguments"]) for each in recorded["exchanges"]
        }
        assert {each["name"]: each["arguments"] for each in recorded["queues"]} == {
            each.name: each.queue_arguments for each in topology.queues if each.name != paused
        }
        parts = ("source", "routing_key", "destination", "destination_type")
        found = {tuple(each[part] for part in parts) for each in recorded["bindings"]}
        assert {(*each[:3], each[3] == "exchange") for each in found} == {
            each for each in topology.bindings if each.source != paused
        }
