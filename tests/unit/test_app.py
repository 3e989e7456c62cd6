"""What an application takes and refuses before it speaks to any broker."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import celery
import pytest
from celery import Task, chain, group
from kombu import Exchange, Queue

from celery_rabbitdelay import Celery, exceptions, install
from celery_rabbitdelay.app.sending.rows import row_of
from celery_rabbitdelay.app.task import TEMPORARY_ERRORS
from celery_rabbitdelay.worker.bootsteps import Modules

#: A port that nothing listens on: what gets as far as the broker fails with another error.
NOWHERE = "amqp://guest:guest@127.0.0.1:1//"

NOWHERE_REDIS = "redis://127.0.0.1:1"

#: It is no row.
SEVEN: Any = "seven"


@pytest.fixture
def app() -> Any:
    app: Any = Celery("shop", broker=NOWHERE, set_as_current=False)
    app.conf.task_publish_retry = False
    app.conf.rabbitdelay_modules = []

    @app.task(name="remind", shared=False)
    def remind(*args: Any) -> None: ...

    return app


@pytest.fixture
def remind(app: Any) -> Any:
    return app.tasks["remind"]


@pytest.mark.parametrize("tolerance", [-1, "60", True, float("nan"), timedelta(seconds=-1)])
@pytest.mark.parametrize("time", [{"delay": 5}, {"countdown": 5}, {}])
def test_a_wrong_tolerance_is_refused_by_that_name(remind: Any, time: Any, tolerance: Any) -> None:
    with pytest.raises(exceptions.InvalidDelay, match="tolerance") as caught:
        remind.apply_async(**time, tolerance=tolerance)
    assert caught.value.value is tolerance
    assert caught.value.what == "tolerance"


def test_a_delay_that_ends_beyond_all_counting_is_refused(remind: Any) -> None:
    with pytest.raises((exceptions.InvalidDelay, exceptions.DelayTooLong)):
        remind.apply_async(delay=10**18)


@pytest.mark.parametrize(
    "time",
    [
        *({"countdown": value} for value in (True, "5", float("nan"))),
        *({"eta": value} for value in ("tomorrow", 5)),
    ],
    ids=str,
)
def test_a_countdown_and_an_eta_are_checked_as_a_delay_is(remind: Any, time: Any) -> None:
    with pytest.raises((exceptions.InvalidDelay, exceptions.InvalidDelayType)):
        remind.apply_async(**time)


@pytest.mark.parametrize("eta", ["tomorrow", 5, date(2100, 1, 1)])
def test_what_is_no_eta_is_named_with_an_example(remind: Any, eta: Any) -> None:
    with pytest.raises(exceptions.InvalidDelay) as caught:
        remind.apply_async(eta=eta)
    assert str(caught.value).startswith(f"eta {eta!r}: takes a datetime or ISO 8601")
    assert str(caught.value).endswith("such as 2030-01-31T09:00:00+01:00")


@pytest.mark.parametrize(
    ("call", "given", "example"),
    [
        (lambda app: app.send_task("remind", eta="tomorrow"), "'tomorrow'", "2030-01-31T09:00"),
        (lambda app: app.send_task("remind", eta=5), "eta 5", "2030-01-31T09:00"),
        (lambda app: app.send_task("remind", delay="5"), "'5'", "timedelta(days=3)"),
        (lambda app: app.send_task("remind", delay=5, key=7), "key = 7", "'key:7'"),
        (lambda app: app.rabbitdelay.cancel(7), "not 7", "result.id"),
        (lambda app: app.rabbitdelay.cancel("a", key="b"), "not 'a' and 'b'", "key='order:7'"),
        (lambda app: app.rabbitdelay.cancel(), "not none", "key='order:7'"),
        (lambda app: app.rabbitdelay.postpone("a"), "neither was given", "delay=60"),
        (lambda app: row_of(SEVEN), "row 'seven'", '{"args": [7], "delay": 3600}'),
    ],
)
def test_a_refusal_says_what_was_given_and_gives_an_example(
    app: Any, call: Callable[[Any], Any], given: str, example: str
) -> None:
    with pytest.raises((ValueError, TypeError)) as refused:
        call(app)
    assert given in str(refused.value)
    assert example in str(refused.value)


def test_a_delay_above_the_capacity_names_the_capacity(remind: Any) -> None:
    with pytest.raises(exceptions.DelayTooLong, match=r"345,599,999\.900 s"):
        remind.apply_async(delay=timedelta(days=4000))


def test_a_delay_of_more_than_a_hundred_years_is_refused(app: Any, remind: Any) -> None:
    app.conf.rabbitdelay_modules = ["check-in", "distribution"]
    with pytest.raises(
        exceptions.InvalidDelay, match="is longer than the longest delay, 3,153,600,000 s"
    ):
        remind.apply_async(delay=timedelta(days=36_500, milliseconds=1))


def test_an_unreachable_broker_is_an_operational_error_as_celery_documents(remind: Any) -> None:
    with pytest.raises(celery.exceptions.OperationalError):
        remind.apply_async(delay=5)


@pytest.mark.parametrize(
    ("late", "told"),
    [
        ({"rabbitdelay_bogus": 1}, "no such setting; there are rabbitdelay_prefix, "),
        ({"rabbitdelay_takeovr": False}, "did you mean rabbitdelay_takeover?"),
        ({"rabbitdelay_prefix": "other"}, "is set too late, 'rabbitdelay' is in use"),
        ({"rabbitdelay_signing_key": "s" * 40}, "signing_key = '**': is set too late, None is in"),
        ({"rabbitdelay_takeover": "no"}, "takes True or False"),
        ({"RABBITDELAY_PREFIX": "other"}, "write rabbitdelay_prefix"),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "change",
    [
        lambda app, late: app.conf.update(late),
        lambda app, late: app.add_defaults(late),
        lambda app, late: app.config_from_object({"broker_url": NOWHERE, **late}),
    ],
    ids=["update", "add_defaults", "config_from_object"],
)
def test_a_setting_that_is_changed_after_its_use_is_an_error_of_the_next_send(
    app: Any, remind: Any, change: Callable[..., None], late: dict[str, Any], told: str
) -> None:
    with pytest.raises(celery.exceptions.OperationalError):
        remind.apply_async(delay=5)
    change(app, late)
    senders: list[Callable[[], Any]] = [
        lambda: remind.apply_async(countdown=5),
        lambda: remind.apply_async(delay=-5, key="order:7"),
        lambda: app.send_task("remind", delay=5),
        lambda: app.rabbitdelay.send_many(remind, []),
        lambda: app.rabbitdelay.postpone("id", delay=5),
    ]
    for send in senders:
        with pytest.raises(exceptions.InvalidSetting) as caught:
            send()
        assert told in str(caught.value)


def test_a_worker_that_is_no_command_raises_the_error_of_a_wrong_setting(app: Any) -> None:
    app.conf.rabbitdelay_prefixx = "a"
    # A fake: a real worker sets up its whole process.
    worker = SimpleNamespace(app=app)
    with pytest.raises(exceptions.InvalidSetting, match="did you mean rabbitdelay_prefix"):
        Modules(worker).include(worker)


def test_a_setting_that_is_set_again_to_what_it_was_changes_nothing(app: Any, remind: Any) -> None:
    for _ in range(2):
        app.conf.update(rabbitdelay_takeover=True, rabbitdelay_modules=[], task_ignore_result=True)
        with pytest.raises(celery.exceptions.OperationalError):
            remind.apply_async(delay=5)


@pytest.mark.parametrize("timeout", ["5", 0, -1, float("nan")])
def test_a_timeout_of_one_call_is_checked_as_the_setting_is(remind: Any, timeout: Any) -> None:
    with pytest.raises(exceptions.InvalidSetting, match="confirm_timeout"):
        remind.apply_async(delay=5, confirm_timeout=timeout)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("time", [{"delay": 5}, {"countdown": 5}, {}], ids=str)
@pytest.mark.parametrize(
    ("option", "value"), [("key", "order:7"), ("job", "import"), ("once", True), ("track", True)]
)
def test_an_option_of_the_registry_needs_one_however_the_task_is_sent(
    app: Any, remind: Any, option: str, value: Any, time: dict[str, Any], eager: bool
) -> None:
    app.conf.task_always_eager = eager
    given = {option: value, **time}
    other = app.signature("remind", app=app)
    senders: list[Callable[[], Any]] = [
        lambda: remind.apply_async(**given),
        lambda: remind.s().apply_async(**given),
        lambda: remind.s().set(**given).apply_async(),
        lambda: remind.retry(throw=False, **given),
    ]
    if not eager:
        # Celery applies the parts of an eager canvas without sending them.
        senders += [
            lambda: chain(remind.si().set(**given), remind.si()).apply_async(),
            lambda: app.send_task("remind", **given),
            lambda: other.set(**given).apply_async(),
            lambda: remind.apply_async(link=remind.si().set(**given)),
            lambda: chain(remind.si(), remind.si().set(**given)).apply_async(),
        ]
        if option != "key":  # of one task: a group refuses it in any case
            senders.append(lambda: group(remind.si(), remind.si()).apply_async(**given))
    for send in senders:
        with pytest.raises(
            exceptions.RegistryRequired, match=f"{option} = {value!r} needs the registry"
        ):
            send()


def test_a_retry_of_a_task_that_a_worker_holds_raises_why_it_is_refused(app: Any) -> None:
    app.conf.rabbitdelay_registry_url = NOWHERE_REDIS

    @app.task(bind=True, shared=False, rabbitdelay=False)
    def held(self: Any) -> None: ...

    held.push_request(id="one", args=(), kwargs={}, called_directly=False)
    # Celery would drop the message, and say so in a warning.
    with pytest.raises(exceptions.UnknownOption, match="the registry cannot reach it"):
        held.retry(countdown=5, once=True)


def test_what_celery_takes_by_position_is_taken_by_position(app: Any) -> None:
    router = app.amqp.router
    with pytest.raises(exceptions.ConnectionLost):
        app.send_task("remind", (), {}, None, None, "id", None, None, router, delay=5)


def test_queues_that_are_set_are_still_celery_s_queues(app: Any) -> None:
    app.amqp.queues = [Queue("one")]
    assert app.amqp.queues["one"].exchange.name == "celery"


@pytest.mark.parametrize("retries", [0, 1])
def test_only_a_retry_goes_back_to_the_queue_that_its_headers_name(app: Any, retries: int) -> None:
    fanout = Exchange("all", type="fanout")
    app.conf.task_queues = [Queue("a", fanout), Queue("b", fanout)]
    headers = {"rabbitdelay-due": 1, "rabbitdelay-queue": "b"}
    expected = exceptions.ConnectionLost if retries else exceptions.NeedsDistribution
    with pytest.raises(expected):
        app.send_task("remind", delay=5, queue="a", headers=headers, retries=retries)


@pytest.mark.parametrize(
    "error",
    [exceptions.LayoutConflict, exceptions.NeedsDistribution, exceptions.TopologyIncomplete],
)
def test_our_errors_of_sending_are_celery_s_and_no_retry_waits_for_them(error: Any) -> None:
    assert issubclass(error, Task.OperationalError)
    assert not issubclass(error, TEMPORARY_ERRORS)


def test_a_wrong_setting_fails_at_the_first_delay(app: Any, remind: Any) -> None:
    app.conf.rabbitdelay_layout = "sundial"
    with pytest.raises(exceptions.InvalidSetting, match="sundial"):
        remind.apply_async(delay=5)


@pytest.fixture
def in_memory() -> Any:
    """An application whose messages stay in this process."""
    return Celery("shop", broker="memory://", set_as_current=False)


@pytest.mark.parametrize(
    ("rabbitdelay", "time"),
    [
        (False, {"delay": timedelta(seconds=3600)}),
        # On another broker than RabbitMQ, a delay is Celery's countdown.
        (True, {"delay": 3600}),
        *((own, {"eta": datetime(2100, 1, 1)}) for own in (True, False)),
    ],
    ids=str,
)
def test_where_celery_delays_a_task_it_has_an_eta(
    in_memory: Any, rabbitdelay: bool, time: dict[str, Any]
) -> None:
    @in_memory.task(rabbitdelay=rabbitdelay, shared=False)
    def remind() -> None: ...

    remind.apply_async(**time)
    eta = _header_of_the_only_message(in_memory)["eta"]
    if "eta" in time:  # a naive one means what Celery says
        assert eta == "2100-01-01T00:00:00"
    else:
        left = datetime.fromisoformat(eta) - datetime.now(UTC)
        assert timedelta(minutes=59) < left <= timedelta(hours=1)


@pytest.mark.parametrize("protocol", [1, 2])
@pytest.mark.parametrize("event", [True, False])
def test_a_held_task_says_its_eta(
    monkeypatch: pytest.MonkeyPatch, in_memory: Any, protocol: int, event: bool
) -> None:
    app = in_memory
    app.conf.update(task_protocol=protocol, task_send_sent_event=event)
    app.conf.task_queues = [Queue("quorum", queue_arguments={"x-queue-type": "quorum"})]
    app.conf.task_default_queue = "held"
    # A fake: memory stands in for RabbitMQ, which nothing is asked of.
    monkeypatch.setattr(
        "celery_rabbitdelay.app.extension.RabbitDelay.is_available", lambda *arguments: True
    )

    @app.task(rabbitdelay=False, shared=False)
    def remind() -> None: ...

    with app.connection_for_write() as connection:
        remind.apply_async(delay=600)
        remind.apply_async(countdown=600, connection=connection)
        remind.apply_async(countdown=600, producer=app.amqp.Producer(connection))
        remind.apply_async(eta=datetime.now(UTC) + timedelta(seconds=600))
        with connection.SimpleQueue("held") as queue:
            messages = [queue.get_nowait() for _ in range(4)]
    for message in messages:
        told = message.headers if protocol == 2 else message.payload
        left = datetime.fromisoformat(told["eta"]) - datetime.now(UTC)
        assert timedelta(seconds=540) < left <= timedelta(seconds=600)


def _header_of_the_only_message(app: Celery) -> dict[str, Any]:
    with app.connection_for_write() as connection, connection.SimpleQueue("celery") as queue:
        headers: dict[str, Any] = queue.get_nowait().headers
        queue.clear()
        return headers


def test_eager_tasks_run_at_once(app: Any, remind: Any) -> None:
    app.conf.task_always_eager = True
    app.conf.broker_url = "memory://"
    assert remind.apply_async(delay=3600).state == "SUCCESS"


class Custom(celery.Celery):
    """A third party's application class."""


