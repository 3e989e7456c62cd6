"""Every way to send one task: whichever is taken, the delay waits in the levels."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from typing import Any
from uuid import uuid4

import celery
import pytest
from celery.contrib.testing.worker import start_worker
from celery.utils.time import timezone as celerys_zone
from kombu import Connection, Queue

from celery_rabbitdelay import Celery, install
from celery_rabbitdelay.levels import headers, wall_clock
from celery_rabbitdelay.testing import wait_for
from tests.integration.arrivals import find_waiting, take
from tests.integration.notes import Notes
from tests.integration.shop import FAR_BACKOFFS, LOST, PATIENCE, QUEUES, make_app, named
from tests.integration.waited import assert_not_delayed, assert_waited
from tests.integration.worker import Beat
from tests.unit.clock import frozen

#: Seconds.
DELAY = 0.3

SENDERS: dict[str, Callable[..., Any]] = {
    "apply_async": lambda app, **options: app.tasks["look"].apply_async(**options),
    "send_task": lambda app, **options: app.send_task("look", **options),
    "signature of the task": lambda app, **options: app.tasks["look"].s().apply_async(**options),
    "app.signature": lambda app, **options: app.signature("look").apply_async(**options),
    "celery.signature": lambda app, **options: celery.signature("look", app=app).apply_async(
        **options
    ),
    "set on the signature of the task": lambda app, **options: (
        app.tasks["look"].s().set(**options).delay()
    ),
    "set on app.signature": lambda app, **options: app.signature("look").set(**options).delay(),
    "signature as a dictionary": lambda app, **options: app.signature(
        json.loads(json.dumps(app.signature("look", options=options)))
    ).apply_async(),
}


@pytest.fixture
def stranger(served_configuration: dict[str, Any]) -> Iterator[Any]:
    """An application that sends to the worker's queues and knows none of its tasks."""
    app: Any = make_app({**served_configuration, "knows_tasks": False})
    yield app
    app.close()


@pytest.mark.parametrize("option", ["delay", "countdown"])
@pytest.mark.parametrize("sender", SENDERS)
def test_a_task_waits_however_it_is_sent(served_shop: Any, sender: str, option: str) -> None:
    before = time.time()
    result = SENDERS[sender](served_shop, **{option: DELAY})
    assert_waited(result.get(timeout=PATIENCE), before, DELAY)


@pytest.mark.parametrize("option", ["delay", "countdown"])
@pytest.mark.parametrize("sender", ["send_task", "app.signature", "set on app.signature"])
def test_a_task_that_is_known_to_the_worker_alone_waits(
    stranger: Any, sender: str, option: str
) -> None:
    assert "look" not in stranger.tasks
    before = time.time()
    result = SENDERS[sender](stranger, **{option: DELAY})
    assert_waited(result.get(timeout=PATIENCE), before, DELAY)


@pytest.mark.parametrize("zone", [UTC, None], ids=["aware", "naive"])
@pytest.mark.parametrize("text", [False, True], ids=["datetime", "ISO string"])
@pytest.mark.parametrize("sender", ["apply_async", "send_task", "set on app.signature"])
def test_an_eta_waits_in_the_levels(served_shop: Any, sender: str, zone: Any, text: bool) -> None:
    # However long it takes to send it, it is not due yet.
    with frozen():
        now = wall_clock.now()
        instant = (now + timedelta(seconds=DELAY)).replace(tzinfo=zone)
        result = SENDERS[sender](served_shop, eta=instant.isoformat() if text else instant)
    assert_waited(result.get(timeout=PATIENCE), now.timestamp(), DELAY)


def _naive_etas() -> Iterator[datetime]:
    """Yield times of Berlin: in winter, in summer, one that no clock shows, and one shown twice."""
    year = datetime.now(UTC).year + 2
    yield from (datetime(year, month, 15, 12) for month in (1, 7))
    for month in (3, 10):
        last_sunday = 31 - date(year, month, 31).isoweekday() % 7
        yield datetime(year, month, last_sunday, 2, 30)


@pytest.fixture
def _new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process be in a time zone with daylight saving; a worker in it leaves it alone."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "America/New_York")
        patch.delitem(vars(celerys_zone), "local", raising=False)
        # It would set up logging and the current application for all tests of this process.
        patch.setattr("celery.contrib.testing.worker.setup_app_for_worker", lambda *given: None)
        time.tzset()
        yield
        vars(celerys_zone).pop("local", None)
    time.tzset()


