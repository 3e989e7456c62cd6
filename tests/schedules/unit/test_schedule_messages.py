"""The messages that schedules send, made by Celery once; and the digest of beat's entries."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery.schedules import crontab, schedule
from django_celery_beat.tzcrontab import TzAwareCrontab
from kombu import Exchange, Queue

from celery_rabbitdelay import Celery
from celery_rabbitdelay.exceptions import InvalidSchedule
from celery_rabbitdelay.levels.delay import milliseconds_of
from celery_rabbitdelay.levels.headers import COPY, ONCE, SCHEDULE, TRACKED
from celery_rabbitdelay.registry.record import stored
from celery_rabbitdelay.schedules.beat import BeatEntries
from celery_rabbitdelay.schedules.record import canonical, captured, message_of, read
from celery_rabbitdelay.schedules.recurrence import LAST, Occurrence, Recurrence

NOWHERE = "amqp://guest:guest@127.0.0.1:1//"
HOURLY = Recurrence(("every 3600000",))
MADE = Occurrence("a", milliseconds_of(datetime(2030, 1, 1, tzinfo=UTC)), HOURLY, LAST)


@contextmanager
def shop(**settings: Any) -> Iterator[Any]:
    """An application that reaches no server."""
    app: Any = Celery("shop", broker=NOWHERE, set_as_current=False)
    app.conf.update(rabbitdelay_registry_url="redis://127.0.0.1:1", **settings)

    @app.task(name="remind", shared=False)
    def remind(*args: Any, **kwargs: Any) -> None: ...

    @app.task(name="tracked", shared=False, track=True)
    def tracked(*args: Any, **kwargs: Any) -> None: ...

    yield app
    app.close()


@pytest.fixture
def app() -> Iterator[Any]:
    with shop() as app:
        yield app


def stored_of(app: Any, task: Any = "remind", args: Any = (), **options: Any) -> str:
    return stored(captured(app, MADE._replace(options=options), task, args, {})[0])


def revision_of(app: Any, task: Any = "remind", args: Any = (), **changes: Any) -> str:
    return captured(app, MADE._replace(**changes), task, args, {})[1]


@pytest.mark.parametrize(
    ("args", "serializer"),
    [
        ([date(2030, 1, 2), datetime(2030, 1, 2, tzinfo=UTC), Decimal("1.10"), b"\xff"], "json"),
        ([date(2030, 1, 2), b"\xff"], "yaml"),
        ([(1, 2), {3: 4, "a": 5}, {6, 7}], "pickle"),
    ],
)
def test_what_a_schedule_sends_is_read_as_it_was_given(
    app: Any, args: list[Any], serializer: str
) -> None:
    made = MADE._replace(options={"serializer": serializer, "compression": "gzip"})
    message = stored(captured(app, made, "remind", args, {"b": args})[0])
    assert repr(read(message, [serializer])) == repr(("remind", tuple(args), {"b": args}))
    others = {"json", "yaml", "pickle"} - {serializer}
    assert read(message, others) == ("remind", None, None)
    # Redis has lost it.
    assert read("", ["json"]) == ("", None, None)


def test_what_cannot_be_written_or_goes_to_no_known_queue_is_refused(app: Any) -> None:
    with pytest.raises(InvalidSchedule, match="its arguments cannot be serialized"):
        captured(app, MADE, "remind", [object()], {})
    with pytest.raises(InvalidSchedule, match="one known queue"):
        stored_of(app, exchange=Exchange("news", type="topic"), routing_key="a.b")


def test_messages_of_an_occurrence_are_those_of_one_task_and_differ_in_their_name(app: Any) -> None:
    occurrence = MADE._replace(order=7, revision="0a")
    sent = [message_of(occurrence, stored_of(app, "tracked")) for _ in range(2)]
    headers = [each.message.headers for each in sent]
    for each, says in zip(sent, headers, strict=True):
        assert (each.task_id, says.others["id"], says.due_ms) == (
            *(occurrence.task_id, occurrence.task_id),
            occurrence.due_ms,
        )
        assert (says.registry[TRACKED], says.registry[COPY]) == (True, "7")
    said = [Occurrence.of(each.registry[SCHEDULE]) for each in headers]
    assert [each and each._replace(message="") for each in said] == [occurrence] * 2
    assert len({each and each.message for each in said}) == 2
    # What is not tracked is not listed.
    assert {*message_of(occurrence, stored_of(app)).message.headers.registry} == {ONCE, SCHEDULE}


def test_the_same_put_again_has_the_same_revision_and_any_other_has_another(app: Any) -> None:
    same = {revision_of(app, args=[{"b": 1, "a": 2}])}
    # Neither when it is due first, nor the edit before it, belongs to what was put.
    same.add(revision_of(app, args=({"a": 2, "b": 1},), instant_ms=MADE.instant_ms + 3_600_000))
    same.add(revision_of(app, args=[{"a": 2, "b": 1}], order=9, revision="0b", message="0c"))
    assert len(same) == 1
    options = [{"priority": 3}, {"queue": "mails"}, {"shadow": "x"}, {"headers": {"x": 1}}]
    others = [
        *(revision_of(app), revision_of(app, "tracked")),
        *(revision_of(app, args=[each]) for each in (1, "1")),
        revision_of(app, recurrence=HOURLY._replace(zone="Europe/Berlin")),
        *(revision_of(app, catch_up_ms=0), revision_of(app, jitter_ms=1)),
        revision_of(app, overlap="skip"),
        *(revision_of(app, options=each) for each in options),
    ]
    # What the configuration makes of a message belongs to it.
    configured: list[dict[str, Any]] = [
        *({"task_routes": {"remind": {"queue": "other"}}}, {"task_default_priority": 4}),
        *({"task_serializer": "pickle"}, {"task_compression": "gzip"}),
        {"task_annotations": {"remind": {"time_limit": 77}}},
    ]
    for settings in configured:
        with shop(**settings) as other:
            others.append(revision_of(other))
    assert len({*same, *others}) == 1 + len(others)


PROGRAM = """
from celery_rabbitdelay.schedules.record import canonical

