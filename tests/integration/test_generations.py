"""Another set of arguments for the levels comes beside the one that is there, in a rolling upgrade.

The third generation is one whose queues really have other arguments. What waits under the second
one arrives, whichever workers run, and ``migrate`` moves it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from uuid import uuid4

import amqp
import pytest
from kombu import Connection

from celery_rabbitdelay import Row
from celery_rabbitdelay.exceptions import LayoutConflict, TopologyInUse
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.generation import GENERATIONS, Generation
from celery_rabbitdelay.levels.layout import custom
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.generations import former_generations
from celery_rabbitdelay.publishing.declaration import declare, delete, is_declared
from celery_rabbitdelay.testing import wait_for
from tests.integration.arrivals import count
from tests.integration.conftest import SHORT
from tests.integration.modules import wait_until_served
from tests.integration.notes import Notes
from tests.integration.shop import named
from tests.integration.worker import Worker, run_celery
from tests.json_schemas import checked


@pytest.fixture
def second(make_shop: Callable[..., Any]) -> Any:
    """The application of the version before."""
    return make_shop(rabbitdelay_generation=2)


@pytest.fixture
def third(configuration: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the later version: the same, but for the generation."""
    return {**configuration, "rabbitdelay_generation": 3}


@pytest.fixture
def upgraded(make_shop: Callable[..., Any]) -> Any:
    """The application of the later version."""
    return make_shop(rabbitdelay_generation=3)


@pytest.fixture
def notes(second: Any) -> Iterator[Notes]:
    """The notes of the test's tasks."""
    notes = Notes(second)
    yield notes
    notes.forget()


def send_all_kinds(shop: Any, notes: Notes, connection: Connection, first: int) -> list[int]:
    """Send by each way: straight, by distribution, in envelopes, meditating, and by check-in."""
    note, key = shop.tasks["note"], {"key": notes.key}
    note.apply_async((first,), key, delay=3)
    note.apply_async((first + 1,), key, delay=2, priority=9)
    # Levels of 5.9 s: it meditates first.
    note.apply_async((first + 2,), key, delay=9)
    rows = [notes.row(first + number, delay=2) for number in range(3, 23)]
    shop.rabbitdelay.send_many(note, rows, tolerance=1)
    task_id = str(uuid4())
    made = shop.amqp.as_task_v2(task_id, "note", (first + 23,), key)
    check_in_body(connection, shop, made, task_id)
    return list(range(first, first + 24))


def check_in_body(connection: Connection, shop: Any, made: Any, task_id: str) -> None:
    connection.Producer().publish(
        json.dumps(made.body),
        exchange=shop.rabbitdelay.topology.module_queues.checkin.exchange.name,
        routing_key=named(shop, "default"),
        headers={**made.headers, "x-delay": 1500},
        content_type="application/json",
        content_encoding="utf-8",
        correlation_id=task_id,
    )


def assert_all_ran_in_time(notes: Notes, numbers: list[int]) -> None:
    runs = notes.wait(len(numbers), 90)
    assert sorted(run["given"][0] for run in runs) == sorted(numbers)
    assert all(run["at"] * 1000 >= run["headers"][header_names.DUE] - 1 for run in runs)


def test_what_waits_under_the_former_generation_arrives_although_no_old_worker_is_left(
    second: Any,
    upgraded: Any,
    configuration: dict[str, Any],
    third: dict[str, Any],
    notes: Notes,
    connection: Connection,
) -> None:
    with Worker(configuration):
        pass
    numbers = send_all_kinds(second, notes, connection, 0)
    with Worker(third) as worker:
        wait_for(lambda: "distribution v2: serving" in worker.log, "the former distribution", 60)
        numbers += send_all_kinds(second, notes, connection, 100)
        numbers += send_all_kinds(upgraded, notes, connection, 200)
        assert_all_ran_in_time(notes, numbers)
        status = upgraded.control.inspect(timeout=5)._request("rabbitdelay_status")
        (modules,) = status.values()
        assert {"check-in", "check-in v2", "distribution", "distribution v2"} <= modules.keys()
    former = former_generations(connection, upgraded.rabbitdelay.topology)
    assert former == {2: 0}
    undeliverable = [
        each.rabbitdelay.topology.module_queues.undeliverable.name for each in (second, upgraded)
    ]
    assert [count(connection, name) for name in undeliverable] == [0, 0]


def test_workers_of_both_versions_run_beside_each_other(
    second: Any,
    upgraded: Any,
    configuration: dict[str, Any],
    third: dict[str, Any],
    notes: Notes,
    connection: Connection,
) -> None:
    with Worker(configuration), Worker(third):
        numbers = send_all_kinds(upgraded, notes, connection, 0)
        numbers += send_all_kinds(second, notes, connection, 100)
        assert_all_ran_in_time(notes, numbers)


def test_without_a_former_generation_a_worker_waits_quietly_for_one(
    upgraded: Any, third: dict[str, Any], notes: Notes, connection: Connection
) -> None:
    with Worker(third) as worker:
        upgraded.tasks["note"].apply_async((1,), {"key": notes.key}, delay=1, priority=9)
        notes.wait(1)
        assert "v2" not in worker.log
        assert "WARNING" not in worker.log
    topology = upgraded.rabbitdelay.topology
    assert former_generations(connection, topology) == {}
    assert not is_declared(connection, topology.former[0])


