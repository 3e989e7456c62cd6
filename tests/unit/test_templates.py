"""A send from a template is what Celery would have sent, and none where Celery might differ."""

from __future__ import annotations

import functools
import importlib
import json
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import amqp
import celery
import pytest
from amqp import spec
from celery import signals
from celery.app.routes import MapRoute, prepare
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kombu import Connection, Exchange, Queue
from kombu.exceptions import EncodeError
from kombu.serialization import register

import celery_rabbitdelay
from celery_rabbitdelay import Celery, InvalidEnvelope, InvalidSetting, MessageTooLarge
from celery_rabbitdelay.app.sending import message_template, templates
from celery_rabbitdelay.app.sending.task_messages import Call, CapturingProducer, capture_message
from celery_rabbitdelay.app.sending.task_sending import TaskSending
from celery_rabbitdelay.kombu import Due, Publisher, Topology
from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.modules.distribution import Distribution
from celery_rabbitdelay.publishing.publication import Publication
from celery_rabbitdelay.publishing.wire import Content
from tests.unit.clock import frozen

#: A port that nothing listens on: whoever opens a connection fails.
NOWHERE = "amqp://guest:guest@127.0.0.1:1//"

HOUR = timedelta(hours=1)

distributed = Distribution(Topology()).receive


def receive(*_: Any, **__: Any) -> None:
    """A task, or a receiver of a signal."""


def make_app(**given: Any) -> Any:
    app: Any = Celery("shop", broker=NOWHERE, set_as_current=False)
    office = Queue("office", Exchange("office"), "paper")
    quorum = Queue("quorum", queue_arguments={"x-queue-type": "quorum"})
    app.conf.update(task_queues=[Queue("celery"), office, quorum], **given)

    @app.task(name="look", shared=False)
    def look(number: int = 1, *more: Any, **kwargs: Any) -> None: ...

    @app.task(
        name="bound",
        shared=False,
        bind=True,
        priority=3,
        ignore_result=True,
        queue="office",
        serializer="yaml",
    )
    def bound(self: Any, *args: Any, **kwargs: Any) -> None: ...

    app.task(receive, name="receive", shared=False)
    return app


@pytest.fixture
def app() -> Iterator[Any]:
    app = make_app()
    yield app
    app.close()


APP = make_app()
PRODUCER = APP.amqp.Producer(APP.connection_for_write(), auto_declare=False)
# Text that is nearly what the default writes, as faster writers of JSON do.
register("terse", partial(json.dumps, separators=(",", ":")), json.loads, "application/x-terse")
# Text that is what the default writes, until it comes to an object.
register("own", partial(json.dumps, default=repr), json.loads, "application/x-own")


def read(content: Content) -> tuple[dict[str, Any], bytes]:
    message: Any = amqp.Message()
    message._load_properties(spec.Basic.CLASS_ID, content.properties, 0)
    return message.properties, content.body


def call(args: Any, kwargs: Any, task_id: str = "") -> Call:
    """A call as ``send_many`` makes it, an empty list like Celery."""
    return Call(task_id or str(uuid.uuid4()), args or (), kwargs, Due.after(HOUR))


class Maker:
    """Makes messages both ways.

    Args:
        options: What ``apply_async`` takes besides.
        given: The application.
        first: The arguments and keyword arguments of the first call.
    """

    def __init__(
        self, options: dict[str, Any], given: Any = APP, first: Any = (("first",), {"key": 1})
    ) -> None:
        publisher = Publisher(Connection(NOWHERE))
        self.by_celery: Callable[[Call], CapturingProducer] = partial(
            capture_message, given, publisher, given.tasks["receive"], options=options
        )
        self.first = call(*first)
        self.made = self.by_celery(self.first)
        self.writer = message_template.Writer(self.made, self.first, options)

    def expected(self, each: Call) -> tuple[dict[str, Any], bytes]:
        """The properties and the body as Celery makes them, through AMQP and back."""
        return read(Content.of(self.by_celery(each).delayed.message.amqp()))

    def alone(self, each: Call) -> tuple[dict[str, Any], bytes]:
        return read(self.writer.content(each))

    def together(self, *calls: Call) -> list[tuple[dict[str, Any], bytes]]:
        """The same by an envelope that distribution opens."""
        items = b"".join(map(self.writer.item, calls))
        properties, body = read(self.writer.envelope(items, calls[0].due.at_ms))
        return [
            (dict(out.message.amqp().properties), out.message.body)
            for out in distributed(amqp.Message(body, **properties))
        ]

    def check(self, each: Call) -> None:
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


