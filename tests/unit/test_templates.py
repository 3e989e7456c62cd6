"""A send from a template is what Celery would have sent, and none where Celery might differ."""

from __future__ import annotations

import functools
import importlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock

import celery
import pytest
from celery import signals
from celery.app.routes import MapRoute, prepare
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kombu import Connection, Exchange, Queue
from kombu.exceptions import EncodeError

import celery_rabbitdelay
from celery_rabbitdelay import Celery, InvalidSetting, MessageTooLarge, Row
from celery_rabbitdelay.app.sending import templates
from celery_rabbitdelay.app.sending.task_messages import Call, CapturingProducer, capture_message
from celery_rabbitdelay.app.sending.task_sending import TaskSending
from celery_rabbitdelay.levels.delay import Due, instant_of
from celery_rabbitdelay.publishing.publication import Publication
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.publishing.wire import Content
from tests.unit.clock import frozen
from tests.unit.test_message_template import NOWHERE, json_able, read, texts

HOUR = timedelta(hours=1)


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


def make_app(**given: Any) -> Any:
    app: Any = Celery("shop", broker=NOWHERE, set_as_current=False)
    office = Queue("office", Exchange("office"), "paper")
    app.conf.update(task_queues=[Queue("celery"), office], **given)

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

    return app


@pytest.fixture
def app() -> Iterator[Any]:
    app = make_app()
    yield app
    app.close()


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
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


APP = make_app()
PRODUCER = APP.amqp.Producer(APP.connection_for_write(), auto_declare=False)


