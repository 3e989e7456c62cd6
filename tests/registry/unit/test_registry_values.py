"""The registry's parts that need no Redis: an arrival's headers, the names of keys, and pauses."""

from typing import Any, get_args
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.levels.headers import COPY, JOB, LIFE, MAX_FORMER, ONCE, ORDER, Mark
from celery_rabbitdelay.registry import pauses
from celery_rabbitdelay.registry.decision import EMPTY, Arrival, Ticket, arrive
from celery_rabbitdelay.registry.holding import _one
from celery_rabbitdelay.registry.index import SHARDS, KeyKind, Kind, Names, shard_of
from celery_rabbitdelay.registry.pauses import Pauses, Questions, paused_since
from celery_rabbitdelay.registry.store import Store
from tests.kernel.unit.clock import Clock
from tests.kernel.unit.waiting import said

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.datetimes()
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(), inner)),
    max_leaves=3,
)
known = st.sampled_from(["id", "retries", COPY, JOB, ONCE, LIFE, ORDER])
names = st.text(st.characters())  # half of a surrogate pair as well


@given(st.dictionaries(known, anything, max_size=5), st.integers(), st.booleans())
def test_an_arrival_is_read_anyhow(headers: dict[str, Any], due_ms: int, redelivered: bool) -> None:
    arrival = Arrival.of(said(headers), due_ms, "queue", redelivered)
    assert (arrival.due_ms, arrival.redelivered) == (due_ms, redelivered)
    for field, header in (("task_id", "id"), ("copy", COPY), ("job", JOB)):
        value = headers.get(header)
        assert getattr(arrival, field) == (value if isinstance(value, str) else "")
    given = headers.get(ONCE)
    # A text is the mark that the message has left before.
    says_once = given is True or (isinstance(given, str) and given != "")
    assert bool(arrival.once) == (says_once and arrival.task_id != "")


def test_an_arrival_says_where_and_at_which_attempt() -> None:
    headers = {"id": "7", ONCE: True, COPY: "copy", JOB: "job", LIFE: "2", ORDER: "3"}
    arrival = Arrival.of(said(headers), 5, "pay", True)
    ticket = Ticket(2, 3)
    expected = Arrival("7", 5, "0.0", "copy", ticket, job="job", once="pay", redelivered=True)
    assert arrival == expected
    of = {**headers, "retries": 3, "replaced_task_nesting": 1}
    assert Arrival.of(said(of), 5, "pay", True).attempt == "3.1"
    assert Arrival.of(said({**headers, "retries": "3"}), 5, "pay", True).attempt == "0.0"
    named = Arrival.of(said({**headers, ONCE: "name"}), 5, "", True)
    assert (named.once, named.mark, named.redelivered) == ("-", Mark("name"), True)
    first = named.named()
    assert (first.mark, first.named().mark) == (Mark("name"), Mark("name", 0, (first.name,)))


@given(names, names, names)
def test_all_keys_of_one_task_are_on_one_server(prefix: str, task_id: str, task: str) -> None:
    keys = Names(prefix.replace("{", ""))
    shard = shard_of(task_id)
    assert 0 <= shard < SHARDS
    every = (
        keys.of("task", task_id),
        keys.due()[shard],
        keys.due(Kind(task, task))[shard],
        keys.due(None, task)[shard],
    )
    slots = {key_slot(key.encode("utf-8", "surrogatepass")) for key in every}
    assert slots == {key_slot(str(shard).encode())}


@given(st.text(), st.integers(0, 2**31), st.lists(st.text("0123456789abcdef"), max_size=40))
def test_a_mark_is_read_as_it_was_written(name: str, generation: int, arrivals: list[str]) -> None:
    mark = Mark(name.replace(".", ""), generation)
    for each in arrivals:
        mark = mark.after(each)
    assert Mark.of(mark.text) == mark
    assert mark.former == tuple(arrivals[-MAX_FORMER:])
    assert isinstance(Mark.of(name).text, str)
    assert Ticket.of(Ticket(-1, generation).headers) == Ticket(-1, generation)


@given(st.sets(names, min_size=2))
def test_different_names_have_different_keys(some: set[str]) -> None:
    keys = Names("test")
    every = [keys.of(kind, each) for each in some for kind in get_args(KeyKind)]
    every += [keys.only("complete-since"), *keys.due()]
    assert len({*every}) == len(every)


@given(st.builds(Kind, names, names))
def test_a_kind_is_read_as_it_was_written(kind: Kind) -> None:
    assert Kind.of(kind.text) == kind


# Pauses: names, instants, and how long a paused task waits.


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(1000.0)
    monkeypatch.setattr(pauses, "time", clock)
    return clock


def test_a_few_tasks_ask_again_soon_and_many_after_a_quarter_of_the_time_that_they_were_held(
    clock: Clock,
) -> None:
    questions = Questions()
    for held_ms in [0, 60_000, 315_360_000_000] * 50:
        clock.now += 0.5  # two a second
        assert 750 <= questions.after_ms(held_ms) <= 1_000
    for held_ms, longest_ms in ((-5, 5_000), (60_000, 15_000), (10**12, 600_000)):
        found = [questions.after_ms(held_ms) for _ in range(60_000)][-200:]
        assert longest_ms * 0.75 <= min(found) < max(found) <= longest_ms
    clock.now += 600
    assert questions.after_ms(10**12) <= 1_000


def test_a_task_is_paused_by_its_name_or_by_its_queue() -> None:
    known = {"task:remind": 7, "queue:mails": 5}
    asked = [("remind", "other"), ("other", "mails"), ("remind", "mails"), ("mails", "remind")]
    assert [paused_since(known, *each) for each in asked] == [7, 5, 5, 0]
    names: list[Any] = [(None, None), ("remind", "mails"), ("", None), (None, ""), (7, None)]
    for task, queue in names:
        with pytest.raises(TypeError, match="takes the name of a task or of a queue"):
            _one(task, queue)


def test_redis_is_asked_once_a_second_and_what_it_said_last_counts_while_it_is_away(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = RegistryUnavailable("away")
    store = Store(mock.Mock(), False, (OSError,))
    strange = ["queue:mails", "yesterday", "task:two", "\u00b2", "task:far", "9" * 15]
    redis = mock.Mock(side_effect=[away, [[["task:remind", "7", *strange]]], away, [[{}]]])
    monkeypatch.setattr(store, "of_each", redis)
    paused = Pauses(store, Names("rabbitdelay"))
    with pytest.raises(RegistryUnavailable):
        paused.known()
    # What is no instant is long ago.
    known = {"task:remind": 7, "queue:mails": 1, "task:two": 1, "task:far": 1}
    for _ in range(100):
        assert paused.known() == known
    assert (redis.call_count, paused.oldest_ms()) == (2, 1)
    clock.now += 1
    assert paused.known() == paused.known() == known
    assert redis.call_count == 3
    clock.now += 1
    assert paused.known() == {}


def test_of_the_copies_of_what_was_put_back_one_runs_and_runs_again_if_it_is_redelivered() -> None:
    put_back = Arrival("id", 1, once="queue", mark=Mark("message", 1), in_doubt=True)
    first, copy = put_back.named(), put_back.named()
    record, word = arrive(EMPTY, first, "run")
    assert word == "run"
    assert arrive(record, copy, "run")[1] == "duplicate"
    assert arrive(record, put_back._replace(redelivered=True).named(), "run")[1] == "run"
