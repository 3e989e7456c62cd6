"""The entries of ``beat_schedule`` as schedules, beside Celery's own beat."""

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from celery import Celery
from celery.beat import ScheduleEntry, Scheduler
from celery.schedules import crontab, schedule
from kombu import Connection, Queue

from celery_rabbitdelay.schedules.beat import BeatEntries
from celery_rabbitdelay.testing import wait_for
from tests.kernel.integration.arrivals import Arrival, take
from tests.kernel.integration.shop import PATIENCE
from tests.kernel.integration.worker import Worker
from tests.registry.integration.registering import RedisSetup
from tests.registry.integration.registry_fixtures import module_settings, redis_setup

__all__ = ["module_settings", "redis_setup"]

GIVEN: list[Any] = [
    *(None, True, 1.5, "grüße", [1, [2, "x"]], {"a": {"b": [None]}}, b"\xff\x00"),
    *(date(2030, 1, 2), datetime(2030, 1, 2, 3, 4, 5, 6, UTC), Decimal("1.10"), UUID(int=7)),
]
ARGUMENTS = {f"argument-{at}": each for at, each in enumerate(GIVEN)}

SIGNATURE = ("task", "args", "kwargs", "options", "subtask_type")
LOOK: Any = dict(zip(SIGNATURE, ("look", [], {}, {}, None), strict=True))
NAMED: list[tuple[str, Any]] = [
    *(("priority", 3), ("headers", {"tenant": "x"}), ("shadow", "another-name")),
    *(("time_limit", 30), ("soft_time_limit", 20), ("expires", 60), ("ignore_result", True)),
    *(("serializer", "json"), ("compression", "gzip"), ("argsrepr", "(hidden)")),
    *(("retry", False), ("retry_policy", {"max_retries": 1}), ("delivery_mode", 2)),
    *(("mandatory", True), ("link", LOOK), ("link_error", LOOK)),
    # These concern one message only.
    *(("task_id", "always-the-same"), ("countdown", 3), ("add_to_parent", False)),
]
OPTIONS = dict(NAMED)

WHENS: dict[str, Any] = {
    "integer": 3600,
    "interval": timedelta(hours=1),
    "object": schedule(timedelta(days=1)),
    "crontab": crontab(minute="*/15", hour="3-5", day_of_week="mon"),
}

#: Options that a schedule leaves out, each with one warning.
LEFT_OUT = ["add_to_parent", "countdown", "task_id"]

HEADERS = ("task", "shadow", "timelimit", "ignore_result", "tenant", "compression")
PROPERTIES = ("priority", "delivery_mode", "content_type")


def entries() -> dict[str, dict[str, Any]]:
    """Return an entry for each kind of argument, option and schedule."""
    common = {"task": "anything", "schedule": 1, "args": ("x",)}
    kinds = {name: {"args": (each,), "kwargs": {name: each}} for name, each in ARGUMENTS.items()}
    kinds |= {name: {"options": {name: each}} for name, each in OPTIONS.items()}
    kinds |= {name: {"schedule": each} for name, each in WHENS.items()}
    return {name: {**common, **each} for name, each in kinds.items()}


def said(arrival: Arrival) -> str:
    """Return what a worker sees of a message, with the types of all arguments."""
    message, is_hidden = arrival.message, arrival.message.headers["argsrepr"] == "(hidden)"
    properties = {**message.properties, "content_type": message.content_type}
    headers = [message.headers.get(name) for name in HEADERS]
    return repr([arrival.body, headers, [properties.get(each) for each in PROPERTIES], is_hidden])


def test_what_arrives_of_each_entry_is_what_beat_sends(
    make_shop: Callable[..., Any],
    module_settings: dict[str, Any],
    connection: Connection,
    make_queue: Callable[..., Queue],
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = make_shop(**module_settings, beat_schedule=entries(), rabbitdelay_beat=True)
    queue = make_queue()
    plain = Celery("plain", broker=module_settings["broker_url"], set_as_current=False)
    plain.conf.update(task_default_queue=queue.name, task_default_queue_type="quorum")

    @app.task(name="anything", shared=False)
    @plain.task(name="anything", shared=False)
    def anything(*args: Any, **kwargs: Any) -> None: ...

    assert BeatEntries(app.rabbitdelay.schedules).put()
    warnings = [text for _, _, text in caplog.record_tuples if "its unsupported" in text]
    assert sorted(text.split()[-1] for text in warnings) == LEFT_OUT
    found = app.rabbitdelay.schedules.all()
    assert sorted(each.name.rpartition(":")[2] for each in found) == sorted(entries())

    beat = Scheduler(plain, lazy=True)
    sent = {
        beat.apply_async(ScheduleEntry(name, app=plain, **entry), advance=False).id: name
        for name, entry in entries().items()
    }
    taken = take(connection, [queue], len(sent))
    expected = {sent[each.message.headers["id"]]: said(each) for each in taken}
    plain.close()

    names = {app.rabbitdelay.schedules.trigger(f"beat:shop:{name}").id: name for name in WHENS}
    came: dict[str, str] = {}
    # One of those triggered may fall due as well.
    while len(came) < len(entries()):
        for arrival in take(connection, [Queue(app.conf.task_default_queue)], 1):
            task_id = arrival.message.headers["id"]
            came[names.get(task_id) or task_id.split(":")[2]] = said(arrival)
    assert came == expected
    BeatEntries(app.rabbitdelay.schedules).end()


def test_an_entry_of_beat_runs_until_it_expires(
    make_shop: Callable[..., Any], module_settings: dict[str, Any]
) -> None:
    ends, over = datetime(2090, 1, 2, tzinfo=UTC), datetime(2020, 1, 1, tzinfo=UTC)
    given = [ends, ends.isoformat(), ends.replace(tzinfo=None), over]
    made = {
        str(each): {"task": "look", "schedule": 3600, "options": {"expires": each}}
        for each in given
    }
    app = make_shop(**module_settings, beat_schedule=made, rabbitdelay_beat=True)
    assert BeatEntries(app.rabbitdelay.schedules).put()
    found = [each.exported()["end"] for each in app.rabbitdelay.schedules.all()]
    assert found == [ends.isoformat()] * 3
    BeatEntries(app.rabbitdelay.schedules).end()


def test_workers_put_the_entries_again_that_redis_has_lost(
    make_shop: Callable[..., Any], module_settings: dict[str, Any], redis_setup: RedisSetup
) -> None:
    made = {"far": {"task": "look", "schedule": 86_400}}
    given = {**module_settings, "beat_schedule": made, "rabbitdelay_beat": True}
    schedules = make_shop(**given).rabbitdelay.schedules
    with Worker({**given, "imports": ["tests.schedules.integration.hasty"]}):
        wait_for(schedules.all, "the entries of beat", PATIENCE)
        schedules.delete("beat:shop:far")
        redis_setup.client.flushall()
        wait_for(schedules.all, "the entries of beat, again", PATIENCE)
    BeatEntries(schedules).end()
