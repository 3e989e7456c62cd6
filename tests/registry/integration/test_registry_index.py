"""What the index says about tracked tasks that wait."""

import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest

from celery_rabbitdelay.levels.delay import milliseconds_of
from celery_rabbitdelay.registry.decision import Registration, Verdict
from celery_rabbitdelay.registry.index import (
    Filter,
    Index,
    Kind,
    KindCounts,
    Pending,
    Summary,
    shard_of,
)
from celery_rabbitdelay.registry.registry import Registry
from celery_rabbitdelay.testing import wait_for
from tests.registry.integration.registering import (
    KEEP_MS,
    MARGIN_MS,
    MINUTE_MS,
    RedisSetup,
    keyed,
    keys,
    now_ms,
    sent,
    tracked,
    verdict,
)

#: Due times lie so far away that the clock goes on meanwhile as it likes.
START_MS = (now_ms() // MINUTE_MS + 60) * MINUTE_MS


@pytest.fixture
def index(registry: Registry) -> Index:
    """The index of this test's registry."""
    return registry.index


def due_at(number: int, task_id: str, **more: Any) -> Registration:
    """Return a tracked task that is due at a minute."""
    return tracked(task_id, **more)._replace(due_ms=START_MS + number * MINUTE_MS)


def in_one_shard(how_many: int) -> list[str]:
    """Return task ids that are in the same shard, in their order."""
    ids = (f"task-{number}" for number in count())
    found = (each for each in ids if shard_of(each) == 7)
    return sorted(next(found) for _ in range(how_many))


def ids(index: Index, **wanted: Any) -> list[str]:
    """Return the ids of tasks that wait."""
    return [each.task_id for each in index.pending(Filter(**wanted))]


def test_a_task_that_waits_is_described(registry: Registry, index: Index) -> None:
    plain, rich = due_at(0, "plain"), due_at(1, "rich", name="shop.pay", key="order", job="job")
    registry.register([rich, plain, sent("untracked", key="another"), due_at(2, "lost")])
    registry.store.commands(lambda pipe: pipe.delete(registry.names.of("task", "lost")))
    due = datetime.fromtimestamp(START_MS // 1000, UTC)
    found = list(index.pending(Filter()))
    assert found == [
        Pending("plain", "shop.remind", due, None, None, found[0].sent),
        Pending("rich", "shop.pay", due + timedelta(minutes=1), "order", "job", found[1].sent),
    ]
    assert found == index.tasks(["plain", "rich", "untracked", "lost"])


def test_a_task_was_sent_when_its_attempt_was_registered_first(
    registry: Registry, index: Index
) -> None:
    def sent_ms() -> int:
        (found,) = index.pending(Filter())
        assert found.sent is not None
        return milliseconds_of(found.sent)

    before = registry.now_ms()
    registry.register([due_at(5, "a")])
    first = sent_ms()
    assert before <= first <= registry.now_ms()
    wait_for(lambda: registry.now_ms() > first, "the clock of Redis")
    registry.register([due_at(1, "a")])
    assert sent_ms() == first, "as if it were moved to earlier"
    registry.register([due_at(9, "a", attempt="1.0")])
    again = sent_ms()
    assert again > first, "a retry is sent anew"
    assert [index.count(Filter(sent_before_ms=again + each)) for each in (0, 1)] == [0, 1]
    # A former version has not noted it.
    store, key = registry.store, registry.names.of("task", "a")
    store.commands(lambda pipe: pipe.hdel(key, "sent"))
    assert [each.sent for each in index.pending(Filter(sent_before_ms=1))] == [None]
    registry.register([due_at(9, "a", attempt="2.0")])
    registry.cancel(["a"])
    assert "sent" not in store.commands(lambda pipe: pipe.hgetall(key))[0]


AT_1, AT_3, AT_4 = (START_MS + each * MINUTE_MS for each in (1, 3, 4))


def test_each_filter_leaves_what_it_says(registry: Registry, index: Index) -> None:
    registry.register(
        [
            due_at(0, "a", name="pay", key="1", job="x"),
            due_at(1, "b", name="pay", job="y"),
            due_at(2, "c", name="ship", key="12", job="x"),
            due_at(3, "d", name="ship"),
        ]
    )
    expected: list[tuple[dict[str, Any], str]] = [
        *(({}, "abcd"), ({"task": "pay"}, "ab"), ({"task": "refund"}, ""), ({"job": "x"}, "ac")),
        *(({"job": "x", "task": "ship"}, "c"), ({"key": "12"}, "c")),
        *(({"where": lambda task: task.key}, "ac"), ({"key": "12", "task": "pay"}, "")),
        *(({"due_after_ms": AT_1}, "bcd"), ({"due_before_ms": AT_1}, "a")),
        *(({"due_after_ms": AT_1, "due_before_ms": AT_3}, "bc"), ({"due_after_ms": AT_4}, "")),
        ({"task": "ship", "job": "x", "due_before_ms": AT_1}, ""),
    ]
    for wanted, found in expected:
        assert ids(index, **wanted) == [*found], wanted
        assert index.count(Filter(**wanted)) == len(found), wanted


def test_tasks_of_kinds_are_found_and_those_that_a_condition_allows(
    registry: Registry, index: Index
) -> None:
    registry.register(
        [
            due_at(0, "a", name="pay", queue="slow", job="x"),
            due_at(1, "b", name="pay", queue="mail", job="x"),
            due_at(2, "c", name="ship", queue="mail", key="order:12"),
            due_at(3, "d", name="ship"),
        ]
    )
    assert [each.queue for each in index.pending(Filter())] == ["slow", "mail", "mail", ""]
    mail = frozenset({Kind("pay", "mail"), Kind("ship", "mail")})
    for wanted, found in (
        ({"kinds": mail}, "bc"),
        ({"kinds": frozenset[Kind]()}, ""),
        ({"kinds": mail, "task": "pay"}, "b"),
        ({"kinds": mail, "job": "x"}, "b"),
        ({"where": lambda each: each.queue != "mail"}, "ad"),
        ({"kinds": mail, "where": lambda each: each.key}, "c"),
    ):
        assert ids(index, **wanted) == [*found], wanted
        assert index.count(Filter(**wanted)) == len(found), wanted


def test_a_summary_counts_each_kind_whatever_becomes_of_its_tasks(
    registry: Registry, index: Index
) -> None:
    draw = random.Random(50)
    kinds = [Kind(task, queue) for task in ("pay", "ship", "{x}") for queue in ("mail", "", "1:a")]
    waiting: dict[str, tuple[Kind, Registration]] = {}
    cancelled: Counter[Kind] = Counter()
    for number in range(300):
        task_id, choice = f"task-{number}", draw.random()
        kind = draw.choice(kinds)
        if choice < 0.6 or not waiting:
            at = draw.randrange(60)
            message = due_at(at, task_id, name=kind.task, queue=kind.queue, job=draw.choice("x "))
            registry.register([message])
            waiting[task_id] = kind, message
            continue
        task_id = draw.choice([*waiting])
        kind, message = waiting.pop(task_id)
        if choice < 0.75:
            assert verdict(registry, message) is Verdict.RUN
        elif choice < 0.9:
            registry.cancel([task_id])
            cancelled[kind] += 1
        else:
            due_ms = message.due_ms + draw.randrange(1, 5) * MINUTE_MS
            registry.postpone(task_id, due_ms)
            waiting[task_id] = kind, message._replace(due_ms=due_ms)
    instants = [now_ms(), *(START_MS + each * MINUTE_MS for each in range(5, 70, 5))]
    told = {each.kind: each for each in index.summary(instants).kinds}
    for kind in kinds:
        dues = [message.due_ms for each, message in waiting.values() if each == kind]
        before = {instant: sum(due < instant for due in dues) for instant in instants}
        first = min(dues, default=None)
        expected = (kind, len(dues), first, first, cancelled[kind], before)
        assert (
            told.pop(kind, KindCounts(kind, 0, None, None, 0, dict.fromkeys(instants, 0)))
            == expected
        )
    assert not told
    few = index.summary(instants, most=2)
    assert len(few.kinds) == 2
    assert few.left_out + sum(each.total for each in few.kinds) == len(waiting)


def test_a_summary_counts_the_largest_kinds_and_forgets_those_that_are_gone(
    registry: Registry, index: Index
) -> None:
    *ones, first, second, third = in_one_shard(23)
    few = [due_at(0, each, name=f"few-{number}") for number, each in enumerate(ones)]
    many = [due_at(0, each, name="many") for each in (first, second, third)]
    registry.register([*few, *many])
    told = index.summary([now_ms()], most=1)
    assert ([each.kind.task for each in told.kinds], told.left_out) == (["many"], len(few))
    for each in (*few, *many):
        assert verdict(registry, each) is Verdict.RUN
    assert index.summary([now_ms()]) == Summary([], 0)
    known = registry.store.commands(lambda pipe: pipe.scard(registry.names.in_shards("kinds")[7]))
    assert known == [0]


def test_cancelled_tasks_are_counted_until_they_are_due(registry: Registry, index: Index) -> None:
    soon, later = in_one_shard(2)
    due_ms = registry.now_ms() + 300
    registry.register([tracked(soon)._replace(due_ms=due_ms), due_at(0, later)])
    registry.cancel([soon])
    wait_for(lambda: registry.now_ms() > due_ms, "its due time")
    registry.cancel([later])
    (told,) = index.summary([registry.now_ms()]).kinds
    assert told.cancelled == 1
    key = f"{registry.names.prefix}:{{7}}:cancelled:{told.kind.text}"
    assert registry.store.commands(lambda pipe: pipe.zrange(key, 0, -1)) == [[later]]


def test_of_each_kind_the_first_task_is_told_and_the_next_one_from_an_instant(
    registry: Registry, index: Index
) -> None:
    registry.register([due_at(each, f"task-{each}") for each in (1, 2, 5)])
    (told,) = index.summary([START_MS + 3 * MINUTE_MS]).kinds
    assert (told.first_due_ms, told.next_due_ms) == tuple(
        START_MS + each * MINUTE_MS for each in (1, 5)
    )


def test_the_due_tasks_of_jobs_are_told_and_of_many_how_many_each_stands_for(
    registry: Registry, index: Index
) -> None:
    of_jobs = [due_at(0, f"{job}{each}", job=job) for job in "ab" for each in range(90)]
    registry.register([*of_jobs, due_at(0, "other"), due_at(2, "late", job="a")])
    end_ms = START_MS + MINUTE_MS
    found = index.due_of_jobs(["a", "b", "none"], end_ms, most=10_000)
    assert {each.task_id: number for each, number in found} == {each.task_id: 1 for each in of_jobs}
    few = index.due_of_jobs(["a", "b"], end_ms, most=1)
    assert len(few) < 70, "one of each job and shard"
    for job in "ab":
        assert round(sum(number for each, number in few if each.job == job)) == 90
    assert index.due_of_jobs([], end_ms, most=1) == []


def test_what_has_arrived_or_will_not_run_leaves_the_index(
    registry: Registry, index: Index, redis_setup: RedisSetup, prefix: str
) -> None:
    arrived, cancelled, superseded, waits = (
        due_at(number, name, job="job", key=name)
        for number, name in enumerate(("arrived", "cancelled", "superseded", "waits"))
    )
    registry.register([arrived, cancelled, superseded, waits])
    assert verdict(registry, arrived) is Verdict.RUN
    registry.cancel(["cancelled"])
    registry.register([keyed(registry, "newer", "superseded", name="")])
    for wanted in (Filter(), Filter(task="shop.remind"), Filter(job="job")):
        assert [each.task_id for each in index.pending(wanted)] == ["waits"]
        assert index.count(wanted) == 1
    verdict(registry, waits)
    verdict(registry, superseded)
    for each in (arrived, cancelled, superseded, waits):
        assert not redis_setup.client.exists(registry.names.of("message", each.task_id))
    assert not [each for each in keys(redis_setup, prefix) if ":due" in each]


def test_a_postponed_task_is_in_the_index_at_its_new_time(registry: Registry, index: Index) -> None:
    first = due_at(0, "first", job="job")
    registry.register([first, due_at(1, "second", job="job")])
    registry.postpone("first", START_MS + 2 * MINUTE_MS)
    assert ids(index) == ids(index, job="job") == ["second", "first"]
    verdict(registry, first)
    registry.postpone("first", START_MS)
    registry.register([first._replace(copy="sent anew")])
    assert ids(index) == ids(index, job="job") == ["first", "second"]


def test_a_task_that_is_registered_under_another_name_is_in_one_index(
    registry: Registry, index: Index
) -> None:
    registry.register([due_at(0, "task", name="old", job="old", key="old")])
    registry.register([due_at(0, "task", name="new")])
    assert (ids(index), ids(index, task="new")) == (["task"], ["task"])
    for old in ({"task": "old"}, {"job": "old"}, {"key": "old"}):
        assert ids(index, **old) == []


def test_tasks_that_never_arrive_leave_the_index_when_they_expire(
    registry: Registry, index: Index, redis_setup: RedisSetup
) -> None:
    lost, other = in_one_shard(2)
    expired = tracked(lost)._replace(due_ms=now_ms() - KEEP_MS - MINUTE_MS)
    late = tracked("late")._replace(due_ms=now_ms() - MARGIN_MS + MINUTE_MS)
    registry.register([expired, late])
    for each in (Filter(), Filter(task="shop.remind")):
        assert [found.task_id for found in index.pending(each)] == ["late"]
        assert index.count(each) == 1
    registry.register([due_at(0, other)])
    everything = redis_setup.client.zrange(registry.names.due()[shard_of(lost)], 0, -1)
    assert everything == [other]


@pytest.mark.parametrize("minutes", [0, 1], ids=["all due at once", "one a minute"])
def test_pages_have_a_constant_size_and_tasks_that_leave_or_join_meanwhile_hide_no_others(
    registry: Registry, index: Index, small_pages: list[int], minutes: int
) -> None:
    names = in_one_shard(60)
    late, names = names[:9], names[9:]
    registry.register([due_at(1 + at * minutes, each) for at, each in enumerate(names)])
    assert ids(index) == names
    assert max(small_pages) <= 5
    assert sum(small_pages) <= 70  # each page but the first one begins with a task read before
    pending = index._due(Filter(), None)
    seen = [next(pending)[1] for _ in range(30)]
    registry.cancel(seen)
    seen += [next(pending)[1] for _ in range(5)]
    registry.register([due_at(0, each) for each in late])
    seen += [task_id for _, task_id in pending]
    assert seen == names


def test_tasks_of_a_name_and_a_job_are_found_by_the_job(registry: Registry, index: Index) -> None:
    jobs = [*("small", "large", "", "large") * 30]
    registry.register(
        [due_at(n, f"task-{n}", name=f"name-{n % 3}", job=job) for n, job in enumerate(jobs)]
    )
    for job, most in (("large", 60), ("small", 30), ("none", 0)):
        wanted = Filter(task="name-1", job=job, due_before_ms=START_MS + 90 * MINUTE_MS)
        expected = [f"task-{each}" for each in range(1, 90, 3) if jobs[each] == job]
        assert [each.task_id for each in index.pending(wanted)] == expected
        read = sum(each.read for each in index.parts(wanted))
        assert read <= most, "more than the job has"


def test_the_index_says_since_when_it_is_complete(
    registry: Registry, index: Index, redis_setup: RedisSetup
) -> None:
    before = now_ms()
    since = index.complete_since()
    assert before <= since.timestamp() * 1000 + 1
    wait_for(lambda: now_ms() > since.timestamp() * 1000 + 1, "the next millisecond")
    assert index.complete_since() == since
    redis_setup.client.delete(registry.names.only("complete-since"))
    assert index.complete_since() > since
