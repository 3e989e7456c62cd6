"""A copy is what Celery would have sent, and none where Celery might differ."""

import functools
import importlib
import json
import struct
import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
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
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kombu import Exchange, Queue
from kombu.serialization import register

import celery_rabbitdelay
from celery_rabbitdelay import Celery, InvalidEnvelope
from celery_rabbitdelay.app import copies, pipelines
from celery_rabbitdelay.app.copies import CapturingProducer, Copies, Template, capture
from celery_rabbitdelay.app.seams import Call
from celery_rabbitdelay.app.task_sending import TaskSending
from celery_rabbitdelay.kombu import Due, Topology
from celery_rabbitdelay.levels import headers, wall_clock
from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.modules.distribution import Distribution
from celery_rabbitdelay.publishing.message import Content, Publication, headers_of
from tests.kernel.unit.clock import frozen

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
        self.by_celery: Callable[[Call], CapturingProducer] = partial(
            capture, given.rabbitdelay, given.tasks["receive"], options=options
        )
        self.first = call(*first)
        self.made = self.by_celery(self.first)
        self.template = Template(self.made, self.first, options)

    def expected(self, each: Call) -> tuple[dict[str, Any], bytes]:
        """The properties and the body as Celery makes them, through AMQP and back."""
        return read(Content.of(self.by_celery(each).delayed.message.amqp()))

    def alone(self, each: Call) -> tuple[dict[str, Any], bytes]:
        return read(self.template.content(each))

    def together(self, *calls: Call) -> list[tuple[dict[str, Any], bytes]]:
        """The same by an envelope that distribution opens."""
        items = b"".join(map(self.template.item, calls))
        properties, body = read(self.template.envelope(items, calls[0].due.at_ms))
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
    "first", [((), {}), (("x" * 5000,), {"k": "é" * 5000}), (([],), {"": None})]
)
def test_the_first_call_is_no_pattern_for_what_is_each_call_s_own(first: Any) -> None:
    maker = Maker({}, first=first)
    for task_id in ("ключ-" + "k" * 200, "\ud800"):  # the other one is half a character
        maker.check(call(("it's",), {"other": 1.5}, task_id))


def test_what_cannot_be_written_is_an_error_of_its_call() -> None:
    for write in (MAKER.template.content, MAKER.template.item):
        with pytest.raises((TypeError, ValueError)):
            write(call(({1, 2, object()},), {}))
    with pytest.raises(struct.error):
        MAKER.alone(call((), {}, "k" * 256))
    MAKER.check(call((1,), {}))
    maker = Maker({"headers": {"when": datetime(2030, 1, 2, tzinfo=UTC)}})
    each = call((1,), {})
    assert maker.alone(each) == maker.expected(each)
    with pytest.raises(InvalidEnvelope):  # it has no place in JSON
        maker.together(each)


def test_each_message_is_signed_as_the_producer_signs_it() -> None:
    maker = Maker({}, make_app(rabbitdelay_signing_key="k" * 32))
    each = call((1,), {})._replace(headers={headers.KEY: "k", headers.ORDER: "1"})
    assert headers.SIGNATURE in maker.alone(each)[0]["application_headers"]
    keys: Any = maker.made.signing_keys
    content = maker.template.content(each)
    received = content.message()
    said, _ = headers.parse(headers_of(received))
    assert keys.verifies(content.body, received.properties, said)
    each = each._replace(headers={})
    assert maker.alone(each) == maker.expected(each)


