"""Schedules, over hours and days that no test waits for; see also ``test_schedules.py``."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from celery_rabbitdelay.levels.delay import milliseconds_of
from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.testing import Travel, wait_for
from celery_rabbitdelay.testing.session import Worker
from celery_rabbitdelay.testing.travel import FORGET, on_all_keys
from tests.kernel.integration.notes import Notes, instants
from tests.kernel.integration.shop import PATIENCE
from tests.testing.integration.travelling_shop import rabbitdelay_celery_app, shop, worker

__all__ = ["rabbitdelay_celery_app", "shop", "worker"]

HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def after_the_hour(travel: Travel) -> None:
    """Begin a minute after one of the instants of a schedule: none passes between two lines."""
    now = travel.now.replace(minute=1, second=0, microsecond=0)
    travel(to=now + HOUR * (3 - now.hour % 3))


@pytest.fixture
def put(shop: Any, noted: Notes) -> Callable[..., Any]:
    """Puts a schedule whose task notes its id."""

    def put(name: str = "a", when: Any = HOUR, **options: Any) -> Any:
        options = {"catch_up": "all", "overlap": "allow", **options}
        kwargs = {"key": noted.key}
        return shop.rabbitdelay.schedules.put(name, "note", when, (name,), kwargs, **options)

    return put


def hours(noted: Notes, first: datetime) -> list[float]:
    """When the occurrences of the schedule ``a`` were due that ran, in hours after the first."""
    return [(each - first.timestamp()) / 3600 for each in instants(noted, "a")]


def test_a_paused_schedule_comes_and_does_not_run_and_is_sent_by_hand(
    shop: Any, put: Callable[..., Any], noted: Notes, worker: Worker, travel: Travel
) -> None:
    schedules, before = shop.rabbitdelay.schedules, worker.log.count("does not run: paused")
    first = put(paused=True).next_at
    travel(hours=3)
    assert worker.log.count("does not run: paused") == before + 3
    assert noted() == []
    assert schedules.trigger("a") is not None
    assert schedules.resume("a")
    travel(hours=3)
    assert hours(noted, first) == [3, 4, 5]
    assert len(noted()) == 4
    assert not schedules.pause("b")


def test_retries_of_an_occurrence_are_no_occurrences(
    shop: Any, worker: Worker, travel: Travel
) -> None:
    given: Any = ([], 2, {"delay": 600})
    start = travel.now + HOUR
    shop.rabbitdelay.schedules.put("a", "retry", HOUR, given, start=start, catch_up="all")
    results = []
    for due in (start, start + HOUR):
        found = shop.rabbitdelay.schedules.get("a")
        assert milliseconds_of(found.next_at) == milliseconds_of(due)
        results.append(shop.AsyncResult(found.next_id))
        travel(to=due)
    travel(hours=1)
    for result in results:
        assert [seen["retries"] for seen in result.get(timeout=PATIENCE)] == [0, 1, 2]


@pytest.mark.parametrize(("catch_up", "ran"), [("last", [0, 15]), (2.5 * HOUR, [12, 15])])
def test_what_was_missed_runs_as_it_says(
    put: Callable[..., Any],
    noted: Notes,
    worker: Worker,
    travel: Travel,
    catch_up: Any,
    ran: list[int],
) -> None:
    first = put(when=3 * HOUR, catch_up=catch_up).next_at
    worker.kill()
    travel(to=first + 14 * HOUR)
    worker.start()
    travel(hours=1)
    # One follows the other only once that has come.
    wait_for(lambda: len(noted()) >= len(ran), "the last one", PATIENCE)
    travel(seconds=1)
    assert hours(noted, first) == ran


def test_what_waits_runs_although_redis_has_lost_everything_and_it_was_put_again(
    shop: Any, put: Callable[..., Any], noted: Notes, worker: Worker, travel: Travel
) -> None:
    first = put().next_at
    travel(hours=2)
    worker.kill()
    # The next one is due, and others are missed.
    travel(hours=10)
    on_all_keys(shop, FORGET)
    put()
    worker.start()
    travel(hours=6)
    wait_for(lambda: len(noted()) >= 18, "the last one", PATIENCE)
    travel(seconds=1)
    assert hours(noted, first) == [*range(18)]
    # One chain has ended: what is sent twice runs once, but costs twice as much.
    queues = [*shop.rabbitdelay.topology.digit_queues, *shop.amqp.queues.values()]
    with shop.connection_for_write() as connection:
        counts = queue_counts(connection, queues).values()
    assert sum(each.messages for each in counts if each is not None) == 1


def test_a_schedule_ends(
    shop: Any, put: Callable[..., Any], noted: Notes, worker: Worker, travel: Travel
) -> None:
    end = travel.now + 12 * HOUR
    first = put(end=end).next_at
    travel(days=2)
    assert shop.rabbitdelay.schedules.get("a") is None
    assert hours(noted, first) == [*range((end - first) // HOUR + 1)]
    # Its code puts it again.
    assert put(end=end) is None
    assert shop.rabbitdelay.schedules.all() == []
