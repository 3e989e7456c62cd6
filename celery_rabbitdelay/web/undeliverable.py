"""The page Undeliverable: messages by reason, details of a message; redrive and purge."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

from kombu import Connection
from kombu.exceptions import OperationalError
from starlette.exceptions import HTTPException

from celery_rabbitdelay.exceptions import DelayTooLong, InvalidDelay, InvalidDestination
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.headers import KEY, X_DELAY
from celery_rabbitdelay.metrics.reading import Reading
from celery_rabbitdelay.operations import undeliverable as read
from celery_rabbitdelay.operations.mover import Place
from celery_rabbitdelay.operations.undeliverable import RemovalReport, UndeliverableFilter
from celery_rabbitdelay.web.charts import DAY
from celery_rabbitdelay.web.deciding import seen
from celery_rabbitdelay.web.site import Glance, Site, Work
from celery_rabbitdelay.web.view_request import ViewRequest, Wrong

#: Seconds between two readings, the maximum number of messages to read, and the largest body, in
#: bytes, that is kept.
PERIOD, MOST_READ, MOST_BODY = 30.0, 1_000, 16_384

#: The maximum number of bytes of a body on a page and in its JSON.
SHOWN_BODY: Final = 2_000

#: How many messages the page lists, and how many tasks and queues it offers as filters.
LISTED, MOST = 100, 20

#: The days on which messages became undeliverable: how many days ago the day ended and began.
DAYS: Final = {"today": (None, 0), "yesterday": (0, 1), "earlier": (1, None)}

#: The reason that a redrive or a purge reports after a user has stopped it.
STOPPED: Final = "stopped on the page"

#: The actions, with their names in the log and on the pages.
ACTIONS: Final = {"redrive": "redriven", "purge": "deleted"}

#: The headers with a task's arguments.
ARGUMENTS: Final = frozenset({"argsrepr", "kwargsrepr"})

#: The fields that choose messages.
FILTERS: Final = ("task", "queue", "id", "reason", "day", "older_than", "newer_than")


class Kept(NamedTuple):
    """A cached message.

    Attributes:
        number: The message's position in the queue, from 1.
        name: The message's name, stable across readings; copies of one message share a name.
        message: The message; a body over :data:`MOST_BODY` bytes is left out.
        body: The displayed part of the body.
    """

    number: int
    name: str
    message: read.UndeliverableMessage
    body: dict[str, Any]


def _latest(site: Site, patience: float | None = None) -> Reading[list[Kept]]:
    """Return the oldest undeliverable messages, from a cached reading."""

    def kept(connection: Connection) -> list[Kept]:
        found = read.undeliverable_messages(connection, site.delays.topology, MOST_READ)
        return [
            Kept(
                number,
                _name(each),
                each if len(each.body) <= MOST_BODY else each._replace(body=b""),
                read.shown_body(each.body, SHOWN_BODY),
            )
            for number, each in enumerate(found, 1)
        ]

    return site.latest("undeliverable", partial(site.ask, kept), PERIOD, patience)


def reasons(site: Site, glance: Glance) -> Counter[str]:
    """Count the reasons of the cached undeliverable messages; do not wait for a new reading."""
    counts = glance.status.backlog.others.get("undeliverable")
    kept = _latest(site, patience=0).value if counts is not None and counts.messages else None
    return Counter(each.message.found.reason for each in kept or ())


def _name(found: read.UndeliverableMessage) -> str:
    """Return a message's name: a hash without headers and position, which the broker changes."""
    parts = found.exchange, found.routing_key, found.found.task_id, sorted(found.properties.items())
    return hashlib.sha256(repr(parts).encode() + found.body).hexdigest()[:20]


def undeliverable(request: ViewRequest) -> dict[str, object]:
    """Return the reasons of the undeliverable messages, and the first matching messages."""
    reading, wanted = _latest(request.site), _filter(request)
    kept = reading.value or []
    days = [(day, _of_day(request, wanted, day)) for day in DAYS]
    found = [each for each in kept if wanted.matches(each.message)]
    summary = read.UndeliverableSummary()
    for each in found:
        summary.add(each.message)
    return {
        "taken": reading.taken,
        "error": reading.error,
        "read": None if reading.value is None else len(kept),
        "is_all": len(kept) < MOST_READ,
        "count": summary.count,
        "reasons": [vars(each) for each in summary.by_count()],
        "tasks": _count(kept, replace(wanted, tasks=()), "tasks"),
        "queues": _count(kept, replace(wanted, queues=()), "queues"),
        "days": {day: sum(of_day.matches(each.message) for each in kept) for day, of_day in days},
        "messages": [_listed(each) for each in found[:LISTED]],
    }


def _count(kept: list[Kept], wanted: UndeliverableFilter, name: str) -> dict[str, int]:
    """Count the matching messages by task or by queue, the most frequent first."""
    contents = (read.Contents.of(each.message) for each in kept if wanted.matches(each.message))
    return dict(Counter(each for one in contents for each in getattr(one, name)).most_common(MOST))


