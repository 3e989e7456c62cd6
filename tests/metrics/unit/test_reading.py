"""Readings that are shared by all who ask for them."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from unittest.mock import ANY

from kombu.exceptions import OperationalError

from celery_rabbitdelay.metrics.reading import Reading, Readings
from tests.kernel.unit.waiting import wait_until


class Query:
    """Counts its calls, and ends each of them only when it may; returns the count at the end."""

    def __init__(self) -> None:
        self.looks = 0
        self.may_end = Event()

    def __call__(self) -> int:
        self.looks += 1
        self.may_end.wait(10)
        return self.looks


def test_one_of_all_who_ask_looks_and_the_others_wait_or_get_what_was_seen_before() -> None:
    query = Query()
    readings = Readings(query, period=60)
    with ThreadPoolExecutor(5) as pool:
        asked = [pool.submit(readings.latest) for _ in range(5)]
        wait_until(lambda: query.looks)
        query.may_end.set()
        assert [each.result(10).value for each in asked] == [1] * 5
        old = Readings(query, period=0)
        assert old.latest().value == 2
        query.may_end.clear()
        second = pool.submit(old.latest)
        wait_until(lambda: query.looks == 3)
        assert old.latest().value == 2
        query.may_end.set()
        assert second.result(10).value == 3


def test_what_is_outdated_while_a_query_runs_is_queried_again() -> None:
    query = Query()
    readings = Readings(query, period=60)
    assert readings.latest(0.01) == readings.ended(0.01) == Reading()
    readings.outdate()
    with ThreadPoolExecutor() as pool:
        later = [pool.submit(readings.latest) for _ in range(3)]
        query.may_end.set()
        assert {each.result().value for each in later} == {2}
    assert readings.latest().value == query.looks == 2


def test_nobody_waits_longer_than_the_patience_and_a_failed_look_ends_nothing() -> None:
    query = Query()

    def look() -> int:
        number = query()
        if number == 2:
            raise OperationalError("amqp://ada:secret@host\nis away")
        if number == 3:
            raise ZeroDivisionError
        return number

    readings = Readings(look, period=60, patience=0.01)
    assert [readings.latest() for _ in range(3)] == [Reading()] * 3
    query.may_end.set()
    wait_until(lambda: readings.latest().value == 1)
    readings.outdate()
    wait_until(lambda: readings.latest().error == "amqp://ada:**@host is away")
    readings.outdate()
    wait_until(lambda: "unexpected" in (readings.latest().error or ""))
    assert readings.latest().value == 1, "the one before"
    readings.outdate()
    wait_until(lambda: readings.latest() == (4, ANY, None))
