"""Cancel, postpone or run now: the selected tasks, or all that match a search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from typing import Final, TypeAlias

from starlette.exceptions import HTTPException

from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.exceptions import InvalidDelay, NotTracked
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import Due, check_max_delay, instant_of, milliseconds_of
from celery_rabbitdelay.registry.commands import WORDS
from celery_rabbitdelay.registry.decision import Outcome
from celery_rabbitdelay.registry.record import TaskState, record_of
from celery_rabbitdelay.web.search import PagedSearch
from celery_rabbitdelay.web.site import Work, in_batches, log_action
from celery_rabbitdelay.web.view_request import ViewRequest, Wrong
from celery_rabbitdelay.web.waiting import found_before, rows

#: The actions, with their names in the log and on the pages.
ACTIONS: Final = {"cancel": "cancelled", "postpone": "postponed", "run-now": "run now"}

#: How many tasks the confirmation lists.
SHOWN: Final = 10

#: The most characters of an address with many ids.
MOST_IN_SEE: Final = 4_000

#: The pages that an action may lead back to.
BACK: Final = ("waiting?", "waiting/task?")

#: The outcomes in words.
OUTCOMES: Final = {
    **{each.value: WORDS[each] for each in WORDS},
    "kept": "unchanged",
    "unconfirmed": "not confirmed: see the task",
    "untracked": "unchanged: only a tracked task can run earlier",
}

#: Returns a task's new due time from its id and its present due time; None for no change.
Until: TypeAlias = Callable[[str, datetime], "datetime | None"]


def select(request: ViewRequest) -> dict[str, object]:
    """Return the confirmation of an action on the selected tasks, and its address."""
    if "id" not in request.fields:
        raise Wrong("id", "select at least one task")
    content, address = confirm(request), f"waiting/all?{request.fields.address()}"
    return {**content, "see": address} if len(address) <= MOST_IN_SEE else content


def confirm(request: ViewRequest) -> dict[str, object]:
    """Count the selected or the matching tasks, for the confirmation of an action.

    Tasks that are sent after the count of a search are left out.
    """
    fields, ids = request.fields, [*dict.fromkeys(request.fields.getlist("id"))]
    # Taken before the count, so that no task that is sent meanwhile is affected.
    end = instant_of(request.with_registry.registry.now_ms() + 1)
    search, count, may_be_more = PagedSearch.of_request(request, end), len(ids), False
    if ids:
        tasks = search.delays.registry.index.tasks(ids[:SHOWN])
    else:
        read, count, may_be_more = search.counted()
        tasks = (read or search.found(None, SHOWN)).tasks[:SHOWN]
    return {
        "action": fields.one_of("action", ACTIONS, "cancel"),
        "q": str(search.query),
        "ids": ids,
        "sent_before": None if ids else end,
        "held_by": search.held_by,
        "count": max(count, found_before(fields)) if may_be_more else count,
        "may_be_more": may_be_more,
        "searched": search.most_read,
        "tasks": rows(search, tasks),
        "back": _back(request) if ids else f"waiting?{fields.address(action=None, so_far=None)}",
    }


def _back(request: ViewRequest) -> str:
    """Return the page that an action leads back to, with its query."""
    back = request.fields.get("back", "")
    return back if back.startswith(BACK) else "waiting"


def decide(request: ViewRequest) -> dict[str, object]:
    """Begin an action on the selected tasks, or on all that match and were counted."""
    action = request.fields.one_of("action", ACTIONS, "")
    delays, until = request.with_registry, _until(request, action)
    outcomes: dict[str, str | None] = dict.fromkeys(request.fields.getlist("id"))
    if outcomes:
        about, total = "selected tasks", len(outcomes)
        tasks = ((each, _due(delays, each)) for each in [*outcomes])
        batches = _decide_each(delays, tasks, until, outcomes)
    else:
        about, total, batches = _decide_matching(request, until)
    work = Work(request.user, ACTIONS[action], about, total, _back(request), outcomes)
    return seen(request.site.works.begin(work, in_batches(batches)))


def _decide_matching(request: ViewRequest, until: Until | None) -> tuple[str, int, Iterator[int]]:
    """Return the name of a search's tasks, their count, and the batches that decide about them."""
    end = request.instant("sent_before")
    if end is None:
        raise Wrong("sent_before", "takes the instant that /api/waiting/all returns")
    search = PagedSearch.of_request(request, end)
    if search.held_by != request.fields.get("held_by", ""):
        changed = "A pause or a job has begun or ended since the count. Search again, and confirm."
        raise HTTPException(409, changed)
    wanted = search.sent_before(end)
    _, count, may_be_more = search.counted()
    about = f"tasks that match {search.query}" if search.query.terms else "all tracked tasks"
    about += f" (at least {count:,})" if may_be_more and count else ""
    if until is None:
        return about, count, wanted.cancel()
    tasks = ((each.task_id, each.due) for each in wanted.tasks())
    return about, count, _decide_each(search.delays, tasks, until, {})


