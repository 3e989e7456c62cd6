"""Schedules of RedBeat, of django-celery-beat and of a file, to be put as schedules of ours."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta, timezone, tzinfo
from importlib import import_module
from typing import Any, Final, NamedTuple
from zoneinfo import ZoneInfo

from celery.schedules import BaseSchedule, crontab, schedule

from celery_rabbitdelay.app.schedules import Schedule, Schedules
from celery_rabbitdelay.exceptions import (
    InvalidSetting,
    PublishError,
    RabbitDelayError,
    RegistryUnavailable,
)
from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.levels.shown_url import without_password
from celery_rabbitdelay.registry.connection import connect

#: The options of both that :meth:`.Schedules.put` takes as they are.
_OPTIONS: Final = ("queue", "exchange", "routing_key", "priority", "headers")


class Foreign(NamedTuple):
    """A schedule that another scheduler keeps.

    Attributes:
        name: Its name.
        given: The arguments of :meth:`.Schedules.put`.
        notes: How the imported schedule differs from the original.
        error: Why it cannot be one of ours, or was not put; empty if it can, or was.
    """

    name: str
    given: dict[str, Any]
    notes: tuple[str, ...] = ()
    error: str = ""


def put_all(schedules: Schedules, found: Iterable[Foreign]) -> Iterator[Foreign]:
    """Put schedules, and yield each with its error, if it was not put.

    Raises:
        PublishError: RabbitMQ did not confirm an occurrence; what came before was put.
        RegistryUnavailable: Redis did not answer, likewise.
    """
    delays = schedules.app.rabbitdelay
    # Workers put these by themselves.
    of_beat = {*schedules.app.conf.beat_schedule, "celery.backend_cleanup"}
    for each in found:
        error = each.error
        if each.name in of_beat and delays.settings.beat:
            error = "it is in beat_schedule, which workers put (rabbitdelay_beat)"
        if not error:
            try:
                schedules.put(each.name, **each.given)
            except (PublishError, RegistryUnavailable):
                raise
            except (RabbitDelayError, LookupError, TypeError, ValueError) as wrong:
                error = str(wrong)
        yield each._replace(error=error)


def exported(found: Schedule) -> dict[str, Any]:
    """Return a schedule as JSON: what :func:`from_json` takes."""
    when, start_ms, end_ms = found.recurrence, found.recurrence.start_ms, found.recurrence.end_ms
    return {
        "name": found.name,
        "task": found.task,
        "args": list(found.args),
        "kwargs": found.kwargs,
        "options": found.options,
        "when": list(when.rules),
        "timezone": when.zone,
        "start": instant_of(start_ms).isoformat() if start_ms else None,
        "end": None if end_ms is None else instant_of(end_ms).isoformat(),
        "exclude": list(when.excluded),
        "jitter": found.jitter,
        "overlap": found.overlap,
        "catch_up": found.catch_up,
        "paused": found.is_paused,
    }


def from_json(text: str) -> Iterator[Foreign]:
    """Yield the schedules of an export.

    Raises:
        ValueError: The text is no export.
    """
    found = json.loads(text)
    if not isinstance(found, dict) or not isinstance(found.get("schedules"), list):
        raise ValueError('it is no export: it has no list "schedules"')
    for each in found["schedules"]:
        given = dict(each)
        for name in ("start", "end"):
            if given.get(name) is not None:
                given[name] = datetime.fromisoformat(given[name])
        name, options = str(given.pop("name", "")), given.pop("options", None) or {}
        yield Foreign(name, {**given, **options})


def from_redbeat(app: Any, url: str | None = None) -> Iterator[Foreign]:
    """Yield the schedules that RedBeat keeps in Redis.

    Args:
        app: The application, with RedBeat's settings.
        url: The URL of that Redis; None for what the settings say.

    Raises:
        InvalidSetting: It is no such URL.
        RegistryUnavailable: Redis did not answer.
    """
    url = str(url or app.conf.get("redbeat_redis_url") or app.conf.broker_url)
    prefix = app.conf.get("redbeat_key_prefix") or "redbeat:"
    try:
        store = connect(url)
    except InvalidSetting as wrong:
        takes = "takes the URL of a Redis; or give --redbeat-url"
        raise InvalidSetting("redbeat_redis_url", without_password(url), takes) from wrong
    try:
        (keys,) = store.commands(lambda pipe: pipe.zrange(f"{prefix}:schedule", 0, -1))

        def add(pipeline: Any) -> None:
            for key in keys:
                pipeline.hmget(key, "definition", "meta")

        found = store.commands(add) if keys else []
        for key, (definition, meta) in zip(keys, found, strict=True):
            if definition is not None:
                yield _of_redbeat(key.removeprefix(prefix), definition, meta)
    finally:
        store.close()


def _of_redbeat(name: str, definition: str, meta: str | None) -> Foreign:
    try:
        found = json.loads(definition, object_hook=_decoded)
        when = found["schedule"]
        if not isinstance(when, BaseSchedule):
            raise TypeError(f"its schedule is {when!r}: write it as a cron text")
        last = json.loads(meta, object_hook=_decoded).get("last_run_at") if meta else None
    except (AttributeError, KeyError, TypeError, ValueError) as wrong:
        return Foreign(name, {}, error=str(wrong))
    given = {
        "task": found["task"],
        "when": when,
        "args": found.get("args") or (),
        "kwargs": found.get("kwargs") or {},
        "paused": not found.get("enabled", True),
        **_phase(when, last),
    }
    return _with_options(name, given, found.get("options") or {})


def _decoded(found: dict[str, Any]) -> Any:
    """Return an object of RedBeat's JSON."""
    kind = found.pop("__type__", None)
    if kind == "interval":
        return schedule(timedelta(seconds=found["every"]))
    if kind == "crontab":
        return crontab(**found)
    if kind == "datetime":
        zone = found.pop("timezone", "UTC")
        return datetime(**found, tzinfo=_zone(zone))
    return found if kind is None else f"of the type {kind}"


