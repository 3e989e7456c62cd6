"""This version takes what each recorded version has left on a broker: all once, none early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from kombu import Connection

import celery_rabbitdelay
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.layout import custom
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.testing import RabbitMQServer, RedisServer, wait_for
from celery_rabbitdelay.testing.servers import PATIENCE
from tests.integration.notes import Notes
from tests.integration.shop import make_app
from tests.integration.trouble import virtual_host
from tests.integration.worker import Worker, run_celery
from tests.upgrade import recording
from tests.upgrade.record import LEVELS, NOTES_KEY, PREFIX, configuration

VERSIONS = sorted(recording.FOLDER.iterdir())


@pytest.fixture
def recorded_on(
    private_rabbitmq: RabbitMQServer, private_redis: RedisServer
) -> Iterator[dict[str, Any]]:
    """Return the settings of a shop in a virtual host of the test's own."""
    with virtual_host(private_rabbitmq, PREFIX) as url:
        # Each test has a registry of its own, which knows of no task that it has run.
        own = {"rabbitdelay_registry_prefix": f"{PREFIX}-{uuid4().hex}"}
        yield {**configuration(url, private_redis.url), **own}


def wait_until(notes: Notes, numbers: set[int], timeout: float = PATIENCE) -> None:
    """Wait until the tasks with these numbers have run; the error names those that have not."""
    try:
        wait_for(lambda: numbers <= set(notes()), "all tasks", timeout)
    except TimeoutError as late:
        raise TimeoutError(f"{late}: {sorted(numbers - set(notes()))} have not run") from None


def test_this_version_has_a_recording() -> None:
    assert recording.FOLDER / celery_rabbitdelay.__version__ in VERSIONS


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda folder: folder.name)
def test_every_recorded_message_arrives_once_and_none_early(
    recorded_on: dict[str, Any], folder: Path
) -> None:
    settings = recorded_on
    shop = make_app(settings)
    notes = Notes(shop)
    notes.key = NOTES_KEY
    notes.forget()
    messages = recording.read_messages(folder)
    numbers = {number for message in messages for number in message.numbers}
    undeliverable = {n for each in messages if "undeliverable" in each.queue for n in each.numbers}
    with Connection(recorded_on["broker_url"]) as connection:
        recording.declare_recorded(connection, recording.read_definitions(folder)[0])
        for queue in shop.amqp.queues.values():
            queue(connection.default_channel).declare()
            pattern = Topology(PREFIX, custom(LEVELS)).keys.destination_pattern(queue.name)
            channel: Any = connection.default_channel
            channel.queue_bind(queue.name, f"{PREFIX}.delivery", pattern)
        due: dict[int, int] = {}
        for message in messages:
            content = message.due_from_now()
            recording.publish_raw(connection, message.exchange, message.routing_key, content)
            headers = content.message().properties["application_headers"]
            for number in message.numbers:
                due[number] = headers.get(header_names.DUE, 0)
        with Worker(settings):
            wait_until(notes, numbers - undeliverable)
            runs = notes.wait(0)
            assert sorted(run["given"][0] for run in runs) == sorted(numbers - undeliverable)
            options = "rabbitdelay undeliverable redrive"
            told = run_celery(settings, options)
            assert told.returncode == 0, told.stderr
            wait_until(notes, numbers)
            runs = notes.wait(0)
        assert Counter(run["given"][0] for run in runs) == Counter(numbers)
        for run in runs:
            assert run["at"] * 1000 >= max(due[run["given"][0]], run["headers"]["rabbitdelay-due"])
    notes.forget()
    shop.close()


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda folder: folder.name)
def test_what_each_version_has_declared_is_declared_by_this_one(folder: Path) -> None:
    """RabbitMQ refuses any difference, and every worker would end.

    Only the queue of paused tasks may be lacking.
    """
    for recorded in recording.read_definitions(folder):
        topology = Topology(PREFIX, custom(LEVELS), **recorded["topology"])
        identity = topology.identity
        exchanges = (*topology.exchanges, identity.guard, identity.marker)
        paused = topology.module_queues.paused.name
        assert {
            each["name"]: (each["type"], each["arguments"]) for each in recorded["exchanges"]
        } == {
            each.name: (each.type, each.arguments or {})
            for each in exchanges
            if each.name != paused
        }
        assert {each["name"]: each["arguments"] for each in recorded["queues"]} == {
            each.name: each.queue_arguments for each in topology.queues if each.name != paused
        }
        assert {
            (
                each["source"],
                each["routing_key"],
                each["destination"],
                each["destination_type"] == "exchange",
            )
            for each in recorded["bindings"]
        } == {each for each in topology.bindings if each.source != paused}
