"""What is stripped from a message before it is published again, and what is restored."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu import Message

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.levels.headers import EarlyHeader
from celery_rabbitdelay.worker.restore import SENTRY_ENQUEUED, restore

MAX_MS = 2**63 - 1
OWN = sorted(headers._KINDS)

texts = st.text(max_size=8)

#: Whatever anybody writes; py-amqp reads names that are not UTF-8 as bytes.
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
#: What this package may have written.
plausible = st.sampled_from([True, {"times": 2, "until": 9, "exchange": "e", "routing-key": "k"}])
plausible |= st.integers(0, 9) | st.integers(0, MAX_MS) | texts | st.integers(-1, 300).map(str)
tables: Any = st.dictionaries(
    st.sampled_from(OWN) | st.sampled_from(sorted(headers.BROKER_HEADERS)) | texts | st.binary(),
    anything | plausible,
)

ADDED_BY_THE_BROKER: dict[str, Any] = {
    "x-death": [{"queue": "rabbitdelay.seconds.1"}],
    **{f"x-{which}-death-queue": "rabbitdelay" for which in ("first", "last")},
    **dict.fromkeys(("x-delivery-count", "x-acquired-count"), 2),
}

DELAYED: dict[str, Any] = {
    headers.DUE: 1_900_000_000_000,
    headers.EXCHANGE: "topic",
    headers.ROUTING_KEY: "daily.reports",
    headers.QUEUE: "daily.reports",
}


def test_headers_are_called_as_in_the_messages_that_wait_on_brokers_already() -> None:
    # A message may wait for years, and the worker that gets it may be of any later version; while
    # workers are updated, also of an earlier one. None of them knows another name.
    names = [name for name in vars(headers).values() if str(name).startswith("rabbitdelay-")]
    assert " ".join(sorted(name.removeprefix("rabbitdelay-") for name in names)) == (
        " attempts checked-in committed copy due early exchange expiration failed-since "
        "first-reason job job-id key key-order life once priority properties queue reason "
        "redelivered redriven routing-key schedule signature tracked unreadable version"
    )
    # Of the plugin of delayed messages, and of Celery.
    assert (headers.X_DELAY, headers.NESTED_HEADERS) == ("x-delay", "headers")


@given(tables)
def test_headers_are_read_and_what_is_invalid_counts_as_missing(found: dict[Any, Any]) -> None:
    said, problems = headers.parse(found)
    assert [*problems] == sorted(problems)
    assert headers.parse(said.to_headers()) == (said, {})
    for name, problem in problems.items():
        assert found[name] is not None
        assert problem.startswith(f"its header {name} is ")
        assert len(problem) < 400
    given = {name for name in OWN if found.get(name) is not None}
    valid = {name: found[name] for name in given - problems.keys()}
    together = {headers.ATTEMPTS, headers.FAILED_SINCE, headers.FIRST_REASON}
    expected = {n: v for n, v in valid.items() if n not in together or together <= valid.keys()}
    back = said.to_headers()
    for name, value in expected.items():
        if name not in (headers.EARLY, headers.REDRIVEN):
            assert back[name] == value
    assert said.redriven == valid.get(headers.REDRIVEN, 0)
    # Passed on unopened, all headers stay but those of the broker.
    kept = {name: value for name, value in found.items() if name not in headers.BROKER_HEADERS}
    assert repr(headers.unopened(found).to_headers()) == repr(kept)


TIME, COUNT, NUMBER = "milliseconds since 1970", "a count", "a number as a string"


@pytest.mark.parametrize(
    ("name", "valid", "invalid", "words"),
    [
        (headers.DUE, (0, MAX_MS), (-1, MAX_MS + 1, True, "0"), TIME),
        (headers.EXCHANGE, ("",), (5,), "an exchange's name"),
        (headers.ROUTING_KEY, ("",), (5,), "a routing key"),
        (headers.PRIORITY, (5, 255), (4, 256, "5"), "a priority"),
        (
            headers.EXPIRATION,
            ("0", "4294967295"),
            ("4294967296", "", "-1", "1.5", 5),
            "a number of milliseconds, as a string",
        ),
        (headers.EARLY, ({},), (5,), "a table"),
        (headers.ATTEMPTS, (1, 2**31), (0, 2**31 + 1), COUNT),
        (headers.FAILED_SINCE, (1, MAX_MS), (0, MAX_MS + 1), TIME),
        (headers.REASON, ("",), (5,), "a string"),
        (headers.REDRIVEN, (0, 2**31), (-1, 2**31 + 1), COUNT),
        (headers.QUEUE, ("q",), ("", b"q"), "a queue's name"),
        (
            headers.LIFE,
            ("-1", "9007199254740991"),
            ("-2", "9007199254740992", "", "\u0663", 1),
            NUMBER,
        ),
        (headers.ORDER, ("1790000000000000",), ("-1", "1.5", 1), NUMBER),
        (headers.ONCE, (True, "mark"), ("", False, 1), "True or a mark"),
        (headers.REDELIVERED, (True,), (False, 1), "True"),
        (headers.COMMITTED, (True,), (False, "True"), "True"),
    ],
)
def test_values_count_up_to_their_bounds(name: str, valid: Any, invalid: Any, words: str) -> None:
    assert [headers.parse({name: value})[1] for value in valid] == [{}] * len(valid)
    assert [headers.parse({name: value})[1] for value in invalid] == [
        {name: f"its header {name} is {value!r}, not {words}"} for value in invalid
    ]


def test_a_message_that_could_not_wait_for_longer_at_once_is_expected_early() -> None:
    early = EarlyHeader(1, until_ms=1000)
    assert [early.expects(now_ms, 100) for now_ms in (899, 900, 2000)] == [False, True, True]
    assert not EarlyHeader(1).expects(1000, 100)


def test_the_header_of_an_early_message_is_read_as_it_is_written() -> None:
    early = EarlyHeader(2, 1000, "exchange", "key")
    (table,) = early.header().values()
    assert EarlyHeader.of(table) == early
    assert EarlyHeader.of({"times": -1, "until": "1000", "exchange": "e"}) == EarlyHeader()


def test_the_users_own_headers_stay() -> None:
    own = {"x-tenant": "shop", "traceparent": "00-ab", "x-deathly": 1, "headers": {"x-mine": 2}}
    nested = {"headers": {"x-mine": 2, **ADDED_BY_THE_BROKER, **DELAYED}}
    assert headers.strip({**own, **ADDED_BY_THE_BROKER, **DELAYED, **nested}) == own
    # Where no table is.
    assert headers.strip({headers.NESTED_HEADERS: "none"}) == {headers.NESTED_HEADERS: "none"}


@pytest.mark.parametrize(
    "found",
    [
        {"task": "t", **ADDED_BY_THE_BROKER},
        # For example one that a task of plain Celery has forwarded with its own headers.
        {"task": "t", headers.DUE: 1_900_000_000_000, headers.QUEUE: "q"},
        {SENTRY_ENQUEUED: 1.5, headers.NESTED_HEADERS: {SENTRY_ENQUEUED: 1.5}},
        *(
            {**DELAYED, name: value}
            for name in (headers.EXCHANGE, headers.ROUTING_KEY, headers.QUEUE)
            for value in (None, 7)
        ),
    ],
)
def test_a_message_without_all_of_our_headers_is_left_alone(found: Any) -> None:
    info = {"exchange": "", "routing_key": "q"}
    message = Message(headers=copy.deepcopy(found), delivery_info=dict(info))
    assert restore(message) is None
    assert (message.headers, message.delivery_info) == (found, info)


@pytest.mark.parametrize("due", [None, "soon", {}, 1.5, True, -(2**63)])
def test_a_task_whose_due_time_is_invalid_is_restored_without_it(due: Any) -> None:
    found = {**DELAYED, headers.DUE: due, SENTRY_ENQUEUED: 1.5}
    message = Message(headers=found, delivery_info={"exchange": "", "routing_key": "0.q"})
    waited = restore(message)
    assert waited is not None
    assert (waited.due_ms, message.headers.get(headers.DUE)) == (None, None)
    assert {SENTRY_ENQUEUED: 1.5}.items() <= message.headers.items()


def dropped(found: dict[Any, Any]) -> dict[Any, Any]:
    headers.drop_own(found)
    return found


@pytest.mark.parametrize("strip", [headers.strip, dropped])
def test_headers_nested_a_thousand_deep_and_names_in_bytes_are_stripped(strip: Any) -> None:
    found: dict[Any, Any] = {}
    for _ in range(5_000):
        found = {headers.NESTED_HEADERS: found, headers.DUE: 5, b"rabbitdelay-\xff": 1, b"\xff": 2}
    _, problems = headers.parse({**found, headers.EARLY: found, headers.DUE: found})
    assert problems.keys() == {headers.DUE}
    stripped: Any = strip(found)
    for _ in range(5_000):
        assert stripped.keys() == {headers.NESTED_HEADERS, b"\xff"}
        stripped = stripped[headers.NESTED_HEADERS]
    assert stripped == {}
