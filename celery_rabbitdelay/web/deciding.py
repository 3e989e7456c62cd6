"""Cancel, postpone and run now: tasks that were selected, or all that match."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Final

from starlette.exceptions import HTTPException

from celery_rabbitdelay.exceptions import InvalidDelay
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import Due, check_max_delay, instant_of, milliseconds_of
from celery_rabbitdelay.metrics.reading import AWAY, why
from celery_rabbitdelay.registry.commands import WORDS
from celery_rabbitdelay.registry.decision import Outcome
from celery_rabbitdelay.registry.record import record_of
from celery_rabbitdelay.web import search
from celery_rabbitdelay.web.asked import Asked, Wrong
from celery_rabbitdelay.web.site import Does, Work, in_batches, log_action
from celery_rabbitdelay.web.waiting import FILTERS, filter_of

#: What can be decided, and how the log and the pages name it afterwards.
ACTIONS: Final = {"cancel": "cancelled", "postpone": "postponed", "run-now": "run now"}


def decide(action: str, asked: Asked) -> dict[str, object]:
    """Decide about the selected tasks, one after the other; an error ends that."""
    decide = _decision(asked, _until(asked, action))
    ids = list(dict.fromkeys(asked.fields.getlist("id")))
    if not ids:
        raise Wrong("id", "select at least one task")
    outcomes: list[dict[str, str]] = []
    error = None
    try:
        for each in ids:
            outcome = decide(each)
            outcomes.append({"id": each, "outcome": outcome.value, "words": WORDS[outcome]})
    except AWAY as failed:
        error = why(failed)
    done = sum(each["outcome"] == Outcome.DONE.value for each in outcomes)
    log_action(asked.user, ACTIONS[action], done, ids)
    return {
        "action": ACTIONS[action],
        "done": done,
        "outcomes": outcomes,
        "left": ids[len(outcomes) :],
        "error": error,
    }


def _decision(asked: Asked, until: search.Until | None) -> Callable[[str], Outcome]:
    """Return what cancels the task of an id, or, with ``until``, lets it run at another time."""
    delays = asked.with_registry
    if until is None:
        return lambda task_id: delays.cancel(task_id, also_future=False)

    def postponed(task_id: str) -> Outcome:
        record = record_of(delays.registry, task_id)
        due = wall_clock.now()  # of what does not wait, the answer says what it is
        if record is not None and record.due_ms is not None:
            due = instant_of(record.runs_ms)
        eta = until(task_id, due) or due
        return delays.postpone(task_id, eta=eta, also_future=False)

    return postponed


def confirm(asked: Asked) -> dict[str, object]:
    """Count the tasks that match; what is sent afterwards is left out of a decision about all."""
    action, delays = asked.fields.one_of("action", ACTIONS, "cancel"), asked.with_registry
    end = instant_of(delays.registry.now_ms() + 1)
    count, may_be_more = search.count_at_least(delays, filter_of(asked))
    return {
        "action": action,
        "sent_before": end,
        "count": count,
        "may_be_more": may_be_more,
        "filter": asked.fields.filter(FILTERS),
    }


def decide_all(asked: Asked) -> dict[str, object]:
    """Begin to decide about all tasks that match and were sent before an instant."""
    action = asked.fields.one_of("action", ACTIONS, "")
    delays, sent_before = asked.with_registry, asked.instant("sent_before")
    if sent_before is None:
        raise Wrong("sent_before", "takes what /api/waiting/all says")
    wanted = filter_of(asked)._replace(sent_before_ms=milliseconds_of(sent_before))
    until = _until(asked, action)
    count, _ = search.count_at_least(delays, filter_of(asked))
    batches: Iterator[int]
    if wanted.key is not None:  # found without reading all tasks
        decide = _decision(asked, until)
        found = search.search(delays, wanted, 1).tasks
        batches = (int(decide(each.task_id) is Outcome.DONE) for each in found)
    elif until is None:
        batches = delays.cancel_batches(wanted)
    else:
        batches = search.postpone_batches(delays, wanted, until)
    return begin(asked, f"{ACTIONS[action]} all", FILTERS, count, in_batches(batches))


def begin(
    asked: Asked, what: str, filters: Collection[str], total: int, does: Does
) -> dict[str, object]:
    """Begin a long action, which is named by the fields that choose what it is about."""
    chosen = " ".join(
        f"{name}={value!r}" for name, value in asked.fields.filter(filters).items() if value
    )
    what = f"{what} with {chosen}" if chosen else what
    return _seen(asked.site.works.begin(asked.user, what, total, does))


def work(asked: Asked) -> dict[str, object]:
    """Return the progress of a long action; without a key, of all of them."""
    works = [_work(asked)] if "key" in asked.fields else asked.site.works.all()
    return {"works": [each.shown() for each in works]}


def stop(asked: Asked) -> dict[str, object]:
    """Stop a long action after its current batch."""
    found = _work(asked)
    found.stopping.set()
    log_action(asked.user, "stopped", 1, found.what)
    return _seen(found)


def _seen(work: Work) -> dict[str, object]:
    return {"work": work.shown(), "see": f"work?key={work.key}"}


def _work(asked: Asked) -> Work:
    found = asked.site.works.get(asked.fields.needed("key"))
    if found is None:
        raise HTTPException(404, "Nothing of this key goes on, or has ended lately.")
    return found


def _until(asked: Asked, action: str) -> search.Until | None:
    """Return the new due time of each task; None cancels."""
    if action == "cancel":
        return None
    if action == "run-now":
        return search.all_at(wall_clock.now())
    by, until = asked.duration("by"), asked.instant("until")
    if by and until is None:
        return search.each_by(by)
    if until is None or by is not None:
        takes = "give a delay of more than 0 (90, 1h30m, 3d), or an instant as 'until'"
        raise Wrong("by", takes)
    try:
        check_max_delay(Due.at(until))
        return search.all_at(until)
    except (InvalidDelay, OverflowError) as wrong:
        raise Wrong("until", "is too far away") from wrong
