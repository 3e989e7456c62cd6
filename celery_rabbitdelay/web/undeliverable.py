"""The page Undeliverable: messages by reason, one message's story; export, redrive and purge."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from kombu.exceptions import OperationalError
from starlette.exceptions import HTTPException

from celery_rabbitdelay.exceptions import DelayTooLong, InvalidDelay, InvalidDestination
from celery_rabbitdelay.operations import undeliverable as read
from celery_rabbitdelay.operations.mover import Place
from celery_rabbitdelay.operations.undeliverable import Matches, RemovalReport
from celery_rabbitdelay.web.asked import Asked, Wrong, servers_away
from celery_rabbitdelay.web.deciding import begin
from celery_rabbitdelay.web.reading import ask_once
from celery_rabbitdelay.web.site import Kept
from celery_rabbitdelay.web.waiting import masked
from celery_rabbitdelay.web.work import Work, log_action

#: How many messages a page lists.
LISTED: Final = 100

#: Why a redrive or a purge ends that somebody has stopped.
STOPPED: Final = "stopped on the page"

#: What can be done, and how the log names it afterwards.
ACTIONS: Final = {"redrive": "redriven", "purge": "deleted"}

#: The headers that show a task's arguments.
ARGUMENTS: Final = frozenset({"argsrepr", "kwargsrepr"})

#: The fields that choose messages.
FILTERS: Final = ("task", "queue", "id", "reason", "older_than", "newer_than")


def undeliverable(asked: Asked) -> dict[str, Any]:
    """Return why messages could not be delivered, and the first ones of those that match."""
    wanted, reading = _filter(asked), asked.site.undeliverable.latest()
    summary, messages = read.UndeliverableSummary(), list[dict[str, Any]]()
    for number, each in enumerate(reading.value or (), 1):
        if wanted.matches(each.message):
            summary.add(each.message)
            if len(messages) < LISTED:
                told = read.summary_of(number, each.message)
                messages.append({**told, "size": each.body["size"]})
    return {
        "taken": reading.taken,
        "error": reading.error,
        "read": None if reading.value is None else len(reading.value),
        "count": summary.count,
        "reasons": [{"reason": reason, **vars(group)} for reason, group in summary.by_count()],
        "messages": messages,
        "shows_arguments": asked.site.options.shows_arguments,
    }


def message(asked: Asked) -> dict[str, Any]:
    """Return all that is known of one message that could not be delivered, by its task's id."""
    task_id, reading = asked.fields.needed("id"), asked.site.undeliverable.latest()
    wanted = read.UndeliverableFilter(ids=(task_id,))
    for number, each in enumerate(reading.value or (), 1):
        if wanted.matches(each.message):
            record = _record(asked, number, each)
            body = record["body"] or {"text": None}
            text = body["text"] if body["text"] is not None else body.get("base64")
            return {"message": {**record, "body": text}}
    raise HTTPException(404, "No message of this id is among those that were read.")


def export(asked: Asked) -> dict[str, Any]:
    """Return the messages that match with their headers and the beginning of their bodies."""
    if not asked.site.options.shows_arguments:
        raise HTTPException(403, "Bodies are hidden: the option shows_arguments shows them.")
    wanted, reading = _filter(asked), asked.site.undeliverable.latest()
    if reading.value is None:
        raise HTTPException(503, f"The broker cannot be asked: {reading.error}")
    messages = [
        _record(asked, number, each)
        for number, each in enumerate(reading.value, 1)
        if wanted.matches(each.message)
    ]
    log_action(asked.user, "exported undeliverable messages", len(messages))
    return {"taken": reading.taken, "read": len(reading.value), "messages": messages}


def _record(asked: Asked, number: int, kept: Kept) -> dict[str, Any]:
    """Return a message as ``undeliverable list --full`` does, without what may not be shown."""
    record = read.as_record(number, kept.message)
    del record["amqp_properties"]  # for programs that send it again; it has the arguments, too
    record["envelope"] = read.Contents.of(kept.message).messages
    options, task, headers = asked.site.options, record["task"] or "", record["headers"]
    if not options.shows_arguments:
        for name in ARGUMENTS:
            headers.pop(name, None)
        return {**record, "body": None}
    for name in headers.keys() & ARGUMENTS:
        headers[name] = masked(options, task, str(headers[name]))
    texts = {name: masked(options, task, kept.body[name]) for name in ("text", "base64")}
    return {**record, "body": {**kept.body, **texts}}


def confirm(asked: Asked) -> dict[str, Any]:
    """Return how many messages match, and what would become of them: a dry run."""
    action = asked.fields.one_of("action", ACTIONS, "redrive")
    with servers_away():
        report = _remove(asked, action, _filter(asked).matches, dry_run=True)
    return {"action": action, "report": vars(report), "filter": asked.fields.filter(FILTERS)}


def decide(asked: Asked) -> dict[str, Any]:
    """Begin to redrive or to delete the messages that match, at most as many as were counted."""
    action = asked.fields.one_of("action", ACTIONS, "")
    count = asked.fields.number("count", 0, 10**9)
    wanted, _ = _filter(asked), asked.duration("delay")  # what is wrong is said at once

    def does(work: Work) -> None:
        report = RemovalReport()

        def matches(found: read.UndeliverableMessage) -> bool:
            work.done = report.removed
            if work.stopping.is_set():
                report.stopped = STOPPED
            return wanted.matches(found)

        try:
            _remove(asked, action, matches, dry_run=False, limit=count, report=report)
        finally:
            work.done = report.removed
            asked.site.undeliverable.outdate()
        if report.stopped not in (None, STOPPED):
            raise OperationalError(report.stopped)

    return begin(asked, f"{ACTIONS[action]} undeliverable messages", FILTERS, count, does)


def _remove(
    asked: Asked,
    action: str,
    matches: Matches,
    *,
    dry_run: bool,
    limit: int | None = None,
    report: RemovalReport | None = None,
) -> RemovalReport:
    """Remove the messages that match, or only count them.

    Args:
        asked: What is asked for.
        action: What becomes of them: one of :data:`ACTIONS`.
        matches: Returns whether a message is chosen; called for each that is read.
        dry_run: Whether to count them only.
        limit: At most so many.
        report: What is counted in; see :func:`.redrive`.
    """
    site = asked.site
    if action == "purge":
        purge = partial(read.redrive, limit=limit, dry_run=dry_run, report=report)
        topology = site.delays.topology
        return ask_once(site.app, lambda found: purge(Place(found, topology), None, matches))
    delay = asked.duration("delay")
    redrive = partial(
        read.redrive_application,
        site.delays,
        matches=matches,
        dry_run=dry_run,
        limit=limit,
        report=report,
        to=asked.fields.text("to"),
        delay=delay,
    )
    try:
        return ask_once(site.app, redrive)
    except (InvalidDelay, DelayTooLong, InvalidDestination) as wrong:
        raise Wrong(action, str(wrong)) from wrong


def _filter(asked: Asked) -> read.UndeliverableFilter:
    fields = asked.fields
    return read.UndeliverableFilter(
        fields.all("task"),
        fields.all("queue"),
        fields.all("id"),
        fields.all("reason"),
        asked.duration("older_than"),
        asked.duration("newer_than"),
    )
