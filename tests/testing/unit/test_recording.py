"""What an application sends, recorded: no server is running here.

What runs when, and what the registry decides, is compared with the real system for random sequences
of calls in ``tests/testing/integration/test_recorded_sequences.py``.
"""

import asyncio
import socket
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import celery
import pytest
from celery import chain, group
from celery.exceptions import QueueNotFound
from kombu import Connection

from celery_rabbitdelay import (
    Celery,
    ConnectionLost,
    DelayTooLong,
    InvalidDelay,
    InvalidSetting,
    JobClosed,
    NotRecorded,
    Outcome,
    RegistryRequired,
    install,
)
from celery_rabbitdelay.testing import Recording, recorded

#: Nothing listens there.
BROKER: Final = "amqp://guest:guest@127.0.0.1:1//"
REDIS: Final = "redis://127.0.0.1:1/0"

DAYS: Final = timedelta(days=1)

#: What the tasks have done, in their order.
done: list[Any] = []


def make(app: Any, **settings: Any) -> Any:
    done.clear()
    app.conf.update(task_queues=None, broker_connection_timeout=0.1, **settings)

    @app.task(name="shop.remind", shared=False)
    def remind(order: int, text: str = "") -> int:
        done.append(order)
        return order

    @app.task(name="shop.add", shared=False)
    def add(one: int, other: int) -> int:
        done.append(one + other)
        return one + other

    @app.task(name="shop.hourly", shared=False)
    def hourly() -> None:
        done.append("hourly")
        hourly.apply_async(delay=3600)

    @app.task(name="shop.note", shared=False)
    def note(*args: Any) -> None:
        done.append("noted")

    return app


def new(**settings: Any) -> Any:
    """Make an application whose servers do not run."""
    return make(Celery("shop", broker=BROKER, set_as_current=False), **settings)


@pytest.fixture
def app() -> Any:
    return new()


@pytest.fixture
def shop() -> Any:
    """An application with a registry and a result backend."""
    return new(rabbitdelay_registry_url=REDIS, result_backend=REDIS)