def _listed(kept: Kept) -> dict[str, object]:
    """Return a message's line in the list: its task, or else where it was published to."""
    headers = kept.message.headers
    key, x_delay = headers.get(KEY), headers.get(X_DELAY)
    return {
        **read.summary_of(kept.number, kept.message),
        "name": kept.name,
        "exchange": kept.message.exchange,
        "routing_key": kept.message.routing_key,
        "key": None if key is None else str(key),
        "x_delay": None if x_delay is None else str(x_delay),
        "size": kept.body["size"],
    }


def message(request: ViewRequest) -> dict[str, object]:
    """Return the details of one undeliverable message."""
    name = request.fields.needed("name")
    for each in _latest(request.site).value or ():
        if each.name == name:
            return {"message": {**_record(request, each), "name": name}}
    raise HTTPException(404, "The latest reading lacks this message: it may have left the queue.")


def _record(request: ViewRequest, kept: Kept) -> dict[str, Any]:
    """Return a message as ``undeliverable export`` does, with masked or hidden arguments."""
    found = kept.message.found
    record = read.as_record(kept.number, kept.message)
    del record["amqp_properties"]  # for programs that resend messages; contains arguments
    options, task, headers = request.site.options, record["task"] or "", record["headers"]
    for name in headers.keys() & ARGUMENTS:
        if (text := options.shown(task, str(headers.pop(name)))) is not None:
            headers[name] = text
    text, encoded, size = (kept.body[name] for name in ("text", "base64", "size"))
    body = options.shown(task, encoded if text is None else text)
    return {**record, "due": found.due, "since": found.since, "body": body, "size": size}


def confirm(request: ViewRequest) -> dict[str, object]:
    """Count the matching messages, and report the outcome of a dry run."""
    action = request.fields.one_of("action", ACTIONS, "redrive")
    try:
        report = _remove(request, action, matches=_filter(request).matches, dry_run=True)
    except (InvalidDelay, DelayTooLong, InvalidDestination) as wrong:
        raise Wrong(action, str(wrong)) from wrong
    return {"action": action, "report": vars(report), "filter": _chosen(request)}


def decide(request: ViewRequest) -> dict[str, object]:
    """Begin to redrive or delete the matching messages, at most as many as the dry run counted."""
    action = request.fields.one_of("action", ACTIONS, "")
    count = request.fields.number("count", 0, 10**9)
    wanted, _ = _filter(request), request.duration("delay")  # reject invalid fields early

    def does(work: Work) -> Iterator[None]:
        report = RemovalReport()

        def matches(found: read.UndeliverableMessage) -> bool:
            work.done = report.moved
            if work.stopping.is_set():
                report.stopped = STOPPED
            return wanted.matches(found)

        try:
            _remove(request, action, matches=matches, dry_run=False, limit=count, report=report)
        finally:
            work.done = report.moved
            request.site.outdate("undeliverable")
        if report.stopped not in (None, STOPPED):
            raise OperationalError(report.stopped)
        yield

    chosen = " ".join(f"{name}={value!r}" for name, value in _chosen(request))
    about = f"undeliverable messages with {chosen}" if chosen else "all undeliverable messages"
    address = request.fields.address(**dict.fromkeys(("action", "count", "to", "delay")))
    work = Work(request.user, ACTIONS[action], about, count, f"undeliverable?{address}")
    return seen(request.site.works.begin(work, does))


def _remove(request: ViewRequest, action: str, **options: Any) -> RemovalReport:
    """Redrive or delete the matching messages, or only count them.

    Args:
        request: The request.
        action: One of :data:`ACTIONS`.
        **options: ``matches``, ``dry_run``, ``limit`` and ``report``, as for :func:`.redrive`.
    """
    site, topology = request.site, request.site.delays.topology
    if action == "purge":
        return site.ask(lambda found: read.redrive(Place(found, topology), None, **options))
    redriving = {"to": request.fields.get("to"), "delay": request.duration("delay")}
    redrive = partial(read.redrive_application, site.delays, redriving=redriving)
    return site.ask(partial(redrive, **options))


def _chosen(request: ViewRequest) -> list[tuple[str, str]]:
    """Return the names and values of the fields that choose messages."""
    return [each for each in request.fields.multi_items() if each[0] in FILTERS]


def _filter(request: ViewRequest) -> UndeliverableFilter:
    names = "task", "queue", "id", "reason"
    tasks, queues, ids, reasons = map(request.fields.getlist, names)
    older, newer = request.duration("older_than"), request.duration("newer_than")
    found = UndeliverableFilter(tasks, queues, ids, reasons, older, newer)
    day = request.fields.one_of("day", (*DAYS, ""), "")
    return _of_day(request, found, day) if day else found


def _of_day(request: ViewRequest, wanted: UndeliverableFilter, day: str) -> UndeliverableFilter:
    """Return a filter for the messages that became undeliverable on a day."""
    now = wall_clock.now()
    today = now.astimezone(request.site.app.timezone).replace(hour=0, minute=0, second=0)
    older, newer = (None if ago is None else now - (today - ago * DAY) for ago in DAYS[day])
    return replace(wanted, older_than=older, newer_than=newer)