@pytest.mark.usefixtures("_new_york")
@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
@pytest.mark.parametrize("enable_utc", [True, False])
def test_a_naive_eta_is_the_same_instant_as_with_plain_celery(
    make_shop: Callable[..., Any], connection: Connection, enable_utc: bool, zone: str | None
) -> None:
    settings = {"timezone": zone, "enable_utc": enable_utc}
    etas = [each for eta in _naive_etas() for each in (eta, eta.isoformat())]
    plain: Any = celery.Celery("plain", broker="memory://", set_as_current=False)
    plain.conf.update(settings, worker_hijack_root_logger=False)

    @plain.task(name="look", shared=False)
    def look() -> None: ...

    plain.finalize()
    worker: Any
    with start_worker(plain, perform_ping_check=False, shutdown_timeout=60) as worker:
        sent = [plain.send_task("look", eta=eta).id for eta in etas]
        schedule = worker.consumer.timer.schedule
        held: dict[str, float] = {}

        def are_held() -> bool:
            for waiting in tuple(schedule.queue):
                (request,) = waiting.entry.args or (None,)
                if request is not None and request.id in sent:
                    held[request.id] = waiting.eta + time.time() - time.monotonic()
            return len(held) == len(etas)

        wait_for(are_held, "the worker's timers")
    shop = make_shop(rabbitdelay_layout=[("days", 9, 365 * 86_400)], **settings)
    ids = [shop.tasks["look"].apply_async(eta=eta).id for eta in etas]
    arrivals = take(connection, shop.rabbitdelay.topology.digit_queues, len(etas))
    waits = {each.message.headers["id"]: each.message.headers[headers.DUE] for each in arrivals}
    assert [waits[each] / 1000 for each in ids] == pytest.approx(
        [held[each] for each in sent], abs=60
    )


@pytest.mark.parametrize("sender", ["apply_async", "set on the signature of the task"])
def test_a_timedelta_is_a_delay(served_shop: Any, sender: str) -> None:
    before = time.time()
    result = SENDERS[sender](served_shop, delay=timedelta(seconds=DELAY))
    assert_waited(result.get(timeout=PATIENCE), before, DELAY)


def test_a_countdown_of_one_tick_waits_in_the_levels(served_shop: Any) -> None:
    before = time.time()
    result = served_shop.tasks["look"].apply_async(countdown=0.1)
    assert_waited(result.get(timeout=PATIENCE), before, 0.1)


PAST = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("queue", ["default", "topic.reports"])
@pytest.mark.parametrize(
    "over",
    [{"eta": PAST}, {"eta": PAST.isoformat()}, {"eta": PAST.replace(tzinfo=None)}]
    + [{option: value} for option in ("delay", "countdown") for value in (0, -86_400)],
    ids=str,
)
def test_a_time_that_is_over_is_seen_as_in_plain_celery(
    served_shop: Any, over: dict[str, Any], queue: str
) -> None:
    plain = celery.Celery("plain", broker="memory://", set_as_current=False)
    # A delay of zero or less says that there is none.
    in_celerys_words = {} if "delay" in over else over
    expected = plain.amqp.as_task_v2("id", "look", **in_celerys_words).headers["eta"]
    result = served_shop.tasks["look"].apply_async(**over, queue=named(served_shop, queue))
    seen = result.get(timeout=PATIENCE)
    assert headers.DUE not in seen["headers"]
    if "eta" in over or expected is None:
        assert seen["eta"] == expected
    else:
        later = datetime.fromisoformat(seen["eta"]) - datetime.fromisoformat(expected)
        assert timedelta(0) <= later < timedelta(minutes=1)


@pytest.mark.parametrize("option", ["delay", "countdown"])
def test_more_than_eight_years_wait_in_full(
    make_shop: Callable[..., Any], connection: Connection, prefix: str, option: str
) -> None:
    shop = make_shop(rabbitdelay_layout="clock", rabbitdelay_confirm_timeout=150)
    before = time.time()
    result = shop.tasks["look"].apply_async(**{option: 2**28})

    (arrival,) = take(connection, [Queue(f"{prefix}.days.3000")], 1)

    assert arrival.message.headers["id"] == result.id
    # 3,106 days, 21 h, 24 min and 16 s.
    key = arrival.message.delivery_info["routing_key"]
    assert key == f"3.1.0.6.21.24.16.0.{prefix}%2Edefault"
    assert -0.001 < arrival.message.headers[headers.DUE] / 1000 - before - 2**28 < 20