def _zone(zone: str | float) -> tzinfo:
    return ZoneInfo(zone) if isinstance(zone, str) else timezone(timedelta(seconds=zone))


def from_django() -> Iterator[Foreign]:
    """Yield the schedules in the tables of django-celery-beat, with Django's settings.

    Raises:
        InvalidSetting: Django or django-celery-beat is not installed, or not set up.
    """
    try:
        import_module("django").setup()  # it does nothing where that is done
        periodic_task: Any = import_module("django_celery_beat.models").PeriodicTask
    except Exception as error:  # whatever Django's settings raise
        name = "DJANGO_SETTINGS_MODULE"
        takes = f"takes Django's settings, with django_celery_beat: {error}"
        raise InvalidSetting(name, os.environ.get(name), takes) from error

    for each in periodic_task.objects.order_by("name"):
        try:
            yield _of_django(each)
        except (AttributeError, TypeError, ValueError) as wrong:
            yield Foreign(each.name, {}, error=f"its row cannot be read: {wrong}")


def _of_django(each: Any) -> Foreign:
    make_aware = import_module("django_celery_beat.utils").make_aware
    if each.one_off or each.clocked is not None:
        return Foreign(each.name, {}, error="it is due once: send its task with an eta")
    when, last = each.schedule, each.start_time or each.last_run_at
    given = {
        "task": each.task,
        "when": when,
        "args": json.loads(each.args or "[]"),
        "kwargs": json.loads(each.kwargs or "{}"),
        "timezone": str(each.crontab.timezone) if each.crontab is not None else None,
        "end": each.expires and make_aware(each.expires),
        "paused": not each.enabled,
        **_phase(when, last and make_aware(last)),
    }
    if each.start_time is not None:
        given["start"] = make_aware(each.start_time)
    if each.expire_seconds is not None:
        given["catch_up"] = each.expire_seconds
    options = {name: getattr(each, name) for name in _OPTIONS}
    options["headers"] = json.loads(each.headers or "{}")
    return _with_options(each.name, given, options)


def _phase(when: Any, last: datetime | None) -> dict[str, Any]:
    """Return the start of an interval, from which it is counted: when it was due last."""
    is_interval = type(when) is schedule
    return {"start": last} if is_interval and last is not None else {}


def _with_options(name: str, given: dict[str, Any], options: dict[str, Any]) -> Foreign:
    """Return a schedule with those of its task's options that ours have too."""
    taken = {key: options[key] for key in _OPTIONS if options.get(key) not in (None, "", {})}
    unknown = options.keys() - {*_OPTIONS, "expires"}
    notes = [f"without {', '.join(sorted(unknown))}"] if unknown else []
    if options.get("expires") is not None:
        if isinstance(options["expires"], int | float):
            given.setdefault("catch_up", options["expires"])
        else:
            notes.append("without expires, which is an instant")
    return Foreign(name, {"overlap": "allow", **given, **taken}, tuple(notes))
