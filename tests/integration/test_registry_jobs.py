"""Jobs: their tasks wait while they are open, then all run, or none."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from celery_rabbitdelay.exceptions import JobClosed, RegistryUnavailable
from celery_rabbitdelay.registry import jobs as jobs_module
from celery_rabbitdelay.registry.connection import ScriptCall, Store
from celery_rabbitdelay.registry.decision import Ticket, Verdict
from celery_rabbitdelay.registry.index import Filter, shard_of
from celery_rabbitdelay.registry.jobs import Jobs, JobState
from celery_rabbitdelay.registry.registry import Registry
from celery_rabbitdelay.testing import wait_for
from tests.integration.registering import (
    KEEP_MS,
    MARGIN_MS,
    MINUTE_MS,
    RedisSetup,
    arrival,
    expiry_ms,
    keyed,
    now_ms,
    sent,
    tracked,
    verdict,
)

JOB = "import 2031-03-01"


@pytest.fixture
def others(registry: Registry) -> Jobs:
    """The same jobs in another process, which remembers nothing of what this one has seen."""
    return Jobs(registry.store, registry.names, KEEP_MS, MARGIN_MS)


@pytest.mark.parametrize("end", [None, JobState.COMMITTED, JobState.ABORTED])
def test_a_job_cannot_be_opened_twice(registry: Registry, end: JobState | None) -> None:
    registry.jobs.open(JOB, MINUTE_MS)
    if end:
        registry.jobs.end(JOB, end)
    with pytest.raises(JobClosed) as raised:
        registry.jobs.open(JOB, MINUTE_MS)
    assert (raised.value.job, raised.value.state) == (JOB, end.value if end else "open")


def test_open_jobs_are_listed_by_when_they_expire(registry: Registry, others: Jobs) -> None:
    names = {f"job:}}:job:{number}": MINUTE_MS * (20 - number) for number in range(20)}
    before = now_ms()
    for name, expires_ms in names.items():
        registry.jobs.open(name, expires_ms)
    listed = others.opened(registry.now_ms(), 100)
    assert [name for name, _ in listed] == sorted(names, key=names.__getitem__)
    for name, expires_ms in listed:
        assert before <= expires_ms - names[name] <= now_ms()
    assert others.opened(registry.now_ms(), 3) == listed[:3]
    ended = [name for name, _ in listed[:2]]
    registry.jobs.end(ended[0], JobState.COMMITTED)
    registry.jobs.end(ended[1], JobState.ABORTED)
    assert others.opened(registry.now_ms(), 100) == listed[2:]


def test_a_job_that_has_expired_is_not_listed_as_open(registry: Registry) -> None:
    registry.jobs.open(JOB, 1)
    wait_for(lambda: registry.jobs.state(JOB) is JobState.ABORTED, "the job to expire")
    assert registry.jobs.opened(registry.now_ms(), 100) == []
    names = (f"another {number}" for number in range(1000))
    another = next(each for each in names if shard_of(each) == shard_of(JOB))
    registry.jobs.open(another, MINUTE_MS)
    assert [name for name, _ in registry.jobs.opened(registry.now_ms(), 100)] == [another]
    lists = registry.store.commands(
        lambda pipe: [pipe.zcard(each) for each in registry.names.open_jobs()]
    )
    assert sum(lists) == 1, "what has expired takes no room"


def test_a_job_whose_commit_redis_has_lost_is_not_listed_once_it_is_confirmed(
    registry: Registry,
) -> None:
    registry.jobs.open(JOB, MINUTE_MS)
    _, job_id = registry.jobs.join(JOB, now_ms())
    registry.jobs.confirm(JOB, job_id)
    assert registry.jobs.opened(registry.now_ms(), 100) == []


def test_a_job_that_an_earlier_version_has_ended_is_not_listed(registry: Registry) -> None:
    registry.jobs.open(JOB, MINUTE_MS)
    record = registry.names.of("job", JOB)
    registry.store.commands(lambda pipe: pipe.hset(record, "state", "committed"))
    assert registry.jobs.opened(registry.now_ms(), 100) == []


@pytest.mark.parametrize("end", list(JobState)[1:])
def test_a_job_says_to_those_who_join_it_what_it_is(registry: Registry, end: JobState) -> None:
    assert registry.jobs.join(JOB, now_ms()) == (None, "")
    registry.jobs.open(JOB, MINUTE_MS)
    state, job_id = registry.jobs.join(JOB, now_ms())
    assert (state, bool(job_id)) == (JobState.OPEN, True)
    registry.jobs.end(JOB, end)
    assert registry.jobs.join(JOB, now_ms()) == (end, job_id)


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
    _, job_id = registry.jobs.join(JOB, 0)
    message = arrival(sent(job=JOB), job_id=job_id)
    wait_for(lambda: registry.jobs.state(JOB) is JobState.ABORTED, "an expired job")
    assert verdict(registry, message) is Verdict.EXPIRED
    assert registry.jobs.state(JOB) is JobState.ABORTED
    assert [(each.levelno, each.args) for each in caplog.records if each.name.endswith("jobs")] == [
        (logging.WARNING, (JOB,))
    ]


@pytest.mark.parametrize("call", ["open", "end"])
def test_an_expired_job_is_closed_whoever_asks_first(registry: Registry, call: str) -> None:
    registry.jobs.open(JOB, 1)
    opened = now_ms()
    wait_for(lambda: now_ms() > opened + 1, "the expiry")
    calls: dict[str, Callable[[], object]] = {
        "open": lambda: registry.jobs.open(JOB, MINUTE_MS),
        "end": lambda: registry.jobs.end(JOB, JobState.COMMITTED),
    }
    with pytest.raises(JobClosed) as raised:
        calls[call]()
    assert raised.value.state == "aborted"


def test_a_job_lives_and_has_its_name_until_its_last_task_may_arrive(
    registry: Registry, redis_setup: RedisSetup
) -> None:
    def lives() -> int:
        return expiry_ms(redis_setup, registry.names.of("job", JOB))

    before = now_ms()
    registry.jobs.open(JOB, MINUTE_MS)
    assert before <= lives() - MINUTE_MS - MARGIN_MS - KEEP_MS <= now_ms()
    due = now_ms() + 10 * MINUTE_MS
    registry.jobs.join(JOB, due)
    registry.jobs.join(JOB, due - MINUTE_MS)
    assert lives() == due + MARGIN_MS + KEEP_MS
    assert int(redis_setup.client.hget(registry.names.of("job", JOB), "free")) == due + MARGIN_MS


def test_an_ended_state_is_remembered_without_asking_as_long_as_redis_knows_it(
    registry: Registry, redis_setup: RedisSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 0.0, time_ns=time.time_ns)
    monkeypatch.setattr(jobs_module, "time", clock)
    job = opened(registry, JOB)
    registry.jobs.end(JOB, JobState.COMMITTED)
    assert registry.jobs.states([job]) == {job: JobState.COMMITTED}
    redis_setup.client.delete(registry.names.of("job", JOB))
    assert registry.jobs.states([job]) == {job: JobState.COMMITTED}
    clock.monotonic = lambda: (MINUTE_MS + MARGIN_MS + KEEP_MS) / 1000
    assert registry.jobs.states([job]) == {}


def test_an_expired_job_is_found_out_once(registry: Registry, others: Jobs) -> None:
    found: list[str] = []
    registry.jobs.on_expired = lambda: found.append("here")
    others.on_expired = lambda: found.append("there")
    job = opened(registry, JOB, 1)
    wait_for(lambda: others.state(JOB) is JobState.ABORTED, "an expired job")
    assert registry.jobs.states([job]) == {job: JobState.ABORTED}
    assert len(found) == 1


def test_an_expired_job_leaves_nothing_to_the_next_one_of_its_name(
    registry: Registry, redis_setup: RedisSetup, caplog: pytest.LogCaptureFixture
) -> None:
    former = opened(registry, JOB, 1)
    wait_for(lambda: registry.jobs.state(JOB) is JobState.ABORTED, "an expired job")
    redis_setup.client.hset(registry.names.of("job", JOB), "free", 0)
    latest = opened(registry, JOB)
    registry.jobs.end(JOB, JobState.ABORTED)
    assert registry.jobs.states([latest]) == {latest: JobState.ABORTED}
    assert not caplog.records  # it was aborted, and has not expired
    # A note of the former one comes late.
    registry.jobs.confirm(*former)
    assert registry.jobs.states([former]) == {former: JobState.COMMITTED}
    registry.jobs.confirm(*latest)
    assert registry.jobs.states([latest]) == {latest: JobState.ABORTED}


@pytest.mark.parametrize("has_expired", [True, False])
def test_a_commit_that_redis_has_lost_is_made_again(
    registry: Registry, others: Jobs, has_expired: bool, caplog: pytest.LogCaptureFixture
) -> None:
    job = opened(registry, JOB, 1 if has_expired else MINUTE_MS)
    if has_expired:
        wait_for(lambda: registry.jobs.state(JOB) is JobState.ABORTED, "an expired job")
        assert registry.jobs.states([job]) == {job: JobState.ABORTED}
    registry.jobs.confirm(*job)
    caplog.clear()
    assert registry.jobs.states([job]) == others.states([job]) == {job: JobState.COMMITTED}
    assert not caplog.records
    registry.jobs.confirm("unknown", "id")
    assert registry.jobs.state("unknown") is None
    answer = registry.jobs.end(JOB, JobState.COMMITTED)
    assert answer[0] == job[1]


def test_the_tasks_of_a_former_job_do_not_take_the_fate_of_a_new_one_of_that_name(
    registry: Registry, redis_setup: RedisSetup
) -> None:
    former = opened(registry, JOB)
    registry.jobs.end(JOB, JobState.COMMITTED)
    # Its last task was due long ago.
    redis_setup.client.hset(registry.names.of("job", JOB), "free", 0)
    latest = opened(registry, JOB)
    assert former != latest
    registry.jobs.end(JOB, JobState.ABORTED)
    assert registry.jobs.states([former, latest, (JOB, "")]) == {
        former: JobState.COMMITTED,
        latest: JobState.ABORTED,
        (JOB, ""): JobState.ABORTED,
    }


def test_a_process_that_opens_a_job_again_after_a_lost_answer_knows_its_own(
    registry: Registry, others: Jobs, redis_setup: RedisSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    call_each = type(registry.store).call_each

    def lose(store: Store, calls: Sequence[ScriptCall]) -> list[Any]:
        call_each(store, calls)
        raise RegistryUnavailable("the answer is lost")

    monkeypatch.setattr(type(registry.store), "call_each", lose)
    with pytest.raises(RegistryUnavailable):
        registry.jobs.open(JOB, MINUTE_MS)
    monkeypatch.setattr(type(registry.store), "call_each", call_each)
    with pytest.raises(JobClosed) as raised:
        others.open(JOB, MINUTE_MS)
    assert raised.value.state == "open"
    registry.jobs.open(JOB, MINUTE_MS)
    assert registry.jobs.state(JOB) is JobState.OPEN
    # It is so long ago that the job has expired, and its name is free again.
    monkeypatch.setattr(type(registry.store), "call_each", lose)
    with pytest.raises(RegistryUnavailable):
        registry.jobs.open("another", 1)
    monkeypatch.setattr(type(registry.store), "call_each", call_each)
    wait_for(lambda: others.state("another") is JobState.ABORTED, "an expired job")
    redis_setup.client.hset(registry.names.of("job", "another"), "free", 0)
    registry.jobs.open("another", MINUTE_MS)
    assert others.state("another") is JobState.OPEN


def test_of_several_threads_that_open_a_job_one_does(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, together = registry.jobs._call, Barrier(4, timeout=60)

    def call_together(*arguments: Any) -> Any:
        together.wait()
        return call(*arguments)

    def open_job(_: int) -> str:
        try:
            registry.jobs.open(JOB, MINUTE_MS)
        except JobClosed as closed:
            return closed.state
        return "opened"

    monkeypatch.setattr(registry.jobs, "_call", call_together)
    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(open_job, range(4))) == ["open"] * 3 + ["opened"]


def test_a_job_that_is_open_for_longer_than_decisions_are_kept_runs_its_tasks(
    registry: Registry,
) -> None:
    _, job_id = opened(registry, JOB)
    # It is not tracked, so nothing is known of it but its job.
    late = arrival(sent(after_ms=-2 * KEEP_MS, job=JOB), job_id=job_id)
    assert verdict(registry, late) is Verdict.LATER
    registry.jobs.end(JOB, JobState.COMMITTED)
    assert verdict(registry, late) is Verdict.FORGOTTEN
    assert verdict(registry, late._replace(put_back_ms=now_ms())) is Verdict.RUN


@pytest.mark.parametrize("wrong", ["type", "state"])
def test_a_job_that_cannot_be_read_says_so(
    registry: Registry, redis_setup: RedisSetup, wrong: str
) -> None:
    job, record = opened(registry, JOB), registry.names.of("job", JOB)
    if wrong == "state":
        redis_setup.client.hset(record, "state", "garbage")
    else:
        redis_setup.client.set(record, "garbage", ex=60)
    (state,) = registry.jobs.states([job]).values()
    assert isinstance(state, str)
    for call in (registry.jobs.state, lambda name: registry.jobs.join(name, 0)):
        with pytest.raises(RegistryUnavailable, match="cannot be read"):
            call(JOB)
    with pytest.raises(RegistryUnavailable, match="cannot be read"):
        registry.jobs.end(JOB, JobState.COMMITTED)


@pytest.mark.parametrize("once", ["", "queue"])
def test_what_cannot_be_read_lets_no_message_win(
    registry: Registry, redis_setup: RedisSetup, once: str
) -> None:
    _, job_id = opened(registry, JOB)
    message = arrival(tracked(job=JOB), job_id=job_id, once=once, name="1")
    redis_setup.client.hset(registry.names.of("job", JOB), "state", "garbage")
    (decision,) = registry.decide([message])
    assert decision.verdict is Verdict.UNREADABLE
    assert "its state is garbage" in decision.why
    redis_setup.client.hset(registry.names.of("job", JOB), "state", "aborted")
    assert verdict(registry, message) is Verdict.EXPIRED


def test_only_so_many_ended_jobs_are_remembered(
    registry: Registry, redis_setup: RedisSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "REMEMBERED", 3)
    jobs = [opened(registry, f"job-{number}") for number in range(5)]
    for name, _ in jobs:
        registry.jobs.end(name, JobState.ABORTED)
    assert registry.jobs.states(jobs) == dict.fromkeys(jobs, JobState.ABORTED)
    for name, _ in jobs:
        redis_setup.client.delete(registry.names.of("job", name))
    assert registry.jobs.states(jobs) == dict.fromkeys(jobs[2:], JobState.ABORTED)


@pytest.mark.parametrize("overdue_ms", [0, 86_400_000])
def test_a_task_of_an_open_job_goes_back_for_a_moment(registry: Registry, overdue_ms: int) -> None:
    message = tracked(job=JOB, after_ms=-overdue_ms)
    registry.jobs.open(JOB, MINUTE_MS)
    registry.register([message])
    before = now_ms()
    once = arrival(message, once="queue", name="a")
    (decision,) = registry.decide([once])
    assert decision.verdict is Verdict.LATER
    assert not decision.is_new_due
    assert before < decision.until_ms <= before + MINUTE_MS
    registry.jobs.end(JOB, JobState.COMMITTED)
    # It left no mark while it went back.
    assert verdict(registry, once._replace(name="b")) is Verdict.RUN


def test_tasks_of_an_aborted_job_do_not_run_leave_the_index_and_can_be_sent_again(
    registry: Registry,
) -> None:
    aborted, again = tracked(job=JOB), tracked(job="again")
    for job in (JOB, "again"):
        registry.jobs.open(job, MINUTE_MS)
    registry.register([aborted])
    registry.jobs.end(JOB, JobState.ABORTED)
    assert verdict(registry, aborted) is Verdict.EXPIRED
    assert verdict(registry, sent("untracked", job=JOB)) is Verdict.EXPIRED
    assert registry.index.count(Filter()) == 0
    assert registry.ask([("task", "")]) == [Ticket()]
    assert registry.register([again]) == ["waiting"]
    registry.jobs.end("again", JobState.COMMITTED)
    assert verdict(registry, arrival(aborted, redelivered=True)) is Verdict.EXPIRED
    assert registry.index.count(Filter()) == 1
    assert verdict(registry, again) is Verdict.RUN


def test_what_is_known_about_a_task_and_its_key_lives_on_while_it_waits_for_its_job(
    registry: Registry, redis_setup: RedisSetup
) -> None:
    message = keyed(registry, "task", "order", job=JOB, after_ms=-MINUTE_MS)
    registry.jobs.open(JOB, MINUTE_MS)
    registry.register([message])
    before = now_ms()
    assert verdict(registry, message) is Verdict.LATER
    for key in (registry.names.of("task", "task"), registry.names.of("key", "order")):
        assert before <= expiry_ms(redis_setup, key) - KEEP_MS <= now_ms()


def test_a_task_whose_job_redis_has_lost_runs(registry: Registry) -> None:
    assert verdict(registry, sent(job="lost")) is Verdict.RUN


def opened(registry: Registry, name: str, expires_ms: int = MINUTE_MS) -> tuple[str, str]:
    """Open a job; return its name and id."""
    registry.jobs.open(name, expires_ms)
    _, job_id = registry.jobs.join(name, 0)
    return name, job_id