def test_a_task_that_another_task_sends_waits(served_shop: Any) -> None:
    before = time.time()
    sent = served_shop.tasks["send"].delay("look", {"countdown": DELAY}).get(timeout=PATIENCE)
    assert_waited(served_shop.AsyncResult(sent).get(timeout=PATIENCE), before, DELAY)


@pytest.mark.parametrize("option", ["delay", "countdown"])
def test_a_shared_task_waits_and_its_retries_do(served_shop: Any, option: str) -> None:
    before = time.time()
    # The worker sends it with a delay of 0.3 s, through whatever the current application is.
    sending = served_shop.tasks["send-shared"].delay({option: DELAY})
    result = served_shop.AsyncResult(sending.get(timeout=PATIENCE))
    seen = result.get(timeout=PATIENCE)
    assert seen["retries"] == 1
    assert_waited(seen, before + 0.3, DELAY)


def test_beat_hands_its_entries_delay_on(
    served_shop: Any, served_configuration: dict[str, Any]
) -> None:
    noted = Notes(served_shop)
    entry = {"task": "note", "schedule": 1.0, "kwargs": {"key": noted.key}, "options": {"delay": 2}}
    before = time.time()
    with Beat({**served_configuration, "beat_schedule": {"remind": entry}}) as beat:
        wait_for(lambda: len(noted.found()) >= 2, "two tasks of beat's")
        assert "Sending due task remind" in beat.log
    for seen in noted.found():
        assert_waited(seen, before, 2)
    noted.forget()


@pytest.mark.parametrize("installed", [False, True], ids=["Celery", "install"])
def test_django_s_namespace_names_the_settings(
    served_configuration: dict[str, Any], installed: bool
) -> None:
    from_django = {
        f"CELERY_{name.upper()}": served_configuration[name]
        for name in ("broker_url", "result_backend", "rabbitdelay_prefix", "rabbitdelay_layout")
    }
    prefix = served_configuration["prefix"]
    made_by = celery.Celery if installed else Celery
    app: Any = install(made_by("shop", set_as_current=False))
    app.config_from_object(type("settings", (), from_django), namespace="CELERY")

    before = time.time()
    queue = make_app(served_configuration).amqp.queues[f"{prefix}.default"]
    seen = app.send_task("look", countdown=DELAY, queue=queue).get(timeout=PATIENCE)

    assert app.rabbitdelay.topology.prefix == prefix
    assert_waited(seen, before, DELAY)
    app.close()


# Retries, by the task, by Celery and after a lost worker: they wait, and return to their queue.


@pytest.mark.parametrize("name", QUEUES)
@pytest.mark.parametrize("first", [{}, {"delay": 0.2}], ids=["undelayed", "delayed"])
def test_a_retry_returns_to_the_queue_it_came_from(
    served_shop: Any, name: str, first: dict[str, Any]
) -> None:
    queue = named(served_shop, name)
    result = served_shop.tasks["retry"].apply_async(
        ([], 2, {"countdown": 0.3}), queue=queue, headers={"x-tenant": "shop"}, **first
    )
    attempts = result.get(timeout=PATIENCE)

    assert [attempt["retries"] for attempt in attempts] == [0, 1, 2]
    # The same exchange and key each time, which do not grow with the retries.
    assert len({(a["exchange"], a["routing_key"]) for a in attempts}) == 1
    # What the caller gave and when it is due, and nothing of the broker's.
    assert all(a["headers"].keys() - {headers.DUE, headers.QUEUE} == {"x-tenant"} for a in attempts)
    assert all(attempt["headers"]["x-tenant"] == "shop" for attempt in attempts)
    assert all(a["headers"][headers.QUEUE] == queue for a in attempts[1:])
    for earlier, later in pairwise(attempts):
        assert_waited(later, earlier["at"], 0.3)


@pytest.mark.parametrize("first", [{}, {"delay": 0.2}], ids=["undelayed", "delayed"])
def test_where_only_the_second_queue_is_served_both_retries_come_back(
    serve: Any, first: dict[str, Any]
) -> None:
    shop = serve(only="second")
    options = {"queue": named(shop, "second"), **first}
    result = shop.tasks["retry"].apply_async(([], 2, {"countdown": 0.3}), **options)
    assert [attempt["retries"] for attempt in result.get(timeout=PATIENCE)] == [0, 1, 2]


@pytest.mark.parametrize("option", ["delay", "countdown", "eta"])
def test_a_retry_takes_every_kind_of_delay(served_shop: Any, option: str) -> None:
    before = datetime.now(UTC)
    value = before + timedelta(seconds=10) if option == "eta" else 0.4
    options = {option: value}
    attempts = served_shop.tasks["retry"].apply_async(([], 1, options)).get(timeout=PATIENCE)
    first, second = attempts
    assert_not_delayed(first)
    if option == "eta":
        assert_waited(second, before.timestamp(), 10)
    else:
        assert_waited(second, first["at"], 0.4)


