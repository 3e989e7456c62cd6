"""What an application sends, recorded: no server is running here."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import celery
import pytest
from celery import chain, chord, group
from celery.exceptions import QueueNotFound
from kombu import Connection

from celery_rabbitdelay import (
    Celery,
    ConnectionLost,
    DelayTooLong,
    InvalidDelay,
    JobClosed,
    NeedsDistribution,
    NotRecorded,
    NotTracked,
    Outcome,
    RegistryRequired,
    RowsNotConfirmed,
    install,
    signals,
)
from celery_rabbitdelay.testing import Recording, recorded

#: Nothing listens there.
BROKER: Final = "amqp://guest:guest@127.0.0.1:1//"
REDIS: Final = "redis://127.0.0.1:1/0"

DAYS: Final = timedelta(days=1)

#: What the tasks have done, in their order.
done: list[Any] = []


def make(app: Any, **settings: Any) -> Any:
    app.conf.update(task_queues=None, **settings)
    app.conf.broker_connection_timeout = 0.1

    @app.task(name="shop.remind", shared=False)
    def remind(order: int, text: str = "") -> int:
        done.append(order)
        return order

    @app.task(name="shop.add", shared=False)
    def add(one: int, other: int) -> int:
        done.append(one + other)
        return one + other

    @app.task(name="shop.total", shared=False)
    def total(numbers: list[int]) -> int:
        done.append(sum(numbers))
        return sum(numbers)

    @app.task(name="shop.poll", bind=True, shared=False, max_retries=3)
    def poll(self: Any, times: int) -> None:
        done.append((self.request.retries, self.request.id))
        if self.request.retries < times:
            self.retry(delay=timedelta(hours=1))

    @app.task(name="shop.hourly", shared=False)
    def hourly() -> None:
        done.append("hourly")
        hourly.apply_async(delay=3600)

    @app.task(name="shop.fail", bind=True, shared=False)
    def fail(self: Any) -> None:
        raise LookupError("no such order")

    @app.task(name="shop.note", shared=False)
    def note(*args: Any) -> None:
        done.append("noted")

    return app


@pytest.fixture
def new_app() -> Iterator[Callable[..., Any]]:
    """Make an application whose servers do not run."""
    done.clear()
    made: list[Any] = []

    def new(**settings: Any) -> Any:
        made.append(make(Celery("shop", broker=BROKER, set_as_current=False), **settings))
        return made[-1]

    yield new
    for app in made:
        app.close()


@pytest.fixture
def app(new_app: Callable[..., Any]) -> Any:
    return new_app()


@pytest.fixture
def shop(new_app: Callable[..., Any]) -> Any:
    """An application with a registry and a result backend."""
    return new_app(rabbitdelay_registry_url=REDIS, result_backend=REDIS)


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
    with recorded(app) as sent:
        result = app.tasks["shop.remind"].apply_async(
            (7,),
            {"text": "please"},
            delay=3 * DAYS,
            tolerance=60,
            queue="mails",
            priority=3,
            expires=7 * 86_400,
            headers={"tenant": "a"},
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
        app.send_task("shop.remind", (3,), delay=delay)
        app.send_task("another.service", (4,))
        remind.s(5).set(delay=delay).apply_async()
        remind.apply_async((6,), eta=datetime.now(UTC) + timedelta(seconds=delay))
        group(remind.s(number) for number in (7, 8)).apply_async(delay=delay)
        chain(remind.si(9), remind.si(10).set(delay=delay)).apply_async()
        app.rabbitdelay.send_many(remind, [{"args": [11], "delay": delay}, {"args": [12]}])
        with app.rabbitdelay.pipeline():
            remind.apply_async((13,), delay=delay)
            remind.apply_async((14,), delay=delay)
            remind.delay(15)
        asyncio.run(app.rabbitdelay.send(remind, (16,), delay=delay))
        with Connection(BROKER) as connection:
            remind.apply_async((17,), connection=connection)
            remind.apply_async((18,), delay=delay, connection=connection)
            remind.apply_async((19,), producer=connection.Producer(auto_declare=False))
        alone = sent.all()
        sent.run_due(within=0)
    # 10 follows 9 when that has run.
    numbers = [number for number in range(1, 20) if number != 10]
    assert [one.args[0] for one in alone] == numbers
    without_delay = [one.args[0] for one in sent.all(delay=0)]
    assert without_delay == [1, 4, 9, 12, 15, 17, 19]
    assert len(sent.all(delay=delay)) == len(numbers) + 1 - len(without_delay)
    assert sent.one(args=[10]) is sent.all()[-1]


def test_a_group_through_a_pipeline_and_an_envelope_are_recorded_task_by_task(
    new_app: Callable[..., Any],
) -> None:
    app = new_app(rabbitdelay_modules=["check-in", "distribution"], task_send_sent_event=True)
    remind = app.tasks["shop.remind"]
    with app.rabbitdelay.pipeline(), recorded(app) as sent:
        group(remind.s(number) for number in range(9)).apply_async(delay=60)
        report = app.rabbitdelay.send_many(remind, [{"args": [9], "delay": 60}] * 3)
        remind.apply_async((10,), delay=60, exchange="news", routing_key="sports", priority=9)
        remind.delay(11)  # an event follows it
    assert (report.sent, report.confirmed) == (3, 3)
    assert [one.args[0] for one in sent.all()] == [*range(9), 9, 9, 9, 10, 11]
    assert len(sent.all(delay=60)) == 13
    routed = sent.one(args=(10,))
    assert (routed.exchange, routed.routing_key, routed.queue) == ("news", "sports", None)
    assert routed.priority == 9


def test_a_task_that_a_worker_holds_is_recorded_with_its_due_time(app: Any) -> None:
    @app.task(name="shop.held", rabbitdelay=False, shared=False)
    def held() -> None: ...

    with recorded(app) as sent:
        held.apply_async(countdown=60)
    assert sent.one(held, delay=60, queue="celery").has_eta
    assert abs(sent.one(held).due - datetime.now(UTC)) < timedelta(seconds=61)


def test_another_broker_is_recorded_too() -> None:
    app = make(Celery("shop", broker="redis://127.0.0.1:1/0", set_as_current=False))
    with recorded(app) as sent:
        app.tasks["shop.remind"].apply_async((1,), delay=60)
        app.tasks["shop.remind"].delay(2)
    assert [one.args for one in sent.all(queue="celery")] == [[1], [2]]
    app.close()


def test_compressed_and_pickled_arguments_are_read(app: Any) -> None:
    with recorded(app) as sent:
        for number, delay in enumerate((0, 60)):
            app.tasks["shop.remind"].apply_async(
                ((number, "x" * 500),), delay=delay, serializer="pickle", compression="zlib"
            )
    assert [one.args for one in sent.all()] == [((0, "x" * 500),), ((1, "x" * 500),)]


def test_an_installed_application_is_recorded() -> None:
    done.clear()
    plain: Any = make(celery.Celery("shop", broker=BROKER, set_as_current=False))
    app = install(plain)
    with recorded(app) as sent:
        plain.tasks["shop.remind"].apply_async((1,), delay=60)
        plain.tasks["shop.remind"].delay(2)
        ran = sent.run_due()
    assert [one.args for one in ran] == [[2], [1]]
    assert done == [2, 1]
    app.close()


def test_a_plain_application_is_refused() -> None:
    app = celery.Celery("shop", broker=BROKER, set_as_current=False)
    with pytest.raises(TypeError, match="installed"), recorded(app):
        pass


def test_the_first_message_protocol_is_refused(new_app: Callable[..., Any]) -> None:
    with pytest.raises(NotRecorded, match="protocol 1"), recorded(new_app(task_protocol=1)):
        pass


def test_eager_tasks_run_and_are_not_recorded(new_app: Callable[..., Any]) -> None:
    app = new_app(task_always_eager=True)
    with recorded(app) as sent:
        app.tasks["shop.remind"].apply_async((7,), delay=60)
    assert (done, sent.all()) == ([7], [])


def test_threads_record_in_one_list(app: Any) -> None:
    remind = app.tasks["shop.remind"]

    def send(number: int) -> None:
        for each in range(50):
            remind.apply_async((number, str(each)), delay=60 * (each % 2))

    with recorded(app) as sent:
        threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len({one.task_id for one in sent.all()}) == 200
    own = [one.args[1] for one in sent.all() if one.args[0] == 3]
    assert own == [str(each) for each in range(50)]


# What is restored.


def test_everything_is_restored_at_the_end_also_after_an_error(
    shop: Any, connections: list[Any]
) -> None:
    backend, registry = shop.backend, shop.rabbitdelay.registry
    for error in (ValueError("order"), None):
        try:
            with recorded(shop):
                assert shop.backend is not backend
                assert shop.rabbitdelay.registry is not registry
                if error is not None:
                    raise error
        except ValueError:
            assert error is not None
        assert shop.backend is backend
        assert shop.rabbitdelay.registry is registry
        assert shop.rabbitdelay.stand_in is None
        with pytest.raises(ConnectionLost):
            shop.rabbitdelay.check(timeout=0.2)
        assert connections
        connections.clear()
        with shop.producer_or_acquire() as producer:
            assert type(producer) is shop.amqp.Producer


def test_a_registry_that_was_not_used_before_is_not_replaced_for_good(shop: Any) -> None:
    with recorded(shop):
        replaced = shop.rabbitdelay.registry
    assert shop.rabbitdelay.registry is not replaced


def test_a_block_within_a_block_records_alone(app: Any) -> None:
    remind = app.tasks["shop.remind"]
    with recorded(app) as outer:
        remind.delay(1)
        with recorded(app) as inner:
            remind.delay(2)
        remind.apply_async((3,), delay=60)
    assert [one.args for one in outer.all()] == [[1], [3]]
    assert [one.args for one in inner.all()] == [[2]]


# What is refused.


def test_a_send_is_checked_as_a_real_one(new_app: Callable[..., Any]) -> None:
    app = new_app(task_create_missing_queues=False, rabbitdelay_modules=[])
    remind = app.tasks["shop.remind"]
    with recorded(app) as sent:
        with pytest.raises(InvalidDelay):
            remind.apply_async((1,), delay=float("nan"))
        with pytest.raises(TypeError):
            remind.apply_async((1,), delay=60, countdown=60)
        with pytest.raises(QueueNotFound):
            remind.apply_async((1,), delay=60, queue="mials")
        with pytest.raises(QueueNotFound):
            remind.apply_async((1,), queue="mials")
        with pytest.raises(DelayTooLong):
            remind.apply_async((1,), delay=5000 * DAYS)
        with pytest.raises(NeedsDistribution):
            remind.apply_async((1,), delay=60, priority=9)
        with pytest.raises(RegistryRequired):
            remind.apply_async((1,), delay=60, key="order:7")
        with pytest.raises(TypeError):
            remind.apply_async((), delay=60)
        with pytest.raises(Exception, match="not JSON serializable"):
            remind.apply_async((object(),), delay=60)
        with pytest.raises(Exception, match="not JSON serializable"):
            remind.delay(object())
        with pytest.raises(RowsNotConfirmed):
            app.rabbitdelay.send_many(remind, [{"args": [1], "delay": float("nan")}])
        with pytest.raises(RegistryRequired):
            app.rabbitdelay.cancel(key="order:7")
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
    assert sent.one("shop.remind", delay=172_800) is seven
    assert sent.one(app.tasks["shop.remind"], args=(8,)) is eight
    assert sent.one(delay=3 * DAYS) is eight
    assert sent.one(due=datetime.now(UTC) + 3 * DAYS) is eight
    assert sent.one(expires=4 * DAYS) is eight
    assert sent.one(headers={"tenant": "a"}) is seven
    assert sent.one(args=[("a", "b")]) is note
    assert sent.all("shop.remind") == [seven, eight]
    sent.none("shop.remind", delay=3 * DAYS, args=[7])


def test_a_delay_is_exact_and_only_an_eta_may_have_become_shorter(sent: Recording) -> None:
    second = timedelta(seconds=1)
    for wrong in (2 * DAYS + second, 2 * DAYS - second, 3 * DAYS - second, 3 * DAYS + 9 * second):
        sent.none("shop.remind", delay=wrong)
    assert sent.one("shop.remind", delay=3 * DAYS + second).args == [8]


def test_a_failed_one_says_what_was_sent_and_what_differs(sent: Recording) -> None:
    with pytest.raises(AssertionError) as failed:
        sent.one("shop.remind", args=[7], delay=3 * DAYS)
    lines = str(failed.value).splitlines()
    assert lines[0] == (
        "Expected one send of shop.remind with args = [7] and delay = 3 days; none was recorded. "
        "3 sent, the most alike first:"
    )
    assert lines[1:3] == ["  shop.remind(7) after 2 days", "    ! delay is 2 days, not 3 days"]
    assert "    ! task is 'shop.note', not 'shop.remind'" in lines
    with pytest.raises(AssertionError, match=r"! headers is \{'tenant': 'a'\}, not"):
        sent.one(headers={"tenant": "b"})


def test_a_failed_one_says_which_are_too_many(sent: Recording) -> None:
    with pytest.raises(AssertionError, match="2 were recorded") as failed:
        sent.one("shop.remind")
    assert "shop.remind(7) after 2 days" in str(failed.value)
    assert "!" not in str(failed.value)
    assert "shop.note" not in str(failed.value)


def test_a_failed_none_shows_what_should_not_have_been_sent(sent: Recording) -> None:
    with pytest.raises(AssertionError) as failed:
        sent.none("shop.note")
    assert str(failed.value) == (
        "Expected no send of shop.note. Sent:\n  shop.note(['a', 'b']) without a delay"
    )


def test_nothing_sent_is_said_in_words(app: Any) -> None:
    with recorded(app) as sent, pytest.raises(AssertionError, match="Nothing was sent"):
        sent.one()


def test_a_long_list_is_cut(app: Any) -> None:
    with recorded(app) as sent:
        for number in range(30):
            app.tasks["shop.remind"].delay(number)
    with pytest.raises(AssertionError, match="and 10 more"):
        sent.one("shop.note")


def test_a_field_that_does_not_exist_is_an_error(sent: Recording) -> None:
    with pytest.raises(TypeError, match="has no dealy; it has task, args"):
        sent.none(dealy=3)


# What is run.


def test_due_tasks_run_in_the_order_in_which_they_are_due(app: Any) -> None:
    remind = app.tasks["shop.remind"]
    with recorded(app) as sent:
        for number, delay in ((3, 3 * DAYS), (1, DAYS), (2, 2 * DAYS), (4, 4 * DAYS)):
            remind.apply_async((number,), delay=delay)
        remind.delay(0)
        app.send_task("another.service", ())
        assert [one.args for one in sent.run_due(within=3 * DAYS)] == [[0], [1], [2], [3]]
        assert done == [0, 1, 2, 3]
        assert sent.run_due(within=DAYS / 2) == []
        assert [one.args for one in sent.run_due(within=DAYS / 2)] == [[4]]


def test_delays_of_what_a_task_sends_count_from_when_it_was_due(app: Any) -> None:
    with recorded(app) as sent:
        app.tasks["shop.hourly"].delay()
        assert len(sent.run_due(within=timedelta(hours=24))) == 25
        first, *_, last = sent.all()
        app.tasks["shop.remind"].apply_async((1,), delay=60)
    # The first one ran a little later than it was due.
    late = last.due - first.due - timedelta(hours=25)
    assert timedelta(0) <= late < timedelta(minutes=1)
    assert last.delay == timedelta(hours=1)
    # The package's clock has moved, and goes on.
    in_a_day = first.due + timedelta(hours=24, minutes=1)
    assert sent.one("shop.remind", due=in_a_day).args == [1]


def test_tasks_without_end_are_an_error(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_rabbitdelay.testing.recording.MAX_RUNS", 50)
    with recorded(app) as sent:
        app.tasks["shop.hourly"].delay()
        with pytest.raises(RuntimeError, match="50 tasks have run"):
            sent.run_due()
    assert len(done) == 50


def test_a_retry_has_the_id_and_the_queue_of_its_task(app: Any) -> None:
    with recorded(app) as sent:
        result = app.tasks["shop.poll"].apply_async((2,), delay=60, queue="polls")
        ran = sent.run_due(within=2 * DAYS)
    assert done == [(retries, result.id) for retries in range(3)]
    assert [one.queue for one in ran] == ["polls"] * 3
    assert [one.delay.total_seconds() for one in ran] == [60, 3600, 3600]
    assert (ran[2].due - ran[0].due).total_seconds() == 7200


def test_a_task_sees_the_request_that_a_worker_would_give_it(app: Any) -> None:
    seen: list[Any] = []

    @app.task(name="shop.look", bind=True, shared=False)
    def look(self: Any, again: bool) -> None:
        seen.append(self.request)
        if again:
            look.apply_async((False,), delay=60, headers={"tenant": "a"}, priority=3)

    with recorded(app) as sent:
        look.delay(again=True)
        first, second = sent.run_due()
    assert [request.id for request in seen] == [first.task_id, second.task_id]
    assert (seen[1].parent_id, seen[1].root_id) == (first.task_id, first.task_id)
    assert not seen[1].called_directly
    assert not seen[1].is_eager
    due_ms = round(second.due.timestamp() * 1000)
    own = {"tenant": "a", "rabbitdelay-due": due_ms, "rabbitdelay-queue": "celery"}
    assert own.items() <= seen[1].headers.items()
    assert "rabbitdelay-exchange" not in seen[1].headers
    assert {"routing_key": "celery", "priority": 3}.items() <= seen[1].delivery_info.items()


def test_links_and_chains_go_on(app: Any) -> None:
    add, note = app.tasks["shop.add"], app.tasks["shop.note"]
    with recorded(app) as sent:
        chain(add.s(1, 2), add.s(3).set(delay=60)).apply_async(link=note.si())
        assert [one.task for one in sent.run_due(within=0)] == ["shop.add"]
        second = sent.one(add, args=[3, 3], delay=60)
        sent.run_due()
    assert done == [3, 6, "noted"]
    assert second.headers["parent_id"] == sent.all()[0].task_id


def test_a_chord_and_results_need_no_server(shop: Any) -> None:
    add, total = shop.tasks["shop.add"], shop.tasks["shop.total"]
    with recorded(shop) as sent:
        result = chord([add.s(1, 2), add.s(3, 4).set(delay=60)])(total.s())
        with pytest.raises(NotRecorded, match="run_due"):
            result.get()
        sent.run_due()
        assert done == [3, 7, 10]
        assert result.get() == 10
        assert add.apply_async((1, 1), task_id=result.id).state == "SUCCESS"
    with recorded(shop):
        assert add.apply_async((1, 1), task_id=result.id).state == "PENDING"


def test_a_task_may_not_wait_for_another(shop: Any) -> None:
    add = shop.tasks["shop.add"]

    @shop.task(name="shop.wait", shared=False)
    def wait() -> None:
        add.delay(1, 2).get()

    with recorded(shop) as sent:
        wait.delay()
        with pytest.raises(RuntimeError, match="Never call result"):
            sent.run_due()


def test_an_error_of_a_task_is_raised_and_the_others_run_then(app: Any) -> None:
    fail, total, remind = (app.tasks[f"shop.{name}"] for name in ("fail", "total", "remind"))
    with recorded(app) as sent:
        fail.apply_async(link_error=total.si([2]))
        remind.apply_async((1,), delay=60)
        with pytest.raises(LookupError, match="no such order"):
            sent.run_due()
        assert done == []
        assert [one.task for one in sent.run_due()] == ["shop.total", "shop.remind"]


def test_a_task_that_has_expired_does_not_run(app: Any) -> None:
    remind = app.tasks["shop.remind"]
    with recorded(app) as sent:
        remind.apply_async((1,), delay=2 * DAYS, expires=86_400)
        remind.apply_async((2,), delay=2 * DAYS, expires=3 * 86_400)
        sent.run_due()
    assert done == [2]


def test_an_eta_counts_from_the_present_also_in_a_task(app: Any) -> None:
    note = app.tasks["shop.note"]

    @app.task(name="shop.at", shared=False)
    def at() -> None:
        note.apply_async(eta=datetime.now(UTC) + 3 * DAYS)

    with recorded(app) as sent:
        at.apply_async(delay=2 * DAYS)
        sent.run_due(within=2 * DAYS)
    assert abs(sent.one(note).due - datetime.now(UTC) - 3 * DAYS) < timedelta(seconds=5)


def test_tasks_run_within_the_block_only(app: Any) -> None:
    with recorded(app) as sent:
        with recorded(app), pytest.raises(RuntimeError, match="within the block"):
            sent.run_due()
        assert sent.run_due() == []
    with pytest.raises(RuntimeError, match="within the block"):
        sent.run_due()


# The registry.


def test_the_newest_task_under_a_key_runs(shop: Any) -> None:
    remind, poll = shop.tasks["shop.remind"], shop.tasks["shop.poll"]
    with recorded(shop) as sent:
        remind.apply_async((1,), delay=3 * DAYS, key="order:7")
        remind.apply_async((2,), delay=DAYS, key="order:7")
        remind.apply_async((3,), delay=2 * DAYS, key="order:8")
        shop.rabbitdelay.send_many(
            remind, [{"args": [each], "delay": 60, "key": "order:9"} for each in (4, 5)]
        )
        poll.apply_async((1,), key="poll")
        assert [one.args for one in sent.all(remind, key="order:7")] == [[1], [2]]
        sent.run_due()
    assert [each for each in done if isinstance(each, int)] == [5, 2, 3]
    assert [each[0] for each in done if isinstance(each, tuple)] == [0, 1]
    assert len(sent.all(poll, key="poll")) == 2


def test_a_unique_task_is_left_out_while_another_waits(shop: Any) -> None:
    remind = shop.tasks["shop.remind"]
    with recorded(shop) as sent:
        first = remind.apply_async((1,), delay=60, key="order:7", unique="first")
        again = remind.apply_async((2,), delay=60, key="order:7", unique="first")
        assert again.id == first.id
        sent.run_due()
        remind.apply_async((3,), delay=60, key="order:7", unique="first")
        sent.run_due()
        remind.apply_async((4,), delay=60, key="order:7", unique="first", unique_for=DAYS)
        remind.apply_async((5,), delay=60, key="order:7", unique="first")
        shop.rabbitdelay.cancel(key="order:7")
        remind.apply_async((6,), delay=60, key="order:7", unique="first")
    assert [one.args for one in sent.all()] == [[1], [3], [5], [6]]


def test_cancelled_tasks_do_not_run(shop: Any) -> None:
    remind, cancelled = shop.tasks["shop.remind"], []
    delays = shop.rabbitdelay

    def note(task_id: str, **_: Any) -> None:
        cancelled.append(task_id)

    signals.cancelled.connect(note)
    with recorded(shop) as sent:
        tracked = remind.apply_async((1,), delay=60, track=True)
        assert tracked.state == "DELAYED"
        assert delays.cancel(tracked) is Outcome.DONE
        assert delays.cancel(tracked) is Outcome.CANCELLED
        assert tracked.state == "REVOKED"
        remind.apply_async((2,), delay=60, key="order:7")
        assert delays.cancel(key="order:7") is Outcome.DONE
        assert delays.cancel(key="order:8") is Outcome.UNKNOWN
        untracked = remind.apply_async((3,), delay=60)
        assert delays.cancel(untracked, also_future=False) is Outcome.UNKNOWN
        assert delays.cancel(untracked.id) is Outcome.NOTED
        remind.apply_async((4,), delay=60).revoke()
        last = remind.apply_async((5,), delay=60)
        assert [one.args for one in sent.run_due()] == [[5]]
        assert delays.cancel(last) is Outcome.NOTED
    signals.cancelled.disconnect(note)
    assert len(set(cancelled)) == 5
    assert len(sent.all()) == 5


def test_a_revoke_cancels_without_a_registry_and_no_worker_answers(app: Any) -> None:
    with recorded(app) as sent:
        app.tasks["shop.remind"].apply_async((1,), delay=60).revoke()
        assert app.control.ping() is None
        assert sent.run_due() == []


def test_postponed_tasks_run_at_the_other_time(shop: Any) -> None:
    remind, delays = shop.tasks["shop.remind"], shop.rabbitdelay
    with recorded(shop) as sent:
        remind.apply_async((1,), delay=DAYS, key="order:1")
        remind.apply_async((2,), delay=9 * DAYS, key="order:2", track=True)
        unknown = remind.apply_async((3,), delay=2 * DAYS)
        assert delays.postpone(key="order:1", delay=3 * DAYS) is Outcome.DONE
        assert delays.postpone(key="order:2", delay=60) is Outcome.DONE
        assert delays.postpone(unknown, delay=DAYS) is Outcome.NOTED
        with pytest.raises(NotTracked):
            delays.postpone(key="order:1", delay=60)
        assert delays.postpone("sent later", delay=DAYS) is Outcome.NOTED
        remind.apply_async((4,), delay=60, task_id="sent later")
        assert sent.one(due=datetime.now(UTC) + 3 * DAYS).args == [1]
        sent.run_due()
    assert done == [2, 4, 3, 1]


def test_the_tasks_of_a_job_run_once_it_is_committed(shop: Any) -> None:
    remind, delays = shop.tasks["shop.remind"], shop.rabbitdelay
    with recorded(shop) as sent:
        with delays.job("import-7", expires=3600):
            remind.apply_async((1,), job="import-7")
            assert sent.run_due() == []
        assert [one.args for one in sent.run_due()] == [[1]]
        delays.open_job("import-8", expires=3600)
        remind.apply_async((2,), job="import-8", delay=60)
        delays.abort_job("import-8")
        for closed in ("import-7", "import-8", "import-9"):
            with pytest.raises(JobClosed):
                remind.apply_async((3,), job=closed)
        assert sent.run_due() == []
        assert sent.one(job="import-8", key=None).args == [2]
        for job in ("import-8", "import-9"):
            with pytest.raises(JobClosed):
                delays.commit_job(job)
        with pytest.raises(JobClosed):
            delays.open_job("import-7", expires=60)


def test_of_a_task_that_runs_once_the_first_message_does(shop: Any) -> None:
    remind = shop.tasks["shop.remind"]
    with recorded(shop) as sent:
        for delay in (60, 30):
            remind.apply_async((delay,), delay=delay, task_id="order-7", once=True)
        assert [one.once for one in sent.run_due()] == [True]
    assert done == [30]


def test_what_waits_is_listed_and_what_asks_the_broker_is_refused(shop: Any) -> None:
    remind, delays = shop.tasks["shop.remind"], shop.rabbitdelay
    with recorded(shop) as sent:
        first, second = (remind.apply_async((each,), delay=60, track=True) for each in (1, 2))
        pending = delays.pending(task="shop.remind")
        assert {each.task_id for each in pending} == {first.id, second.id}
        assert sent.one(task_id=first.id).args == [1]
        assert delays.cancel_pending() == 2
        assert (delays.count(), delays.paused()) == (0, [])
        remind.apply_async((3,), delay=60, key="order:7")
        calls: list[Callable[[], Any]] = [
            lambda: delays.show(key="order:7"),
            lambda: delays.schedules.put("daily", remind, DAYS, (1,)),
            lambda: delays.schedules.all(),
        ]
        for call in calls:
            with pytest.raises(NotRecorded, match=r"testing\.travel"):
                call()