class Sends:
    """Sends tasks, and keeps what would be published, instead of a broker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.published: list[Publication] = []
        self.by_celery = 0

        def publish(_: Any, publication: Publication, *__: Any) -> None:
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
            return mock.Mock() if connection is not None else None

        real = TaskSending.send
        monkeypatch.setattr(pipelines, "current_pipeline", pipeline)
        monkeypatch.setattr(pipelines, "publish_task", publish)
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
    taken = copies.OF_MEMBER - {"task_id", "eta", "producer"}
    shared: dict[str, Any] = {name: options[name] for name in taken if name in options}
    call = Call(options["task_id"], args, kwargs, Due.at(options["eta"]))
    delayed = capture(app.rabbitdelay, task, call, shared).delayed
    return read(Content.of(delayed.message.amqp())), delayed.destination


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"queue": "office", "priority": 4},
        {"exchange": "office", "routing_key": "paper", "serializer": "json"},
        {"queue": "elsewhere", "serializer": "pickle"},
        {"queue": None, "priority": None, "serializer": None},
    ],
)
@frozen()
def test_a_plain_send_is_what_celery_would_have_sent(sends: Sends, app: Any, options: Any) -> None:
    eta = instant_of(wall_clock.ms()) + HOUR
    given: tuple[Any, Any] = (("it's", 2), {"a": [1.5]})
    for name in ("look", "bound"):
        ways = (name, partial(app.send_task, name)), (app.tasks[name], app.tasks[name].apply_async)
        for time in ({"delay": HOUR}, {"countdown": 3600, "tolerance": 5}, {"eta": eta}):
            for task, send in ways:
                own = {**options, "task_id": "x"}
                assert sends.from_template(send, *given, **own, **time)
                publication = sends.published[-1]
                expected, destination = celerys(app, task, *given, {**own, "eta": eta})
                assert read(publication.content) == expected
                route = app.rabbitdelay.topology.route(Due.at(eta), destination, "x")
                assert publication.address() == (route.exchange, route.routing_key)


def rows_are_copies(app: Any, task: Any = None, **options: Any) -> bool:
    """Return whether the rows of a task are written from a template that is kept."""

    def captured(*given: Any, **options: Any) -> CapturingProducer:
        if "headers" in options:
            raise LookupError("the first row is sent through Celery")
        return capture(*given, **options)

    call = Call("row", (1,), {}, Due.after(60))
    with mock.patch.object(copies, "capture", captured), suppress(LookupError):
        app.rabbitdelay.part(Copies).of_rows(task or app.tasks["look"], call, options, {}, None)
        return True
    return False


@frozen()
def test_the_members_of_a_group_come_from_a_template(sends: Sends, app: Any) -> None:
    of_all = {"group_id": "g", "root_id": "r", "parent_id": "p", "reply_to": "q"}
    eta = instant_of(wall_clock.ms()) + HOUR
    own = {**of_all, "producer": PRODUCER, "add_to_parent": False, "eta": eta, "task_id": "x"}
    look, from_template = app.tasks["look"], []
    for index in range(5):
        own["group_index"] = index
        from_template.append(sends.from_template(look.apply_async, (index,), **own))
        if from_template[-1]:
            expected, _ = celerys(app, look, (index,), {}, own)
            assert read(sends.published[-1].content) == expected
    assert all(from_template)


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
    *[("expires", 900), ("headers", {"a": 1}), ("link", None), ("retry", True)],
    *[("reply_to", "x"), ("group_id", "g"), ("queue", Queue("own"))],
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
    assert not sends.from_template(app.send_task, "look", **options)
    assert not sends.from_template(app.tasks["look"].apply_async, **options)
    of_all = {name: value for name, value in options.items() if name not in ("delay", "eta")}
    assert rows_are_copies(app, **of_all) == (not of_all)


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
    apply_async = app.tasks["look"].apply_async
    assert sends.from_template(apply_async, delay=60)
    assert rows_are_copies(app)
    with monkeypatch.context() as patch:
        try:
            OWN_CODE[what](app, patch)
            monkeypatch.setattr(celery.Task, "apply", lambda *_, **__: app.send_task("look"))
            for _ in range(2):
                assert not sends.from_template(apply_async, delay=60)
                assert not rows_are_copies(app)
        finally:
            signals.before_task_publish.disconnect(receive)


def test_routers_and_subclasses_send_through_celery(sends: Sends) -> None:
    class OwnTask(celery.Task):  # type: ignore[type-arg]  # no generic before Celery 5.7
        def apply_async(self, *args: Any, **options: Any) -> Any:
            return super().apply_async(*args, **options)

    class OwnApp(celery.Celery):
        def send_task(self, *args: Any, **options: Any) -> Any:
            return super().send_task(*args, **options)

    routed = make_app(task_routes=[route])
    own_app = celery_rabbitdelay.install(OwnApp("shop", broker=NOWHERE, set_as_current=False))
    own_tasks: Any = Celery("shop", broker=NOWHERE, set_as_current=False, task_cls=OwnTask)
    for app in (routed, own_app, own_tasks):
        task = app.task(receive, name="own", shared=False)
        for _ in range(2):
            assert not sends.from_template(task.apply_async, delay=60)
            assert not rows_are_copies(app, task)


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


def test_a_worker_s_task_sends_through_celery(sends: Sends, app: Any) -> None:
    task, state = app.tasks["look"], importlib.import_module("celery._state")
    task.push_request(id="parent", called_directly=False)
    state._task_stack.push(task)
    try:
        assert not sends.from_template(task.apply_async, delay=60)
        assert not rows_are_copies(app)
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


def test_there_are_only_so_many_templates(
    sends: Sends, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "MAX_TEMPLATES", 3)
    for number in range(20):
        assert sends.from_template(app.send_task, f"task-{number}", delay=60)
        assert len(app.rabbitdelay.part(Copies)._templates) <= 3
