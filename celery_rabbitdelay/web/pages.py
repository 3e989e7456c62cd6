"""The table of all pages; each is also JSON under ``/api``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

from celery_rabbitdelay.web import deciding, jobs, schedules, undeliverable, waiting
from celery_rabbitdelay.web.asked import Asked
from celery_rabbitdelay.web.health import health
from celery_rabbitdelay.web.now import now
from celery_rabbitdelay.web.workers import workers

#: Returns what a page and its JSON show. It may block; it is called in a thread.
View: TypeAlias = Callable[[Asked], dict[str, Any]]


class Page(NamedTuple):
    """A page.

    Attributes:
        path: Its path, without a slash before it.
        view: Returns what it shows.
        title: Its title; empty for a file, and for an action that leads to another page.
        template: The name of its template; empty likewise.
        is_action: Whether it changes something: an operator posts a form with a token.
        in_menu: Whether it stands in the menu.
        refresh: Seconds after which a page that is open is refreshed; 0 for never.
        file: Instead of a template: the name of the file with a line of JSON for each of the
            ``messages``.
    """

    path: str
    view: View
    title: str = ""
    template: str = ""
    is_action: bool = False
    in_menu: bool = False
    refresh: int = 0
    file: str = ""


def _action(path: str, view: View, title: str = "", template: str = "") -> Page:
    return Page(path, view, title, template, is_action=True)


#: All pages.
PAGES: Final = (
    Page("now", now, "Now", "now.html", in_menu=True, refresh=2),
    Page("waiting", waiting.waiting, "Waiting", "waiting.html", in_menu=True),
    Page("waiting/task", waiting.story, "Task", "task.html", refresh=5),
    _action("waiting/cancel", deciding.cancel, "Cancel", "decided.html"),
    _action("waiting/postpone", deciding.postpone, "Postpone", "decided.html"),
    _action("waiting/run-now", deciding.run_now, "Run now", "decided.html"),
    Page("waiting/all", deciding.confirm, "All that match", "confirm.html"),
    _action("waiting/decide-all", deciding.decide_all),
    Page("work", deciding.work, "Progress", "work.html", refresh=1),
    _action("work/stop", deciding.stop),
    Page(
        "undeliverable",
        undeliverable.undeliverable,
        "Undeliverable",
        "undeliverable.html",
        in_menu=True,
    ),
    Page("undeliverable/export", undeliverable.export, file="undeliverable.jsonl"),
    Page("undeliverable/message", undeliverable.message, "Message", "message.html"),
    Page(
        "undeliverable/all",
        undeliverable.confirm,
        "All that match",
        "undeliverable_confirm.html",
    ),
    _action(
        "undeliverable/decide-all",
        undeliverable.decide,
    ),
    Page("jobs", jobs.jobs, "Jobs", "jobs.html", in_menu=True),
    _action("jobs/open", jobs.open_job),
    _action("jobs/commit", jobs.commit),
    _action("jobs/abort", jobs.abort),
    Page(
        "schedules",
        schedules.schedules,
        "Schedules",
        "schedules.html",
        in_menu=True,
        refresh=30,
    ),
    Page("schedules/one", schedules.schedule, "Schedule", "schedule.html"),
    _action("schedules/edit", schedules.edit),
    _action("schedules/pause", schedules.pause),
    _action("schedules/resume", schedules.resume),
    _action("schedules/trigger", schedules.trigger),
    _action("schedules/end", schedules.end),
    Page("workers", workers, "Workers", "workers.html", in_menu=True, refresh=10),
    Page("health", health, "Health", "health.html", in_menu=True, refresh=30),
)
