"""The language of a search: read, written, and compared with tasks."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_rabbitdelay.exceptions import InvalidSearch
from celery_rabbitdelay.levels.delay import milliseconds_of
from celery_rabbitdelay.registry.index import Filter, Kind, Pending
from celery_rabbitdelay.registry.pauses import Paused
from celery_rabbitdelay.registry.query import (
    MOST_TERMS,
    NAMES,
    Context,
    Query,
    Term,
    completions,
    filter_of,
)
from celery_rabbitdelay.registry.record import ON_ITS_WAY
from celery_rabbitdelay.registry.states import STATES, Holds

#: A Saturday, in the morning in Tokyo.
NOW = datetime(2030, 2, 2, 1, 30, tzinfo=UTC)
TOKYO = ZoneInfo("Asia/Tokyo")

TEXTS = st.text(st.characters() | st.sampled_from('*"\\: \u202e\ud800'), max_size=20)


def task(**fields: Any) -> Pending:
    """Return a task that waits for an hour."""
    own = {"task_id": "a1", "task": "store.pay", "key": None, "job": None, "queue": "mail"}
    whole = {"due": NOW + timedelta(hours=1), "sent": NOW - timedelta(days=1), **own, **fields}
    return Pending(**whole)


#: Nothing is paused, and no job is open.
NOTHING_HELD = Holds(NOW)


def found(
    text: str, tasks: Sequence[Pending], holds: Holds = NOTHING_HELD, **context: Any
) -> list[str]:
    """Return the ids of the tasks that a search finds."""
    kinds = sorted({Kind(each.task, each.queue) for each in tasks})
    wanted = filter_of(Query.of(text), Context(holds, TOKYO, kinds, **context))
    has_words = wanted.where_message or (lambda task, message: True)
    return [each.task_id for each in tasks if wanted.matches(each) and has_words(each, "a message")]


@given(st.lists(st.tuples(st.sampled_from(["", "Order", *NAMES]), TEXTS), max_size=8))
@example([("", "task:x"), ("key", ""), ("job", "a b*"), ("id", '\\"\u2028'), ("", 'say:"x"')])
def test_a_search_of_any_texts_is_written_and_read_again(terms: list[tuple[str, str]]) -> None:
    query = Query(tuple(Term.of(*each) for each in terms if each[0] or each[1]))
    assert Query.of(str(query)) == query
    assert str(query).isprintable()
    for term, text in zip(query.terms, [text for name, text in terms if name or text], strict=True):
        assert term.parts == (text,)


@given(st.text(st.characters() | st.sampled_from('*"\\: \n'), max_size=60))
@example('key:"not closed')
@example("key:x\\")
def test_whatever_one_types_is_read_or_refused_and_stays_as_it_is(text: str) -> None:
    with suppress(InvalidSearch):
        again = str(Query.of(text))
        assert str(Query.of(again)) == again


@given(TEXTS, TEXTS, TEXTS)
def test_a_wildcard_stands_for_any_text(before: str, between: str, after: str) -> None:
    keyed, term = task(key=before + between + after), Term("key", (before, after))
    assert found(str(term), [keyed]) == ["a1"]
    if before + after:
        assert found(str(term), [task(key="")]) == []


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", "abcd"),
        ("task:store.pay", "ab"),
        ("task:store.*", "abc"),
        ("task:store.pay task:mail", "abd"),
        ("task:store.* queue:mail", "ac"),
        ('queue:""', "d"),
        ("key:order:4711*", "ab"),
        ("key:*:pay", "a"),
        ('key:""', "cd"),
        ("job:import-*", "cd"),
        ("job:import-7", "c"),
        ("id:b id:d", "bd"),
        ("4711", "ab"),
        ('"ORDER:4711" pay', "a"),
        ("order\\:4711", "ab"),
        ("471", ""),
        ("711", ""),
        ("711:pay", "a"),
        ("471*", "ab"),
        ("pa", "a"),
        ("sent:<2h", "d"),
        ("sent:yesterday", "abc"),
        ("state:waiting", "abc"),
        ("state:overdue", "d"),
        ("due:<30m", "d"),
        ("nothing", ""),
        ("task:nothing", ""),
    ],
)
def test_a_search_finds_tasks(text: str, ids: str) -> None:
    tasks = [
        task(task_id="a", key="order:4711:pay"),
        task(task_id="b", key="order:4711", queue="bulk"),
        task(task_id="c", task="store.ask", job="import-7"),
        task(task_id="d", task="mail", job="import-8", queue="", due=NOW - timedelta(hours=1),
             sent=NOW - timedelta(hours=1)),
    ]  # fmt: skip
    assert "".join(found(text, tasks)) == ids


def test_of_what_an_index_has_no_record_is_read() -> None:
    context = Context(Holds(NOW), TOKYO, [Kind("pay", "mail"), Kind("ask", "mail")])

    def wanted(text: str) -> Filter:
        return filter_of(Query.of(text), context)

    for text in ("", "task:p*", "queue:mail state:overdue", "due:<2h state:waiting", "job:x"):
        assert not wanted(text).needs_records, text
    assert wanted("task:p*").kinds == frozenset({Kind("pay", "mail")})
    for text in ("4711", "key:x", "job:x*", "sent:today", "state:held state:waiting"):
        assert wanted(text).needs_records, text


def test_what_is_due_is_held_by_a_pause_or_by_an_open_job_or_overdue() -> None:
    late = NOW - timedelta(minutes=1)
    tasks = [
        task(task_id="w"),
        task(task_id="s", due=NOW - ON_ITS_WAY),
        task(task_id="h", due=late),
        task(task_id="q", task="ask", queue="bulk", due=late),
        task(task_id="j", task="ask", job="import-7", due=late),
        task(task_id="o", task="ask", job="import-8", due=late),
    ]
    paused = [Paused("store.pay", None, late), Paused(None, "bulk", late)]
    for of_jobs, held, job_open, overdue in (
        ([(tasks[4], 1)], "hqj", "j", "o"),
        ([], "hq", "", "jo"),
    ):
        holds = Holds(NOW, paused, of_jobs)
        for text, ids in (
            ("state:waiting", "ws"),
            ("state:held", held),
            ("state:job-open", job_open),
            ("state:overdue", overdue),
            ("state:waiting state:overdue", f"ws{overdue}"),
        ):
            assert "".join(found(text, tasks, holds)) == ids, (text, of_jobs)
        assert {holds.state(each) for each in tasks} <= set(STATES)


def test_a_word_finds_what_the_arguments_say_as_far_as_they_are_shown() -> None:
    tasks = [task(task_id="a"), task(task_id="b", task="ask")]

    def arguments(name: str, message: str) -> str | None:
        assert message == "a message"
        return None if name == "ask" else "('Order 4711',)"

    assert found("order 4711", tasks, arguments=arguments) == ["a"]
    assert found("ord*4711", tasks, arguments=arguments) == ["a"]
    assert found("4712", tasks, arguments=arguments) == []
    assert found("4711", tasks) == []


def test_a_word_finds_an_id_by_its_beginning_and_not_what_random_ids_have_by_chance() -> None:
    tasks = [task(task_id="ab12-cd99")]
    for text, count in (("AB12", 1), ("ab*99", 1), ("ab12-cd99", 1), ("12", 0), ("cd99", 0)):
        assert len(found(text, tasks)) == count, text


def _local(text: str) -> int:
    return milliseconds_of(datetime.fromisoformat(text).replace(tzinfo=TOKYO))


@pytest.mark.parametrize(
    ("text", "start", "end"),
    [
        ("due:<2h", None, "2030-02-02T12:30"),
        ("due:2h", None, "2030-02-02T12:30"),
        ("due:>1d", "2030-02-03T10:30", None),
        ("due:<-1h", None, "2030-02-02T09:30"),
        ("due:1h..2h", "2030-02-02T11:30", "2030-02-02T12:30"),
        ("due:2030-01-31", "2030-01-31", "2030-02-01"),
        ("due:today", "2030-02-02", "2030-02-03"),
        ("due:Tomorrow", "2030-02-03", "2030-02-04"),
        ("due:<2030-01-31", None, "2030-01-31"),
        ("due:>2030-01-31", "2030-02-01", None),
        ("due:2030-01-31T09:00", "2030-01-31T09:00", "2030-01-31T09:01"),
        ("due:2030-01-31..2030-02-02", "2030-01-31", "2030-02-03"),
        ("due:2030-01-31..", "2030-01-31", None),
        ("due:..2030-01-31", None, "2030-02-01"),
        ("due:>1h due:<2h", "2030-02-02T11:30", "2030-02-02T12:30"),
        ("sent:<2h", "2030-02-02T08:30", None),
        ("sent:>2h", None, "2030-02-02T08:30"),
        ("sent:yesterday", "2030-02-01", "2030-02-02"),
        ("sent:<2030-01-31", None, "2030-01-31"),
    ],
)
def test_instants_are_lengths_of_time_days_and_spans(
    text: str, start: str | None, end: str | None
) -> None:
    bounds = tuple(None if each is None else _local(each) for each in (start, end))
    assert Query.of(text).span(text.partition(":")[0], NOW, TOKYO) == bounds


@pytest.mark.parametrize(
    "text",
    ["task:", "state:lost", "state:h*", "due:soon", "due:", 'due:""', "due:<",
     "due:99999999999999d", "due:<9999-12-31T23:59:59.999", "sent:2030-13-01",
     "args:4711", "order:", " x" * (MOST_TERMS + 1)],
)  # fmt: skip
def test_what_a_term_does_not_take_is_named_with_what_it_takes(text: str) -> None:
    with pytest.raises(InvalidSearch, match=r" takes |: the fields are ") as wrong:
        filter_of(Query.of(text), Context(NOTHING_HELD, TOKYO))
    assert str(wrong.value).startswith(f"cannot search for {text!r}"[:-1])


@pytest.mark.parametrize("name", ["key", "job"])
def test_a_wildcard_needs_a_key_or_a_job(name: str) -> None:
    tasks = [task(task_id="with", **{name: "x"}), task(task_id="without")]
    assert found(f"{name}:*", tasks) == ["with"]
    assert found(f'{name}:""', tasks) == ["without"]


def test_an_instant_with_seconds_is_exact() -> None:
    tasks = [task(due=datetime(2030, 2, 3, 9, 0, second, tzinfo=TOKYO)) for second in (30, 31)]
    assert len(found("due:2030-02-03T09:00", tasks)) == 2
    assert len(found("due:2030-02-03T09:00:30", tasks)) == 1
    assert len(found("due:>2030-02-03T09:00:30", tasks)) == 1


def test_terms_are_added_replaced_and_removed() -> None:
    query = Query.of("task:a 4711 task:b* due:<2h")
    assert str(query.replaced("task", Term.of("task", "x y"))) == '4711 due:<2h task:"x y"'
    assert str(query.replaced("due")) == "task:a 4711 task:b*"
    assert str(query.without(query.terms[1])) == "task:a task:b* due:<2h"
    assert (query.texts("task"), query.texts("due"), query.texts("key")) == ([], ["<2h"], [])


def test_the_last_term_is_completed_as_one_types() -> None:
    values = {"task": ["store.pay", "store ask"], "queue": ["mail"], "state": list(STATES)}
    assert completions("queue:mail st", values) == [
        "queue:mail state:",
        "queue:mail task:store.pay",
        'queue:mail task:"store ask"',
    ]
    assert completions("task:PAY", values) == ["task:store.pay"]
    assert completions("state:h", values) == ["state:held"]
    assert {f"{each}:" for each in NAMES} < {*completions("", values)}
    assert completions("nothing", values) == []
