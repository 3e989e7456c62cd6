"""What stands for the entries of beat: equal entries have the same digest, and others have not."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from zoneinfo import ZoneInfo

from celery import Celery
from celery.schedules import crontab, schedule
from django_celery_beat.tzcrontab import TzAwareCrontab
from kombu import Queue

from celery_rabbitdelay import install
from celery_rabbitdelay.schedules.beat import _digest, _puts


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
