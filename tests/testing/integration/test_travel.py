"""Time travel: what waits is due in a moment, in its order, on a real broker, in a real worker."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import chain, group

from celery_rabbitdelay import JobClosed, Row
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.registry.application import RegistrySettings
from celery_rabbitdelay.testing import DidNotSettle, Travel, wait_for
from celery_rabbitdelay.testing.session import name_of
from tests.given_times import KINDS
from tests.node_control import close_all_connections
from tests.testing.integration import travelling
from tests.testing.integration.travelling import app, note, ran, redis, remind, texts, try_again

DAY_MS = 86_400_000


@pytest.fixture(scope="session")
def rabbitdelay_celery_app() -> Any:
    return app


@pytest.fixture
def trip(rabbitdelay_worker: Any, travel: Travel) -> Iterator[Travel]:
    """Travel, with a clock that stands while nothing travels."""
    redis().delete(travelling.NOTES)
    stand(travel)
    yield travel
    redis().delete(travelling.NOTES)


def stand(travel: Travel) -> int:
    """Let the clock stand from now on; return the time."""
    travel.clock.stand_at(wall_clock.ms() * 1_000_000)
    return wall_clock.ms()


def test_what_falls_due_runs_at_its_time_and_what_does_not_waits(trip: Travel) -> None:
    began = wall_clock.ms()
    note.apply_async(("third",), delay=timedelta(days=3))
    note.apply_async(("first",), countdown=3600.25)
    note.apply_async(("fourth",), eta=instant_of(began + 4 * DAY_MS))
    note.apply_async(("second",), delay=timedelta(days=2))
    # The next one waits for a task that takes seconds.
    travelling.wait_for_seconds.apply_async((2,), delay=timedelta(days=2, seconds=1))
    trip(days=3)
    assert ran() == [
        ("first", began + 3_600_250),
        ("second", began + 2 * DAY_MS),
        ("2 seconds", began + 2 * DAY_MS + 1000),
        ("third", began + 3 * DAY_MS),
    ]
    assert not trip.nothing_waits()
    assert trip.now - instant_of(began) < timedelta(days=3, minutes=10)
    trip(days=1)
    assert ran()[4:] == [("fourth", began + 4 * DAY_MS)]
    assert trip.nothing_waits()


def test_what_is_sent_on_the_way_falls_due_on_the_way(trip: Travel) -> None:
    began = wall_clock.ms()
    remind.apply_async(("a", 3, 6), delay=timedelta(days=1))
    try_again.apply_async(("b", 4, 60), delay=timedelta(days=1, hours=1))
    trip(days=2)
    hours = [24, 24, 25, 25 + 1 / 60, 25 + 3 / 60, 25 + 7 / 60, 25.25, 30, 30, 36]
    names = ["a-3", "a-sent", "b-0", "b-1", "b-2", "b-3", "b-4", "a-2", "a-sent", "a-1"]
    expected = [(n, began + round(h * 3_600_000)) for n, h in zip(names, hours, strict=True)]
    assert ran() == expected


def test_without_waiting_all_that_is_due_is_delivered_at_once(trip: Travel) -> None:
    travelling.wait_until_told.apply_async(("told",), delay=60)
    trip(days=1, wait=False)
    wait_for(texts, "a task that runs")
    redis().set("told", "yes", ex=60)


def test_until_something_is_so(trip: Travel) -> None:
    began = wall_clock.ms()
    remind.apply_async(("a", 5, 24), delay=timedelta(days=1))
    trip.until(lambda: "a-3" in texts())
    assert ran()[-2:] == [("a-3", began + 3 * DAY_MS), ("a-sent", began + 3 * DAY_MS)]
    trip.until(trip.nothing_waits)
    assert ran()[-1] == ("a-1", began + 5 * DAY_MS)
    with pytest.raises(TimeoutError, match="nothing waits"):
        trip.until(lambda: False)
    note.apply_async(("far",), delay=timedelta(days=400))
    with pytest.raises(TimeoutError, match="1 messages wait beyond"):
        trip.until(lambda: False, within=timedelta(days=399))


def test_all_ways_to_send_travel(trip: Travel) -> None:
    delays = app.rabbitdelay
    began = wall_clock.ms()
    delays.send_many(note, [Row(("row",), delay=DAY_MS / 1000) for _ in range(500)])
    note.apply_async(("far",), delay=timedelta(days=5000))  # above the capacity
    note.apply_async(
        ("mirrored",), delay=timedelta(days=2), exchange="travelling.fanout", routing_key="any"
    )
    chain(note.si("c1"), note.si("c2").set(countdown=86_400)).apply_async(countdown=3 * 86_400)
    group(note.si(f"g{n}") for n in range(3)).apply_async(countdown=5 * 86_400)
    trip(days=10)
    assert [text for text, at_ms in ran() if at_ms == began + DAY_MS] == ["row"] * 500
    later = sorted((at_ms - began, text) for text, at_ms in ran() if text != "row")
    days = [(2, "mirrored"), (3, "c1"), (4, "c2"), (5, "g0"), (5, "g1"), (5, "g2")]
    assert later == [(day * DAY_MS, text) for day, text in days]
    trip(days=4995)
    assert ran()[-1] == ("far", began + 5000 * DAY_MS)


def test_what_is_over_after_some_time_is_over_for_the_traveller(trip: Travel) -> None:
    delays, lease = app.rabbitdelay, app.rabbitdelay.registry.store.lease
    leased = f"{app.conf.rabbitdelay_prefix}:lease"

    delays.open_job("import", expires=3600)
    note.apply_async(("of a job",), delay=60, job="import")
    own = note.apply_async(("kept",), delay=60, key="order").id
    note.apply_async(("in time",), delay=3600, expires=3601)
    note.apply_async(("too late",), delay=3600, expires=3599)
    assert lease(leased, "mine", 7_200_000)
    trip(hours=1, minutes=59)
    assert not lease(leased, "another's", 60_000)
    assert sorted(texts()) == ["in time", "kept"]
    with pytest.raises(JobClosed, match="aborted"):
        delays.commit_job("import")
    trip(minutes=1)
    assert lease(leased, "another's", 60_000)
    trip(seconds=delays.settings_of(RegistrySettings).registry_keep)
    assert delays.show(own) is None


def test_to_an_instant_and_what_is_left_of_a_delay_is_waited_in_the_levels(trip: Travel) -> None:
    began, (at, _, _) = wall_clock.ms(), KINDS["own"]
    note.apply_async(("a",), delay=timedelta(days=30))
    trip(to=at(instant_of(began) + timedelta(days=30, seconds=-1)))
    with pytest.raises(ValueError, match="cannot travel back"):
        trip(to=trip.now - timedelta(days=1))
    trip.clock.go_on()
    wait_for(texts, "what is due in a second")
    assert ran()[0][1] >= began + 30 * DAY_MS


def test_what_no_destination_takes_is_tried_again_until_it_is_given_up(trip: Travel) -> None:
    undeliverable = app.rabbitdelay.topology.module_queues.undeliverable.name
    to: Any = {"exchange": "travelling.gone", "routing_key": "any"}
    note.apply_async(("lost",), delay=timedelta(days=1), **to)
    trip(days=1, minutes=5)
    with app.connection_for_write() as connection:
        channel: Any = connection.default_channel
        channel.exchange_declare("travelling.gone", "fanout", durable=False, auto_delete=True)
        channel.queue_bind("travelling", "travelling.gone", "")
        trip(hours=1)
        assert texts() == ["lost"]
        channel.queue_unbind("travelling", "travelling.gone", "")
        note.apply_async(("lost",), delay=timedelta(days=1), **to)
        trip(days=3)
        assert texts() == ["lost"]
        assert channel.queue_declare(undeliverable, passive=True).message_count == 1


def test_code_sees_the_time_if_it_is_to(trip: Travel) -> None:
    travelling.note_what_time_it_seems.apply_async(delay=timedelta(days=3))
    trip(days=4)
    assert datetime.fromisoformat(texts()[0]) < datetime.now(UTC) + timedelta(hours=1)
    trip.code_sees_it = True
    assert abs(datetime.now(UTC) - trip.now) < timedelta(minutes=10)
    travelling.note_what_time_it_seems.apply_async(eta=datetime.now(UTC) + timedelta(days=3))
    stand(trip)
    trip(days=4)
    seen, at_ms = ran()[1]
    assert abs(datetime.fromisoformat(seen) - instant_of(at_ms)) < timedelta(minutes=10)
    assert abs(datetime.now(UTC) - trip.now) < timedelta(minutes=10)
    trip.code_sees_it = False
    assert trip.now - datetime.now(UTC) > timedelta(days=7)


def test_a_worker_that_has_died_is_named_at_once_with_its_log(trip: Travel) -> None:
    travelling.kill_the_worker.apply_async(delay=60)
    with pytest.raises(DidNotSettle, match="the worker has ended") as raised:
        trip(days=1)
    assert "kill_the_worker" in str(raised.value)


def test_what_a_killed_worker_and_a_lost_connection_leave_runs_later(
    trip: Travel, rabbitdelay_broker: Any, rabbitdelay_worker: Any
) -> None:
    note.apply_async(("a",), delay=timedelta(days=1))
    note.apply_async(("b",), delay=timedelta(days=3))
    # The worker connects again, and is waited for.
    close_all_connections(rabbitdelay_broker, "as if it fell", rabbitdelay_broker.virtual_host)
    trip(days=2)
    assert texts() == ["a"]
    rabbitdelay_worker.kill()
    trip(days=2)
    assert texts() == ["a"]
    rabbitdelay_worker.start()
    trip(days=1)
    assert texts() == ["a", "b"]


def test_an_application_that_no_module_has_cannot_be_run_elsewhere() -> None:
    assert name_of(app) == "tests.testing.integration.travelling:app"
    with pytest.raises(LookupError, match="rabbitdelay_worker = thread"):
        name_of(object())