class Sent:
    def __init__(self, tags):
        self.tags = tags

tags = {"new", "old", "blue", "red", "large", "small"}
print(canonical([tags, frozenset(tags), {"tags": tags, "b": 1}, Sent(tags), (Sent({"x": tags}),)]))
"""


def test_equal_values_are_written_alike_by_all_processes_and_others_differently() -> None:
    """The order of a set differs with each process, and so does where an object is in memory."""
    written = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert ["'blue'" in each for each in written] == [True]
    values: list[Any] = [
        *(1, "1", b"1", 1.5, None, True, [], {}, frozenset[int](), [1, 2], [2, 1], [[1], 2]),
        *([1, [2]], {1: 2}, {"1": 2}, {(1, 2)}, {1, 2}, {"a", "b"}, ["a", "b"], ["a, b"]),
        *([{"a": 1}], [{"a": {1}}], timedelta(1), SimpleNamespace(a=1), SimpleNamespace(a=2)),
    ]
    assert len({canonical(each) for each in values}) == len(values)
    assert canonical([1, {2}]) == canonical((1, {2}))


# Equal entries of beat have the same digest, and others have not.


class Point:
    """An argument that only pickle writes."""

    def __init__(self, x: int) -> None:
        self.x = x


ENTRY: dict[str, Any] = {"task": "note", "schedule": 60}


def app_of(**entries: dict[str, Any]) -> Any:
    app = Celery("shop", broker="amqp://127.0.0.1:1//", set_as_current=False)
    app.conf.update(
        accept_content=["json", "pickle"],
        beat_schedule={name: {**ENTRY, **entry} for name, entry in entries.items()},
        rabbitdelay_registry_url="redis://127.0.0.1:1/0",
        result_expires=None,
        task_default_queue="mine",
        task_queues=[Queue("mine"), Queue("other")],
        task_serializer="pickle",
        timezone="Europe/Berlin",
    )
    return app


def digest_of(**entries: dict[str, Any]) -> str:
    of_beat = BeatEntries(app_of(**entries).rabbitdelay.schedules)
    assert len(of_beat.puts) == len(entries), "none is refused"
    return of_beat.digest


def test_it_is_the_same_for_entries_that_are_equal() -> None:
    tokyo = TzAwareCrontab(0, 3, tz=ZoneInfo("Asia/Tokyo"))
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"schedule": crontab(hour="3")}, {"schedule": crontab(hour=[3])}),
        ({"schedule": 60}, {"schedule": schedule(timedelta(minutes=1))}),
        ({"args": ()}, {"kwargs": {}}),
        ({"args": (Point(1),)}, {"args": [Point(1)]}),
        ({"options": {"countdown": 3}}, {}),
        ({"schedule": tokyo}, {"schedule": crontab(0, 3), "options": {"timezone": "Asia/Tokyo"}}),
    ]
    for one, other in pairs:
        assert digest_of(a=one) == digest_of(a=other)


def test_it_is_another_one_for_other_entries() -> None:
    others: list[dict[str, Any]] = [
        *({"args": (1,)}, {"kwargs": {"a": None}}, {"task": "other"}, {"schedule": crontab()}),
        *({"options": each} for each in ({"expires": 60}, {"paused": True}, {"queue": "other"})),
    ]
    for other in others:
        assert digest_of(a=other) != digest_of(a={})
        assert digest_of(a={}, b=other) != digest_of(a={})
