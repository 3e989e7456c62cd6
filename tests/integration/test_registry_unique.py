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


@pytest.mark.parametrize("last", [{"delay": DELAY - 0.5}, {}], ids=["delayed", "at once"])
def test_the_newest_task_under_a_key_runs(noted: Notes, last: dict[str, Any]) -> None:
    key = f"order:{uuid4().hex}"
    for number in range(4):
        noted.send(number, delay=DELAY - 0.1 * number, key=key)
    noted.send("newest", key=key, **last)
    assert noted.until(DELAY) == ["newest"]


def test_of_all_that_are_sent_at_once_the_first_under_a_key_is_sent_alone(noted: Notes) -> None:
    key = f"order:{uuid4().hex}"

    def send(number: int) -> Any:
        return noted.send(number, delay=DELAY, key=key, unique="first")

    with ThreadPoolExecutor(12) as threads:
        sent = list(threads.map(send, range(24)))
    assert len({each.id for each in sent}) == 1
    assert len(noted.until(DELAY)) == 1


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
    noted.send("third", delay=DELAY, key=key, unique="first")
    noted.send("newest", delay=0.5, key=key, unique="newest")
    assert noted.until(DELAY) == ["second", "newest"]


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


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"unique": "first"}, "needs a key"),
        ({"key": "order:7", "unique": "last"}, "takes 'first' or 'newest'"),
        ({"key": "order:7", "unique_for": 60}, "needs unique='first'"),
        ({"key": "order:7", "unique": "first", "unique_for": True}, "takes seconds"),
    ],
)
def test_a_unique_that_says_nothing_is_refused(
    noted: Notes, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnknownOption, match=reason):
        noted.send("refused", delay=DELAY, **options)


@pytest.mark.parametrize("make", [group, chain, chord], ids=["group", "chain", "chord"])
def test_what_others_wait_for_cannot_be_left_out(shop: Any, noted: Notes, make: Any) -> None:
    member = shop.tasks["note"].si("member", key=noted.key).set(key="order:7", unique="first")
    canvas = make(member, member) if make is not chord else chord([member], member)
    with pytest.raises(UnknownOption, match="others would wait"):
        canvas.apply_async(delay=DELAY)


def test_nor_can_a_retry_or_a_task_of_a_job(shop: Any, noted: Notes) -> None:
    noted.send("first", delay=DELAY, key="order:8", unique="first")
    given: Any = ([], 1, {"delay": 0.2, "key": "order:8", "unique": "first"})
    with pytest.raises(UnknownOption, match="others would wait"):
        shop.tasks["retry"].apply_async(given).get(timeout=PATIENCE)
    job = f"job-{uuid4().hex}"
    shop.rabbitdelay.open_job(job, expires=60)
    with pytest.raises(UnknownOption, match="combined with job"):
        noted.send("in a job", delay=DELAY, key="order:8", unique="first", job=job)
    with pytest.raises(UnknownOption, match="rabbitdelay_registry_keep"):
        noted.send(delay=DELAY, key="order:8", unique="first", unique_for=timedelta(days=99))


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


def test_the_tasks_of_an_aborted_job_do_not_run(shop: Any, noted: Notes) -> None:
    job = f"import-{uuid4().hex}"
    rows = [noted.row("aborted", delay=0.5)] * 20

    def broken_off() -> None:
        with shop.rabbitdelay.job(job, expires=60):
            shop.rabbitdelay.send_many(shop.tasks["note"], rows, job=job)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken_off()
    assert noted.until(0.5) == []


def test_tasks_of_an_aborted_job_run_when_they_are_sent_again(shop: Any, noted: Notes) -> None:
    rows = [noted.row(number, delay=0.5, task_id=uuid4().hex) for number in range(3)]

    def send_as(job: str) -> None:
        shop.rabbitdelay.send_many(shop.tasks["note"], rows, job=job, once=True, track=True)

    failed, again = uuid4().hex, uuid4().hex
    shop.rabbitdelay.open_job(failed, expires=60)
    send_as(failed)
    shop.rabbitdelay.abort_job(failed)
    assert noted.until(0.5) == []
    with shop.rabbitdelay.job(again, expires=60):
        send_as(again)
    wait_for(lambda: sorted(noted()) == [0, 1, 2], "the tasks", PATIENCE)


@pytest.mark.parametrize("envelopes", [True, False])
def test_rows_with_keys_supersede_each_other(shop: Any, noted: Notes, envelopes: bool) -> None:
    key = f"order:{uuid4().hex}"
    rows = [noted.row(number, delay=DELAY, key=f"{key}:{number % 3}") for number in range(9)]
    shop.rabbitdelay.send_many(shop.tasks["note"], rows, envelopes=envelopes)
    assert sorted(noted.until(DELAY)) == [6, 7, 8]