def test_the_operator_moves_what_waits_and_deletes_the_former_generation(
    second: Any,
    upgraded: Any,
    third: dict[str, Any],
    notes: Notes,
    connection: Connection,
) -> None:
    # Hours meditate; the others wait in the levels.
    rows = [Row(args=(n,), kwargs={"key": notes.key}, delay=20 + n / 10) for n in range(20)]
    second.rabbitdelay.send_many(second.tasks["note"], rows, envelopes=False)
    for number in range(20, 25):
        second.tasks["note"].apply_async((number,), {"key": notes.key}, delay=5.5)
    numbers = list(range(25))
    wait_for(lambda: former_generations(connection, upgraded.rabbitdelay.topology) == {2: 25}, "25")

    told = run_celery(third, "rabbitdelay migrate --from-generation 2 --json")
    assert told.returncode == 0, told.stderr
    assert checked("moved", told.stdout)["moved"] > 0
    assert former_generations(connection, upgraded.rabbitdelay.topology) == {2: 0}
    told = run_celery(third, "rabbitdelay delete --generation 2 --yes --json")
    assert told.returncode == 0, told.stderr
    assert former_generations(connection, upgraded.rabbitdelay.topology) == {}
    assert is_declared(connection, upgraded.rabbitdelay.topology)
    with Worker(third):
        assert_all_ran_in_time(notes, numbers)


def test_the_former_generation_is_deleted_when_no_worker_serves_it_any_more(
    second: Any,
    upgraded: Any,
    configuration: dict[str, Any],
    third: dict[str, Any],
    notes: Notes,
    connection: Connection,
) -> None:
    """A worker without modules does not serve it, and goes on to run tasks."""
    former = second.rabbitdelay.topology
    with Worker(configuration):
        pass
    with Worker(third) as worker:
        wait_until_served(worker, "check-in v2", "distribution v2")
        with pytest.raises(TopologyInUse):
            delete(connection, former)
    with Worker({**third, "rabbitdelay_modules": []}):
        delete(connection, former)
        upgraded.tasks["note"].apply_async((1,), {"key": notes.key}, delay=1)
        notes.wait(1)
    assert former_generations(connection, upgraded.rabbitdelay.topology) == {}
    assert is_declared(connection, upgraded.rabbitdelay.topology)


def test_the_former_generation_is_deleted_by_force_under_a_worker_that_serves_it(
    second: Any,
    upgraded: Any,
    configuration: dict[str, Any],
    third: dict[str, Any],
    notes: Notes,
    connection: Connection,
) -> None:
    """The worker neither declares it again nor stops to serve the present one."""
    former = second.rabbitdelay.topology
    with Worker(configuration):
        pass
    with Worker(third) as worker:
        wait_until_served(worker, "check-in v2", "distribution v2")
        delete(connection, former, force=True)
        wait_for(lambda: worker.log.count(" v2: connects again") == 2, "the loss of both", 60)
        send_all_kinds(upgraded, notes, connection, 0)
        assert_all_ran_in_time(notes, list(range(24)))
        assert worker.log.count(" v2: connects again") == 2
        assert former_generations(connection, upgraded.rabbitdelay.topology) == {}
        assert not is_declared(connection, former)


def test_a_message_of_the_third_generation_may_be_given_back_any_number_of_times(
    connection: Connection, make_topology: Callable[..., Topology]
) -> None:
    """In the second one, RabbitMQ 4 passes it on to the next level after the twentieth time."""
    topology = make_topology(
        custom([("hours", 3, 3600), ("minutes", 60, 60)]), generation=GENERATIONS[3]
    )
    declare(connection, topology)
    route = topology.route(3600, "nobody")
    channel: Any = connection.default_channel
    channel.basic_publish(amqp.Message(b"", delivery_mode=2), route.exchange, route.routing_key)
    (stop,) = route.stops
    for _ in range(25):
        wait_for(lambda: count(connection, stop) == 1, "the message")
        channel.basic_reject(channel.basic_get(stop).delivery_tag, requeue=True)
    wait_for(lambda: count(connection, stop) == 1, "the message")


def test_a_release_that_forgets_the_generation_is_told_what_is_wrong(
    connection: Connection, topology: Topology
) -> None:
    """The declared levels stay as they are."""
    declare(connection, topology)
    forgetful = Topology(topology.prefix, SHORT, generation=Generation(2, 50))
    with pytest.raises(LayoutConflict, match="another version of celery_rabbitdelay has declared"):
        declare(connection, forgetful)
    assert is_declared(connection, topology)


def test_a_third_generation_is_declared_beside_the_second(
    connection: Connection, topology: Topology, make_topology: Callable[..., Topology]
) -> None:
    declare(connection, topology)
    beside = make_topology(generation=Generation(3, 2**31 - 1))
    declare(connection, beside)
    assert is_declared(connection, topology)
    assert is_declared(connection, beside)
    with suppress(Exception):
        delete(connection, beside)
    assert is_declared(connection, topology)
