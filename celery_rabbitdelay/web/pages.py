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
        title: Its title.
        view: Returns what it shows.
        template: The name of its template.
        parameters: What its address or its form takes.
        is_action: Whether it changes something: an operator posts a form with a token.
        in_menu: Whether it stands in the menu.
        refresh: Seconds after which a page that is open is refreshed; 0 for never.
        file: Instead of a template: the name of the file with a line of JSON for each of the
            ``messages``.
    """

    path: str
    title: str
    view: View
    template: str
    parameters: tuple[Parameter, ...] = ()
    is_action: bool = False
    in_menu: bool = False
    refresh: int = 0
    file: str = ""


_INSTANT: Final = "ISO 8601; without a time zone in the application's"
_ID: Final = Parameter("id", "the id of a task", is_needed=True)
_IDS: Final = Parameter("id", "the ids of tasks", is_list=True, is_needed=True)
_FILTERS: Final = (
    Parameter("task", "only tasks of this name"),
    Parameter("key", "only the task of this key; with * at its end, of keys that begin so"),
    Parameter("job", "only tasks that were sent with this job"),
    Parameter("due_after", f"only tasks that are due then or later; {_INSTANT}"),
    Parameter("due_before", f"only tasks that are due before; {_INSTANT}"),
)
_UNTIL: Final = (
    Parameter("by", "how much later each of them is to run: 90, 1h30m, 3d"),
    Parameter("until", f"instead: the instant at which all of them run; {_INSTANT}"),
)
_ACTION: Final = Parameter("action", "what to do", tuple(deciding.ACTIONS))
_KEY: Final = Parameter("key", "the key that the answer had when it was begun")
_JOB: Final = Parameter("name", "the name of a job")
_NAME: Final = Parameter("name", "its name", is_needed=True)
_COUNT: Final = Parameter("count", "at most so many", is_needed=True)
_SENT: Final = Parameter(
    "sent_before",
    f"only tasks sent before this instant, which /api/waiting/all says; {_INSTANT}",
    is_needed=True,
)
_REMOVE: Final = Parameter("action", "what to do", tuple(undeliverable.ACTIONS))
_OF_MESSAGES: Final = (
    Parameter("task", "only tasks of these names or patterns", is_list=True),
    Parameter("queue", "only for queues of these names or patterns", is_list=True),
    Parameter("id", "only the tasks with these ids", is_list=True),
    Parameter("reason", "only with one of these texts in their reason", is_list=True),
    Parameter("older_than", "undeliverable for at least so long: 90, 1h30m, 3d"),
    Parameter("newer_than", "undeliverable for at most so long"),
)
_REDRIVE: Final = (
    Parameter("to", "the queue that gets all of them, instead of their own"),
    Parameter("delay", "each waits for at least so long"),
)

#: All pages.
PAGES: Final = (
    Page(
        "now",
        "Now",
        now,
        "now.html",
        (Parameter("horizon", "how far the histogram looks ahead", tuple(HORIZONS)),),
        in_menu=True,
        refresh=2,
    ),
    Page(
        "waiting",
        "Waiting",
        waiting.waiting,
        "waiting.html",
        (
            Parameter("id", "only the task with this id"),
            *_FILTERS,
            Parameter("limit", f"how many, at most {waiting.MOST}"),
            Parameter("after", "where the page begins: 'next' of the page before"),
        ),
        in_menu=True,
    ),
    Page("waiting/task", "Task", waiting.story, "task.html", (_ID,), refresh=5),
    Page("waiting/cancel", "Cancel", deciding.cancel, "decided.html", (_IDS,), is_action=True),
    Page(
        "waiting/postpone",
        "Postpone",
        deciding.postpone,
        "decided.html",
        (_IDS, *_UNTIL),
        is_action=True,
    ),
    Page("waiting/run-now", "Run now", deciding.run_now, "decided.html", (_IDS,), is_action=True),
    Page("waiting/all", "All that match", deciding.confirm, "confirm.html", (_ACTION, *_FILTERS)),
    Page(
        "waiting/decide-all",
        "All that match",
        deciding.decide_all,
        "work.html",
        (_ACTION._replace(is_needed=True), _SENT, *_FILTERS, *_UNTIL),
        is_action=True,
    ),
    Page("work", "Progress", deciding.work, "work.html", (_KEY,), refresh=1),
    Page(
        "work/stop",
        "Stop",
        deciding.stop,
        "work.html",
        (_KEY._replace(is_needed=True),),
        is_action=True,
    ),
    Page(
        "undeliverable",
        "Undeliverable",
        undeliverable.undeliverable,
        "undeliverable.html",
        _OF_MESSAGES,
        in_menu=True,
    ),
    Page(
        "undeliverable/export",
        "Export",
        undeliverable.export,
        "",
        _OF_MESSAGES,
        file="undeliverable.jsonl",
    ),
    Page("undeliverable/message", "Message", undeliverable.message, "message.html", (_ID,)),
    Page(
        "undeliverable/all",
        "All that match",
        undeliverable.confirm,
        "undeliverable_confirm.html",
        (_REMOVE, *_OF_MESSAGES, *_REDRIVE),
    ),
    Page(
        "undeliverable/decide-all",
        "All that match",
        undeliverable.decide,
        "work.html",
        (_REMOVE._replace(is_needed=True), _COUNT, *_OF_MESSAGES, *_REDRIVE),
        is_action=True,
    ),
    Page("jobs", "Jobs", jobs.jobs, "jobs.html", (_JOB,), in_menu=True),
    Page(
        "jobs/open",
        "Open",
        jobs.open_job,
        "jobs.html",
        (
            _NAME,
            Parameter("expires", "when it is aborted unless it is committed", is_needed=True),
        ),
        is_action=True,
    ),
    Page("jobs/commit", "Commit", jobs.commit, "jobs.html", (_NAME,), is_action=True),
    Page("jobs/abort", "Abort", jobs.abort, "jobs.html", (_NAME,), is_action=True),
    Page(
        "schedules",
        "Schedules",
        schedules.schedules,
        "schedules.html",
        (Parameter("horizon", "how far the time line looks ahead", tuple(HORIZONS)),),
        in_menu=True,
        refresh=30,
    ),
    Page("schedules/one", "Schedule", schedules.schedule, "schedule.html", (_NAME,)),
    Page(
        "schedules/edit",
        "Edit",
        schedules.edit,
        "schedule.html",
        (
            _NAME,
            Parameter("when", "cron texts and intervals, one a line: every 1h30m", is_list=True),
            Parameter("timezone", "the IANA name of the time zone of cron texts"),
            Parameter("paused", "whether it is paused", ("yes", "no")),
        ),
        is_action=True,
    ),
    *(
        Page(f"schedules/{path}", title, view, "schedule.html", (_NAME,), is_action=True)
        for path, title, view in (
            ("pause", "Pause", schedules.pause),
            ("resume", "Resume", schedules.resume),
            ("trigger", "Run now", schedules.trigger),
            ("end", "End", schedules.end),
        )
    ),
    Page("workers", "Workers", workers, "workers.html", in_menu=True, refresh=10),
    Page("health", "Health", health, "health.html", in_menu=True, refresh=30),
)