@pytest.fixture(autouse=True)
def connections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The addresses that were connected to, none of them unless a test clears the list."""
    tried: list[Any] = []
    of_others = set(threading.enumerate()) - {threading.current_thread()}

    def connect(_: socket.socket, address: Any) -> None:
        if threading.current_thread() not in of_others:
            tried.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket.socket, "connect", connect)
    yield tried
    assert tried == []


# What is recorded.


def test_a_delayed_send_is_recorded_with_all_that_its_message_says(app: Any) -> None:
    before = datetime.now(UTC)
    options = {"queue": "mails", "priority": 3, "expires": 7 * 86_400, "headers": {"tenant": "a"}}
    with recorded(app) as sent:
        remind = app.tasks["shop.remind"]
        result = remind.apply_async(
            (7,), {"text": "please"}, delay=3 * DAYS, tolerance=60, **options
        )
    one = sent.one("shop.remind")
    assert (one.task_id, one.args, one.kwargs) == (result.id, [7], {"text": "please"})
    assert (one.delay, one.tolerance, one.has_eta) == (3 * DAYS, timedelta(minutes=1), False)
    assert before + 3 * DAYS - timedelta(seconds=1) < one.due < datetime.now(UTC) + 3 * DAYS
    assert (one.exchange, one.routing_key, one.queue, one.priority) == ("", "mails", "mails", 3)
    assert one.expires is not None
    assert abs(one.expires - before - 7 * DAYS) < timedelta(seconds=5)
    assert (one.headers["tenant"], one.headers["id"]) == ("a", result.id)
    assert (one.key, one.job, one.once) == (None, None, False)


def test_all_of_celerys_ways_to_send_are_recorded(app: Any) -> None:
    remind, delay = app.tasks["shop.remind"], 60
    with recorded(app) as sent:
        remind.delay(1)
        remind.apply_async((2,), countdown=delay)
        app.send_task("another.service", (3,))
        remind.s(4).set(delay=delay).apply_async()
        remind.apply_async((5,), eta=datetime.now(UTC) + timedelta(seconds=delay))
        group(remind.s(number) for number in (6, 7)).apply_async(delay=delay)
        chain(remind.si(8), remind.si(20).set(delay=delay)).apply_async()
        app.rabbitdelay.send_many(remind, [{"args": [9], "delay": delay}, {"args": [10]}])
        with app.rabbitdelay.pipeline():
            remind.apply_async((11,), delay=delay)
            remind.delay(12)
        asyncio.run(app.rabbitdelay.send(remind, (13,), delay=delay))
        with Connection(BROKER) as connection:
            remind.apply_async((14,), delay=delay, connection=connection)
            remind.apply_async((15,), producer=connection.Producer(auto_declare=False))
        assert [one.args[0] for one in sent.all()] == [*range(1, 16)]
        assert [one.args[0] for one in sent.all(delay=0)] == [1, 3, 8, 10, 12, 15]
        sent.run_due(within=0)
        assert sent.one(args=[20], delay=delay), "8 has run"


def test_tasks_of_every_kind_of_application_are_recorded(app: Any) -> None:
    plain: Any = make(celery.Celery("shop", broker=BROKER, set_as_current=False))
    with pytest.raises(TypeError, match="installed"), recorded(plain):
        pass
    install(plain)
    for each in (plain, make(Celery("shop", broker="redis://127.0.0.1:1/0", set_as_current=False))):
        with recorded(each) as sent:
            each.tasks["shop.remind"].apply_async((1,), delay=60)
            each.tasks["shop.remind"].delay(2)
            assert [one.args for one in sent.run_due()] == [[2], [1]]
    eager = new(task_always_eager=True)
    with recorded(eager) as sent:
        eager.tasks["shop.remind"].apply_async((7,), delay=60)
    assert (done[-1], sent.all()) == (7, [])
    former = new(task_protocol=1)
    with recorded(former), pytest.raises(InvalidSetting, match=r"task_protocol = 1: .*protocol 2"):
        former.tasks["shop.remind"].apply_async((7,), delay=60)


# What is restored.


def test_everything_is_restored_at_the_end_also_after_an_error(
    shop: Any, connections: list[Any]
) -> None:
    with recorded(shop):
        replaced = shop.rabbitdelay.registry
    backend, registry = shop.backend, shop.rabbitdelay.registry
    assert registry is not replaced

    def fail() -> None:
        with recorded(shop):
            assert shop.backend is not backend
            assert shop.rabbitdelay.registry is not registry
            raise ValueError("order")

    with pytest.raises(ValueError, match="order"):
        fail()
    assert shop.backend is backend
    assert shop.rabbitdelay.registry is registry
    with pytest.raises(ConnectionLost):
        shop.rabbitdelay.check(timeout=0.2)
    assert connections
    connections.clear()


def test_a_block_within_a_block_records_alone(app: Any) -> None:
    remind = app.tasks["shop.remind"]
    with recorded(app) as outer:
        remind.delay(1)
        with recorded(app) as inner:
            remind.delay(2)
            with pytest.raises(RuntimeError, match="within the block"):
                outer.run_due()
        remind.apply_async((3,), delay=60)
    assert [one.args for one in outer.all()] == [[1], [3]]
    assert [one.args for one in inner.all()] == [[2]]
    with pytest.raises(RuntimeError, match="within the block"):
        outer.run_due()


# What is refused.


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"delay": float("nan")}, InvalidDelay),
        ({"delay": 60, "countdown": 60}, TypeError),
        ({"queue": "mials"}, QueueNotFound),
        ({"delay": 5000 * DAYS}, DelayTooLong),
        ({"delay": 60, "key": "order:7"}, RegistryRequired),
        ({"delay": 60, "args": ()}, TypeError),
        ({"args": (object(),)}, Exception),
    ],
)
def test_a_send_is_checked_as_a_real_one(options: Any, error: Any) -> None:
    app = new(task_create_missing_queues=False, rabbitdelay_modules=[])
    with recorded(app) as sent, pytest.raises(error):
        app.tasks["shop.remind"].apply_async(**{"args": (1,), **options})
    assert sent.all() == []


# What tests ask for.


@pytest.fixture
def sent(app: Any) -> Recording:
    with recorded(app) as sent:
        remind = app.tasks["shop.remind"]
        remind.apply_async((7,), delay=2 * DAYS, headers={"tenant": "a"})
        remind.apply_async((8,), eta=datetime.now(UTC) + 3 * DAYS, expires=4 * 86_400)
        app.tasks["shop.note"].delay(("a", "b"))
    return sent


def test_a_send_is_found_by_any_of_its_fields(sent: Recording, app: Any) -> None:
    seven, eight, note = sent.all()
    second = timedelta(seconds=1)
    assert sent.one("shop.remind", delay=172_800) is seven
    assert sent.one(app.tasks["shop.remind"], args=(8,)) is eight
    assert sent.one("shop.remind", delay=3 * DAYS) is eight
    # Only an eta may have become shorter.
    for wrong in (2 * DAYS + second, 2 * DAYS - second, 3 * DAYS - second, 3 * DAYS + 9 * second):
        sent.none("shop.remind", delay=wrong)
    assert sent.one(due=datetime.now(UTC) + 3 * DAYS) is eight
    assert sent.one(expires=4 * DAYS) is eight
    assert sent.one(headers={"tenant": "a"}) is seven
    assert sent.one(args=[("a", "b")]) is note
    with pytest.raises(TypeError, match="has no field dealy; it has task, args"):
        sent.none(dealy=3)


def test_a_failure_says_what_was_sent_and_what_differs(sent: Recording) -> None:
    with pytest.raises(AssertionError) as failed:
        sent.one("shop.remind", args=[7], delay=3 * DAYS)
    first, *lines = str(failed.value).splitlines()
    assert first.startswith("Expected one send of shop.remind with args = [7] and delay = 3 days")
    assert lines[:2] == ["  shop.remind(7) after 2 days", "    ! delay is 2 days, not 3 days"]
    with pytest.raises(AssertionError, match="2 were recorded"):
        sent.one("shop.remind")
    with pytest.raises(AssertionError, match=r"Expected no send of shop\.note"):
        sent.none("shop.note")


# What is run.


def test_what_a_task_sends_is_due_from_when_it_was_due_and_what_was_cancelled_does_not_run(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    remind = shop.tasks["shop.remind"]
    with recorded(shop) as sent:
        remind.apply_async((1,), delay=DAYS, expires=3600)
        remind.apply_async((2,), delay=60).revoke()
        tracked = remind.apply_async((3,), delay=60, track=True)
        assert shop.rabbitdelay.cancel(tracked) is Outcome.DONE
        assert shop.control.ping() is None
        shop.tasks["shop.hourly"].delay()
        assert {one.task for one in sent.run_due(within=2 * DAYS)} == {"shop.hourly"}
        *_, first, last = sent.all("shop.hourly")
        assert last.due - first.due >= timedelta(hours=1)
        assert len(sent.all("shop.hourly")) == 50
        monkeypatch.setattr("celery_rabbitdelay.testing.recording.MAX_RUNS", 50)
        with pytest.raises(RuntimeError, match="50 tasks have run"):
            sent.run_due()
    assert done == ["hourly"] * len(done)


def test_chains_and_results_need_no_server(shop: Any) -> None:
    add, note = shop.tasks["shop.add"], shop.tasks["shop.note"]

    @shop.task(name="shop.wait", shared=False)
    def wait() -> None:
        add.delay(1, 2).get()

    with recorded(shop) as sent:
        result = chain(add.s(1, 2), add.s(3).set(delay=60)).apply_async(link=note.si())
        with pytest.raises(NotRecorded, match="run_due"):
            result.get()
        assert [one.task for one in sent.run_due(within=0)] == ["shop.add"]
        sent.run_due()
        assert (done, result.get()) == ([3, 6, "noted"], 6)
    with recorded(shop) as sent:
        assert add.apply_async((1, 1), task_id=result.id).state == "PENDING"
        wait.delay()
        with pytest.raises(RuntimeError, match="Never call result"):
            sent.run_due()


def test_the_registry_decides_in_memory(shop: Any) -> None:
    remind, delays = shop.tasks["shop.remind"], shop.rabbitdelay
    with recorded(shop) as sent:
        older, _ = (
            remind.apply_async((number,), delay=number * DAYS, key="order:1") for number in (1, 2)
        )
        tracked = remind.apply_async((6,), delay=9 * DAYS, key="order:6", track=True)
        assert [each.task_id for each in delays.pending(task="shop.remind")] == [tracked.id]
        assert delays.postpone(key="order:6", delay=3 * DAYS) is Outcome.DONE
        untracked = remind.apply_async((3,), delay=60)
        assert delays.postpone(untracked, delay=2.5 * DAYS) is Outcome.NOTED
        with delays.job("import", expires=3600):
            remind.apply_async((7,), job="import")
            assert sent.run_due(within=0) == []
        with pytest.raises(JobClosed):
            remind.apply_async((8,), job="import")
        delays.open_job("failed", expires=3600)
        expired = remind.apply_async((9,), delay=60, job="failed", track=True)
        delays.abort_job("failed")
        sent.run_due()
        shown = [delays.show(each) for each in (older, expired)]
        assert [(each.state, each.key, each.job) for each in shown] == [
            ("superseded", "order:1", None),
            ("expired", None, "failed"),
        ]
    assert done == [7, 2, 3, 6]
