"""Jobs: their tasks wait while they are open, then all run, or none."""

import logging
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import pytest

from celery_rabbitdelay.exceptions import JobClosed, RegistryUnavailable
from celery_rabbitdelay.levels.delay import milliseconds_of
from celery_rabbitdelay.registry.decision import Verdict
from celery_rabbitdelay.registry.index import shard_of
from celery_rabbitdelay.registry.jobs import Jobs, JobState
from celery_rabbitdelay.registry.registry import Registry
from celery_rabbitdelay.registry.store import ScriptCall, Store
from celery_rabbitdelay.testing import wait_for
from tests.registry.integration.registering import (
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
COMMITTED, ABORTED = JobState.COMMITTED, JobState.ABORTED


@pytest.fixture
def others(registry: Registry) -> Jobs:
    """The same jobs in another process, which remembers nothing of what this one has seen."""
    return Jobs(registry.store, registry.names, KEEP_MS, MARGIN_MS)


def opened(registry: Registry, name: str = JOB, expires_ms: int = MINUTE_MS) -> tuple[str, str]:
    """Open a job; return its name and id."""
    registry.jobs.open(name, expires_ms)
    _, job_id = registry.jobs.join(name, 0)
    return name, job_id


def opened_and_expired(registry: Registry, name: str = JOB) -> tuple[str, str]:
    """Open a job, and wait until it has expired."""
    job = opened(registry, name, 1)
    wait_for(lambda: registry.jobs.state(name) is ABORTED, "an expired job")
    return job


def free(registry: Registry, name: str = JOB) -> None:
    """Let it be so long ago that another job may have the name."""
    record = registry.names.of("job", name)
    registry.store.commands(lambda pipe: pipe.hset(record, "free", 0))


def listed_in_redis(registry: Registry) -> int:
    """Return how many jobs the lists take room for."""
    names = registry.names.in_shards("jobs")
    return sum(registry.store.commands(lambda pipe: [pipe.zcard(each) for each in names]))


def is_later(registry: Registry, instant_ms: int) -> bool:
    """Return whether the clock of Redis is past an instant."""
    return registry.now_ms() > instant_ms


def closed(call: Callable[[], object]) -> str:
    """Return the state of which a call complains."""
    with pytest.raises(JobClosed) as raised:
        call()
    return raised.value.state


@pytest.mark.parametrize("end", [COMMITTED, ABORTED])
def test_a_job_is_opened_and_ended_once_and_says_what_it_is(
    registry: Registry, others: Jobs, end: JobState, caplog: pytest.LogCaptureFixture
) -> None:
    jobs, other = registry.jobs, ABORTED if end is COMMITTED else COMMITTED
    assert closed(lambda: jobs.end(JOB, end)) == "unknown"
    assert (jobs.state(JOB), jobs.join(JOB, now_ms()), jobs.states([])) == (None, (None, ""), {})
    jobs.open(JOB, MINUTE_MS)
    state, job_id = jobs.join(JOB, now_ms())
    assert (state, bool(job_id)) == (JobState.OPEN, True)
    assert closed(lambda: others.open(JOB, MINUTE_MS)) == "open"
    for _ in range(2):
        assert jobs.end(JOB, end)[0] == job_id
    assert closed(lambda: jobs.end(JOB, other)) == end.value
    assert closed(lambda: jobs.open(JOB, MINUTE_MS)) == end.value
    assert jobs.join(JOB, now_ms()) == (end, job_id)
    assert others.state(JOB) is end
    assert not [each for each in caplog.records if each.name.endswith("jobs")]


def test_all_jobs_are_listed_and_the_newest_come_first(registry: Registry, others: Jobs) -> None:
    names = [f"job:}}:job:{number}" for number in range(20)]
    before = now_ms()
    for number, name in enumerate(names):
        registry.jobs.open(name, (number + 1) * MINUTE_MS)
        wait_for(partial(is_later, registry, registry.now_ms()), "the clock of Redis")
    listed = others.all(registry.now_ms(), 100)
    assert [each.name for each in listed] == names[::-1]
    for number, each in enumerate(listed[::-1]):
        assert before <= milliseconds_of(each.opened) <= now_ms()
        lasts = each.expires - each.opened
        assert lasts == timedelta(minutes=number + 1)
    assert others.all(registry.now_ms(), 3) == listed[:3]
    committed, aborted, confirmed = (each.name for each in listed[:3])
    registry.jobs.end(committed, COMMITTED)
    registry.jobs.end(aborted, ABORTED)
    registry.jobs.confirm(confirmed, registry.jobs.join(confirmed, 0)[1])
    states = [each.state for each in others.all(registry.now_ms(), 100)]
    assert states == [COMMITTED, ABORTED, COMMITTED, *[JobState.OPEN] * 17]
    assert {*others.open_ones(registry.now_ms())} == {*names[:17]}
    in_ten_minutes = registry.now_ms() + 10 * MINUTE_MS + MINUTE_MS // 2
    assert {*others.open_ones(in_ten_minutes)} == {*names[10:17]}


def test_a_job_that_has_expired_is_listed_as_aborted_and_leaves_the_list_when_it_is_gone(
    registry: Registry,
) -> None:
    opened_and_expired(registry)
    assert [each.state for each in registry.jobs.all(registry.now_ms(), 100)] == [ABORTED]
    registry.store.commands(lambda pipe: pipe.delete(registry.names.of("job", JOB)))
    assert registry.jobs.all(registry.now_ms(), 100) == []
    names = (f"another {number}" for number in range(1000))
    another = next(each for each in names if shard_of(each) == shard_of(JOB))
    registry.jobs.open(another, MINUTE_MS)
    assert [each.name for each in registry.jobs.all(registry.now_ms(), 100)] == [another]
    assert listed_in_redis(registry) == 1, "what is gone takes no room"


def test_a_job_that_is_not_committed_in_time_turns_aborted_once_with_a_warning(
    registry: Registry, others: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[str] = []
    registry.jobs.on_expired = lambda: found.append("here")
    others.on_expired = lambda: found.append("there")
    job = opened(registry, expires_ms=1)
    message = arrival(sent(job=JOB), job_id=job[1])
    wait_for(lambda: others.state(JOB) is ABORTED, "an expired job")
    assert verdict(registry, message) is Verdict.EXPIRED
    assert registry.jobs.states([job]) == {job: ABORTED}
    assert len(found) == 1
    assert [(each.levelno, each.args) for each in caplog.records if each.name.endswith("jobs")] == [
        (logging.WARNING, (JOB,))
    ]


def test_an_expired_job_is_closed_whoever_asks_first(registry: Registry) -> None:
    calls: dict[str, Callable[[str], object]] = {
        "open": lambda job: registry.jobs.open(job, MINUTE_MS),
        "end": lambda job: registry.jobs.end(job, COMMITTED),
    }
    for job, call in calls.items():
        registry.jobs.open(job, 1)
        at = now_ms()
        wait_for(lambda at=at: now_ms() > at + 1, "the expiry")  # type: ignore[misc]
        assert closed(partial(call, job)) == "aborted"


def test_an_expired_job_leaves_the_list_of_open_jobs_when_another_one_is_opened(
    registry: Registry,
) -> None:
    opened(registry, expires_ms=1)
    other = next(name for name in map(str, count()) if shard_of(name) == shard_of(JOB))
    expired_ms = registry.now_ms() + 1
    wait_for(lambda: registry.now_ms() > expired_ms, "the end of the job")
    opened(registry, other)
    lists = registry.names.in_shards("open")
    found = registry.store.commands(lambda pipe: [pipe.zrange(each, 0, -1) for each in lists])
    assert [name for names in found for name in names] == [other]


def test_a_job_lives_and_has_its_name_until_its_last_task_may_arrive(
    registry: Registry, redis_setup: RedisSetup
) -> None:
    record = registry.names.of("job", JOB)
    before = now_ms()
    registry.jobs.open(JOB, MINUTE_MS)
    lives = expiry_ms(redis_setup, record)
    assert before <= lives - MINUTE_MS - MARGIN_MS - KEEP_MS <= now_ms()
    due = now_ms() + 10 * MINUTE_MS
    registry.jobs.join(JOB, due)
    registry.jobs.join(JOB, due - MINUTE_MS)
    assert expiry_ms(redis_setup, record) == due + MARGIN_MS + KEEP_MS
    assert int(redis_setup.client.hget(record, "free")) == due + MARGIN_MS


def test_an_expired_job_leaves_nothing_to_the_next_one_of_its_name(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    former = opened_and_expired(registry)
    free(registry)
    caplog.clear()
    latest = opened(registry)
    registry.jobs.end(JOB, ABORTED)
    assert registry.jobs.states([latest]) == {latest: ABORTED}
    assert not caplog.records  # it was aborted, and has not expired
    # A note of the former one comes late.
    registry.jobs.confirm(*former)
    registry.jobs.confirm(*latest)
    assert registry.jobs.states([former, latest, (JOB, "")]) == {
        former: COMMITTED,
        latest: ABORTED,
        (JOB, ""): ABORTED,
    }


@pytest.mark.parametrize("has_expired", [True, False])
def test_a_commit_that_redis_has_lost_is_made_again(
    registry: Registry, others: Jobs, has_expired: bool, caplog: pytest.LogCaptureFixture
) -> None:
    job = (opened_and_expired if has_expired else opened)(registry)
    registry.jobs.states([job])
    registry.jobs.confirm(*job)
    caplog.clear()
    assert registry.jobs.states([job]) == others.states([job]) == {job: COMMITTED}
    assert not caplog.records
    registry.jobs.confirm("unknown", "id")
    assert registry.jobs.state("unknown") is None
    assert registry.jobs.end(JOB, COMMITTED)[0] == job[1]


def test_a_process_that_opens_a_job_again_after_a_lost_answer_knows_its_own(
    registry: Registry, others: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_each = Store.of_each

    def lose(store: Store, *calls: ScriptCall, **options: Any) -> list[Any]:
        of_each(store, *calls, **options)
        raise RegistryUnavailable("the answer is lost")

    def open_and_lose(job: str, expires_ms: int) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Store, "of_each", lose)
            with pytest.raises(RegistryUnavailable):
                registry.jobs.open(job, expires_ms)

    open_and_lose(JOB, MINUTE_MS)
    assert closed(lambda: others.open(JOB, MINUTE_MS)) == "open"
    registry.jobs.open(JOB, MINUTE_MS)
    assert registry.jobs.state(JOB) is JobState.OPEN
    # It is so long ago that the job has expired, and its name is free again.
    open_and_lose("another", 1)
    wait_for(lambda: others.state("another") is ABORTED, "an expired job")
    free(registry, "another")
    registry.jobs.open("another", MINUTE_MS)
    assert others.state("another") is JobState.OPEN


@pytest.mark.parametrize("wrong", ["type", "state"])
def test_a_job_that_cannot_be_read_says_so_and_lets_no_message_win(
    registry: Registry, redis_setup: RedisSetup, wrong: str
) -> None:
    job, record = opened(registry), registry.names.of("job", JOB)
    messages = [
        arrival(tracked(once or "-", job=JOB), job_id=job[1], once=once, name="1")
        for once in ("", "queue")
    ]
    if wrong == "state":
        redis_setup.client.hset(record, "state", "garbage")
    else:
        redis_setup.client.set(record, "garbage", ex=60)
    (state,) = registry.jobs.states([job]).values()
    assert isinstance(state, str)
    for call in (lambda: registry.jobs.join(JOB, 0), lambda: registry.jobs.end(JOB, COMMITTED)):
        with pytest.raises(RegistryUnavailable, match="cannot be read"):
            call()
    decisions = registry.decide(messages)
    assert {each.verdict for each in decisions} == {Verdict.UNREADABLE}
    assert {each.why for each in decisions} == {state.removeprefix("!")}
    if wrong == "state":
        redis_setup.client.hset(record, "state", "aborted")
        assert [verdict(registry, each) for each in messages] == [Verdict.EXPIRED] * 2


@pytest.mark.parametrize("overdue_ms", [0, 86_400_000])
def test_a_task_of_an_open_job_goes_back_for_a_moment_and_is_remembered_meanwhile(
    registry: Registry, redis_setup: RedisSetup, overdue_ms: int
) -> None:
    registry.jobs.open(JOB, MINUTE_MS)
    message = keyed(registry, "task", "order", job=JOB, after_ms=-overdue_ms)
    registry.register([message])
    before = now_ms()
    once = arrival(message, once="queue", name="a")
    (decision,) = registry.decide([once])
    assert (decision.verdict, decision.is_new_due) == (Verdict.LATER, False)
    assert before < decision.until_ms <= before + MINUTE_MS
    for key in (registry.names.of("task", "task"), registry.names.of("key", "order")):
        assert before <= expiry_ms(redis_setup, key) - KEEP_MS <= now_ms()
    registry.jobs.end(JOB, COMMITTED)
    # It left no mark while it went back.
    assert verdict(registry, once._replace(name="b")) is Verdict.RUN


def test_a_job_that_is_open_for_longer_than_decisions_are_kept_runs_its_tasks(
    registry: Registry,
) -> None:
    _, job_id = opened(registry)
    # It is not tracked, so nothing is known of it but its job.
    late = arrival(sent(after_ms=-2 * KEEP_MS, job=JOB), job_id=job_id)
    assert verdict(registry, late) is Verdict.LATER
    registry.jobs.end(JOB, COMMITTED)
    assert verdict(registry, late) is Verdict.FORGOTTEN
    assert verdict(registry, late._replace(put_back_ms=now_ms())) is Verdict.RUN
    assert verdict(registry, sent("other", job="a job that Redis has lost")) is Verdict.RUN