@pytest.mark.parametrize("given", ["", "-attributes", "-arguments"])
@pytest.mark.parametrize(
    ("name", "waits"), [("autoretry", 1), ("autoretry-delay", 0.4), ("autoretry-both", 1)]
)
def test_autoretry_waits_for_its_delay_or_its_backoff_and_returns(
    served_shop: Any, name: str, waits: float, given: str
) -> None:
    queue = named(served_shop, "second")
    before = time.time()
    seen = served_shop.tasks[name + given].apply_async(queue=queue).get(timeout=PATIENCE)
    assert seen["retries"] == 1
    assert seen["routing_key"] == queue
    assert seen["headers"][headers.QUEUE] == queue
    assert_waited(seen, before, waits)


@pytest.mark.parametrize("given", ["", "-attributes", "-arguments"])
@pytest.mark.parametrize("name", ["autoretry-wrong", "autoretry-wrong-held"])
def test_a_retry_that_we_refuse_fails_the_task_with_the_reason_and_its_own_error(
    served_shop: Any, name: str, given: str
) -> None:
    result = served_shop.tasks[name + given].apply_async()
    with pytest.raises(Exception, match="soon") as caught:
        result.get(timeout=PATIENCE)
    assert type(caught.value).__name__ == "InvalidDelayType"
    assert "the mail gateway does not answer" in result.traceback


@pytest.mark.parametrize("option", ["delay", "countdown"])
def test_a_delayed_task_s_retry_without_a_delay_comes_back_at_once(
    served_shop: Any, option: str
) -> None:
    second = named(served_shop, "second")
    retry = served_shop.tasks["retry"]
    result = retry.apply_async(([], 1, {option: 0}), delay=0.3, queue=second)
    _, again = result.get(timeout=PATIENCE)
    assert_not_delayed(again)
    assert again["routing_key"] == second
    assert again["headers"] == {}


def test_a_backoff_above_ten_minutes_waits_in_full_below_its_maximum(
    serve: Any, connection: Connection
) -> None:
    shop = serve(rabbitdelay_layout="clock", rabbitdelay_confirm_timeout=150)
    topology, second = shop.rabbitdelay.topology, named(shop, "second")
    # What Celery makes of the options: exactly these, and with jitter anything up to the maximum.
    exactly = {"backoff": 1000, "backoff-max": 4000}
    for name, options in FAR_BACKOFFS.items():
        before = time.time()
        result = shop.tasks[name].apply_async(queue=second)
        waiting = find_waiting(connection, topology.digit_queues)
        message = waiting.message
        assert message.headers["id"] == result.id
        assert message.headers["retries"] == 1
        assert message.headers["eta"] is None
        ahead = message.headers[headers.DUE] / 1000 - before
        if name in exactly:
            assert exactly[name] <= ahead < exactly[name] + 60
            # Of what is left of it when it is written.
            left = (exactly[name] - tenths / 10 for tenths in range(600))
            routes = [topology.route(each, second) for each in left]
            assert (waiting.queue, message.delivery_info["routing_key"]) in [
                (route.stops[0], route.routing_key) for route in routes
            ]
        else:
            assert 600 < ahead < options["retry_backoff_max"] + 60


@pytest.mark.parametrize("name", LOST)
def test_a_task_whose_worker_was_lost_runs_again(served_shop: Any, name: str) -> None:
    key = f"lost-{uuid4().hex}"
    second = named(served_shop, "second")
    redis = served_shop.backend.client
    before = time.time()
    own = {"x-tenant": "shop"}
    result = served_shop.tasks[name].apply_async((key,), delay=0.5, queue=second, headers=own)
    again = result.get(timeout=PATIENCE)
    first, noted = (json.loads(text) for text in redis.lrange(key, 0, -1))

    assert_waited(first, before, 0.5)
    for name_of in ("exchange", "routing_key"):
        assert first[name_of] == noted[name_of] == again[name_of]
    assert again["headers"].keys() == first["headers"].keys() == {*own, headers.DUE, headers.QUEUE}
    if name == "lost":
        # The broker has kept the message, which is due since the first time.
        assert again["headers"] == first["headers"]
        assert again["retries"] == 0
    else:
        assert_waited(again, first["at"], 1)
        assert again["retries"] == 1
    redis.delete(key)
