"""The private parts of Celery that the two files celery_internals.py use are where they look.

A test that fails names the part that a new version of Celery has moved.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from unittest import mock

import celery
import pytest
from celery.app.amqp import AMQP, Queues
from celery.app.defaults import SETTING_KEYS
from celery.app.task import Task
from celery.backends.cache import CacheBackend
from celery.bootsteps import StartStopStep
from celery.canvas import Signature
from celery.exceptions import InvalidTaskError, Reject
from celery.utils.quorum_queues import detect_quorum_queues
from celery.worker import state
from celery.worker.consumer.consumer import Consumer
from celery.worker.consumer.delayed_delivery import DelayedDelivery
from kombu import Queue
from kombu.common import QoS
from kombu.exceptions import DecodeError
from kombu.utils.limits import TokenBucket

from celery_rabbitdelay.app import celery_internals as of_app
from celery_rabbitdelay.worker import celery_internals as of_worker
from celery_rabbitdelay.worker import celery_requests


def moved(name: str, file: str = "app/celery_internals.py") -> str:
    return f"Celery {celery.__version__} has moved or changed {name}: mend {file}"


def moved_in_worker(name: str) -> str:
    return moved(name, "worker/celery_internals.py")


@pytest.fixture
def app() -> Any:
    app: Any = celery.Celery("shop", broker="memory://", set_as_current=False)

    @app.task(name="remind", shared=False)
    def remind(order: int) -> None: ...

    return app


def parameters(function: Any) -> list[str]:
    return [*inspect.signature(function).parameters]


def test_an_application_connects_anew(app: Any) -> None:
    app.conf.result_backend = "cache+memory://"
    former = [app.backend, app.pool, app.amqp.producer_pool]
    app.conf.update(broker_url="memory://elsewhere", result_backend="rpc://")
    of_app.forget_connections(app)
    for one, other in zip(former, [app.backend, app.pool, app.amqp.producer_pool], strict=True):
        assert one is not other, moved("what an application keeps of its connections")


def test_results_are_kept_elsewhere_for_a_while(app: Any) -> None:
    own = app.backend
    other = CacheBackend(app, url="memory://")
    with of_app.results_kept_in(app, other):
        assert app.backend is app.tasks["remind"].backend is other, moved("_backend_cache")
    assert app.backend is own


def test_celery_says_when_it_counts_the_retries_of_a_callback_itself() -> None:
    assert not of_app.sends_a_callback()
    if hasattr(AMQP, "_retry_publish"):  # from 5.7 on
        seen: list[bool] = []
        app = celery.Celery("shop", broker="memory://", set_as_current=False)
        retrying: Any = app.amqp
        retrying._retry_publish(lambda: seen.append(of_app.sends_a_callback()))
        assert seen == [True], moved("amqp._callback_publish_retry")


def test_the_function_that_sends_a_group_s_members_acquires_their_producer(app: Any) -> None:
    seen: list[bool] = []

    def acquire(producer: Any = None) -> Any:
        seen.append(of_app.sends_a_group())
        return nullcontext(app.amqp.Producer(app.connection_for_write(), auto_declare=False))

    app.producer_or_acquire = acquire
    celery.group([app.tasks["remind"].si(7).set(queue="group")], app=app).apply_async()
    # The first for the group, and the other one for its member.
    assert seen == [True, False], moved("group._apply_tasks")


def test_send_task_acquires_a_producer_and_has_the_id_of_its_task(app: Any) -> None:
    seen: list[str | None] = []

    def acquire(producer: Any = None) -> Any:
        seen.append(of_app.task_that_is_sent())
        return nullcontext(app.amqp.Producer(app.connection_for_write(), auto_declare=False))

    app.producer_or_acquire = acquire
    app.send_task("remind", task_id="an id")
    acquire()
    assert seen == ["an id", None], moved("Celery.send_task")


def test_a_retry_by_autoretry_is_told_from_a_task_s_own(app: Any) -> None:
    seen: list[bool] = []

    class Retrying(Task):  # type: ignore[type-arg]
        name, autoretry_for = "retrying", (LookupError,)

        def retry(self, *args: Any, **options: Any) -> Any:
            seen.append(of_app.retries_by_itself())
            return ValueError("a retry")

        def run(self, is_own: bool) -> None:
            raise self.retry() if is_own else LookupError

    task = app.register_task(Retrying())
    for is_own in (True, False):
        with pytest.raises(ValueError, match="a retry"):
            task(is_own)
    assert seen == [False, True], moved("celery.app.autoretry")


def test_a_task_is_found_without_finalizing_the_application(app: Any) -> None:
    assert hasattr(app, "_tasks"), moved("Celery._tasks")
    assert of_app.registered_task(app, "unknown") is None
    assert not app.finalized, moved("Celery._tasks, which finalizes the application now")
    app.finalize()
    found = of_app.registered_task(app, "remind")
    assert found is not None, moved("Celery._tasks")
    assert found.name == "remind"


def test_send_task_takes_its_first_arguments_in_our_order() -> None:
    first = ["self", "name", "args", "kwargs", "countdown", "eta", "task_id", "producer"]
    order = parameters(celery.Celery.send_task)
    assert order[:9] == [*first, "connection"], moved("the order of send_task's arguments")
    assert "publisher" in order, moved("send_task(publisher)")
    assert "task_type" in order, moved("send_task(task_type)")


def test_a_quorum_queue_turns_native_delayed_delivery_on(app: Any) -> None:
    assert parameters(detect_quorum_queues) == ["app", "driver_type"], moved("detect_quorum_queues")
    assert not of_app.has_quorum_queue(app), moved("detect_quorum_queues")
    app.conf.task_queues = [Queue("quorum", queue_arguments={"x-queue-type": "quorum"})]
    app.amqp.__dict__.pop("queues", None)
    assert of_app.has_quorum_queue(app), moved("detect_quorum_queues")


@pytest.mark.parametrize("name", ["amqp", "control", "AsyncResult", "Task"])
def test_an_application_caches_what_it_makes(app: Any, name: str) -> None:
    assert name not in vars(app)
    assert getattr(app, name) is vars(app)[name], moved(f"Celery.{name}, a cached property")


def test_each_task_is_put_into_the_registry_before_it_is_used(app: Any) -> None:
    seen: list[str] = []

    class Tasks(type(app._tasks)):  # type: ignore[misc]
        def __setitem__(self, name: str, task: Any) -> None:
            seen.append(name)
            super().__setitem__(name, task)

    class Registered(Task):  # type: ignore[type-arg]
        name = "registered"

    def run() -> None: ...

    app._tasks.__class__ = Tasks
    celery.shared_task(name="shared")(run)
    app.task(run, name="decorated", shared=False)
    app.register_task(Registered())
    app.finalize()
    assert {"decorated", "registered", "shared", "celery.chord"} <= {*seen}, moved("Celery._tasks")


def test_an_application_is_rebuilt_from_its_class_first(app: Any) -> None:
    rebuild, arguments = app.__reduce__()
    assert callable(rebuild), moved("the shape of Celery.__reduce__")
    assert arguments[0] is celery.Celery, moved("the shape of Celery.__reduce__")


def test_queues_are_made_and_selected_by_these_methods(app: Any) -> None:
    assert hasattr(AMQP, "Queues"), moved("AMQP.Queues")
    assert isinstance(app.amqp.Queues([]), Queues), moved("AMQP.Queues")
    assert hasattr(Queues, "select_add"), moved("Queues.select_add")
    assert app.amqp.queues.select_add("more").name == "more", moved("Queues.select_add")
    assert "more" in app.amqp.queues.consume_from, moved("Queues.consume_from")
    assert "amqp" in app.__dict__, moved("Celery.amqp, which was a cached property")
    assert "queues" in app.amqp.__dict__, moved("AMQP.queues, which was a cached property")


def test_a_task_checks_its_arguments(app: Any) -> None:
    check = of_app.argument_check(app.tasks["remind"])
    assert check is not None, moved("Task.__header__")
    check(7)
    with pytest.raises(TypeError):
        check(7, 8)


def test_a_signature_has_its_application_and_its_task(app: Any) -> None:
    class Own(Signature[Any]):
        """A signature of another class."""

    signature: Any = app.tasks["remind"].s(7)
    for name in ("_app", "_type"):
        assert hasattr(signature, name), moved(f"Signature.{name}")
    copy: Any = of_app.copied_as(Own, signature)
    assert (copy._app, copy._type) == (signature._app, signature._type), moved("Signature")
    assert dict(copy) == dict(signature), moved("Signature.__init__")


def test_messages_show_their_arguments_as_we_show_them(app: Any) -> None:
    for name in ("argsrepr_maxsize", "kwargsrepr_maxsize"):
        assert isinstance(getattr(AMQP, name, None), int), moved(f"AMQP.{name}")
    assert "task_serializer" in SETTING_KEYS, moved("app.defaults.SETTING_KEYS")
    args, kwargs = ([[[[["x" * 5000]]]]], 1), {"k": "y" * 5000}
    message = app.amqp.as_task_v2("id", "remind", args, kwargs)
    sizes, levels = of_app.repr_limits(app)
    for name, value, size in zip(("argsrepr", "kwargsrepr"), (args, kwargs), sizes, strict=True):
        shown = of_app.celerys_repr(value, size, levels)
        assert message.headers[name] == shown, moved(f"how a message shows {name}")


def test_a_configuration_says_what_was_set_and_how_many_sources_it_has(app: Any) -> None:
    str(app.conf.broker_url)  # until it is needed, the configuration is another object
    _, sources, changes = of_app.own_changes(app, "mine")
    app.conf.mine_one = 1
    app.conf.update(MINE_TWO=2)
    app.add_defaults({"mine_three": 3})
    _, more, now = of_app.own_changes(app, "mine")
    assert (changes, now) == ({}, {"mine_one": 1, "MINE_TWO": 2}), moved("Settings.changes")
    assert more == sources + 1, moved("Settings.maps")


def test_a_retry_takes_its_first_arguments_in_our_order_and_rejects_what_it_cannot_send() -> None:
    first = ["self", "args", "kwargs", "exc", "throw", "eta", "countdown", "max_retries"]
    assert parameters(Task.retry)[:8] == first, moved("the order of Task.retry's arguments")
    assert "raise Reject(exc, requeue=False)" in inspect.getsource(Task.retry), moved(
        "what Task.retry raises when it cannot send", "app/task.py"
    )
    unsent = ValueError("x")
    assert Reject(unsent).args[0] is unsent, moved("Reject.args", "app/task.py")


def test_celerys_own_delayed_delivery_is_a_step_that_can_be_left_out() -> None:
    consumer: Any = type("Fake", (), {})()
    other = object()
    # A fake: a real consumer would have to run in a worker.
    consumer.steps = [other, DelayedDelivery.__new__(DelayedDelivery)]
    of_worker.leave_out_delayed_delivery(consumer)
    assert consumer.steps == [other]
    assert "parent.steps.append" in inspect.getsource(StartStopStep.include), moved_in_worker(
        "consumer.steps"
    )


def test_a_worker_s_consumer_has_what_the_early_tasks_need() -> None:
    source = inspect.getsource(Consumer)
    for name in ("hub", "controller", "qos", "task_consumer", "strategies"):
        assert f"self.{name}" in source, moved_in_worker(f"Consumer.{name}")
    for name in ("on_invalid_task", "on_decode_error", "perform_pending_operations"):
        assert callable(getattr(Consumer, name, None)), moved_in_worker(f"Consumer.{name}")
    assert parameters(Consumer.on_invalid_task) == ["self", "body", "message", "exc"], (
        moved_in_worker("the arguments of Consumer.on_invalid_task")
    )
    assert parameters(Consumer.on_decode_error) == ["self", "message", "exc"], moved_in_worker(
        "the arguments of Consumer.on_decode_error"
    )
    for name in ("increment_eventually", "decrement_eventually"):
        assert callable(getattr(QoS, name, None)), moved_in_worker(f"kombu's QoS.{name}")


def test_a_task_that_its_rate_limit_holds_is_in_a_bucket_of_the_consumer() -> None:
    consumer: Any = Consumer.__new__(Consumer)
    consumer.task_buckets = {"limited": TokenBucket(1), "other": None}
    consumer._limit_order, consumer.timer = 0, mock.Mock()
    consumer.on_task_request = mock.Mock()

    def waits(task_id: str, task: str = "limited") -> bool:
        message: Any = mock.Mock(headers={"id": task_id})
        delivery = of_worker.Delivery(message, None, mock.Mock(), mock.Mock(), task, False)
        return of_worker.waits_for_rate(consumer, delivery)

    for each in ("first", "second"):
        request = mock.Mock(id=each)
        consumer._limit_task(request, consumer.task_buckets["limited"], 1)
        state.reserved_requests.discard(request)
        state.requests.pop(each, None)
    assert (waits("first"), waits("second")) == (False, True), moved_in_worker("task_buckets")
    assert not waits("second", "other")


def test_a_worker_knows_which_tasks_are_revoked() -> None:
    assert hasattr(state, "revoked"), moved_in_worker("celery.worker.state.revoked")
    state.revoked.add("upstream")
    try:
        consumer: Any = type("Fake", (), {})()
        consumer.controller = type("Fake", (), {"state": state})()
        assert of_worker.is_revoked(consumer, "upstream"), moved_in_worker("state.revoked")
        assert not of_worker.is_revoked(consumer, "other")
    finally:
        state.revoked.discard("upstream")


@pytest.mark.parametrize(
    ("error", "handler"),
    [
        (InvalidTaskError("x"), "on_invalid_task"),
        (DecodeError("x"), "on_decode_error"),
        (TypeError("x"), "undeliverable"),
    ],
)
def test_errors_of_a_strategy_go_to_the_consumer(error: Exception, handler: str) -> None:
    called: list[str] = []

    class Fake:
        """Notes what a real consumer would do about a message."""

        connection_errors = channel_errors = ()

        def on_invalid_task(self, *arguments: Any) -> None:
            called.append("on_invalid_task")

        def on_decode_error(self, *arguments: Any) -> None:
            called.append("on_decode_error")

    def strategy() -> None:
        raise error

    message: Any = None
    delivery = of_worker.Delivery(message, None, print, strategy, "task", False)
    celery_requests.run_strategy(Fake(), delivery, lambda *_: called.append("undeliverable"))
    assert called == [handler]


def test_an_eta_is_read_as_celery_reads_it() -> None:
    instant = datetime(2030, 1, 2, tzinfo=UTC)
    tokyo = timezone(timedelta(hours=9))
    for value in (instant, instant.isoformat(), "2030-01-02T00:00:00"):
        assert of_app.eta_of(value, tokyo) == instant, moved_in_worker("utils.time")
    wrong: list[Any] = [None, "tomorrow", 5]
    for each in wrong:
        assert of_app.eta_of(each, tokyo) is None, moved_in_worker("utils.time.maybe_iso8601")
