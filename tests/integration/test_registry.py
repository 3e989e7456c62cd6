"""What becomes of tasks that arrive, after they were cancelled or postponed, or come twice."""

from __future__ import annotations

import time

import pytest

from celery_rabbitdelay.registry.decision import Arrival, Decision, Outcome, Verdict
from celery_rabbitdelay.registry.index import Filter
from celery_rabbitdelay.registry.registry import TASKS_PER_CALL, Earlier, Registration, Registry
from tests.integration.registering import (
    KEEP_MS,
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

#: Where a task with ``once`` arrives.
HERE = "queue:0"


def unknown(task_id: str = "task", **more: object) -> Arrival:
    """Return an arrival of which nothing was noted when it was sent."""
    return Arrival(task_id, now_ms())._replace(**more)  # type: ignore[arg-type]


def test_a_task_of_which_nothing_is_known_runs_and_leaves_nothing(
    registry: Registry, redis_setup: RedisSetup
) -> None:
    assert verdict(registry, unknown()) is Verdict.RUN
    assert not redis_setup.client.exists(registry.names.task("task"))


def test_no_arrivals_ask_nothing(registry: Registry) -> None:
    assert registry.decide([], []) == []
    assert registry.cancel([]) == []
    assert registry.register([]) == []


def test_many_arrivals_are_decided_each_by_itself(registry: Registry) -> None:
    ids = [f"task-{number}" for number in range(100)]
    registry.cancel(ids[::3])
    decisions = registry.decide([unknown(each) for each in ids], [""] * len(ids))
    expected = [Verdict.RUN if number % 3 else Verdict.CANCELLED for number in range(100)]
    assert [decision.verdict for decision in decisions] == expected


def test_an_untracked_task_that_is_cancelled_does_not_run_nor_do_its_retries(
    registry: Registry, redis_setup: RedisSetup
) -> None:
    before = now_ms()
    assert registry.cancel(["task"]) == [Outcome.UNKNOWN]
    assert verdict(registry, unknown()) is Verdict.CANCELLED
    assert verdict(registry, unknown()) is Verdict.CANCELLED
    lives = expiry_ms(redis_setup, registry.names.task("task"))
    assert before <= lives - KEEP_MS - MARGIN_MS <= now_ms()


def test_cancelling_a_tracked_task_tells_that_it_was_waiting(
    registry: Registry, redis_setup: RedisSetup
) -> None:
    message = tracked()
    assert registry.register([message]) == ["waiting"]
    assert registry.cancel(["task"]) == [Outcome.DONE]
    assert registry.cancel(["task"]) == [Outcome.CANCELLED]
    assert verdict(registry, message) is Verdict.CANCELLED
    lives = expiry_ms(redis_setup, registry.names.task("task"))
    assert lives == message.due_ms + MARGIN_MS


def test_a_task_that_has_arrived_cannot_be_cancelled(registry: Registry) -> None:
    message = tracked()
    registry.register([message])
    assert verdict(registry, message) is Verdict.RUN
    assert registry.cancel(["task"]) == [Outcome.RELEASED]
    assert verdict(registry, arrival(message, redelivered=True)) is Verdict.RUN


def test_cancelling_a_superseded_task_changes_nothing(registry: Registry) -> None:
    message = sent(key="order")
    registry.register([message])
    registry.supersede("order")
    assert registry.cancel(["task"]) == [Outcome.CANCELLED]


def test_many_tasks_are_cancelled_in_one_call_also_if_an_id_comes_twice(
    registry: Registry,
) -> None:
    message = tracked("task-7")
    registry.register([message])
    ids = [f"task-{number}" for number in range(2 * TASKS_PER_CALL + 1)]
    found = registry.cancel([*ids, "task-7"])
    expected = [Outcome.DONE if each == "task-7" else Outcome.UNKNOWN for each in [*ids, "task-7"]]
    assert found == expected
    decisions = registry.decide([unknown(each) for each in ids], [""] * len(ids))
    assert {decision.verdict for decision in decisions} == {Verdict.CANCELLED}


def test_a_cancelled_task_that_is_overdue_stays_cancelled_for_the_margin(
    registry: Registry, redis_setup: RedisSetup
) -> None:
    registry.register([tracked(after_ms=-MINUTE_MS)])
    before = now_ms()
    assert registry.cancel(["task"]) == [Outcome.DONE]
    lives = expiry_ms(redis_setup, registry.names.task("task"))
    assert before <= lives - MARGIN_MS <= now_ms()


def test_an_untracked_task_that_was_postponed_stays_cancelled_for_the_longest_delay(
    registry: Registry, redis_setup: RedisSetup
) -> None:
    registry.postpone("task", now_ms() + MINUTE_MS)
    before = now_ms()
    registry.cancel(["task"])
    lives = expiry_ms(redis_setup, registry.names.task("task"))
    assert before <= lives - KEEP_MS - MARGIN_MS <= now_ms()


@pytest.mark.parametrize("task_id", ["half a pair \ud800", "}:task:{1}", "\x00 \n ünïcode"])
def test_a_task_id_may_be_any_text(registry: Registry, task_id: str) -> None:
    message = tracked(task_id, key=task_id, job=task_id)
    assert registry.register([message]) == ["waiting"]
    assert registry.waiting_under(task_id) == [task_id]
    assert registry.cancel([task_id]) == [Outcome.DONE]
    assert verdict(registry, message) is Verdict.CANCELLED


def test_only_the_first_arrival_runs_once(registry: Registry) -> None:
    first = unknown(once=HERE)
    assert verdict(registry, first, "a") is Verdict.RUN
    assert verdict(registry, first, "b") is Verdict.DUPLICATE


def test_a_decision_whose_answer_was_lost_can_be_asked_for_again(registry: Registry) -> None:
    first = unknown(once=HERE)
    assert verdict(registry, first, "a") is Verdict.RUN
    assert verdict(registry, first, "a") is Verdict.RUN
    assert verdict(registry, first, "b") is Verdict.DUPLICATE


def test_a_task_that_the_broker_redelivers_runs_although_it_is_to_run_once(
    registry: Registry,
) -> None:
    first = unknown(once=HERE)
    assert verdict(registry, first, "a") is Verdict.RUN
    assert verdict(registry, first._replace(redelivered=True), "b") is Verdict.RUN
    assert verdict(registry, first, "a") is Verdict.DUPLICATE


def test_a_retry_is_no_duplicate_of_the_attempt_before_it(registry: Registry) -> None:
    assert verdict(registry, unknown(once="queue:0"), "a") is Verdict.RUN
    assert verdict(registry, unknown(once="queue:1"), "b") is Verdict.RUN


def test_the_same_task_twice_in_one_call_runs_once(registry: Registry) -> None:
    first = unknown(once=HERE)
    decisions = registry.decide([first, first], ["a", "b"])
    assert [decision.verdict for decision in decisions] == [Verdict.RUN, Verdict.DUPLICATE]


@pytest.mark.parametrize("after_ms", [0, MINUTE_MS, -MARGIN_MS - MINUTE_MS])
def test_a_mark_lives_for_the_margin_after_the_task_is_due_or_arrives(
    registry: Registry, redis_setup: RedisSetup, after_ms: int
) -> None:
    before = now_ms()
    due = before + after_ms
    assert verdict(registry, Arrival("task", due, once=HERE)) is Verdict.RUN
    lives = expiry_ms(redis_setup, registry.names.task("task"))
    assert max(due, before) <= lives - MARGIN_MS <= max(due, now_ms())


def test_a_due_time_of_any_size_can_be_decided_about(registry: Registry) -> None:
    for due_ms in (0, -1, 2**62):
        assert verdict(registry, Arrival(str(due_ms), due_ms, once=HERE)) is Verdict.RUN


def test_a_postponed_task_goes_back_once_and_then_runs(registry: Registry) -> None:
    message = tracked()
    registry.register([message])
    later = message.due_ms + MINUTE_MS
    assert registry.postpone("task", later) is Outcome.DONE
    back = Decision(Verdict.LATER, later, is_new_due=True)
    assert registry.decide([arrival(message)], [""]) == [back]
    # As if the answer had been lost.
    assert registry.decide([arrival(message)], [""]) == [back]
    assert verdict(registry, arrival(message, due_ms=later)) is Verdict.RUN


def test_an_untracked_task_can_be_postponed_to_later(
    registry: Registry, redis_setup: RedisSetup
) -> None:
    first = unknown()
    later = now_ms() + MINUTE_MS
    assert registry.postpone("task", later) is Outcome.UNKNOWN
    assert registry.decide([first], [""]) == [Decision(Verdict.LATER, later, is_new_due=True)]
    lives = expiry_ms(redis_setup, registry.names.task("task"))
    assert lives == later + MARGIN_MS
    assert verdict(registry, first._replace(due_ms=later)) is Verdict.RUN


def test_a_task_that_waits_can_be_postponed_again_and_cancelled(registry: Registry) -> None:
    message = tracked()
    registry.register([message])
    registry.postpone("task", message.due_ms + 2 * MINUTE_MS)
    sooner = message.due_ms + MINUTE_MS
    assert registry.postpone("task", sooner) is Outcome.DONE
    assert registry.decide([arrival(message)], [""])[0].until_ms == sooner
    assert registry.cancel(["task"]) == [Outcome.DONE]
    assert verdict(registry, arrival(message, due_ms=sooner)) is Verdict.CANCELLED


def test_a_postponed_task_that_went_back_cannot_be_had_earlier_without_sending_it_anew(
    registry: Registry,
) -> None:
    message = tracked()
    registry.register([message])
    registry.postpone("task", message.due_ms + 2 * MINUTE_MS)
    assert verdict(registry, message) is Verdict.LATER
    sooner = message.due_ms + MINUTE_MS
    assert registry.postpone("task", sooner) == Earlier(message.copy, "to send")


def test_a_task_that_has_arrived_was_cancelled_or_superseded_cannot_be_postponed(
    registry: Registry,
) -> None:
    released, cancelled = tracked("released"), tracked("cancelled")
    superseded = tracked("superseded", key="order")
    registry.register([released, cancelled, superseded])
    verdict(registry, released)
    registry.cancel(["cancelled"])
    registry.supersede("order")
    later = now_ms() + 2 * MINUTE_MS
    assert registry.postpone("released", later) is Outcome.RELEASED
    assert registry.postpone("cancelled", later) is Outcome.CANCELLED
    assert registry.postpone("superseded", later) is Outcome.CANCELLED
    assert verdict(registry, superseded) is Verdict.SUPERSEDED


def test_to_run_earlier_a_task_is_sent_anew_if_its_message_is_known(registry: Registry) -> None:
    known, unnamed = tracked("known"), sent("unnamed", key="order")
    registry.register([known, unnamed])
    assert registry.postpone("known", known.due_ms - 1) == Earlier(known.copy, "to send")
    assert registry.postpone("unnamed", unnamed.due_ms - 1) == Earlier(unnamed.copy, "")
    assert verdict(registry, known) is Verdict.RUN


def test_a_message_replaces_the_one_before_it(registry: Registry) -> None:
    first, second = tracked(after_ms=2 * MINUTE_MS), tracked()
    registry.register([first])
    outcome = registry.replace("task", first.copy, second.copy, second.due_ms)
    assert outcome is Outcome.DONE
    # As if the answer had been lost.
    assert registry.replace("task", first.copy, second.copy, second.due_ms) is Outcome.DONE
    assert verdict(registry, second) is Verdict.RUN
    assert verdict(registry, first) is Verdict.REPLACED
    assert registry.cancel(["task"]) == [Outcome.RELEASED]


def test_a_message_that_arrives_before_it_is_said_to_replace_another_runs(
    registry: Registry,
) -> None:
    first, second = tracked(after_ms=2 * MINUTE_MS), tracked()
    registry.register([first])
    assert verdict(registry, second) is Verdict.RUN
    outcome = registry.replace("task", first.copy, second.copy, second.due_ms)
    assert outcome is Outcome.DONE
    assert verdict(registry, first) is Verdict.REPLACED
    assert registry.cancel(["task"]) == [Outcome.RELEASED]


@pytest.mark.parametrize("earlier_comes_first", [True, False], ids=["second", "first"])
def test_of_two_messages_of_a_task_the_one_that_arrives_first_runs_alone(
    registry: Registry, earlier_comes_first: bool
) -> None:
    """The process that moves a task to earlier may die before it says which message counts."""
    first, second = tracked(after_ms=2 * MINUTE_MS), tracked()
    registry.register([first])
    outcome = registry.announce("task", first.copy, second.copy, second.due_ms)
    assert outcome is Outcome.DONE
    one, other = (second, first) if earlier_comes_first else (first, second)
    assert verdict(registry, one) is Verdict.RUN
    assert verdict(registry, other) is Verdict.REPLACED
    assert registry.cancel(["task"]) == [Outcome.RELEASED]
    assert list(registry.index.pending(Filter())) == []
    # RabbitMQ delivers it again.
    assert verdict(registry, arrival(one, redelivered=True)) is Verdict.RUN


def test_of_three_messages_of_a_task_the_one_that_arrives_first_runs_alone(
    registry: Registry,
) -> None:
    first, second, third = tracked(after_ms=2 * MINUTE_MS), tracked(), tracked()
    registry.register([first])
    # Two processes move the task to earlier at once.
    for each in (second, third):
        registry.announce("task", first.copy, each.copy, each.due_ms)
    registry.replace("task", first.copy, third.copy, third.due_ms)
    assert verdict(registry, second) is Verdict.RUN
    assert registry.replace("task", first.copy, second.copy, second.due_ms) is Outcome.DONE
    assert verdict(registry, third) is Verdict.REPLACED
    assert verdict(registry, first) is Verdict.REPLACED


@pytest.mark.parametrize("verb", ["released", "cancelled"])
def test_a_second_message_is_not_announced_for_a_task_that_does_not_wait(
    registry: Registry, verb: str
) -> None:
    first, second = tracked(after_ms=2 * MINUTE_MS), tracked()
    registry.register([first])
    if verb == "cancelled":
        registry.cancel(["task"])
    else:
        verdict(registry, first)
    outcome = registry.announce("task", first.copy, second.copy, second.due_ms)
    assert outcome is Outcome(verb)


def test_a_retry_is_none_of_the_messages_before_it(registry: Registry) -> None:
    first, second, retry = tracked(after_ms=2 * MINUTE_MS), tracked(), tracked(is_retry=True)
    registry.register([first])
    registry.announce("task", first.copy, second.copy, second.due_ms)
    assert verdict(registry, second) is Verdict.RUN
    registry.register([retry])
    # RabbitMQ delivers the one before it again: the retry waits nevertheless.
    assert verdict(registry, arrival(second, redelivered=True)) is Verdict.RUN
    assert [each.task_id for each in registry.index.pending(Filter())] == ["task"]
    assert verdict(registry, retry) is Verdict.RUN


def test_a_superseded_task_runs_by_none_of_its_messages(registry: Registry) -> None:
    first, second = tracked(after_ms=2 * MINUTE_MS, key="order"), tracked(key="order")
    registry.register([first])
    registry.announce("task", first.copy, second.copy, second.due_ms)
    registry.supersede("order")
    assert verdict(registry, second) is Verdict.SUPERSEDED
    assert verdict(registry, first) is Verdict.SUPERSEDED


def test_a_task_that_is_cancelled_while_the_message_in_its_place_runs_stays_cancelled(
    registry: Registry,
) -> None:
    first, second = tracked(after_ms=2 * MINUTE_MS), tracked()
    registry.register([first])
    verdict(registry, second)
    assert registry.cancel(["task"]) == [Outcome.DONE]
    registry.replace("task", first.copy, second.copy, second.due_ms)
    assert registry.cancel(["task"]) == [Outcome.CANCELLED]
    assert verdict(registry, first) is Verdict.CANCELLED


@pytest.mark.parametrize("message", [sent(key="order"), None], ids=["untracked", "unknown"])
def test_a_message_of_which_little_is_known_can_be_replaced(
    registry: Registry, message: Registration | None
) -> None:
    second = sent()
    if message:
        registry.register([message])
    first = message.copy if message else "long forgotten"
    assert registry.replace("task", first, second.copy, second.due_ms) is Outcome.DONE
    assert verdict(registry, second._replace(copy=first)) is Verdict.REPLACED
    assert verdict(registry, second) is Verdict.RUN


def test_a_message_is_not_replaced_once_the_one_in_its_place_has_arrived(
    registry: Registry,
) -> None:
    first, second, third = tracked(after_ms=2 * MINUTE_MS), tracked(), tracked()
    registry.register([first])
    registry.replace("task", first.copy, second.copy, second.due_ms)
    assert verdict(registry, second) is Verdict.RUN
    outcome = registry.replace("task", first.copy, third.copy, third.due_ms)
    assert outcome is Outcome.RELEASED
    assert verdict(registry, third) is Verdict.REPLACED


@pytest.mark.parametrize("retried", [False, True], ids=["it runs", "its retry waits"])
def test_a_message_that_has_arrived_is_not_replaced(registry: Registry, retried: bool) -> None:
    first, second, retry = tracked(after_ms=2 * MINUTE_MS), tracked(), tracked(is_retry=True)
    registry.register([first])
    assert verdict(registry, first) is Verdict.RUN
    if retried:
        registry.register([retry])
    outcome = registry.replace("task", first.copy, second.copy, second.due_ms)
    assert outcome is Outcome.RELEASED
    assert verdict(registry, second) is Verdict.REPLACED
    assert not retried or verdict(registry, retry) is Verdict.RUN


def test_a_cancelled_task_is_not_replaced(registry: Registry) -> None:
    first, second = tracked(after_ms=2 * MINUTE_MS), tracked()
    registry.register([first])
    registry.cancel(["task"])
    outcome = registry.replace("task", first.copy, second.copy, second.due_ms)
    assert outcome is Outcome.CANCELLED
    assert verdict(registry, second) is Verdict.CANCELLED


def test_a_task_that_is_superseded_while_it_is_sent_anew_does_not_run(registry: Registry) -> None:
    first, second = tracked(after_ms=2 * MINUTE_MS, key="order"), tracked(key="order")
    registry.register([first])
    registry.supersede("order")
    outcome = registry.replace("task", first.copy, second.copy, second.due_ms)
    assert outcome is Outcome.CANCELLED
    assert verdict(registry, first) is Verdict.SUPERSEDED
    assert verdict(registry, second) is Verdict.SUPERSEDED


def test_a_task_that_was_sent_anew_is_superseded_under_its_key(registry: Registry) -> None:
    first, second = tracked(after_ms=2 * MINUTE_MS, key="order"), tracked(key="order")
    registry.register([first])
    registry.replace("task", first.copy, second.copy, second.due_ms)
    registry.supersede("order")
    assert verdict(registry, first) is Verdict.SUPERSEDED
    assert verdict(registry, second) is Verdict.SUPERSEDED


def test_of_two_messages_that_replace_one_the_last_one_runs(registry: Registry) -> None:
    first, second, third = tracked(after_ms=2 * MINUTE_MS), tracked(), tracked()
    registry.register([first])
    registry.replace("task", first.copy, second.copy, second.due_ms)
    outcome = registry.replace("task", first.copy, third.copy, third.due_ms)
    assert outcome is Outcome.DONE
    assert verdict(registry, first) is Verdict.REPLACED
    assert verdict(registry, second) is Verdict.REPLACED
    assert verdict(registry, third) is Verdict.RUN


def test_a_task_that_was_sent_anew_is_no_longer_postponed(registry: Registry) -> None:
    first, second = tracked(after_ms=2 * MINUTE_MS), tracked()
    registry.register([first])
    registry.postpone("task", first.due_ms + MINUTE_MS)
    registry.replace("task", first.copy, second.copy, second.due_ms)
    assert verdict(registry, second) is Verdict.RUN


def test_what_arrives_again_while_its_retry_waits_leaves_the_retry_to_be_cancelled(
    registry: Registry,
) -> None:
    first, retry = tracked(), tracked(is_retry=True)
    registry.register([first])
    assert verdict(registry, first) is Verdict.RUN
    registry.register([retry])
    assert verdict(registry, arrival(first, redelivered=True)) is Verdict.RUN
    assert registry.cancel(["task"]) == [Outcome.DONE]
    assert verdict(registry, retry) is Verdict.CANCELLED


def test_senders_share_a_rate(registry: Registry) -> None:
    began = time.monotonic()
    assert registry.reserve("shared", 10, 5) == 0
    waits = [registry.reserve("shared", 5, 5), registry.reserve("shared", 1, 5)]
    passed = time.monotonic() - began
    for wait, expected in zip(waits, (2, 3), strict=True):
        assert expected - passed - 0.01 <= wait <= expected
    assert registry.reserve("other", 1, 0.5) == 0
