"""One task as the registry knows it, in each of its states."""

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from kombu import Connection

from celery_rabbitdelay import KnownTask, RegistryUnavailable
from celery_rabbitdelay.registry.record import TaskState, record_of
from celery_rabbitdelay.registry.registry import Registry
from celery_rabbitdelay.testing import wait_for
from tests.kernel.integration.arrivals import count
from tests.kernel.integration.notes import Notes
from tests.kernel.integration.shop import PATIENCE, named
from tests.registry.integration.registering import MINUTE_MS, keyed, now_ms, sent, tracked, verdict


def state_of(registry: Registry, task_id: str = "task") -> TaskState | None:
    record = record_of(registry, task_id)
    return None if record is None else record.state


def test_the_state_of_a_task_is_that_by_which_it_is_decided_about(registry: Registry) -> None:
    assert state_of(registry) is None
    message = tracked()
    registry.register([message])
    record = record_of(registry, "task")
    assert record is not None
    assert record[:5] == (TaskState.WAITING, message.due_ms, None, "shop.remind", None)
    verdict(registry, message)
    assert state_of(registry) is TaskState.ARRIVED
    # It is retried.
    registry.register([sent(attempt="1.0")])
    assert state_of(registry) is TaskState.WAITING
    registry.cancel(["task"])
    assert state_of(registry) is TaskState.CANCELLED
    # Sent anew after it had run, it is another life.
    (ticket,) = registry.ask([("task", "")])
    registry.register([tracked(ticket=ticket)])
    assert state_of(registry) is TaskState.WAITING
    # What is noted before a task is sent is its state.
    later = now_ms() + MINUTE_MS
    registry.postpone("postponed", later)
    registry.cancel(["cancelled"])
    record = record_of(registry, "postponed")
    assert record is not None
    assert record[:3] == (TaskState.NOTED, None, later)
    assert state_of(registry, "cancelled") is TaskState.CANCELLED
    # The older task of a key is superseded.
    older, newer = (keyed(registry, name, "order:7") for name in ("older", "newer"))
    registry.register([older, newer])
    assert state_of(registry, "older") is TaskState.SUPERSEDED
    assert state_of(registry, "newer") is TaskState.WAITING
    # It stays superseded when it has arrived, also if it is then postponed or its key is forgotten.
    verdict(registry, older)
    registry.postpone("older", later)
    registry.store.commands(lambda pipe: pipe.delete(registry.names.of("key", "order:7")))
    record = record_of(registry, "older")
    assert record is not None
    assert record[:5] == (TaskState.SUPERSEDED, None, later, None, "order:7")
    # Sent anew, it waits.
    registry.register([tracked("older")])
    assert state_of(registry, "older") is TaskState.WAITING
    # A retry of a superseded task, which the registry does not know of, runs.
    first, second = (keyed(registry, name, "order:8") for name in ("first", "second"))
    registry.register([first, second])
    verdict(registry, first)
    verdict(registry, sent("first", attempt="1.0"))
    assert state_of(registry, "first") is TaskState.ARRIVED


def test_a_record_that_cannot_be_read_is_an_error(registry: Registry) -> None:
    registry.register([tracked()])
    record = registry.names.of("task", "task")
    registry.store.commands(lambda pipe: pipe.hset(record, "due", "soon"))
    with pytest.raises(RegistryUnavailable, match="record of task task cannot be read"):
        record_of(registry, "task")


@pytest.fixture
def configuration(configuration: dict[str, Any], redis_url: str) -> dict[str, Any]:
    return {
        **configuration,
        "rabbitdelay_registry_url": redis_url,
        # Long digits: it does not matter how long a test takes.
        "rabbitdelay_layout": [("long", 3, 3600), ("short", 6, 600)],
    }


def test_a_task_is_known_with_its_route_its_job_and_where_it_may_be(
    shop: Any, noted: Notes, connection: Connection
) -> None:
    delays, job = shop.rabbitdelay, f"import-{uuid4().hex}"
    delays.open_job(job, expires=3600)
    direct = {"exchange": named(shop, "direct"), "routing_key": "second", "priority": 3}
    noted.send(8, delay=7200)  # in a queue in which the other one may not be
    result = noted.send(7, delay=4200, track=True, job=job, key=noted.key, **direct)
    began = datetime.now(UTC)
    for each in ("long.1", "long.2"):
        wait_for(partial(count, connection, named(shop, each)), "the message", PATIENCE)

    found: KnownTask = delays.show(result)
    assert found == delays.show(result.id) == delays.show(key=noted.key)
    assert (found.task_id, found.state, found.task) == (result.id, "waiting", "note")
    assert found.due is not None
    assert abs(found.due - began - timedelta(seconds=4200)) < timedelta(seconds=60)
    assert (found.args, found.kwargs) == ("(7,)", repr({"key": noted.key}))
    assert (found.queue, found.exchange) == (named(shop, "second"), direct["exchange"])
    assert (found.routing_key, found.priority) == ("second", 3)
    assert (found.key, found.job, found.job_state) == (noted.key, job, "open")
    assert (found.may_be_in, found.missing) == ({"long.1": 1}, ())

    later = datetime.now(UTC) + timedelta(hours=3)
    delays.postpone(result, eta=later)
    moved = delays.show(result)
    assert moved.due == moved.postponed
    assert abs(moved.due - later) < timedelta(milliseconds=1)
    delays.cancel(result)
    assert (delays.show(result).state, delays.show(result).may_be_in) == ("cancelled", {})
    assert delays.show(uuid4()) is delays.show(key=uuid4().hex) is None
