"""What the registry says and keeps.

Which message of a task runs is what test_registry_rule.py compares with the rule in Python, which
tests/registry/unit/test_registry_rule.py explores.
"""

import time

import pytest

from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.levels.headers import Mark
from celery_rabbitdelay.registry.decision import Arrival, Outcome, Registration, Ticket, Verdict
from celery_rabbitdelay.registry.index import Filter
from celery_rabbitdelay.registry.record import TaskState, record_of
from celery_rabbitdelay.registry.registry import NOTE_MS, Earlier, Registry
from celery_rabbitdelay.registry.store import KEYS_PER_CALL
from tests.registry.integration.registering import (
    KEEP_MS,
    MINUTE_MS,
    RedisSetup,
    arrival,
    expiry_ms,
    keyed,
    keys,
    now_ms,
    sent,
    tracked,
    verdict,
)

KEY = "order 7"


def unknown(task_id: str = "task", **more: object) -> Arrival:
    """Return an arrival of which nothing was noted when it was sent."""
    return Arrival(task_id, now_ms())._replace(**more)  # type: ignore[arg-type]


def verdicts(registry: Registry, messages: list[Registration]) -> list[Verdict]:
    """Return what becomes of arrivals, all of which arrive at once."""
    return [each.verdict for each in registry.decide([arrival(each) for each in messages])]


@pytest.mark.parametrize("task_id", ["", "größer\n%s", "\ud800", "{1}:task:b"])
def test_ids_keys_and_jobs_may_be_any_text(registry: Registry, task_id: str) -> None:
    registry.jobs.open(task_id, MINUTE_MS)
    message = keyed(registry, task_id, task_id or "key", job=task_id, name=task_id or "name")
    registry.register([message])
    assert [each.task_id for each in registry.index.pending(Filter())] == [task_id]
    assert registry.waiting_under(message.key) == [task_id]
    assert registry.cancel([task_id]) == [Outcome.DONE]
    assert verdict(registry, message) is Verdict.CANCELLED
    assert registry.index.count(Filter()) == 0


def test_what_cannot_be_read_fails_by_itself(
    registry: Registry, redis_setup: RedisSetup, prefix: str
) -> None:
    names, client = registry.names, redis_setup.client
    client.set(names.of("task", "bad record"), "garbage")
    client.hset(names.of("task", "bad number"), mapping={"waits": "0.0.0", "due": "soon"})
    client.hset(names.of("key", "bad key"), "field", "garbage")
    bad = [
        arrival(sent("bad record")),
        arrival(sent("bad number", after_ms=-2 * KEEP_MS)),
        arrival(sent("bad key", key="bad key", ticket=Ticket(order=1))),
    ]
    decisions = registry.decide([*bad, arrival(sent("good")), unknown("plain")])
    expected = [*[Verdict.UNREADABLE] * 3, *[Verdict.RUN] * 2]
    assert [each.verdict for each in decisions] == expected
    assert all(each.why for each in decisions[:3])
    with pytest.raises(RegistryUnavailable, match="bad record"):
        registry.cancel(["bad record", "other"])
    assert registry.cancel(["other"]) == [Outcome.CANCELLED]
    for key in keys(redis_setup, prefix):
        client.expire(key, 60)


def test_each_of_many_tasks_is_registered_cancelled_and_decided_about_by_itself(
    registry: Registry,
) -> None:
    messages = [tracked(f"task-{number}") for number in range(KEYS_PER_CALL + 7)]
    assert registry.register(messages) == ["waiting"] * len(messages)
    cancelled = [each.task_id for each in messages[::3]]
    assert registry.cancel([*cancelled, "task-0"]) == [Outcome.DONE] * (len(cancelled) + 1)
    assert registry.index.count(Filter()) == len(messages) - len(cancelled)
    expected = [Verdict.RUN if at % 3 else Verdict.CANCELLED for at in range(len(messages))]
    # Of a due time of any size.
    due = (0, 2**62, now_ms())
    arrivals = [arrival(each, due_ms=due[at % 3]) for at, each in enumerate(messages)]
    assert [each.verdict for each in registry.decide(arrivals)] == expected
    assert (registry.decide([]), registry.cancel([]), registry.register([])) == ([], [], [])


