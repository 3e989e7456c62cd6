"""What stands for the entries of beat: equal entries have the same digest, and others have not."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any, ClassVar
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import crontab, schedule
from django_celery_beat.tzcrontab import TzAwareCrontab
from kombu import Queue

from celery_rabbitdelay import install
from celery_rabbitdelay.registry.registry import Registry
from celery_rabbitdelay.schedules import beat
from celery_rabbitdelay.schedules.beat import _digest, _puts, put_beat, state_of_beat
from celery_rabbitdelay.schedules.schedules import Schedules


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
    install(app)
    return app


def digest_of(**entries: dict[str, Any]) -> str:
    puts = _puts(app_of(**entries))
    assert len(puts) == len(entries), "none is refused"
    return _digest(puts)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"schedule": crontab(hour="3")}, {"schedule": crontab(hour=[3])}),
        ({"schedule": 60}, {"schedule": schedule(timedelta(minutes=1))}),
        ({"args": ()}, {"kwargs": {}}),
        ({"args": (Point(1),)}, {"args": [Point(1)]}),
        ({"options": {"countdown": 3}}, {}),
        (
            {"schedule": TzAwareCrontab(0, 3, tz=ZoneInfo("Asia/Tokyo"))},
            {"schedule": crontab(0, 3), "options": {"timezone": "Asia/Tokyo"}},
        ),
    ],
)
def test_it_is_the_same_for_entries_that_are_equal(one: Any, other: Any) -> None:
    assert digest_of(a=one) == digest_of(a=other)


@pytest.mark.parametrize(
    "other",
    [
        *({"args": (1,)}, {"kwargs": {"a": None}}, {"task": "other"}),
        *({"options": each} for each in ({"expires": 60}, {"paused": True}, {"queue": "other"})),
        *({"schedule": crontab()}, {"schedule": 61}),
    ],
)
def test_it_is_another_one_for_other_entries(other: Any) -> None:
    assert digest_of(a=other) != digest_of(a={})
    assert digest_of(a={}, b=other) != digest_of(a={})


class Forgetful:
    """The notes about beat, in a Redis that loses everything when a schedule is put."""

    noted: ClassVar[dict[str, str]] = {}

    def __init__(self, registry: Any) -> None: ...

    def taken_over(self, application: str) -> dict[str, str]:
        return dict(self.noted)

    def take_over(self, application: str, former: str | None, current: str) -> None:
        self.noted["current"] = current

    def all(self) -> list[str]:
        return []


def test_entries_that_redis_loses_while_they_are_put_are_known_to_be_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(beat, "Records", Forgetful)
    monkeypatch.setattr(Registry, "alone_under", lambda *_: nullcontext())
    monkeypatch.setattr(Schedules, "_put", lambda *_: Forgetful.noted.clear())
    schedules = app_of(a={}).rabbitdelay.schedules
    assert put_beat(schedules)
    assert state_of_beat(schedules) == "lost"
    monkeypatch.setattr(Schedules, "_put", lambda *_: None)
    assert put_beat(schedules)
    assert state_of_beat(schedules) == "current"
