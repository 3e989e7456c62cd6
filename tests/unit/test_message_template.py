"""What is written like the first message is what Celery itself would have made of the call."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import amqp
import pytest
from amqp import spec
from hypothesis import example, given
from hypothesis import strategies as st
from kombu import Connection, Exchange, Queue
from kombu.serialization import register

from celery_rabbitdelay import Celery, InvalidEnvelope
from celery_rabbitdelay.app.sending import message_template, task_messages
from celery_rabbitdelay.kombu import Due, Publisher, Topology
from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.modules.distribution import Distribution
from celery_rabbitdelay.publishing.wire import Content

#: A port that nothing listens on: whoever opens a connection fails.
NOWHERE = "amqp://guest:guest@127.0.0.1:1//"

distributed = Distribution(Topology()).receive

FIRST = ("first",), {"key": 1}


def make_app(**settings: Any) -> Any:
    app: Any = Celery("shop", broker=NOWHERE, set_as_current=False)
    app.conf.update(
        task_queues=[
            Queue("celery"),
            Queue(
                "quorum", Exchange("office"), "paper", queue_arguments={"x-queue-type": "quorum"}
            ),
        ],
        **settings,
    )

    @app.task(name="look", shared=False)
    def look(*args: Any, **kwargs: Any) -> None: ...

    return app


app = make_app()
# Text that is nearly what the default writes, as faster writers of JSON do.
register("terse", partial(json.dumps, separators=(",", ":")), json.loads, "application/x-terse")
# Text that is what the default writes, until it comes to an object.
register("own", partial(json.dumps, default=repr), json.loads, "application/x-own")


def call(args: Any, kwargs: Any, task_id: str = "") -> task_messages.Call:
    """A call as ``send_many`` makes it, an empty list like Celery."""
    return task_messages.Call(
        task_id or str(uuid.uuid4()), args or (), kwargs, Due.after(timedelta(hours=1))
    )


class Maker:
    """Makes messages both ways.

    Args:
        options: What ``apply_async`` takes besides.
        given: The application.
        first: The arguments and keyword arguments of the first call.
    """

    def __init__(self, options: dict[str, Any], given: Any = app, first: Any = FIRST) -> None:
        publisher = Publisher(Connection(NOWHERE))
        self.by_celery: Callable[[task_messages.Call], task_messages.CapturingProducer] = partial(
            task_messages.capture_message, given, publisher, given.tasks["look"], options=options
        )
        self.first = call(*first)
        self.made = self.by_celery(self.first)
        self.writer = message_template.Writer(self.made, self.first, options)

    def expected(self, each: task_messages.Call) -> tuple[dict[str, Any], bytes]:
        """The properties and the body as Celery makes them, through AMQP and back."""
        return read(Content.of(self.by_celery(each).delayed.message.amqp()))

    def alone(self, each: task_messages.Call) -> tuple[dict[str, Any], bytes]:
        return read(self.writer.content(each))

    def together(self, *calls: task_messages.Call) -> list[tuple[dict[str, Any], bytes]]:
        """The same by an envelope that distribution opens."""
        items = b"".join(map(self.writer.item, calls))
        properties, body = read(self.writer.envelope(items, calls[0].due.at_ms))
        return [
            (dict(out.message.amqp().properties), out.message.body)
            for out in distributed(amqp.Message(body, **properties))
        ]

    def check(self, each: task_messages.Call) -> None:
        """Both ways are the same, alone and in an envelope."""
        expected_properties, expected_body = self.expected(each)
        properties, body = self.alone(each)
        assert (body, properties) == (expected_body, expected_properties)
        ((properties, body),) = self.together(each)
        assert body == expected_body
        told = expected_properties["application_headers"]
        # What distribution takes out again, and puts where it belongs.
        own = (headers.EXCHANGE, headers.ROUTING_KEY, headers.QUEUE, headers.PRIORITY)
        priority = told.get(headers.PRIORITY, expected_properties.get("priority"))
        if priority is not None:
            expected_properties["priority"] = priority
        expected_properties["application_headers"] = {
            name: value for name, value in told.items() if name not in own
        }
        properties = {name: value for name, value in properties.items() if value is not None}
        assert properties == expected_properties


def read(content: Content) -> tuple[dict[str, Any], bytes]:
    message: Any = amqp.Message()
    message._load_properties(spec.Basic.CLASS_ID, content.properties, 0)
    return message.properties, content.body


texts = st.text(st.characters(), max_size=30)
odd_texts = ["it's", 'say "no"', "both ' and \"", "line\nbreak", "\\", "é", "日本", "(", "<"]
leaves = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False)),
    *(texts, st.sampled_from(odd_texts), st.decimals(allow_nan=False), st.uuids(), st.dates()),
    *(st.datetimes(timezones=st.just(UTC)), st.binary(max_size=9)),
)
json_able = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(texts, inner, max_size=3)
    ),
    max_leaves=12,
)
long_texts = st.integers(900, 3000).map(lambda length: "0123456789" * (length // 10))
arguments = st.lists(json_able | long_texts, max_size=4)
keywords = st.dictionaries(texts, json_able | long_texts, max_size=3)

MAKER = Maker({})


@given(arguments | arguments.map(tuple), keywords)
@example([], {})
@example(["x" * 1020], {"k": "x" * 1016})
@example(["x" * 1021, [1]], {"k": "x" * 1017, "l": {}})
@example([[[[[1]]]]], {"k": {"l": {"m": {"n": {}}}}})
@example([b"bytes", b"\xff", {"a": b"x"}], {})
@example([date(2030, 1, 2), datetime(2030, 1, 2, tzinfo=UTC), Decimal("1.50")], {})
def test_any_call_is_written_as_celery_makes_it(args: Any, kwargs: Any) -> None:
    MAKER.check(call(args, kwargs))


class Color(IntEnum):
    RED = 1


class Pair(NamedTuple):
    """A tuple that prints with its name."""

    left: int


@pytest.mark.parametrize("odd", [Color.RED, Pair(1), (1,), (), [()], True, -0.0, 10**400])
def test_what_prints_otherwise_is_shown_as_celery_shows_it(odd: Any) -> None:
    MAKER.check(call((odd,), {"odd": odd}))


OPTIONS: list[dict[str, Any]] = [
    {"priority": 3},
    {"priority": 9},
    {"queue": "quorum", "priority": 9},
    {"queue": "quorum"},
    {"exchange": "a-fanout", "routing_key": "paper"},
    {"headers": {"mine": [1, "é"], "x-tenant": None, "n": 2**40}},
    {"expires": "2100-01-01T00:00:00+00:00"},
    {"reply_to": "someone", "app_id": "shop", "message_id": "m", "type": "t"},
    {"correlation_id": "mine"},
    {"correlation_id": None, "reply_to": "someone"},
    {"argsrepr": "<hidden>"},
    {"kwargsrepr": "<hidden>", "shadow": "other"},
    {"root_id": "root", "parent_id": "parent", "group_id": "group", "group_index": 3},
    {"time_limit": 30, "soft_time_limit": 20, "ignore_result": True},
    {"link": [app.tasks["look"].si(1)], "link_error": [app.tasks["look"].si(2)]},
    {"serializer": "pickle"},
    {"serializer": "terse"},
    {"serializer": "own"},
    {"unknown-to-amqp": object()},
    {"compression": "zlib"},
    {"serializer": "pickle", "compression": "bzip2"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_whatever_the_options_are(options: dict[str, Any]) -> None:
    maker = Maker(options)
    maker.check(maker.first)
    maker.check(call(("it's", [1, {"a": "é\n"}]), {"k": "x" * 2000}))
    maker.check(call((), {}))
    if options.get("serializer") == "own":  # it writes the first call as kombu does, and no date
        maker.check(call((date(2030, 1, 2), Decimal("1.50")), {}))


@pytest.mark.parametrize(
    "settings",
    [
        {"task_repr_maxlevels": 1},
        {"task_repr_maxlevels": None},
        {"task_serializer": "pickle", "task_default_priority": 2},
        {"rabbitdelay_queue_type": "classic"},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_whatever_the_settings_are(settings: dict[str, Any]) -> None:
    maker = Maker({"priority": 9}, make_app(**settings))
    maker.check(call((1, [[[[2]]]]), {"a": {"b": [{}]}}))


def test_inside_of_a_task_the_root_is_shared_and_without_one_it_is_each_its_own() -> None:
    @app.task(name="parent", shared=False)
    def parent() -> None:
        maker = Maker({})
        each = call((1,), {})
        maker.check(each)
        told = maker.expected(each)[0]["application_headers"]
        assert (told["root_id"], told["parent_id"]) == ("the-parent", "the-parent")

    parent.apply(task_id="the-parent").get()
    each = call((1,), {})
    assert MAKER.expected(each)[0]["application_headers"]["root_id"] == each.task_id
    MAKER.check(each)


def test_the_first_call_is_no_pattern_for_what_is_each_call_s_own() -> None:
    firsts: list[Any] = [((), {}), (("x" * 5000,), {"k": "é" * 5000}), (([],), {"": None})]
    for first in firsts:
        maker = Maker({}, first=first)
        for task_id in ("ключ-" + "k" * 200, "\ud800"):  # the other one is half a character
            maker.check(call(("it's",), {"other": 1.5}, task_id))


@pytest.mark.parametrize("serializer", ["own", "pickle"])
@pytest.mark.parametrize("options", [{}, {"link": [app.tasks["look"].si({1, 2})]}])
def test_another_serializer_writes_what_json_cannot(serializer: str, options: Any) -> None:
    maker = Maker({"serializer": serializer, **options}, first=(({1},), {}))
    maker.check(maker.first)
    maker.check(call(({2},), {"key": {3}}))


def test_many_calls_in_one_envelope_come_out_in_their_order() -> None:
    calls = [call((number, "it's " * number), {}) for number in range(50)]
    for each, (properties, body) in zip(calls, MAKER.together(*calls), strict=True):
        assert properties["correlation_id"] == properties["application_headers"]["id"]
        assert (properties["correlation_id"], body) == (each.task_id, MAKER.expected(each)[1])


@pytest.mark.parametrize("task_id", ["", "k" * 256, "\ud800"])
def test_an_id_that_amqp_cannot_carry_is_an_error_or_what_celery_would_send(task_id: str) -> None:
    each = task_messages.Call(task_id, (), {}, Due.after(5))
    try:
        written = MAKER.alone(each)
    except ValueError:
        return
    assert written[0]["correlation_id"] == task_id


@pytest.mark.parametrize("args", [(object(),), ({1, 2, object()},), (Fraction(1, 3),)])
def test_what_json_cannot_write_is_an_error_of_its_call(args: Any) -> None:
    for write in (MAKER.writer.content, MAKER.writer.item):
        with pytest.raises((TypeError, ValueError)):
            write(call(args, {}))
    MAKER.check(call((1,), {}))


def test_a_shared_header_without_a_place_in_json_is_refused_by_the_envelope_only() -> None:
    maker = Maker({"headers": {"when": datetime(2030, 1, 2, tzinfo=UTC)}})
    each = call((1,), {})
    assert maker.alone(each) == maker.expected(each)
    with pytest.raises(InvalidEnvelope):
        maker.together(each)


def test_headers_of_one_call_are_no_other_s() -> None:
    given: dict[str, Any] = {"mine": {"a": 1}}
    maker = Maker({"headers": given})
    first, second = call((1,), {}), call((2,), {})
    assert maker.made.delayed.message.headers.to_headers()["id"] == maker.first.task_id
    for each in (first, second):
        assert maker.alone(each)[0]["application_headers"]["id"] == each.task_id
    assert given == {"mine": {"a": 1}}