def test_a_longer_delay_and_a_postponement_lengthen_each_life_and_a_shorter_one_shortens_none(
    registry: Registry, redis_setup: RedisSetup, prefix: str
) -> None:
    message = keyed(registry, "task", KEY, job="job")
    registry.register([message])
    written = keys(redis_setup, prefix)
    assert len(written) == 7  # the record, the message, the key, three indexes and their kinds
    assert {expiry_ms(redis_setup, each) for each in written} == {message.due_ms + KEEP_MS}
    later = now_ms() + 5 * MINUTE_MS
    registry.postpone("task", later)
    listed = set(keys(redis_setup, prefix)) - {registry.names.of("key", KEY)}
    assert {expiry_ms(redis_setup, each) for each in listed} == {later + KEEP_MS}
    registry.register([keyed(registry, "newer", KEY, name="")._replace(due_ms=later)])
    written = [
        each for each in keys(redis_setup, prefix) if not each.endswith((":newer", ":kinds"))
    ]
    # That it is superseded takes the task from the lists.
    assert {*written} == {registry.names.of("task", "task"), registry.names.of("key", KEY)}
    assert {expiry_ms(redis_setup, each) for each in written} == {later + KEEP_MS}
    shorter = keyed(registry, "task", KEY)
    registry.register([shorter])
    assert verdict(registry, shorter) is Verdict.LATER
    assert {expiry_ms(redis_setup, each) for each in written} == {later + KEEP_MS}


@pytest.mark.parametrize("decision", ["cancelled", "run", "once", "postponed"])
def test_a_decision_lives_on_after_it(
    registry: Registry, redis_setup: RedisSetup, decision: str
) -> None:
    message, last = tracked(after_ms=-MINUTE_MS), now_ms()
    if decision == "cancelled":
        registry.register([message])
        assert registry.cancel(["task"]) == [Outcome.DONE]
    elif decision == "run":
        assert verdict(registry, message) is Verdict.RUN
    elif decision == "once":
        assert verdict(registry, unknown(once="queue", name="a")) is Verdict.RUN
    else:
        last += 5 * MINUTE_MS
        registry.postpone("task", last)
    lives = expiry_ms(redis_setup, registry.names.of("task", "task"))
    assert last <= lives - KEEP_MS <= max(now_ms(), last)


def test_a_cancel_of_a_task_of_which_nothing_waits_lives_for_ten_years(
    registry: Registry, redis_setup: RedisSetup
) -> None:
    assert verdict(registry, tracked("ran")) is Verdict.RUN
    before = now_ms()
    assert registry.cancel(["task", "ran"]) == [Outcome.NOTED, Outcome.RELEASED]
    for task_id in ("task", "ran"):
        lives = expiry_ms(redis_setup, registry.names.of("task", task_id))
        assert before <= lives - NOTE_MS - KEEP_MS <= now_ms()


def test_what_nobody_knows_leaves_no_record_and_what_was_cancelled_is_kept_no_longer(
    registry: Registry, redis_setup: RedisSetup, prefix: str
) -> None:
    later = now_ms() + MINUTE_MS
    assert registry.cancel(["task"], also_future=False) == [Outcome.UNKNOWN]
    assert registry.postpone("task", later, also_future=False) is Outcome.UNKNOWN
    assert verdict(registry, unknown()) is Verdict.RUN
    assert keys(redis_setup, prefix) == []
    registry.register([tracked()])
    record = registry.names.of("task", "task")
    assert registry.cancel(["task"], also_future=False) == [Outcome.DONE]
    lives = expiry_ms(redis_setup, record)
    assert registry.cancel(["task"], also_future=False) == [Outcome.CANCELLED]
    assert expiry_ms(redis_setup, record) == lives


def test_a_task_that_is_to_run_once_runs_once_at_each_queue(registry: Registry) -> None:
    message = tracked()
    here, there = (
        arrival(message, once=queue, mark=Mark(queue), name="1") for queue in ("here", "there")
    )
    assert [each.verdict for each in registry.decide([here, there])] == [Verdict.RUN] * 2
    assert verdict(registry, here._replace(name="2")) is Verdict.DUPLICATE
    assert verdict(registry, here._replace(name="2", redelivered=True)) is Verdict.RUN


def test_a_redelivered_message_runs_although_another_version_has_marked_it(
    registry: Registry, redis_setup: RedisSetup
) -> None:
    first = unknown(once="queue", mark=Mark("message"), name="1")
    assert verdict(registry, first) is Verdict.RUN
    record = registry.names.of("task", first.task_id)
    (name,) = (each for each in redis_setup.client.hkeys(record) if each.startswith("once:"))
    redis_setup.client.hset(record, name, "message.arrival")
    again = first._replace(name="2")
    assert verdict(registry, again) is Verdict.DUPLICATE
    other = again._replace(mark=Mark("other"), redelivered=True)
    assert verdict(registry, other) is Verdict.DUPLICATE
    assert verdict(registry, again._replace(redelivered=True)) is Verdict.RUN


def test_what_follows_a_task_that_runs_once_lengthens_its_life(
    registry: Registry, redis_setup: RedisSetup
) -> None:
    first = unknown(once="queue", name="1")
    record = registry.names.of("task", first.task_id)
    assert verdict(registry, first) is Verdict.RUN
    redis_setup.client.pexpire(record, MINUTE_MS)
    assert verdict(registry, first._replace(name="2", redelivered=True)) is Verdict.RUN
    assert redis_setup.client.pttl(record) > MINUTE_MS