class Color(IntEnum):
    RED = 1


class Pair(NamedTuple):
    """A tuple that prints with its name."""

    left: int


@settings(max_examples=50)
@given(arguments | arguments.map(tuple), keywords)
@example([], {})
@example(["x" * 1020], {"k": "x" * 1016})
@example(["x" * 1021, [1]], {"k": "x" * 1017, "l": {}})
@example([[[[[1]]]]], {"k": {"l": {"m": {"n": {}}}}})
@example([b"bytes", b"\xff", {"a": b"x"}], {})
@example([date(2030, 1, 2), datetime(2030, 1, 2, tzinfo=UTC), Decimal("1.50")], {})
@example([Color.RED, Pair(1)], {"pair": Pair(1), "zero": -0.0})
@example(((),), {"empty": [()]})
def test_any_call_is_written_as_celery_makes_it(args: Any, kwargs: Any) -> None:
    MAKER.check(call(args, kwargs))


OPTIONS: list[dict[str, Any]] = [
    {"queue": "quorum", "priority": 9, "correlation_id": "mine", "expires": "2100-01-01T00:00:00Z"},
    {"exchange": "a-fanout", "routing_key": "paper", "priority": 3, "unknown-to-amqp": object()},
    {"headers": {"mine": [1, "é"], "x-tenant": None, "n": 2**40}, "argsrepr": "<hidden>"},
    {"correlation_id": None, "reply_to": "someone", "app_id": "shop", "message_id": "m"},
    {"kwargsrepr": "<hidden>", "shadow": "other", "time_limit": 30, "ignore_result": True},
    {"root_id": "root", "parent_id": "parent", "group_id": "group", "group_index": 3},
    {"link": [APP.tasks["look"].si(1)], "link_error": [APP.tasks["look"].si(2)]},
    {"serializer": "terse"},
    {"serializer": "own"},
    {"serializer": "pickle", "compression": "bzip2"},
    {"compression": "zlib"},
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
    "given",
    [
        {"task_repr_maxlevels": 1, "rabbitdelay_queue_type": "classic"},
        {"task_repr_maxlevels": None, "task_serializer": "pickle", "task_default_priority": 2},
    ],
    ids=str,
)
def test_whatever_the_settings_are(given: dict[str, Any]) -> None:
    maker = Maker({"priority": 9}, make_app(**given))
    maker.check(call((1, [[[[2]]]]), {"a": {"b": [{}]}}))


def test_inside_of_a_task_the_root_is_shared_and_without_one_it_is_each_its_own() -> None:
    @APP.task(name="parent", shared=False)
    def parent() -> None:
        maker = Maker({})
        each = call((1,), {})
        maker.check(each)
        told = maker.expected(each)[0]["application_headers"]
        assert (told["root_id"], told["parent_id"]) == ("the-parent", "the-parent")

    parent.apply(task_id="the-parent").get()
    each = call((1,), {})
    assert MAKER.expected(each)[0]["application_headers"]["root_id"] == each.task_id


@pytest.mark.parametrize(
    "first", [((), {}), (("x" * 5000,), {"k": "é" * 5000}), (([],), {"": None})]
)
def test_the_first_call_is_no_pattern_for_what_is_each_call_s_own(first: Any) -> None:
    maker = Maker({}, first=first)
    for task_id in ("ключ-" + "k" * 200, "\ud800"):  # the other one is half a character
        maker.check(call(("it's",), {"other": 1.5}, task_id))


def test_many_calls_in_one_envelope_come_out_in_their_order() -> None:
    calls = [call((number, "it's " * number), {}) for number in range(50)]
    for each, (properties, body) in zip(calls, MAKER.together(*calls), strict=True):
        assert properties["correlation_id"] == properties["application_headers"]["id"]
        assert (properties["correlation_id"], body) == (each.task_id, MAKER.expected(each)[1])


