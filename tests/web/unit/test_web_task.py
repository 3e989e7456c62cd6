"""The reasons why a due task has not run."""

from dataclasses import fields
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.publishing.declaration import Backlog
from celery_rabbitdelay.publishing.kombu_internals import Counts
from celery_rabbitdelay.registry.index import Kind, KindCounts
from celery_rabbitdelay.registry.pauses import Paused
from celery_rabbitdelay.registry.record import KnownTask
from celery_rabbitdelay.registry.states import Holds
from celery_rabbitdelay.web import task
from celery_rabbitdelay.web.site import Counted


def reason(messages: int, consumers: int, held: int) -> task.Reason:
    """Return why an overdue task has not run, while tasks of another name are paused.

    Args:
        messages: The messages in its queue.
        consumers: The consumers of its queue.
        held: The messages in the queue of paused tasks.
    """
    known: dict[str, Any] = dict.fromkeys(each.name for each in fields(KnownTask))
    known |= {"task_id": "a1", "state": "waiting", "queue": "mail", "missing": (), "pauses": ()}
    known["due"] = wall_clock.now() - timedelta(minutes=1)
    known["in_queue"] = {"messages": messages, "consumers": consumers}
    backlog = Backlog({}, {}, {"paused": Counts(held, 0)}, ())
    request: Any = SimpleNamespace(site=None)
    (found,) = task.reasons(request, KnownTask(**known), backlog)
    return found


@pytest.mark.parametrize(
    ("messages", "consumers", "words", "ahead"),
    [
        (0, 0, "its message was lost", "'Run now' sends it again"),
        (3, 0, "no worker consumes its queue", "A worker that consumes its queue runs it"),
        (3, 1, "the workers of its queue are busy", "A free worker runs it"),
    ],
)
def test_a_due_task_may_be_one_of_the_resumed_tasks_but_not_of_those_that_a_pause_holds(
    messages: int, consumers: int, words: str, ahead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = wall_clock.now()
    holds = Holds(now, [Paused("other", None, now)])
    kinds = [
        KindCounts(Kind(name, "mail"), 10, None, None, 0, {holds.late_ms: 10})
        for name in ("store.pay", "other")
    ]
    monkeypatch.setattr(task, "counted", lambda site: Counted(holds, kinds))
    resumed = "one of at most 4 tasks that return"
    found = reason(messages, consumers, held=14)
    assert words in found.words
    assert resumed in found.words
    found = reason(messages, consumers, held=10)
    assert "was resumed" not in found.words
    assert (found.page, found.ahead) == ("workers", ahead)