def test_earlier_is_earlier_than_what_a_task_waits_for(registry: Registry) -> None:
    message, untracked = tracked(), sent("untracked")
    registry.register([message, untracked])
    assert registry.postpone("untracked", now_ms()) == Earlier("", "")
    assert registry.postpone("task", now_ms() + 3 * MINUTE_MS) is Outcome.DONE
    assert verdict(registry, message) is Verdict.LATER
    assert isinstance(registry.postpone("task", now_ms() + 2 * MINUTE_MS), Earlier)


def test_who_is_alone_holds_a_lease_and_gives_it_back(
    registry: Registry, redis_setup: RedisSetup
) -> None:
    lease = registry.names.of("alone", KEY)
    with registry.alone(KEY):
        assert redis_setup.client.exists(lease)
    assert not redis_setup.client.exists(lease)


def test_only_the_newest_of_many_tasks_under_one_key_runs_and_is_listed(registry: Registry) -> None:
    rows = [keyed(registry, f"task-{number}", KEY) for number in range(5)]
    tickets = registry.ask([("", KEY)] * 5)
    rows += [tracked(f"row-{n}", key=KEY, ticket=tickets[n]) for n in range(5)]
    # Whoever is registered last.
    states = registry.register([*rows[1:], rows[0], tracked("other")])
    assert states[-3:] == ["waiting", "superseded", "waiting"]
    assert registry.waiting_under(KEY) == ["row-4"]
    assert {each.task_id for each in registry.index.pending(Filter())} == {"row-4", "other"}
    assert verdicts(registry, rows) == [*[Verdict.SUPERSEDED] * 9, Verdict.RUN]


def test_a_task_that_runs_in_the_end_was_not_dropped(registry: Registry) -> None:
    older, newer = (keyed(registry, task_id, KEY) for task_id in ("older", "newer"))
    registry.register([older, newer])
    assert verdict(registry, older) is Verdict.SUPERSEDED
    dropped = record_of(registry, "older")
    assert dropped is not None
    assert (dropped.state, dropped.key) == (TaskState.SUPERSEDED, KEY)
    # Sent again under its id, and not registered.
    again = sent("older", ticket=registry.ask([("older", "")])[0])
    assert verdict(registry, again) is Verdict.RUN
    run = record_of(registry, "older")
    assert run is not None
    assert run.state is TaskState.ARRIVED


def test_an_order_never_falls_behind_that_of_the_newest_task(
    registry: Registry, redis_setup: RedisSetup
) -> None:
    # The clock of a server that takes over may be behind.
    ahead = (now_ms() + MINUTE_MS) * 1000
    redis_setup.client.set(registry.names.of("key", KEY), f"{ahead} task", px=MINUTE_MS)
    assert [each.order for each in registry.ask([("", KEY)] * 2)] == [ahead + 1, ahead + 2]


def test_a_full_redis_decides_and_notes_what_frees_memory(
    registry: Registry, redis_setup: RedisSetup
) -> None:
    message, cancelled = tracked(), tracked("cancelled")
    registry.register([message, cancelled])
    lease, other = (registry.names.of("key", name) for name in ("held", "other"))
    assert registry.store.lease(lease, "mine", 60_000)
    set_memory(redis_setup, "maxmemory", 1)
    try:
        with pytest.raises(RegistryUnavailable, match="maxmemory"):
            registry.store.lease(other, "mine", 60_000)
        assert registry.store.lease(lease, "mine", 60_000)
        assert not registry.store.lease(lease, "mine", 0)
        assert registry.cancel(["cancelled"]) == [Outcome.DONE]
        assert verdicts(registry, [message, cancelled]) == [Verdict.RUN, Verdict.CANCELLED]
        assert verdict(registry, arrival(message, redelivered=True)) is Verdict.RUN
        assert verdict(registry, unknown("plain")) is Verdict.RUN
    finally:
        set_memory(redis_setup, "maxmemory", 0)
    assert registry.index.count(Filter()) == 0


def set_memory(redis_setup: RedisSetup, name: str, value: int) -> None:
    """Set a value of every server's configuration."""
    client = redis_setup.client
    if hasattr(client, "get_primaries"):
        client.config_set(name, value, target_nodes=type(client).PRIMARIES)
    else:
        client.config_set(name, value)


def test_senders_share_a_rate(registry: Registry) -> None:
    began = time.monotonic()
    assert registry.reserve("shared", 10, 5) == 0
    waits = [registry.reserve("shared", 5, 5), registry.reserve("shared", 1, 5)]
    passed = time.monotonic() - began
    for wait, expected in zip(waits, (2, 3), strict=True):
        assert expected - passed - 0.01 <= wait <= expected
    assert registry.reserve("other", 1, 0.5) == 0
