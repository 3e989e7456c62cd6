"""Jobs: their tasks wait while they are open, then all run, or none."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace

import pytest

from celery_rabbitdelay.exceptions import JobClosed
from celery_rabbitdelay.registry import jobs as jobs_module
from celery_rabbitdelay.registry.decision import Outcome, Verdict
from celery_rabbitdelay.registry.index import Filter, Index
from celery_rabbitdelay.registry.jobs import Jobs, JobState
from celery_rabbitdelay.registry.registry import JOB_PAUSE_MS, Registry
from celery_rabbitdelay.testing import wait_for
from tests.integration.registering import (
    MARGIN_MS,
    MINUTE_MS,
    RedisSetup,
    arrival,
    expiry_ms,
    now_ms,
    sent,
    tracked,
    verdict,
)

JOB = "import 2031-03-01"


@pytest.fixture
def others(registry: Registry) -> Jobs:
    """The same jobs in another process, which remembers nothing of what this one has seen."""
    return Jobs(registry.store, registry.names, MARGIN_MS)


def test_a_job_is_open_until_it_is_committed(registry: Registry, others: Jobs) -> None:
    registry.jobs.open(JOB, MINUTE_MS)
    assert others.state(JOB) is JobState.OPEN
    registry.jobs.end(JOB, JobState.COMMITTED)
    assert others.state(JOB) is JobState.COMMITTED


@pytest.mark.parametrize("end", [None, JobState.COMMITTED, JobState.ABORTED])
def test_a_job_cannot_be_opened_twice(registry: Registry, end: JobState | None) -> None:
    registry.jobs.open(JOB, MINUTE_MS)
    if end:
        registry.jobs.end(JOB, end)
    with pytest.raises(JobClosed) as raised:
        registry.jobs.open(JOB, MINUTE_MS)
    assert (raised.value.job, raised.value.state) == (JOB, end.value if end else "open")


@pytest.mark.parametrize("end", list(JobState)[1:])
def test_a_job_that_is_not_open_takes_no_tasks(registry: Registry, end: JobState) -> None:
    with pytest.raises(JobClosed) as raised:
        registry.jobs.join(JOB, now_ms())
    assert raised.value.state == "unknown"
    registry.jobs.open(JOB, MINUTE_MS)
    registry.jobs.join(JOB, now_ms())
    registry.jobs.end(JOB, end)
    with pytest.raises(JobClosed) as raised:
        registry.jobs.join(JOB, now_ms())
    assert raised.value.state == end.value


@pytest.mark.parametrize(
    ("first", "second"),
    [(JobState.COMMITTED, JobState.ABORTED), (JobState.ABORTED, JobState.COMMITTED)],
)
def test_a_job_is_ended_once_and_saying_so_again_changes_nothing(
    registry: Registry,
    others: Jobs,
    first: JobState,
    second: JobState,
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry.jobs.open(JOB, MINUTE_MS)
    registry.jobs.end(JOB, first)
    registry.jobs.end(JOB, first)
    with pytest.raises(JobClosed) as raised:
        registry.jobs.end(JOB, second)
    assert raised.value.state == first.value
    assert others.state(JOB) is first
    assert not [each for each in caplog.records if each.name.endswith("jobs")]


def test_an_unknown_job_cannot_be_ended_and_has_no_state(registry: Registry) -> None:
    with pytest.raises(JobClosed) as raised:
        registry.jobs.end(JOB, JobState.COMMITTED)
    assert raised.value.state == "unknown"
    assert registry.jobs.state(JOB) is None
    assert registry.jobs.states([]) == {}


def test_a_job_that_is_not_committed_in_time_turns_aborted_with_a_warning(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    registry.jobs.open(JOB, 1)
    message = sent(job=JOB)
    wait_for(lambda: registry.jobs.state(JOB) is JobState.ABORTED, "an expired job")
    assert verdict(registry, message) is Verdict.EXPIRED
    assert registry.jobs.state(JOB) is JobState.ABORTED
    assert [(each.levelno, each.args) for each in caplog.records if each.name.endswith("jobs")] == [
        (logging.WARNING, (JOB,))
    ]


@pytest.mark.parametrize("call", ["open", "join", "end"])
def test_an_expired_job_is_closed_whoever_asks_first(registry: Registry, call: str) -> None:
    registry.jobs.open(JOB, 1)
    opened = now_ms()
    wait_for(lambda: now_ms() > opened + 1, "the expiry")
    calls = {
        "open": lambda: registry.jobs.open(JOB, MINUTE_MS),
        "join": lambda: registry.jobs.join(JOB, now_ms()),
        "end": lambda: registry.jobs.end(JOB, JobState.COMMITTED),
    }
    with pytest.raises(JobClosed) as raised:
        calls[call]()
    assert raised.value.state == "aborted"


def test_a_job_lives_until_its_last_task_may_arrive(
    registry: Registry, redis_setup: RedisSetup
) -> None:
    def lives() -> int:
        return expiry_ms(redis_setup, registry.names.job(JOB))

    before = now_ms()
    registry.jobs.open(JOB, MINUTE_MS)
    assert before <= lives() - MINUTE_MS - MARGIN_MS <= now_ms()
    due = now_ms() + 10 * MINUTE_MS
    registry.jobs.join(JOB, due)
    registry.jobs.join(JOB, due - MINUTE_MS)
    assert lives() == due + MARGIN_MS


def test_a_job_lives_on_for_a_task_that_is_postponed_while_it_is_open(
    registry: Registry, redis_setup: RedisSetup
) -> None:
    message = sent(job=JOB)
    registry.jobs.open(JOB, MINUTE_MS)
    later = now_ms() + 10 * MARGIN_MS
    registry.postpone("task", later)
    assert verdict(registry, message) is Verdict.LATER
    assert expiry_ms(redis_setup, registry.names.job(JOB)) == later + MARGIN_MS


def test_an_ended_state_is_remembered_without_asking_until_the_name_is_free_again(
    registry: Registry, redis_setup: RedisSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 0.0, time_ns=time.time_ns)
    monkeypatch.setattr(jobs_module, "time", clock)
    registry.jobs.open(JOB, MINUTE_MS)
    registry.jobs.end(JOB, JobState.COMMITTED)
    assert registry.jobs.state(JOB) is JobState.COMMITTED
    redis_setup.client.delete(registry.names.job(JOB))
    assert registry.jobs.state(JOB) is JobState.COMMITTED
    clock.monotonic = lambda: (MINUTE_MS + MARGIN_MS) / 1000
    assert registry.jobs.state(JOB) is None
    registry.jobs.open(JOB, MINUTE_MS)
    assert registry.jobs.state(JOB) is JobState.OPEN


def test_only_so_many_ended_jobs_are_remembered(
    registry: Registry, redis_setup: RedisSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "REMEMBERED", 3)
    names = [f"job-{number}" for number in range(5)]
    for each in names:
        registry.jobs.open(each, MINUTE_MS)
        registry.jobs.end(each, JobState.ABORTED)
    assert registry.jobs.states(names) == dict.fromkeys(names, JobState.ABORTED)
    for each in names:
        redis_setup.client.delete(registry.names.job(each))
    assert registry.jobs.states(names) == dict.fromkeys(names[2:], JobState.ABORTED)


def test_a_task_of_an_open_job_goes_back_for_some_seconds_then_runs_when_it_is_committed(
    registry: Registry,
) -> None:
    message = tracked(job=JOB)
    registry.jobs.open(JOB, MINUTE_MS)
    registry.register([message])
    before = now_ms()
    (decision,) = registry.decide([arrival(message, once="queue:0")], ["a"])
    assert decision.verdict is Verdict.LATER
    assert not decision.is_new_due
    assert before <= decision.until_ms - JOB_PAUSE_MS <= now_ms()
    registry.jobs.end(JOB, JobState.COMMITTED)
    # It left no mark while it went back.
    assert verdict(registry, arrival(message, once="queue:0"), "b") is Verdict.RUN


def test_tasks_of_an_aborted_job_do_not_run_and_leave_the_index(registry: Registry) -> None:
    message = tracked(job=JOB)
    registry.jobs.open(JOB, MINUTE_MS)
    registry.register([message])
    registry.jobs.end(JOB, JobState.ABORTED)
    assert verdict(registry, message) is Verdict.EXPIRED
    assert verdict(registry, sent("untracked", job=JOB)) is Verdict.EXPIRED
    assert Index(registry.store, registry.names).count(Filter()) == 0
    assert registry.cancel(["task"]) == [Outcome.CANCELLED]


def test_a_task_of_an_aborted_job_can_be_sent_again_after_it_has_arrived(
    registry: Registry,
) -> None:
    aborted, again = tracked(job=JOB), tracked(job="again")
    for job in (JOB, "again"):
        registry.jobs.open(job, MINUTE_MS)
    registry.register([aborted])
    registry.jobs.end(JOB, JobState.ABORTED)
    assert verdict(registry, aborted) is Verdict.EXPIRED
    assert registry.register([again]) == ["waiting"]
    registry.jobs.end("again", JobState.COMMITTED)
    assert verdict(registry, arrival(aborted, redelivered=True)) is Verdict.EXPIRED
    assert Index(registry.store, registry.names).count(Filter()) == 1
    assert verdict(registry, again) is Verdict.RUN


def test_a_task_of_an_aborted_job_does_not_run_either_once_its_job_is_forgotten(
    registry: Registry, redis_setup: RedisSetup
) -> None:
    message = tracked(job=JOB)
    registry.jobs.open(JOB, MINUTE_MS)
    registry.register([message])
    registry.jobs.end(JOB, JobState.ABORTED)
    assert verdict(registry, message) is Verdict.EXPIRED
    redis_setup.client.delete(registry.names.job(JOB))
    registry.jobs._ended.clear()
    assert verdict(registry, message) is Verdict.EXPIRED


def test_a_task_that_is_registered_after_it_has_expired_is_not_listed(registry: Registry) -> None:
    message = tracked(job=JOB)
    registry.jobs.open(JOB, MINUTE_MS)
    registry.jobs.end(JOB, JobState.ABORTED)
    assert verdict(registry, message) is Verdict.EXPIRED
    assert registry.register([message]) == ["released"]
    assert Index(registry.store, registry.names).count(Filter()) == 0


def test_an_expired_task_can_be_cancelled_before_it_is_sent_again(registry: Registry) -> None:
    aborted, again = tracked(job=JOB), tracked()
    registry.jobs.open(JOB, MINUTE_MS)
    registry.register([aborted])
    registry.jobs.end(JOB, JobState.ABORTED)
    assert verdict(registry, aborted) is Verdict.EXPIRED
    assert registry.postpone("task", now_ms() + MINUTE_MS) is Outcome.CANCELLED
    assert registry.cancel(["task"]) == [Outcome.CANCELLED]
    assert registry.register([again]) == ["cancelled"]
    assert verdict(registry, again) is Verdict.CANCELLED


def test_a_duplicate_that_does_not_run_leaves_the_index(registry: Registry) -> None:
    first, second, late = tracked(), tracked(), tracked()
    registry.register([first, second])
    assert verdict(registry, arrival(first, once="queue:0"), "a") is Verdict.RUN
    assert Index(registry.store, registry.names).count(Filter()) == 1
    assert verdict(registry, arrival(second, once="queue:0"), "b") is Verdict.DUPLICATE
    assert verdict(registry, arrival(late, once="queue:0"), "c") is Verdict.DUPLICATE
    assert registry.register([late]) == ["released"]
    assert Index(registry.store, registry.names).count(Filter()) == 0


def test_a_postponed_task_of_an_aborted_job_does_not_go_back(registry: Registry) -> None:
    message = sent(job=JOB)
    registry.jobs.open(JOB, MINUTE_MS)
    registry.postpone("task", message.due_ms + MINUTE_MS)
    registry.jobs.end(JOB, JobState.ABORTED)
    assert verdict(registry, message) is Verdict.EXPIRED


def test_a_task_that_waits_for_its_job_can_be_cancelled_and_superseded(registry: Registry) -> None:
    first, second = tracked("first", job=JOB), tracked("second", job=JOB, key="order")
    registry.jobs.open(JOB, MINUTE_MS)
    registry.register([first, second])
    assert verdict(registry, first) is Verdict.LATER
    assert verdict(registry, second) is Verdict.LATER
    assert registry.cancel(["first"]) == [Outcome.DONE]
    registry.supersede("order")
    registry.jobs.end(JOB, JobState.COMMITTED)
    assert verdict(registry, first) is Verdict.CANCELLED
    assert verdict(registry, second) is Verdict.SUPERSEDED


def test_what_is_known_about_a_task_lives_on_while_it_waits_for_its_job(
    registry: Registry, redis_setup: RedisSetup
) -> None:
    message = tracked(job=JOB, after_ms=-MINUTE_MS)
    registry.jobs.open(JOB, MINUTE_MS)
    registry.register([message])
    before = now_ms()
    assert verdict(registry, message) is Verdict.LATER
    lives = expiry_ms(redis_setup, registry.names.task("task"))
    assert before <= lives - MARGIN_MS <= now_ms()


def test_a_task_whose_job_redis_has_lost_runs(registry: Registry) -> None:
    assert verdict(registry, sent(job="lost")) is Verdict.RUN