@pytest.mark.parametrize(
    "options",
    [
        {"delay": 60},
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


OTHER_OPTIONS = [
    *[("expires", 900), ("headers", {"a": 1}), ("link", None), ("shadow", "x"), ("retry", True)],
    *[("confirm_timeout", 5), ("once", True), ("key", "k"), ("reply_to", "x"), ("root_id", "r")],
    *[("group_id", "g"), ("queue", Queue("own")), ("priority", 2.5), ("task_id", 7)],
    *[("compression", "gzip"), ("a-stamp", 1)],
]


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


def test_the_hosts_of_the_caller_s_connection_say_whether_a_queue_may_refuse(
    app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[str] = []

    def publish_all(_: Any, publications: Any, *__: Any, **___: Any) -> None:
        keys.extend(each.address()[1] for each in publications)

    monkeypatch.setattr(Publisher, "publish_all", publish_all)
    cluster = Connection(f"{NOWHERE};{NOWHERE}")
    for connection in (None, cluster, None):
        rows = [Row(delay=60)]
        app.rabbitdelay.send_many("look", rows, connection=connection, envelopes=False)
    assert [key.rpartition(".")[2] == "celery" for key in keys] == [True, False, True]


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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"delay": 0},
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


def receive(**_: Any) -> None:
    """A receiver of a signal."""


def route(name: str, *_: Any, **__: Any) -> dict[str, Any]:
    """A router."""
    return {"queue": "office"}


class OwnRoute(MapRoute):
    """A map of routes that also looks at the arguments."""


#: Things that an application or a library may do; afterwards each send must go through Celery.
OWN_CODE: dict[str, Callable[[Any, Any], Any]] = {
    "a receiver of before_task_publish": lambda app, _: signals.before_task_publish.connect(
        receive
    ),
    "a receiver of after_task_publish": lambda app, _: signals.after_task_publish.connect(receive),
    "a receiver of task_sent": lambda app, _: signals.task_sent.connect(receive),
    "an event for each task": lambda app, _: app.conf.update(task_send_sent_event=True),
    "message protocol 1": lambda app, _: app.conf.update(task_protocol=1),
    "eager": lambda app, _: app.conf.update(task_always_eager=True),
    "tasks run once": lambda app, _: setattr(app.tasks["look"], "once", True),
    "not in the levels": lambda app, _: setattr(app.tasks["look"], "rabbitdelay", False),
    "an expiry": lambda app, _: vars(app.tasks["look"]).update(expires=60, _exec_options=None),
    "a wrapped send_task": lambda app, patch: patch.setattr(
        celery.Celery, "send_task", wrapped(celery.Celery.send_task)
    ),
    "a wrapped apply_async": lambda app, patch: patch.setattr(
        celery.Task, "apply_async", wrapped(celery.Task.apply_async)
    ),
    "a mock": lambda app, patch: patch.setattr(app.amqp, "send_task_message", mock.Mock()),
    "a wrapped maker": lambda app, patch: patch.setattr(
        celery.app.amqp.AMQP, "as_task_v2", wrapped(celery.app.amqp.AMQP.as_task_v2)
    ),
    "a wrapped message of an application": lambda app, patch: patch.setattr(
        app.amqp, "create_task_message", wrapped(app.amqp.create_task_message)
    ),
    "a route of its own": lambda app, _: setattr(app.amqp.router, "routes", (OwnRoute({}),)),
    "a router that has no routes": lambda app, _: vars(app.amqp).update(
        router=mock.Mock(spec=["route"])
    ),
    "a router": lambda app, _: setattr(app.amqp.router, "routes", [route]),
    "a shadow": lambda app, _: setattr(app.tasks["look"], "shadow_name", lambda *_: "shadow"),
}


def wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


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
            for signal in (signals.before_task_publish, signals.after_task_publish):
                signal.disconnect(receive)
            signals.task_sent.disconnect(receive)


def test_routers_subclasses_and_the_registry_send_through_celery(sends: Sends) -> None:
    class OwnTask(celery.Task):  # type: ignore[type-arg]  # no generic before Celery 5.7
        def apply_async(self, *args: Any, **options: Any) -> Any:
            return super().apply_async(*args, **options)

    class OwnApp(celery.Celery):
        def send_task(self, *args: Any, **options: Any) -> Any:
            return super().send_task(*args, **options)

    class OwnAMQP(celery.app.amqp.AMQP):
        pass

    routed = make_app(task_routes=[route])
    own_app = celery_rabbitdelay.install(OwnApp("shop", broker=NOWHERE, set_as_current=False))
    own_tasks: Any = Celery("shop", broker=NOWHERE, set_as_current=False, task_cls=OwnTask)
    own_amqp = Celery("shop", broker=NOWHERE, set_as_current=False, amqp=OwnAMQP)
    tracked = make_app(rabbitdelay_registry_url="redis://127.0.0.1:1", rabbitdelay_track="all")
    for app in (routed, own_app, own_tasks, own_amqp, tracked):
        task = app.task(receive, name="own", shared=False)
        for _ in range(2):
            assert not sends.from_template(task.apply_async, delay=60)
            assert of_rows(app, task) is None


#: Changes of data after which Celery makes other messages of the same calls.
CHANGES: dict[str, Callable[[Any], object]] = {
    "default queue": lambda app: app.conf.update(task_default_queue="office"),
    "priority": lambda app: vars(app.tasks["look"]).update(priority=7, _exec_options=None),
    "queues": lambda app: app.amqp.queues.add(Queue("third")),
    "another queue in its place": lambda app: app.amqp.queues.add(
        Queue("celery", Exchange("office", "topic"), "other paper")
    ),
    "routes": lambda app: vars(app.amqp).update(
        router=app.amqp.router.__class__(prepare([{"look": {"queue": "office"}}]), app.amqp.queues)
    ),
    "ignore_result": lambda app: vars(app.tasks["look"]).update(
        ignore_result=True, _exec_options=None
    ),
    "lengths of reprs": lambda app: vars(app.amqp).update(argsrepr_maxsize=8),
    "time limit": lambda app: vars(app.tasks["look"]).update(time_limit=9, _exec_options=None),
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
    assert (before != after) == (what != "queues")


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

    task = app.task(receive_all, base=Counting, name="counting", shared=False)
    for number in range(3):
        assert sends.from_template(task.apply_async, (number,))
    assert called == [(0,), (1,), (2,)]
    assert of_rows(app, task) is None
    bodies = [json.loads(read(each.content)[1]) for each in sends.published]
    assert [body[0] for body in bodies] == [["first", number] for number in range(3)]


def receive_all(*_: Any) -> None:
    """Takes anything."""


def test_a_task_that_was_defined_before_install_comes_from_a_template(sends: Sends) -> None:
    plain: Any = celery.Celery("shop", broker=NOWHERE, set_as_current=False)
    plain.task(receive, name="early", shared=False)
    plain.finalize()
    app = celery_rabbitdelay.install(plain)
    for _ in range(2):
        assert sends.from_template(app.send_task, "early", delay=60)
        assert sends.from_template(app.tasks["early"].apply_async, countdown=60)


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
