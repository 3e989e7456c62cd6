"""Which tasks are superseded: the newest one under a key runs, and no step on the way loses it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from celery_rabbitdelay.registry.decision import Outcome, Verdict
from celery_rabbitdelay.registry.index import Filter, Index
from celery_rabbitdelay.registry.registry import Registration, Registry
from tests.integration.registering import (
    MARGIN_MS,
    MINUTE_MS,
    RedisSetup,
    arrival,
    expiry_ms,
    keys,
    now_ms,
    sent,
    tracked,
    verdict,
)

KEY = "order 7"


def claim(registry: Registry, message: Registration) -> list[str]:
    """Take the first step of registering a message, as if the process died after it."""
    (answer,) = registry.store.call_each([registry._claim(message)])
    return list(answer)


def verdicts(registry: Registry, messages: list[Registration]) -> list[Verdict]:
    """Return what becomes of arrivals, all of which arrive at once."""
    decisions = registry.decide([arrival(each) for each in messages], [""] * len(messages))
    return [decision.verdict for decision in decisions]


def test_a_task_waits_once_it_is_registered_and_lives_as_long_as_it_may_arrive(
    registry: Registry, redis_setup: RedisSetup, prefix: str
) -> None:
    message = tracked(key=KEY, job="job")
    assert registry.register([message]) == ["waiting"]
    written = keys(redis_setup, prefix)
    assert len(written) == 5  # the record, the key, and three indexes
    for each in written:
        assert expiry_ms(redis_setup, each) == message.due_ms + MARGIN_MS


def test_a_tracked_task_without_key_and_job_has_a_record_and_two_indexes(
    registry: Registry, redis_setup: RedisSetup, prefix: str
) -> None:
    registry.register([tracked()])
    assert len(keys(redis_setup, prefix)) == 3


def test_a_shorter_delay_under_the_same_key_shortens_no_life(
    registry: Registry, redis_setup: RedisSetup
) -> None:
    first, second = sent(key=KEY, after_ms=2 * MINUTE_MS), sent(key=KEY)
    registry.register([first])
    registry.register([second])
    for each in (registry.names.key(KEY), registry.names.task("task")):
        assert expiry_ms(redis_setup, each) == first.due_ms + MARGIN_MS


def test_a_task_may_arrive_before_it_is_registered(registry: Registry) -> None:
    message = tracked(key=KEY)
    assert verdict(registry, message) is Verdict.RUN
    assert registry.register([message]) == ["released"]
    assert registry.cancel(["task"]) == [Outcome.RELEASED]


def test_another_message_that_arrives_before_it_is_registered_releases_no_task_that_waits(
    registry: Registry,
) -> None:
    first, second = tracked(), tracked()
    registry.register([first])
    assert verdict(registry, second) is Verdict.RUN
    assert registry.register([second]) == ["released"]
    assert registry.cancel(["task"]) == [Outcome.DONE]
    assert verdict(registry, first) is Verdict.CANCELLED


def test_a_task_that_is_registered_late_does_not_wait_again_once_its_retry_has_arrived(
    registry: Registry,
) -> None:
    first, retry = tracked(), tracked(is_retry=True)
    assert verdict(registry, first) is Verdict.RUN
    registry.register([retry])
    assert verdict(registry, retry) is Verdict.RUN
    assert registry.register([first]) == ["released"]
    assert registry.cancel(["task"]) == [Outcome.RELEASED]


def test_a_retry_waits_again(registry: Registry) -> None:
    first, retry = tracked(key=KEY), tracked(key=KEY, is_retry=True)
    registry.register([first])
    verdict(registry, first)
    assert registry.register([retry]) == ["waiting"]
    assert registry.cancel(["task"]) == [Outcome.DONE]
    assert verdict(registry, retry) is Verdict.CANCELLED


def test_a_cancelled_task_stays_cancelled_when_it_is_registered(registry: Registry) -> None:
    message = tracked()
    registry.cancel(["task"])
    assert registry.register([message]) == ["cancelled"]
    assert verdict(registry, message) is Verdict.CANCELLED


def test_a_task_that_is_postponed_before_it_is_registered_stays_postponed(
    registry: Registry,
) -> None:
    message = tracked()
    registry.postpone("task", message.due_ms + MINUTE_MS)
    assert registry.register([message]) == ["waiting"]
    assert verdict(registry, message) is Verdict.LATER


def test_a_retry_is_not_postponed_because_the_attempt_before_it_was(registry: Registry) -> None:
    first = tracked()
    registry.register([first])
    registry.postpone("task", first.due_ms + 5 * MINUTE_MS)
    assert verdict(registry, first._replace(due_ms=first.due_ms + 5 * MINUTE_MS)) is Verdict.RUN
    retry = tracked(is_retry=True)
    registry.register([retry])
    assert verdict(registry, retry) is Verdict.RUN


def test_what_arrives_again_while_its_retry_is_postponed_runs(registry: Registry) -> None:
    first, retry = tracked(), tracked(is_retry=True)
    registry.register([first])
    verdict(registry, first)
    registry.register([retry])
    registry.postpone("task", retry.due_ms + MINUTE_MS)
    assert verdict(registry, arrival(first, redelivered=True)) is Verdict.RUN
    assert verdict(registry, retry) is Verdict.LATER


def test_only_the_newest_of_a_chain_of_tasks_under_one_key_runs(registry: Registry) -> None:
    chain = [sent(f"task-{number}", key=KEY) for number in range(10)]
    for each in chain:
        assert registry.register([each]) == ["waiting"]
    assert registry.waiting_under(KEY) == ["task-9"]
    assert verdicts(registry, chain) == [*[Verdict.SUPERSEDED] * 9, Verdict.RUN]


def test_only_the_last_row_of_one_call_under_one_key_runs(registry: Registry) -> None:
    rows = [sent(f"task-{number}", key=KEY) for number in range(3)]
    other = sent("other", key="another key")
    states = registry.register([*rows, other, sent("no key")])
    assert states == ["superseded", "superseded", "waiting", "waiting", "waiting"]
    assert verdicts(registry, rows) == [Verdict.SUPERSEDED, Verdict.SUPERSEDED, Verdict.RUN]
    assert verdict(registry, other) is Verdict.RUN


def test_the_same_task_sent_twice_under_one_key_runs_once(registry: Registry) -> None:
    first, second = tracked(key=KEY), tracked(key=KEY)
    registry.register([first])
    registry.register([second])
    assert registry.waiting_under(KEY) == ["task"]
    assert Index(registry.store, registry.names).count(Filter()) == 1
    assert verdicts(registry, [first, second]) == [Verdict.REPLACED, Verdict.RUN]


def test_a_task_without_delay_supersedes_what_waits(registry: Registry) -> None:
    message = sent(key=KEY)
    registry.register([message])
    registry.supersede(KEY)
    registry.supersede("a key under which nothing waits")
    assert registry.waiting_under(KEY) == []
    assert verdict(registry, message) is Verdict.SUPERSEDED


def test_a_task_that_has_arrived_stays_released(registry: Registry) -> None:
    first, second = sent("first", key=KEY), sent("second", key=KEY)
    registry.register([first])
    assert verdict(registry, first) is Verdict.RUN
    registry.register([second])
    assert registry.cancel(["first"]) == [Outcome.RELEASED]
    again = arrival(first, redelivered=True)
    assert verdict(registry, again) is Verdict.RUN


def test_a_retry_never_supersedes_a_newer_task(registry: Registry) -> None:
    first, newer = sent("first", key=KEY), sent("newer", key=KEY)
    retry = sent("first", key=KEY, is_retry=True)
    registry.register([first])
    verdict(registry, first)
    registry.register([newer])
    assert registry.register([retry]) == ["superseded"]
    assert registry.waiting_under(KEY) == ["newer"]
    assert verdicts(registry, [retry, newer]) == [Verdict.SUPERSEDED, Verdict.RUN]


def test_a_retry_never_runs_after_a_newer_task_without_delay(registry: Registry) -> None:
    first, retry = sent(key=KEY), sent(key=KEY, is_retry=True)
    registry.register([first])
    verdict(registry, first)
    registry.supersede(KEY)
    assert registry.register([retry]) == ["superseded"]
    assert verdict(registry, retry) is Verdict.SUPERSEDED


def test_a_retry_is_superseded_by_what_is_sent_after_it(registry: Registry) -> None:
    first, retry = sent("first", key=KEY), sent("first", key=KEY, is_retry=True)
    newer = sent("newer", key=KEY)
    registry.register([first])
    verdict(registry, first)
    assert registry.register([retry]) == ["waiting"]
    registry.register([newer])
    assert verdicts(registry, [retry, newer]) == [Verdict.SUPERSEDED, Verdict.RUN]


def test_a_message_that_is_registered_again_leaves_the_newer_one_to_run(
    registry: Registry,
) -> None:
    first, newer = tracked("first", key=KEY), tracked("newer", key=KEY)
    registry.register([first])
    registry.register([newer])
    assert registry.register([first]) == ["superseded"]
    assert verdicts(registry, [first, newer]) == [Verdict.SUPERSEDED, Verdict.RUN]


def test_a_message_that_is_claimed_again_leaves_the_newer_one_to_run(registry: Registry) -> None:
    first, newer = sent("first", key=KEY), sent("newer", key=KEY)
    registry.register([first])
    claim(registry, newer)
    assert claim(registry, first) == ["superseded"]
    registry.register([newer])
    assert verdicts(registry, [first, newer]) == [Verdict.SUPERSEDED, Verdict.RUN]


@pytest.mark.parametrize("same_id", [False, True], ids=["another task", "the same task again"])
@pytest.mark.parametrize("registered", [False, True], ids=["claimed", "registered"])
def test_a_process_that_dies_while_it_registers_leaves_nothing_that_the_next_one_cannot_supersede(
    registry: Registry, registered: bool, same_id: bool
) -> None:
    first = sent("task", key=KEY)
    second = sent("task" if same_id else "other", key=KEY)
    registry.register([first])
    claim(registry, second)
    if registered:
        registry.store.call_each([registry._register(second)])
    third = sent("third", key=KEY)
    registry.register([third])
    assert registry.waiting_under(KEY) == ["third"]
    assert set(verdicts(registry, [first, second])) <= {Verdict.SUPERSEDED, Verdict.REPLACED}
    assert verdict(registry, third) is Verdict.RUN


def test_a_process_that_dies_before_or_while_it_registers_leaves_a_task_that_runs(
    registry: Registry,
) -> None:
    first, second = sent("first", key=KEY), sent("second", key=KEY)
    registry.register([first])
    # It dies before it: the message of the second one is in the broker, and both run.
    assert verdicts(registry, [first, second]) == [Verdict.RUN, Verdict.RUN]
    third, fourth = sent("third", key=KEY), sent("fourth", key=KEY)
    registry.register([third])
    claim(registry, fourth)
    # On a cluster, the one before it is superseded in a further step.
    third_runs = Verdict.RUN if registry.store.is_cluster else Verdict.SUPERSEDED
    assert verdicts(registry, [third, fourth]) == [third_runs, Verdict.RUN]


def test_a_process_that_dies_before_superseded_messages_are_forgotten_does_no_harm(
    registry: Registry,
) -> None:
    first, second, third = (sent(f"task-{number}", key=KEY) for number in range(3))
    registry.register([first])
    claim(registry, second)
    record = registry.names.task(first.task_id)
    registry.store.call("void", [record], first.copy, first.due_ms)
    registry.register([third])
    assert registry.waiting_under(KEY) == [third.task_id]
    assert verdicts(registry, [first, second, third]) == [
        Verdict.SUPERSEDED,
        Verdict.SUPERSEDED,
        Verdict.RUN,
    ]


@pytest.mark.parametrize("task_id", ["a", "b", "c", "d"])  # on a cluster, on several servers
def test_a_retry_whose_worker_dies_while_it_registers_is_superseded_by_the_next_task(
    registry: Registry, redis_setup: RedisSetup, task_id: str
) -> None:
    first, newer = sent(task_id, key=KEY), sent("newer", key=KEY)
    retry = sent(task_id, key=KEY, is_retry=True, after_ms=5 * MINUTE_MS)
    registry.register([first])
    verdict(registry, first)
    registry.register([newer])
    assert claim(registry, retry) == ["superseded"]
    if registry.store.is_cluster:
        lives = expiry_ms(redis_setup, registry.names.key(KEY))
        assert lives == retry.due_ms + MARGIN_MS
    last = sent("last", key=KEY)
    registry.register([last])
    assert verdicts(registry, [newer, retry]) == [Verdict.SUPERSEDED] * 2
    assert verdict(registry, last) is Verdict.RUN


def test_a_hundred_messages_from_two_threads_leave_exactly_the_last_one(
    registry: Registry, redis_setup: RedisSetup
) -> None:
    halves = [[sent(f"{half}-{number}", key=KEY) for number in range(50)] for half in "ab"]

    def register_all(messages: list[Registration]) -> None:
        for each in messages:
            registry.register([each])

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(register_all, halves))
    messages = [*halves[0], *halves[1]]
    runs = [
        each
        for each, found in zip(messages, verdicts(registry, messages), strict=True)
        if found is not Verdict.SUPERSEDED
    ]
    newest = redis_setup.client.hget(registry.names.key(KEY), "newest")
    assert [f"{each.copy} {each.task_id}" for each in runs] == [newest]
    assert runs[0] in (halves[0][-1], halves[1][-1])


def test_a_postponed_task_is_superseded_although_it_is_due_after_its_key_was_to_expire(
    registry: Registry, redis_setup: RedisSetup
) -> None:
    message = sent(key=KEY)
    registry.register([message])
    later = now_ms() + 10 * MARGIN_MS
    registry.postpone("task", later)
    for each in (registry.names.key(KEY), registry.names.task("task")):
        assert expiry_ms(redis_setup, each) == later + MARGIN_MS
