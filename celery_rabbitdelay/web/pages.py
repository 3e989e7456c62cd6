"""The table of all pages; every page is also available as JSON under ``/api``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from celery_rabbitdelay.web import deciding, holding, schedules, undeliverable
from celery_rabbitdelay.web.levels import levels
from celery_rabbitdelay.web.now import health, now
from celery_rabbitdelay.web.task import story
from celery_rabbitdelay.web.view_request import ViewRequest
from celery_rabbitdelay.web.waiting import complete, waiting
from celery_rabbitdelay.web.workers import workers

#: Returns the content of a page and of its JSON. It may block, because it runs in a thread.
View: TypeAlias = Callable[[ViewRequest], dict[str, object]]


class Page(NamedTuple):
    """A page.

    Attributes:
        path: The page's path, without a leading slash.
        view: Returns its content.
        title: The page's title; empty for an action that redirects to another page.
        template: The name of the template, without ``.html``; empty for such an action.
        in_menu: Whether the page is in the menu.
        refresh: Seconds after which an open page refreshes; 0 for never.
        is_action: Whether the page changes something; an operator posts a form.
    """

    path: str
    view: View
    title: str = ""
    template: str = ""
    in_menu: bool = False
    refresh: int = 0
    is_action: bool = False


_action = partial(Page, is_action=True)
_in_menu = partial(Page, in_menu=True)

#: All pages.
PAGES: Final = (
    _in_menu("now", now, "Now", "now", refresh=5),
    _in_menu("waiting", waiting, "Waiting", "waiting"),
    Page("waiting/completions", complete, "Completions", "completions"),
    Page("waiting/task", story, "Task", "task", refresh=5),
    _action("waiting/confirm", deciding.select, "Are you sure?", "confirm"),
    Page("waiting/all", deciding.confirm, "Are you sure?", "confirm"),
    _action("waiting/decide", deciding.decide),
    Page("work", deciding.work, "Actions", "work"),
    _action("work/stop", deciding.stop),
    _in_menu("undeliverable", undeliverable.undeliverable, "Undeliverable", "undeliverable"),
    Page("undeliverable/message", undeliverable.message, "Message", "message"),
    Page("undeliverable/all", undeliverable.confirm, "All that match", "undeliverable_confirm"),
    _action("undeliverable/decide", undeliverable.decide),
    _in_menu("jobs", holding.jobs, "Jobs", "jobs"),
    Page("jobs/one", holding.job, "Job", "job"),
    _action("jobs/commit", partial(holding.change_job, "commit_job", "committed")),
    _action("jobs/abort", partial(holding.change_job, "abort_job", "aborted")),
    _in_menu("pauses", holding.pauses, "Pauses", "pauses", refresh=5),
    _action("pauses/pause", holding.pause),
    _action("pauses/resume", holding.resume),
    _in_menu("schedules", schedules.schedules, "Schedules", "schedules", refresh=30),
    Page("schedules/one", schedules.schedule, "Schedule", "schedule"),
    _action("schedules/edit", schedules.edit),
    _action("schedules/pause", partial(schedules.change, "pause", "paused the schedule")),
    _action("schedules/resume", partial(schedules.change, "resume", "resumed the schedule")),
    _action("schedules/trigger", partial(schedules.change, "trigger", "triggered")),
    _action("schedules/end", schedules.end),
    _in_menu("levels", levels, "Levels", "levels", refresh=2),
    _in_menu("workers", workers, "Workers", "workers", refresh=10),
    _in_menu("health", health, "Health", "health", refresh=30),
)