def _due(delays: RabbitDelay, task_id: str) -> datetime | None:
    """Return the present due time of a task; None if it does not wait."""
    record = record_of(delays.registry, task_id)
    if record is None or record.state is not TaskState.WAITING:
        return None
    return instant_of(record.runs_ms)


def _decide_each(
    delays: RabbitDelay,
    tasks: Iterable[tuple[str, datetime | None]],
    until: Until | None,
    outcomes: dict[str, str | None],
) -> Iterator[int]:
    """Cancel or postpone tasks one by one; yield 1 for each task that has changed, 0 for others.

    Args:
        delays: The application's delays.
        tasks: The ids and the due times of the tasks; None for a task that does not wait.
        until: Returns the new due times; None to cancel the tasks.
        outcomes: The outcomes of its tasks are set.
    """
    for task_id, due in tasks:
        # A task that does not wait is postponed to any time, for its outcome.
        eta = until(task_id, due) if until and due else wall_clock.now()
        outcome = "unconfirmed"  # stays if a server fails
        try:
            if until is None:
                outcome = delays.cancel(task_id, also_future=False).value
            elif eta is None:
                outcome = "kept"
            else:
                outcome = delays.postpone(task_id, eta=eta, also_future=False).value
        except NotTracked:
            outcome = "untracked"
        finally:
            if task_id in outcomes:
                outcomes[task_id] = outcome
        yield int(outcome == Outcome.DONE.value)


def work(request: ViewRequest) -> dict[str, object]:
    """Return the progress and the outcomes of one action or, without a key, of all."""
    works = request.site.works
    if "key" in request.fields:
        return {"works": [works.shown(request.fields.needed("key"))], "words": OUTCOMES}
    return {"works": [{**each.shown(), "outcomes": {}} for each in works.all()], "words": OUTCOMES}


def stop(request: ViewRequest) -> dict[str, object]:
    """Stop an action after its current task or batch."""
    found = request.site.works.get(request.fields.needed("key"))
    found.stopping.set()
    log_action(request.user, f"stopped the action on {found.about}")
    return seen(found)


def seen(work: Work) -> dict[str, object]:
    """Return an action, and the page that shows its progress."""
    return {"work": work.shown(), "see": f"work?key={work.key}"}


def _until(request: ViewRequest, action: str) -> Until | None:
    """Return the function that gives each task its new due time; None to cancel them."""
    if action == "cancel":
        return None
    if action == "run-now":
        now = instant_of(wall_clock.ms())
        return lambda _, due: None if now <= due <= wall_clock.now() else now  # it moves only once
    by, until = request.duration("by"), request.instant("until")
    at = request.instant("at") if len(request.fields.getlist("id")) == 1 else None
    new = until or at
    if by and new is None:
        return _by_delay(by)
    if new is None or by is not None or (until and at):
        raise Wrong("by", "takes a delay above 0 (90, 1h30m, 3d), or an instant as 'until'")
    try:
        check_max_delay(Due.at(new))
        instant = instant_of(milliseconds_of(new))
    except (InvalidDelay, OverflowError) as wrong:
        raise Wrong("until" if until else "at", "is too far away") from wrong
    return lambda _, due: None if due == instant or (until and due > instant) else instant


def _by_delay(delay: timedelta) -> Until:
    """Return the function that postpones tasks by a delay, counted from now for late tasks.

    A task that comes up again at its new place in the order does not move again.
    """
    moved = dict[str, datetime]()

    def until(task_id: str, due: datetime) -> datetime | None:
        while (passed := next(iter(moved), None)) is not None and moved[passed] < due:
            del moved[passed]  # the order has passed its new place: it cannot come up again
        if task_id in moved:
            return None
        return moved.setdefault(task_id, max(due, wall_clock.now()) + delay)

    return until
