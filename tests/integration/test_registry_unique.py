"""Tasks under a key, those that run once and those of a job, with a worker of their own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from celery import chain, chord, group

from celery_rabbitdelay import JobClosed, NotTracked, UnknownOption
from celery_rabbitdelay.app.sending import task_sending
from celery_rabbitdelay.registry import registry
from celery_rabbitdelay.registry.decision import Outcome
from celery_rabbitdelay.testing import wait_for
from tests.integration.notes import Notes
from tests.integration.registry_fixtures import (
    DELAY,
    module_settings,
    module_worker,
    redis_setup,
    shop,
)
from tests.integration.shop import PATIENCE

__all__ = ["module_settings", "module_worker", "redis_setup", "shop"]


def test_a_task_with_a_key_cannot_run_earlier_unless_it_is_tracked(shop: Any, noted: Notes) -> None:
    key = f"order:{uuid4().hex}"
    result = noted.send("keyed", delay=60, key=key)
    with pytest.raises(NotTracked, match=result.id):
        shop.rabbitdelay.postpone(key=key, delay=1)
    assert shop.rabbitdelay.cancel(key=key) is Outcome.DONE


def test_of_the_tasks_under_each_key_the_newest_runs(shop: Any, noted: Notes) -> None:
    for kind, last in (("delayed", {"delay": DELAY - 0.5}), ("at once", {})):
        for number in range(4):
            noted.send(number, delay=DELAY - 0.1 * number, key=f"{kind} {noted.key}")
        noted.send(f"newest {kind}", key=f"{kind} {noted.key}", **last)
    for envelopes in (True, False):
        keys = [f"{envelopes} {noted.key}:{number % 3}" for number in range(9)]
        rows = [noted.row(f"row {at}", delay=DELAY, key=key) for at, key in enumerate(keys)]
        shop.rabbitdelay.send_many(shop.tasks["note"], rows, envelopes=envelopes)
    newest = ["newest at once", "newest delayed"]
    assert sorted(noted.until(DELAY)) == [*newest, *sorted([f"row {at}" for at in (6, 7, 8)] * 2)]


def test_of_all_that_are_sent_at_once_the_first_under_a_key_is_sent_alone(noted: Notes) -> None:
    key = f"order:{uuid4().hex}"

    def send(number: int) -> Any:
        return noted.send(number, delay=60, key=key, unique="first")

    with ThreadPoolExecutor(12) as threads:
        assert len({each.id for each in threads.map(send, range(24))}) == 1


def test_the_first_under_a_key_leaves_others_out_while_it_waits(shop: Any, noted: Notes) -> None:
    key = f"order:{uuid4().hex}"
    first = noted.send("cancelled", delay=DELAY, key=key, unique="first")
    assert noted.send("left out", key=key, unique="first").id == first.id
    assert shop.rabbitdelay.cancel(key=key) is Outcome.DONE
    second = noted.send("second", delay=60, key=key, unique="first", track=True)
    assert second.id != first.id
    assert noted.send("left out", delay=9, key=key, unique="first", unique_for=9).id == second.id
    assert shop.rabbitdelay.postpone(key=key, delay=0.5) is Outcome.DONE
    second.get(timeout=PATIENCE)
    assert (
        noted.send("left out", key=key, unique="first", unique_for=timedelta(hours=1)).id
        == second.id
    )
    # Without a time, it may be sent again as soon as it has arrived; the newest always may.
    third = noted.send("third", delay=60, key=key, unique="first")
    noted.send("newest", delay=0.5, key=key, unique="newest")
    assert shop.rabbitdelay.show(third).state == "superseded"
    wait_for(lambda: noted() == ["second", "newest"], "the newest", PATIENCE)


def test_of_two_that_are_sent_as_the_first_the_newest_runs(
    shop: Any, noted: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = f"order:{uuid4().hex}"
    monkeypatch.setattr(registry, "SENDING_LEASE", 0.2)
    # As if its sender had died before it could register it.
    with shop.rabbitdelay.registry.alone_under(key), monkeypatch.context() as patch:
        patch.setattr(task_sending, "register_sent", lambda *given: [])
        first = noted.send("first", delay=DELAY, key=key, unique="first")
    second = noted.send("second", delay=DELAY - 1, key=key, unique="first")
    assert first.id != second.id
    assert noted.until(DELAY) == ["second"]


def test_retries_of_the_first_under_a_key_are_sent(shop: Any) -> None:
    key = f"order:{uuid4().hex}"
    given: Any = ([], 2, {"delay": 0.2})
    retried = shop.tasks["retry"].apply_async(given, delay=0.2, key=key, unique="first")
    assert len(retried.get(timeout=PATIENCE)) == 3


def test_a_unique_that_says_nothing_or_leaves_others_waiting_is_refused(
    shop: Any, noted: Notes
) -> None:
    first = {"key": "order:7", "unique": "first"}
    job = f"job-{uuid4().hex}"
    shop.rabbitdelay.open_job(job, expires=60)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"unique": "first"}, "needs a key"),
        ({"key": "order:7", "unique": "last"}, "takes 'first' or 'newest'"),
        ({"key": "order:7", "unique_for": 60}, "needs unique='first'"),
        ({**first, "unique_for": True}, "takes seconds"),
        ({**first, "unique_for": timedelta(days=99)}, "rabbitdelay_registry_keep"),
        ({**first, "job": job}, "combined with job"),
    ]
    for options, reason in refused:
        with pytest.raises(UnknownOption, match=reason):
            noted.send("refused", delay=DELAY, **options)
    member = shop.tasks["note"].si("member", key=noted.key).set(**first)
    for canvas in (group(member, member), chain(member, member), chord([member], member)):
        with pytest.raises(UnknownOption, match="others would wait"):
            canvas.apply_async(delay=DELAY)
    noted.send("first", delay=60, **first)
    given: Any = ([], 1, {"delay": 0.2, **first})
    with pytest.raises(UnknownOption, match="others would wait"):
        shop.tasks["retry"].apply_async(given).get(timeout=PATIENCE)


def test_a_task_that_was_sent_twice_with_once_runs_once(noted: Notes) -> None:
    task_id = uuid4().hex
    for _ in range(3):
        noted.send("once", delay=0.5, task_id=task_id, once=True)
    assert noted.until(0.5) == ["once"]


def test_a_key_is_of_one_task_and_a_job_of_a_whole_chord(shop: Any, noted: Notes) -> None:
    note, look = shop.tasks["note"], shop.tasks["look"]
    members = [note.si(number, key=noted.key) for number in range(3)]
    sends = (
        group(members).apply_async,
        chord(members, look.si()).apply_async,
        chain(*members).apply_async,
    )
    for each in sends:
        with pytest.raises(UnknownOption, match=r"give it to one of their tasks"):
            each(delay=0.3, key="order")
    keyed = group(member.set(key=f"{noted.key}-{n}") for n, member in enumerate(members))
    keyed.apply_async(delay=0.3)
    wait_for(lambda: sorted(noted()) == [0, 1, 2], "the group", PATIENCE)
    job = f"import-{uuid4().hex}"
    with shop.rabbitdelay.job(job, expires=60):
        result = chord([look.si(n) for n in range(3)], look.si("body")).apply_async(
            delay=0.3, job=job
        )
    assert result.get(timeout=PATIENCE)["given"] == ["body"]


def test_the_tasks_of_a_job_wait_until_it_is_committed(shop: Any, noted: Notes) -> None:
    job = f"import-{uuid4().hex}"
    with shop.rabbitdelay.job(job, expires=60):
        for number in range(3):
            noted.send(number, delay=0.2, job=job)
        noted.send(3, job=job)
        assert noted.until(0.5) == []
    wait_for(lambda: sorted(noted()) == [0, 1, 2, 3], "the job's tasks", PATIENCE)
    with pytest.raises(JobClosed, match="is committed"):
        noted.send(4, delay=1, job=job)


def test_tasks_of_an_aborted_job_do_not_run_until_they_are_sent_again(
    shop: Any, noted: Notes
) -> None:
    rows = [noted.row(number, delay=0.5, task_id=uuid4().hex) for number in range(3)]

    def send_as(job: str) -> None:
        shop.rabbitdelay.send_many(shop.tasks["note"], rows, job=job, once=True, track=True)

    def broken_off(job: str) -> None:
        with shop.rabbitdelay.job(job, expires=60):
            send_as(job)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken_off(uuid4().hex)
    assert noted.until(0.5) == []
    again = uuid4().hex
    with shop.rabbitdelay.job(again, expires=60):
        send_as(again)
    wait_for(lambda: sorted(noted()) == [0, 1, 2], "the tasks", PATIENCE)
