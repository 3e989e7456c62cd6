"""Cancel, postpone or run now: the selected tasks, or all that match a search."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final, TypeAlias

from starlette.exceptions import HTTPException

from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.exceptions import InvalidDelay
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import Due, check_max_delay, instant_of, milliseconds_of
from celery_rabbitdelay.metrics.reading import AWAY, why
from celery_rabbitdelay.registry.commands import WORDS
from celery_rabbitdelay.registry.decision import Outcome
from celery_rabbitdelay.registry.index import Pending
from celery_rabbitdelay.registry.record import TaskState, record_of
from celery_rabbitdelay.registry.search import Search
from celery_rabbitdelay.web.search import PagedSearch
from celery_rabbitdelay.web.site import Verb, Work, in_batches, log_action
from celery_rabbitdelay.web.view_request import Fields, ViewRequest, Wrong
from celery_rabbitdelay.web.waiting import found_before, rows

#: The actions, with their names in the log and on the pages.
ACTIONS: Final = {
    "cancel": Verb("cancelling", "cancelled"),
    "postpone": Verb("postponing", "postponed"),
    "run-now": Verb("running now", "run now"),
}

#: How many tasks the confirmation lists.
SHOWN: Final = 10

#: The most characters of an address with many ids.
MOST_IN_SEE: Final = 4_000

#: The pages that an action may lead back to.
BACK: Final = ("waiting?", "waiting/task?")

#: The outcome of a task whose due time the action leaves unchanged.
KEPT: Final = "kept"

#: The outcomes in words.
OUTCOMES: Final = {**{each.value: WORDS[each] for each in WORDS}, KEPT: "unchanged"}

#: Returns a task's new due time from its id and its present due time; None for no change.
Until: TypeAlias = Callable[[str, datetime], "datetime | None"]


def decide(action: str, request: ViewRequest) -> dict[str, object]:
    """Cancel, postpone or run the selected tasks one by one, up to the first error."""
    until, ids, delays = _until(request, action), _ids(request), request.with_registry
    outcomes: list[tuple[str, str]] = []
    error = None
    try:
        for each in ids:
            outcomes.append((_decide(delays, each, until), each))
    except AWAY as failed:
        error = why(failed)
    fields = Fields([("action", action), ("back", _back(request)), *outcomes])
    told = decided(replace(request, fields=fields))
    log_action(request.user, ACTIONS[action].done, len(fields.getlist(Outcome.DONE.value)), ids)
    if error is None:
        return _with_address("waiting/decided", fields, told)
    return {**told, "left": ids[len(outcomes) :], "error": error}


def decided(request: ViewRequest) -> dict[str, object]:
    """Return the outcomes of an action on selected tasks, which are in the address."""
    fields = request.fields
    return {
        "action": ACTIONS[fields.one_of("action", ACTIONS, "cancel")].done,
        "done": len(fields.getlist(Outcome.DONE.value)),
        "outcomes": [
            {"id": each, "outcome": outcome, "words": words}
            for outcome, words in OUTCOMES.items()
            for each in fields.getlist(outcome)
        ],
        "left": [],
        "error": None,
        "back": _back(request),
    }


def _with_address(page: str, fields: Fields, content: dict[str, object]) -> dict[str, object]:
    """Return the content of a page, and its address, unless it is too long for a browser."""
    address = f"{page}?{fields.address()}"
    return {**content, "see": address} if len(address) <= MOST_IN_SEE else content


def _ids(request: ViewRequest) -> list[str]:
    """Return the ids of the selected tasks."""
    if ids := list(dict.fromkeys(request.fields.getlist("id"))):
        return ids
    raise Wrong("id", "select at least one task")


def _back(request: ViewRequest) -> str:
    """Return the page that an action leads back to, with its query."""
    back = request.fields.get("back", "")
    return back if back.startswith(BACK) else "waiting"


def _decide(delays: RabbitDelay, task_id: str, until: Until | None) -> str:
    """Cancel the task of an id or, with ``until``, postpone it; return the outcome."""
    if until is None:
        return delays.cancel(task_id, also_future=False).value
    record = record_of(delays.registry, task_id)
    eta: datetime | None = wall_clock.now()  # any time will do if the task does not wait
    if record is not None and record.state is TaskState.WAITING:
        eta = until(task_id, instant_of(record.runs_ms))
    if eta is None:
        return KEPT
    return delays.postpone(task_id, eta=eta, also_future=False).value


def select(request: ViewRequest) -> dict[str, object]:
    """Return the confirmation of an action on the selected tasks, and its address."""
    return _with_address("waiting/all", request.fields, confirm(request))


def confirm(request: ViewRequest) -> dict[str, object]:
    """Return the selected tasks, for the confirmation of an action."""
    search, ids = PagedSearch.of_request(request), _ids(request)
    tasks = search.delays.registry.index.tasks(ids[:SHOWN])
    scope = {"sent_before": None, "count": len(ids), "may_be_more": False, "back": _back(request)}
    return {**_question(request, search, tasks), "ids": ids, **scope}


def confirm_all(request: ViewRequest) -> dict[str, object]:
    """Count the tasks that match, for the confirmation; tasks sent afterwards are left out."""
    if "id" in request.fields:
        return confirm(request)
    # Taken before the count, so that no task that is sent meanwhile is affected.
    end = instant_of(request.with_registry.registry.now_ms() + 1)
    search = PagedSearch.of_request(request, end)
    read, count, may_be_more = search.counted()
    tasks = (read or search.found(None, SHOWN)).tasks[:SHOWN]
    back = f"waiting?{request.fields.address(action=None)}"
    scope = {"sent_before": end, "count": count, "may_be_more": may_be_more, "back": back}
    if may_be_more:
        scope["searched"] = search.most_read
        scope["count"] = max(count, found_before(request.fields))
    return {**_question(request, search, tasks), "ids": [], **scope}


def _question(request: ViewRequest, search: PagedSearch, tasks: list[Pending]) -> dict[str, object]:
    action = request.fields.one_of("action", ACTIONS, "cancel")
    return {"action": action, "q": str(search.query), "tasks": rows(search, tasks)}


def decide_all(request: ViewRequest) -> dict[str, object]:
    """Begin an action on all tasks that match and were sent before an instant."""
    action, end = request.fields.one_of("action", ACTIONS, ""), request.instant("sent_before")
    if end is None:
        raise Wrong("sent_before", "takes the instant that /api/waiting/all returns")
    search, until = PagedSearch.of_request(request, end), _until(request, action)
    _, count, may_be_more = search.counted()
    wanted = search.sent_before(end)
    batches = wanted.cancel() if until is None else _postpone_each(wanted, until)
    about = f"tasks that match {search.query}" if search.query.terms else "all tracked tasks"
    about += f" (at least {count:,})" if may_be_more and count else ""
    work = Work(request.user, ACTIONS[action], about, count, _back(request))
    return seen(request.site.works.begin(work, in_batches(batches)))


def _postpone_each(search: Search, until: Until) -> Iterator[int]:
    """Postpone the matching tasks, and yield for each whether it has changed."""
    for each in search.tasks():
        if (eta := until(each.task_id, each.due)) is not None:
            outcome = search.delays.postpone(each.task_id, eta=eta, also_future=False)
            yield int(outcome is Outcome.DONE)


def work(request: ViewRequest) -> dict[str, object]:
    """Return the progress of one long action or, without a key, of all."""
    works = [_work(request)] if "key" in request.fields else request.site.works.all()
    return {"works": [each.shown() for each in works]}


def stop(request: ViewRequest) -> dict[str, object]:
    """Stop a long action after its current batch."""
    found = _work(request)
    found.stopping.set()
    log_action(request.user, "stopped", 1, found.about)
    return seen(found)


def seen(work: Work) -> dict[str, object]:
    """Return a long action, and the page that shows its progress."""
    return {"work": work.shown(), "see": f"work?key={work.key}"}


def _work(request: ViewRequest) -> Work:
    found = request.site.works.get(request.fields.needed("key"))
    if found is None:
        raise HTTPException(404, "No action with this key is running or has ended lately.")
    return found


def _until(request: ViewRequest, action: str) -> Until | None:
    """Return the function that gives each task its new due time; None cancels."""
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
