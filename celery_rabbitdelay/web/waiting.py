"""The page Waiting: the tracked tasks, searched and read a page at a time, and the story of one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import milliseconds_of
from celery_rabbitdelay.publishing.backlog import Backlog
from celery_rabbitdelay.registry.index import Filter
from celery_rabbitdelay.registry.known_task import KnownTask, known_task
from celery_rabbitdelay.web.asked import Asked, Wrong, servers_away
from celery_rabbitdelay.web.options import Options
from celery_rabbitdelay.web.reasons import reasons
from celery_rabbitdelay.web.search import Found, Place, count_at_least, search

logger = logging.getLogger(__name__)

#: How many tasks a page has unless it says so, and at most.
PAGE, MOST = 50, 500

#: How many similar names of tasks are proposed.
SIMILAR: Final = 5

#: The fields that choose tasks.
FILTERS: Final = ("task", "key", "job", "due_after", "due_before")


def waiting(asked: Asked) -> dict[str, Any]:
    """Return the tracked tasks that wait and match, the next one first."""
    fields, delays = asked.fields, asked.with_registry
    wanted, task_id = filter_of(asked), fields.text("id")
    most, after = fields.number("limit", PAGE, MOST), _place(asked)
    with servers_away():
        if task_id is not None:
            found = Found(delays.registry.index.tasks([task_id]), None)
        else:
            found = search(delays, wanted, most, after)
        count, is_least = len(found.tasks), found.next is not None
        if task_id is None and wanted.key_start is None:
            count, is_least = count_at_least(delays, wanted)
        since = delays.pending_since()
    names = sorted(each for each in asked.site.app.tasks if not each.startswith("celery."))
    return {
        "count": count,
        "may_be_more": is_least,
        "complete_since": since,
        "tasks": [each._asdict() for each in found.tasks],
        "next": None if found.next is None else str(found.next),
        "next_address": None if found.next is None else fields.address(after=str(found.next)),
        "can_decide_about_all": task_id is None,
        "has_filter": any(each in fields for each in FILTERS),
        "task_names": names,
        "similar": _similar(names, wanted.task) if not count and wanted.task else [],
    }


def _similar(names: Sequence[str], name: str) -> list[str]:
    """Return the names of tasks that contain a text."""
    found = [each for each in names if each != name and name.lower() in each.lower()]
    return found[:SIMILAR]


def story(asked: Asked) -> dict[str, Any]:
    """Return all that is known of one task."""
    site, delays, task_id = asked.site, asked.with_registry, asked.fields.needed("id")
    glance, layout = site.glance.latest(), delays.topology.layout

    def backlog() -> Backlog:
        # The counts that all share; the page says so if there are none.
        nothing = Backlog({}, {level.name: {} for level in layout.levels}, {}, ())
        return nothing if glance.value is None else glance.value.status.backlog

    with servers_away():
        found = known_task(delays.registry, task_id, layout, backlog)
        why_not = [] if found is None else reasons(asked, found)
    return {
        "task_id": task_id,
        "task": None if found is None else _known(found, site.options),
        "why_not_run": [each._asdict() for each in why_not],
        "broker_error": glance.error,
        "levels": [] if found is None else _levels(asked, found),
    }


def _known(found: KnownTask, options: Options) -> dict[str, Any]:
    told = asdict(found)
    told["arguments_shown"] = options.shows_arguments
    for name in ("args", "kwargs"):
        told[name] = masked(options, found.task or "", told[name])
    return told


def _levels(asked: Asked, found: KnownTask) -> list[dict[str, Any]]:
    """Return the levels that are still ahead of a task, and where it may be; none if it is due."""
    levels = asked.site.delays.topology.layout.levels
    left_ms = 0 if found.due is None else milliseconds_of(found.due) - wall_clock.ms()
    if left_ms <= 0:
        return []
    return [
        {
            "name": level.name,
            "digit": left_ms // level.place_ms % level.base,
            "unit": level.unit,
            "count": left_ms // level.place_ms % level.base * level.multiple,
            "may_be_in": {
                queue: found.may_be_in[queue]
                for digit in range(1, level.base)
                if (queue := level.queue_name(digit)) in found.may_be_in
            },
        }
        for level in levels
    ]


def masked(options: Options, task: str, text: str | None) -> str | None:
    """Return the text of a task's arguments as far as it may be shown; None if it may not."""
    if not options.shows_arguments or text is None:
        return None
    if options.mask is None:
        return text
    try:
        return str(options.mask(task, text))
    except Exception:
        logger.exception("The mask has failed; arguments of %.200r are hidden", task)
        return None


def filter_of(asked: Asked) -> Filter:
    """Return which tasks the fields choose; ``key=order:*`` chooses the keys that begin so."""
    fields, key, start = asked.fields, asked.fields.text("key"), None
    if key is not None and key.endswith("*"):
        start, key = key[:-1], None
    after, before = asked.instant("due_after"), asked.instant("due_before")
    return Filter(
        fields.text("task"),
        key,
        fields.text("job"),
        None if after is None else milliseconds_of(after),
        None if before is None else milliseconds_of(before),
        start,
    )


def _place(asked: Asked) -> Place | None:
    text = asked.fields.text("after")
    if text is None:
        return None
    if (place := Place.of(text)) is None:
        raise Wrong("after", "takes what 'next' of the page before says")
    return place
