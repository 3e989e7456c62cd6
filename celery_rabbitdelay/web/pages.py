"""The table of all pages; each is also JSON under ``/api``, and described there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

from celery_rabbitdelay.web import deciding, jobs, schedules, undeliverable, waiting
from celery_rabbitdelay.web.asked import Asked
from celery_rabbitdelay.web.health import health
from celery_rabbitdelay.web.now import now
from celery_rabbitdelay.web.site import HORIZONS
from celery_rabbitdelay.web.workers import workers

#: Returns what a page and its JSON show. It may block; it is called in a thread.
View: TypeAlias = Callable[[Asked], dict[str, Any]]


class Parameter(NamedTuple):
    """A field of an address or of a form.

    Attributes:
        name: Its name.
        meaning: What it means.
        words: The words that it takes; none: any text.
        is_list: Whether it may stand several times.
        is_needed: Whether it has to be there.
    """

    name: str
    meaning: str
    words: tuple[str, ...] = ()
    is_list: bool = False
    is_needed: bool = False


class Page(NamedTuple):
    """A page.

    Attributes:
        path: Its path, without a slash before it.
        view: Returns what it shows.
        parameters: What its address or its form takes.
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
    parameters: tuple[Parameter, ...] = ()
    title: str = ""
    template: str = ""
    is_action: bool = False
    in_menu: bool = False
    refresh: int = 0
    file: str = ""


def _action(
    path: str, view: View, parameters: tuple[Parameter, ...], title: str = "", template: str = ""
) -> Page:
    return Page(path, view, parameters, title, template, is_action=True)


_INSTANT: Final = "ISO 8601; without a time zone in the application's"
_HORIZON: Final = (Parameter("horizon", "how far the page looks ahead", tuple(HORIZONS)),)
_ID: Final = Parameter("id", "the id of a task", is_needed=True)
_IDS: Final = Parameter("id", "the ids of tasks", is_list=True, is_needed=True)
_FILTERS: Final = (
    Parameter("task", "only tasks of this name"),
    Parameter("key", "only the task of this key; with * at its end, of keys that begin so"),
    Parameter("job", "only tasks that were sent with this job"),
    Parameter("due_after", f"only tasks that are due then or later; {_INSTANT}"),
    Parameter("due_before", f"only tasks that are due before; {_INSTANT}"),
)
_SEARCH: Final = (
    Parameter("id", "only the task with this id"),
    *_FILTERS,
    Parameter("limit", f"how many, at most {waiting.MOST}"),
    Parameter("after", "where the page begins: 'next' of the page before"),
)
_UNTIL: Final = (
    Parameter("by", "how much later each of them is to run: 90, 1h30m, 3d"),
    Parameter("until", f"instead: the instant at which all of them run; {_INSTANT}"),
)
_ACTION: Final = Parameter("action", "what to do", tuple(deciding.ACTIONS))
_SENT: Final = Parameter(
    "sent_before",
    f"only tasks sent before this instant, which /api/waiting/all says; {_INSTANT}",
    is_needed=True,
)
_DECIDE_ALL: Final = (_ACTION._replace(is_needed=True), _SENT, *_FILTERS, *_UNTIL)
_KEY: Final = Parameter("key", "the key that the answer had when it was begun")
_NAME: Final = Parameter("name", "its name", is_needed=True)
_JOB: Final = Parameter("name", "the name of a job")
_EXPIRES: Final = Parameter("expires", "when it is aborted unless it is committed", is_needed=True)
_REMOVE: Final = Parameter("action", "what to do", tuple(undeliverable.ACTIONS))
_COUNT: Final = Parameter("count", "at most so many", is_needed=True)
_MESSAGES: Final = (
    Parameter("task", "only tasks of these names or patterns", is_list=True),
    Parameter("queue", "only for queues of these names or patterns", is_list=True),
    Parameter("id", "only the tasks with these ids", is_list=True),
    Parameter("reason", "only with one of these texts in their reason", is_list=True),
    Parameter("older_than", "undeliverable for at least so long: 90, 1h30m, 3d"),
    Parameter("newer_than", "undeliverable for at most so long"),
)
_REDRIVE: Final = (
    *_MESSAGES,
    Parameter("to", "the queue that gets all of them, instead of their own"),
    Parameter("delay", "each waits for at least so long"),
)
_EDIT: Final = (
    _NAME,
    Parameter("when", "cron texts and intervals, one a line: every 1h30m", is_list=True),
    Parameter("timezone", "the IANA name of the time zone of cron texts"),
    Parameter("paused", "whether it is paused", ("yes", "no")),
)

#: All pages.
PAGES: Final = (
    Page("now", now, _HORIZON, "Now", "now.html", in_menu=True, refresh=2),
    Page("waiting", waiting.waiting, _SEARCH, "Waiting", "waiting.html", in_menu=True),
    Page("waiting/task", waiting.story, (_ID,), "Task", "task.html", refresh=5),
    _action("waiting/cancel", deciding.cancel, (_IDS,), "Cancel", "decided.html"),
    _action("waiting/postpone", deciding.postpone, (_IDS, *_UNTIL), "Postpone", "decided.html"),
    _action("waiting/run-now", deciding.run_now, (_IDS,), "Run now", "decided.html"),
    Page("waiting/all", deciding.confirm, (_ACTION, *_FILTERS), "All that match", "confirm.html"),
    _action("waiting/decide-all", deciding.decide_all, _DECIDE_ALL),
    Page("work", deciding.work, (_KEY,), "Progress", "work.html", refresh=1),
    _action("work/stop", deciding.stop, (_KEY._replace(is_needed=True),)),
    Page(
        "undeliverable",
        undeliverable.undeliverable,
        _MESSAGES,
        "Undeliverable",
        "undeliverable.html",
        in_menu=True,
    ),
    Page("undeliverable/export", undeliverable.export, _MESSAGES, file="undeliverable.jsonl"),
    Page("undeliverable/message", undeliverable.message, (_ID,), "Message", "message.html"),
    Page(
        "undeliverable/all",
        undeliverable.confirm,
        (_REMOVE, *_REDRIVE),
        "All that match",
        "undeliverable_confirm.html",
    ),
    _action(
        "undeliverable/decide-all",
        undeliverable.decide,
        (_REMOVE._replace(is_needed=True), _COUNT, *_REDRIVE),
    ),
    Page("jobs", jobs.jobs, (_JOB,), "Jobs", "jobs.html", in_menu=True),
    _action("jobs/open", jobs.open_job, (_NAME, _EXPIRES)),
    _action("jobs/commit", jobs.commit, (_NAME,)),
    _action("jobs/abort", jobs.abort, (_NAME,)),
    Page(
        "schedules",
        schedules.schedules,
        _HORIZON,
        "Schedules",
        "schedules.html",
        in_menu=True,
        refresh=30,
    ),
    Page("schedules/one", schedules.schedule, (_NAME,), "Schedule", "schedule.html"),
    _action("schedules/edit", schedules.edit, _EDIT),
    _action("schedules/pause", schedules.pause, (_NAME,)),
    _action("schedules/resume", schedules.resume, (_NAME,)),
    _action("schedules/trigger", schedules.trigger, (_NAME,)),
    _action("schedules/end", schedules.end, (_NAME,)),
    Page("workers", workers, (), "Workers", "workers.html", in_menu=True, refresh=10),
    Page("health", health, (), "Health", "health.html", in_menu=True, refresh=30),
)
