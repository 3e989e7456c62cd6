"""The registry's pure parts: what an arrival's headers say, and the names of keys."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from celery_rabbitdelay.levels.headers import COPY, JOB, LIFE, MAX_FORMER, ONCE, ORDER, Mark
from celery_rabbitdelay.registry.decision import Arrival, Ticket
from celery_rabbitdelay.registry.index import SHARDS, Kind, Names, shard_of
from tests.unit.waiting import said

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
        keys.due(shard),
        keys.due(shard, task),
        keys.due(shard, None, task),
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
    every = [keys.of(kind, each) for each in some for kind in get_args(Kind)]
    every += [keys.only("complete-since"), *keys.all_due()]
    assert len({*every}) == len(every)
