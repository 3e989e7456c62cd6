"""Tasks under a key, those that run once and those of a job, with a worker of their own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from celery import chain, chord, group

from celery_rabbitdelay import JobClosed, UnknownOption
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


def test_of_all_that_are_sent_at_once_the_first_under_a_key_is_sent_alone(noted: Notes) -> None:
    key = f"order:{uuid4().hex}"

    def send(number: int) -> Any:
        return noted.send(number, delay=60, key=key, unique="first")

    with ThreadPoolExecutor(12) as threads:
        assert len({each.id for each in threads.map(send, range(24))}) == 1


def test_retries_of_the_first_under_a_key_are_sent(shop: Any) -> None:
    key = f"order:{uuid4().hex}"
    given: Any = ([], 2, {"delay": 0.2})
    retried = shop.tasks["retry"].apply_async(given, delay=0.2, key=key, unique="first")
    assert len(retried.get(timeout=PATIENCE)) == 3


def test_of_the_tasks_under_each_key_the_newest_runs_and_of_copies_one(
    shop: Any, noted: Notes
) -> None:
    for kind, last in (("delayed", {"delay": DELAY - 0.5}), ("at once", {})):
        for number in range(3):
            noted.send(number, delay=DELAY - 0.1 * number, key=f"{kind} {noted.key}")
        noted.send(f"newest {kind}", key=f"{kind} {noted.key}", **last)
    for envelopes in (True, False):
        keys = [f"{envelopes} {noted.key}:{number % 3}" for number in range(9)]
        rows = [noted.row(f"row {at}", delay=DELAY, key=key) for at, key in enumerate(keys)]
        shop.rabbitdelay.send_many(shop.tasks["note"], rows, envelopes=envelopes)
    task_id = uuid4().hex
    for _ in range(3):
        noted.send("once", delay=DELAY, task_id=task_id, once=True)
    expected = ["newest at once", "newest delayed", "once", *[f"row {at}" for at in (6, 7, 8)] * 2]
    assert sorted(noted.until(DELAY)) == sorted(expected)


def test_the_first_under_a_key_leaves_others_out_while_it_waits(shop: Any, noted: Notes) -> None:
    key = f"order:{uuid4().hex}"

    def send(name: str, unique: str = "first", **options: Any) -> Any:
        return noted.send(name, key=key, unique=unique, **options)

    first = send("cancelled", delay=DELAY)
    assert send("left out").id == first.id
    assert shop.rabbitdelay.cancel(key=key) is Outcome.DONE
    second = send("second", delay=60, track=True)
    assert second.id != first.id
    assert shop.rabbitdelay.postpone(key=key, delay=0.5) is Outcome.DONE
    second.get(timeout=PATIENCE)
    assert send("left out", unique_for=timedelta(hours=1)).id == second.id
    # Without a time, it may be sent again as soon as it has arrived; the newest always may.
    third = send("third", delay=60)
    send("newest", "newest", delay=0.5)
    assert shop.rabbitdelay.show(third).state == "superseded"
    wait_for(lambda: noted() == ["second", "newest"], "the newest", PATIENCE)


def test_an_option_that_says_nothing_or_leaves_other_tasks_waiting_is_refused(
    shop: Any, noted: Notes
) -> None:
    first, job = {"key": noted.key, "unique": "first"}, f"job-{uuid4().hex}"
    shop.rabbitdelay.open_job(job, expires=60)
    for options, reason in (
        ({"unique": "first"}, "needs a key"),
        ({"key": "order:7", "unique": "last"}, "takes 'first' or 'newest'"),
        ({"key": "order:7", "unique_for": 60}, "needs unique='first'"),
        ({**first, "unique_for": timedelta(days=99)}, "rabbitdelay_registry_keep"),
        ({**first, "job": job}, "combined with job"),
    ):
        with pytest.raises(UnknownOption, match=reason):
            noted.send("refused", delay=DELAY, **options)
    member = shop.tasks["note"].si("member", key=noted.key)
    for make in (group, chain, lambda *members: chord(members, member)):
        with pytest.raises(UnknownOption, match="others would wait"):
            make(member.clone().set(**first), member).apply_async(delay=DELAY)
        with pytest.raises(UnknownOption, match="give it to one of their tasks"):
            make(member, member).apply_async(delay=DELAY, key="order")
    noted.send("first", delay=60, **first)
    given: Any = ([], 1, {"delay": 0.2, **first})
    with pytest.raises(UnknownOption, match="others would wait"):
        shop.tasks["retry"].apply_async(given).get(timeout=PATIENCE)


def test_the_tasks_of_a_job_wait_until_it_is_committed_and_never_run_if_its_block_fails(
    shop: Any, noted: Notes
) -> None:
    job, look, delays = f"import-{uuid4().hex}", shop.tasks["look"], shop.rabbitdelay
    rows = [noted.row(number, delay=0.5, task_id=uuid4().hex) for number in range(3)]
    with suppress(ZeroDivisionError), delays.job(f"failed {job}", expires=60):
        delays.send_many("note", rows, job=f"failed {job}", once=True, track=True)
        raise ZeroDivisionError
    with delays.job(job, expires=60):
        noted.send("at once", job=job)
        whole = chord([look.si(n) for n in range(2)], look.si("body"))
        result = whole.apply_async(delay=0.3, job=job)
        assert noted.until(0.5) == []
        # The same tasks may be sent again.
        delays.send_many("note", rows, job=job, once=True, track=True)
    assert result.get(timeout=PATIENCE)["given"] == ["body"]
    wait_for(lambda: {*noted()} == {"at once", 0, 1, 2}, "the job's tasks", PATIENCE)
    with pytest.raises(JobClosed, match="is committed"):
        noted.send("late", delay=1, job=job)
