"""Cancel, postpone and run now: tasks that were selected, or all that match."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any, Final

from starlette.exceptions import HTTPException

from celery_rabbitdelay.exceptions import InvalidDelay
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import Due, check_max_delay
from celery_rabbitdelay.operations.waiting import WORDS, count_at_least, postpone_batches, search
from celery_rabbitdelay.registry.decision import Outcome
from celery_rabbitdelay.web.asked import Asked, Wrong, servers_away
from celery_rabbitdelay.web.reading import AWAY, why
from celery_rabbitdelay.web.waiting import FILTERS, check_registry, filter_of
from celery_rabbitdelay.web.work import Work, in_batches, log_action

#: What can be decided, and how the log and the pages name it afterwards.
ACTIONS: Final = {"cancel": "cancelled", "postpone": "postponed", "run-now": "run now"}


def cancel(asked: Asked) -> dict[str, Any]:
    """Cancel the selected tasks."""
    delays = asked.site.delays
    return _decided(asked, "cancel", lambda each: delays.cancel(each, also_future=False))


def postpone(asked: Asked) -> dict[str, Any]:
    """Let the selected tasks run at another time."""
    return _postponed(asked, "postpone", _due(asked))


def run_now(asked: Asked) -> dict[str, Any]:
    """Let the selected tasks run now."""
    return _postponed(asked, "run-now", wall_clock.now())


def _postponed(asked: Asked, action: str, due: datetime) -> dict[str, Any]:
    delays = asked.site.delays
    return _decided(asked, action, lambda each: delays.postpone(each, eta=due, also_future=False))


def _decided(asked: Asked, action: str, decide: Callable[[str], Outcome]) -> dict[str, Any]:
    """Decide about the selected tasks, one after the other; an error ends that."""
    check_registry(asked)
    ids = list(dict.fromkeys(asked.fields.all("id")))
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


def confirm(asked: Asked) -> dict[str, Any]:
    """Return how many tasks match, before something is decided about all of them."""
    check_registry(asked)
    action = asked.fields.one_of("action", ACTIONS, "cancel")
    with servers_away():
        count, may_be_more = count_at_least(asked.site.delays, filter_of(asked))
    return {
        "action": action,
        "count": count,
        "may_be_more": may_be_more,
        "filter": {name: asked.fields.text(name) for name in FILTERS},
    }


def decide_all(asked: Asked) -> dict[str, Any]:
    """Begin to decide about all tasks that match, at most as many as were counted."""
    check_registry(asked)
    action = asked.fields.one_of("action", ACTIONS, "")
    count = asked.fields.number("count", 0, 10**9)
    wanted, delays = filter_of(asked), asked.site.delays
    due = _due(asked) if action == "postpone" else wall_clock.now()
    batches: Iterator[int]
    if wanted.key is not None:
        batches = _of_key(asked, action, due, count)
    elif action == "cancel":
        batches = delays.cancel_batches(wanted, count)
    else:
        batches = postpone_batches(delays, wanted, due, count)
    chosen = " ".join(
        f"{name}={asked.fields.text(name)!r}" for name in FILTERS if name in asked.fields
    )
    what = f"{ACTIONS[action]} all with {chosen}" if chosen else f"{ACTIONS[action]} all"
    work = asked.site.works.begin(asked.user, what, count, in_batches(batches))
    return {"work": work.as_json(), "see": f"work?key={work.key}"}


def _of_key(asked: Asked, action: str, due: datetime, count: int) -> Iterator[int]:
    """Decide about the task of a key, which is found without reading all others."""
    delays = asked.site.delays
    for each in search(delays, filter_of(asked), count).tasks:
        outcome = (
            delays.cancel(each.task_id, also_future=False)
            if action == "cancel"
            else delays.postpone(each.task_id, eta=due, also_future=False)
        )
        yield int(outcome is Outcome.DONE)


def work(asked: Asked) -> dict[str, Any]:
    """Return how far something has come that takes long; without a key, all that goes on."""
    if "key" not in asked.fields:
        return {"works": [each.as_json() for each in asked.site.works.all()]}
    return {"works": [_work(asked).as_json()]}


def stop(asked: Asked) -> dict[str, Any]:
    """Stop something that takes long, after the batch that goes on."""
    found = _work(asked)
    found.stop()
    log_action(asked.user, "stopped", 1, found.what)
    return {"work": found.as_json(), "see": f"work?key={found.key}"}


def _work(asked: Asked) -> Work:
    found = asked.site.works.get(asked.fields.needed("key"))
    if found is None:
        raise HTTPException(404, "Nothing of this key goes on, or has ended lately.")
    return found


def _due(asked: Asked) -> datetime:
    """Return the instant that tasks are postponed to: a delay from now on, or an instant."""
    delay, until = asked.delay("delay"), asked.instant("until")
    if (delay is None) == (until is None):
        raise Wrong("delay", "give a delay (90, 1h30m, 3d), or an instant")
    if until is not None:
        return until
    try:
        check_max_delay(Due.after(delay))
        return wall_clock.now() + timedelta(seconds=float(delay))
    except (InvalidDelay, OverflowError) as wrong:
        raise Wrong("delay", "is too long") from wrong