def test_what_cannot_be_written_is_an_error_of_its_call() -> None:
    for write in (MAKER.writer.content, MAKER.writer.item):
        with pytest.raises((TypeError, ValueError)):
            write(call(({1, 2, object()},), {}))
    with pytest.raises(ValueError, match="bytes must be in range"):
        MAKER.alone(call((), {}, "k" * 256))
    MAKER.check(call((1,), {}))
    maker = Maker({"headers": {"when": datetime(2030, 1, 2, tzinfo=UTC)}})
    each = call((1,), {})
    assert maker.alone(each) == maker.expected(each)
    with pytest.raises(InvalidEnvelope):  # it has no place in JSON
        maker.together(each)


class Sends:
    """Sends tasks, and keeps what would be published, instead of a broker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.published: list[Publication] = []
        self.by_celery = 0

        def publish(_: Any, template: Any, publication: Publication, sent: Any) -> None:
            self.published.append(publication)

        def send(sending: TaskSending) -> Any:
            if isinstance(sending.options.get("producer"), CapturingProducer):
                return real(sending)
            self.by_celery += 1
            return None

        def acquire(app: Any, producer: Any = None) -> Any:
            if producer is not None:
                return nullcontext(producer)
            plain = mock.MagicMock()
            plain.publish = self._publish_at_once
            return nullcontext(plain)

        def pipeline(_: Any, connection: Any) -> Any:
            block = mock.Mock()
            block.publish = lambda make, sent, policy: self.published.append(make(sent))
            return block if connection is not None else None

        real = TaskSending.send
        monkeypatch.setattr(templates, "current_pipeline", pipeline)
        monkeypatch.setattr(templates.Templates, "_publish", publish)
        monkeypatch.setattr(TaskSending, "send", send)
        monkeypatch.setattr(Celery, "producer_or_acquire", acquire)

    def _publish_at_once(self, body: Any, **options: Any) -> None:
        self.by_celery += 1

    def from_template(self, function: Callable[..., Any], *args: Any, **options: Any) -> bool:
        """Send a task; return whether it was sent from a template."""
        before = len(self.published), self.by_celery
        function(*args, **options)
        after = len(self.published), self.by_celery
        assert sum(after) == sum(before) + 1
        return after[0] > before[0]


@pytest.fixture
def sends(monkeypatch: pytest.MonkeyPatch) -> Sends:
    return Sends(monkeypatch)


def celerys(app: Any, task: Any, args: Any, kwargs: Any, options: dict[str, Any]) -> Any:
    """The message of the same send through all of Celery."""
    taken = {*templates.SHARED, *templates.OF_MEMBER} - {"task_id", "eta", "producer"}
    shared: dict[str, Any] = {name: options[name] for name in taken if name in options}
    call = Call(options["task_id"], args, kwargs, Due.at(options["eta"]))
    with app.rabbitdelay.publisher() as publisher:
        delayed = capture_message(app, publisher, task, call, shared).delayed
    return read(Content.of(delayed.message.amqp())), delayed.destination


shared_options = st.fixed_dictionaries(
    {},
    optional={
        "queue": st.sampled_from([None, "celery", "office", "elsewhere"]),
        "priority": st.none() | st.integers(0, 9),
        "routing_key": st.sampled_from([None, "paper", "celery"]),
        "serializer": st.sampled_from([None, "json", "pickle", "yaml"]),
    },
)

#: What Celery gives the members of a group.
member_options = st.fixed_dictionaries(
    {"group_id": texts, "group_index": st.integers(3, 10**6), "add_to_parent": st.just(False)},
    optional=dict.fromkeys(("root_id", "parent_id", "reply_to"), st.sampled_from(["one", "two"])),
)


@given(
    st.sampled_from(["look", "bound"]),
    st.booleans(),
    st.lists(st.lists(json_able, max_size=3), min_size=2, max_size=3),
    st.dictionaries(
        texts.filter(lambda name: name not in ("number", "self")), json_able, max_size=3
    ),
    shared_options,
    st.none() | member_options,
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@frozen()
def test_each_send_is_what_celery_would_have_sent(
    sends: Sends,
    name: str,
    by_name: bool,
    calls: list[Any],
    kwargs: Any,
    shared: dict[str, Any],
    member: dict[str, Any] | None,
) -> None:
    app = APP
    if member is not None:
        shared, by_name = {**shared, **member, "producer": PRODUCER}, False
    task = app.tasks[name]
    send = functools.partial(app.send_task, name) if by_name else task.apply_async
    for args in calls:
        options = {**shared, "task_id": os.urandom(8).hex(), "eta": datetime.now(UTC) + HOUR}
        try:
            if not sends.from_template(send, args, kwargs, **options):
                continue
        except EncodeError:
            with pytest.raises(EncodeError):
                celerys(app, name if by_name else task, args, kwargs, options)
            continue
        expected, destination = celerys(app, name if by_name else task, args, kwargs, options)
        if member is not None:
            member["group_index"] += 1
            shared["group_index"] = member["group_index"]
        publication = sends.published[-1]
        assert read(publication.content) == expected
        exchange, key = publication.address()
        route = app.rabbitdelay.topology.route(Due.at(options["eta"]), destination, "x")
        assert (exchange, key.rpartition(".")[2]) == (
            route.exchange,
            route.routing_key.rpartition(".")[2],
        )


@pytest.mark.parametrize(
    "options",
    [
        {"delay": HOUR, "tolerance": 5},
        {"countdown": 60},
        {"eta": datetime(2100, 1, 1, tzinfo=UTC)},
        {"delay": 60, "queue": "office", "priority": 4, "task_id": "x"},
        {"delay": 60, "exchange": "office", "routing_key": "paper", "serializer": "json"},
    ],
)
def test_a_plain_send_comes_from_a_template(sends: Sends, app: Any, options: Any) -> None:
    for _ in range(2):
        assert sends.from_template(app.tasks["look"].apply_async, (1,), {"a": 2}, **options)
        assert sends.from_template(app.send_task, "look", (1,), {"a": 2}, **options)
        assert sends.from_template(app.tasks["look"].s(1).apply_async, **options)
        assert sends.from_template(app.send_task, "unknown", **options)


def of_rows(app: Any, task: Any = None, **options: Any) -> templates.Template | None:
    """Return the template that the rows of a task are written from."""
    call = Call("row", (1,), {}, Due.after(60))
    made: templates.Template | None = app.rabbitdelay.templates.of_rows(
        task or app.tasks["look"], call, options
    )
    return made


@pytest.mark.parametrize("options", [{}, {"queue": "office", "priority": 4}])
def test_the_next_rows_come_from_the_same_template(app: Any, options: Any) -> None:
    kept = of_rows(app, **options)
    assert kept is not None
    assert of_rows(app, **options) is kept
    assert of_rows(app, **options, serializer="yaml") not in (kept, None)
    call = Call("next", (7,), {"a": "b"}, Due.after(60))
    told = {**options, "task_id": "next", "eta": instant_of(call.due.at_ms)}
    expected, _ = celerys(app, app.tasks["look"], call.args, call.kwargs, told)
    assert read(kept.publication(call).content) == expected


def test_the_members_of_a_group_come_from_a_template_after_the_first_ones(
    sends: Sends, app: Any
) -> None:
    of_all = {"group_id": "g", "root_id": "r", "parent_id": "p", "reply_to": "q"}
    own = {"producer": PRODUCER, "add_to_parent": False, "delay": 60}
    from_template = [
        sends.from_template(app.tasks["look"].apply_async, **of_all, **own, group_index=index)
        for index in range(5)
    ]
    assert from_template == [False, False, False, True, True]


def test_the_backend_hears_of_each_call_whose_result_counts(
    sends: Sends, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(app.backend, "on_task_call", lambda _, task_id: heard.append(task_id))
    for name in ("look", "bound"):
        app.tasks[name].apply_async(delay=60)  # makes the template, which may be heard as well
        heard.clear()
        assert sends.from_template(app.tasks[name].apply_async, delay=60, task_id=name)
        assert heard == (["look"] if name == "look" else [])


OTHER_OPTIONS = [
    *[("expires", 900), ("headers", {"a": 1}), ("link", None), ("retry", True), ("once", True)],
    *[("key", "k"), ("reply_to", "x"), ("group_id", "g"), ("queue", Queue("own"))],
    *[("priority", 2.5), ("task_id", 7), ("a-stamp", 1)],
]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"delay": -5},
        {"eta": datetime(2000, 1, 1, tzinfo=UTC)},
        *({"delay": 60, name: value} for name, value in OTHER_OPTIONS),
    ],
)
def test_any_other_send_goes_through_celery(sends: Sends, app: Any, options: Any) -> None:
    app.conf.rabbitdelay_registry_url = "redis://127.0.0.1:1"
    assert not sends.from_template(app.send_task, "look", **options)
    assert not sends.from_template(app.tasks["look"].apply_async, **options)
    of_all = {name: value for name, value in options.items() if name not in ("delay", "eta")}
    assert (of_rows(app, **of_all) is None) == bool(of_all)


def route(name: str, *_: Any, **__: Any) -> dict[str, Any]:
    """A router."""
    return {"queue": "office"}


class OwnRoute(MapRoute):
    """A map of routes that also looks at the arguments."""


def wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def of_task(app: Any, **attributes: Any) -> None:
    vars(app.tasks["look"]).update(**attributes, _exec_options=None)


def wrap(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    patch.setattr(owner, name, wrapped(getattr(owner, name)))


#: Things that an application or a library may do; afterwards each send must go through Celery.
OWN_CODE: dict[str, Callable[[Any, Any], Any]] = {
    "a receiver of a signal": lambda app, _: signals.before_task_publish.connect(receive),
    "an event for each task": lambda app, _: app.conf.update(task_send_sent_event=True),
    "message protocol 1": lambda app, _: app.conf.update(task_protocol=1),
    "eager": lambda app, _: app.conf.update(task_always_eager=True),
    "tasks run once": lambda app, _: of_task(app, once=True),
    "not in the levels": lambda app, _: of_task(app, rabbitdelay=False),
    "an expiry": lambda app, _: of_task(app, expires=60),
    "a shadow": lambda app, _: of_task(app, shadow_name=lambda *_: "shadow"),
    "a wrapped send_task": lambda app, patch: wrap(patch, celery.Celery, "send_task"),
    "a wrapped apply_async": lambda app, patch: wrap(patch, celery.Task, "apply_async"),
    "a wrapped message": lambda app, patch: wrap(patch, app.amqp, "create_task_message"),
    "a mock": lambda app, patch: patch.setattr(app.amqp, "send_task_message", mock.Mock()),
    "a route of its own": lambda app, _: setattr(app.amqp.router, "routes", (OwnRoute({}),)),
    "another router": lambda app, _: vars(app.amqp).update(router=mock.Mock(spec=["route"])),
}


@pytest.mark.parametrize("what", OWN_CODE)
def test_where_other_code_takes_part_celery_sends(
    sends: Sends, app: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    app.conf.rabbitdelay_registry_url = "redis://127.0.0.1:1"
    apply_async = app.tasks["look"].apply_async
    assert sends.from_template(apply_async, delay=60)
    assert of_rows(app) is not None
    with monkeypatch.context() as patch:
        try:
            OWN_CODE[what](app, patch)
            monkeypatch.setattr(celery.Task, "apply", lambda *_, **__: app.send_task("look"))
            for _ in range(2):
                assert not sends.from_template(apply_async, delay=60)
                assert of_rows(app) is None
        finally:
            signals.before_task_publish.disconnect(receive)


def test_routers_subclasses_and_the_registry_send_through_celery(sends: Sends) -> None:
    class OwnTask(celery.Task):  # type: ignore[type-arg]  # no generic before Celery 5.7
        def apply_async(self, *args: Any, **options: Any) -> Any:
            return super().apply_async(*args, **options)

    class OwnApp(celery.Celery):
        def send_task(self, *args: Any, **options: Any) -> Any:
            return super().send_task(*args, **options)

    routed = make_app(task_routes=[route])
    own_app = celery_rabbitdelay.install(OwnApp("shop", broker=NOWHERE, set_as_current=False))
    own_tasks: Any = Celery("shop", broker=NOWHERE, set_as_current=False, task_cls=OwnTask)
    tracked = make_app(rabbitdelay_registry_url="redis://127.0.0.1:1", rabbitdelay_track="all")
    for app in (routed, own_app, own_tasks, tracked):
        task = app.task(receive, name="own", shared=False)
        for _ in range(2):
            assert not sends.from_template(task.apply_async, delay=60)
            assert of_rows(app, task) is None


#: Changes of data after which Celery makes other messages of the same calls.
CHANGES: dict[str, Callable[[Any], object]] = {
    "default queue": lambda app: app.conf.update(task_default_queue="office"),
    "an attribute of the task": lambda app: of_task(app, ignore_result=True, time_limit=9),
    "another queue in its place": lambda app: app.amqp.queues.add(
        Queue("celery", Exchange("office", "topic"), "other paper")
    ),
    "routes": lambda app: vars(app.amqp).update(
        router=app.amqp.router.__class__(prepare([{"look": {"queue": "office"}}]), app.amqp.queues)
    ),
    "lengths of reprs": lambda app: vars(app.amqp).update(argsrepr_maxsize=8),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_makes_a_new_template(sends: Sends, app: Any, what: str) -> None:
    task = app.tasks["look"]
    options = {"task_id": "x", "eta": datetime(2100, 1, 1, tzinfo=UTC)}
    given: tuple[Any, Any] = ((123456789,), {})
    assert sends.from_template(task.apply_async, *given, **options)
    before = read(sends.published[-1].content), sends.published[-1].address()
    CHANGES[what](app)
    app.amqp.__dict__.pop("send_task_message", None)  # Celery has read the configuration
    assert sends.from_template(task.apply_async, *given, **options)
    after = read(sends.published[-1].content), sends.published[-1].address()
    assert after[0] == celerys(app, task, *given, options)[0]
    assert before != after


def test_threads_share_a_template_and_have_addresses_of_their_own(
    sends: Sends, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def capture(*given: Any, **more: Any) -> Any:
        made.append(given)
        return capture_message(*given, **more)

    monkeypatch.setattr(templates, "capture_message", capture)
    send = functools.partial(app.tasks["look"].apply_async, delay=60)
    rows: list[Any] = []
    for in_thread in (send, lambda: rows.append(of_rows(app))):
        in_thread()
        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()
    written = [each.content for each in sends.published]
    written += [each.publication(Call("row", (1,), {}, Due.after(60))).content for each in rows]
    addresses = [read(content)[0]["reply_to"] for content in written]
    # A thread may have the identity, and so the address, of one that has ended.
    assert [each == app.thread_oid for each in addresses] == [True, False] * 2
    # The rows of each thread have one of their own.
    assert len(made) == 1 + 2


def test_what_overrides_ours_is_called_once_for_each_send(sends: Sends, app: Any) -> None:
    called = []

    class Counting(app.Task):  # type: ignore[misc]
        def apply_async(self, args: Any = None, *more: Any, **options: Any) -> Any:
            called.append(args)
            options.setdefault("countdown", 60)
            return super().apply_async(("first", *args), *more, **options)

    task = app.task(receive, base=Counting, name="counting", shared=False)
    for number in range(3):
        assert sends.from_template(task.apply_async, (number,))
    assert called == [(0,), (1,), (2,)]
    assert of_rows(app, task) is None
    bodies = [json.loads(read(each.content)[1]) for each in sends.published]
    assert [body[0] for body in bodies] == [["first", number] for number in range(3)]


def test_a_worker_s_task_sends_through_celery(sends: Sends, app: Any) -> None:
    task, state = app.tasks["look"], importlib.import_module("celery._state")
    task.push_request(id="parent", called_directly=False)
    state._task_stack.push(task)
    try:
        assert not sends.from_template(task.apply_async, delay=60)
        assert of_rows(app) is None
    finally:
        state._task_stack.pop()
        task.pop_request()


def test_wrong_calls_are_refused_as_without_a_template(sends: Sends, app: Any) -> None:
    task = app.tasks["look"]
    task.apply_async(delay=60)
    with pytest.raises(TypeError, match="number"):
        task.apply_async((1,), {"number": 1}, delay=60)
    # Celery's way raises, where it goes into the levels.
    assert not sends.from_template(task.apply_async, delay="soon")
    assert not sends.from_template(task.apply_async, (object(),), delay=60)  # not JSON
    app.conf.rabbitdelay_prefix = "other"
    with pytest.raises(InvalidSetting):
        task.apply_async(delay=60)


def test_what_no_worker_takes_is_refused(sends: Sends) -> None:
    app = make_app(rabbitdelay_max_message_bytes=100_000, rabbitdelay_may_refuse=["celery"])
    app.tasks["look"].apply_async(delay=60)
    with pytest.raises(MessageTooLarge):
        app.tasks["look"].apply_async((1, "x" * 100_000), delay=60)


def test_there_are_only_so_many_templates(
    sends: Sends, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "MAX_TEMPLATES", 3)
    for number in range(20):
        assert sends.from_template(app.send_task, f"task-{number}", delay=60)
        assert len(app.rabbitdelay.templates._templates) <= 3