@pytest.mark.parametrize("base", [celery.Celery, Custom])
def test_install_makes_an_existing_application_ours(base: type[celery.Celery]) -> None:
    app = base("shop", broker=NOWHERE, set_as_current=False)
    app.conf.rabbitdelay_modules = ["distribution"]
    assert app.amqp.queues is not None

    @app.task(shared=False)
    def remind() -> None: ...

    assert install(app) is app
    assert isinstance(app, base)
    assert isinstance(app, Celery)
    assert install(app) is app
    with pytest.raises(exceptions.DelayTooLong):
        app.tasks[remind.name].apply_async(countdown=1e9)


@pytest.mark.parametrize("base", [celery.Celery, Custom])
def test_an_installed_application_survives_pickling(base: type[celery.Celery]) -> None:
    app = install(base("shop", broker=NOWHERE, set_as_current=False))
    copy = pickle.loads(pickle.dumps(app))
    assert isinstance(copy, base)
    assert isinstance(copy, Celery)
    assert copy.main == "shop"


def test_a_task_class_of_the_user_s_own_stays() -> None:
    class Audited(celery.Task):  # type: ignore[type-arg]
        audited = True

    app: Any = Celery("shop", broker=NOWHERE, task_cls=Audited, set_as_current=False)

    @app.task(shared=False)
    def remind() -> None: ...

    assert isinstance(remind, Audited)
    assert remind.audited
    assert app.tasks[remind.name].rabbitdelay
