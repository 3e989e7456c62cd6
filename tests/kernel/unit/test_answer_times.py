"""Which destinations do not answer, and which exchanges are missing; the clock is a fake."""

from collections.abc import Iterable
from itertools import count

import pytest

from celery_rabbitdelay.modules.answer_times import AnswerTimes
from celery_rabbitdelay.modules.failures import MissingExchanges
from tests.kernel.unit.clock import Clock

#: How many messages a destination may have in flight at first, and at most if it is prompt.
ROOM = 30
MOST = 300


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def unanswered(clock: Clock) -> AnswerTimes:
    return AnswerTimes(clock)


def send(
    unanswered: AnswerTimes, destination: str, numbers: Iterable[object] = range(ROOM)
) -> None:
    for number in numbers:
        unanswered.sent(number, destination)


@pytest.mark.parametrize("other", ["sound", None], ids=["another destination", "the levels"])
def test_a_destination_is_silent_if_what_was_sent_a_second_later_is_answered(
    unanswered: AnswerTimes, clock: Clock, other: str | None
) -> None:
    unanswered.sent("first", "lost")
    clock.now += 1.0
    unanswered.sent("second", other)
    assert unanswered.state_of("lost", 0.0) == "ready"
    unanswered.settled("second", other)
    assert unanswered.state_of("lost", 0.0) == "silent"
    assert unanswered.state_of("sound", 0.0) == "ready"
    unanswered.settled("first", "lost")
    assert unanswered.state_of("lost", 0.0) == "ready"


def test_where_the_broker_is_slow_for_all_no_destination_is_silent(
    unanswered: AnswerTimes, clock: Clock
) -> None:
    for number in range(10):
        unanswered.sent(number, "busy")
        clock.now += 1.0
    for number in range(9):
        unanswered.settled(number, "busy")
        assert unanswered.state_of("busy", 0.0) == "ready"


def test_if_nothing_at_all_is_answered_each_may_be_the_cause(
    unanswered: AnswerTimes, clock: Clock
) -> None:
    clock.now = 5.0
    unanswered.sent("first", "lost")
    clock.now = 5.9
    assert [unanswered.state_of(name, 1.0) for name in ("lost", "other")] == ["ready", "ready"]
    clock.now = 6.0
    assert unanswered.state_of("lost", 0.9) == "ready"
    assert [unanswered.state_of(name, 1.0) for name in ("lost", "other")] == ["silent", "ready"]


def test_after_a_timeout_a_destination_gets_one_at_a_time(unanswered: AnswerTimes) -> None:
    unanswered.sent("first", "lost")
    unanswered.settled("first", "lost", in_time=False)
    assert unanswered.state_of("lost", 0.0) == "ready"
    unanswered.sent("second", "lost")
    assert unanswered.state_of("lost", 0.0) == "silent"
    unanswered.settled("second", "lost")
    unanswered.sent("third", "lost")
    assert unanswered.state_of("lost", 0.0) == "ready"


def test_the_broker_is_asked_for_an_exchange_once_and_again_if_it_was_missing(
    clock: Clock,
) -> None:
    asked: list[str] = []
    there = {"news"}

    def ask(exchange: str) -> bool:
        asked.append(exchange)
        return exchange in there

    missing = MissingExchanges(ask, {""}, clock)

    def is_missing(*names: str) -> list[bool]:
        return [missing.why_missing(name) is not None for name in names]

    assert is_missing("", "news", "gone", "news", "gone") == [False, False, True, False, True]
    assert asked == ["news", "gone"]
    clock.now += 0.9
    assert is_missing("gone") == [True]
    clock.now += 0.1
    there.add("gone")
    missing.add("news")
    assert is_missing("gone", "news") == [False, True]
    clock.now += 1.0
    assert is_missing("news") == [False]
    assert asked == ["news", "gone", "gone", "news"]


def test_a_slow_destination_gets_no_more_than_it_answers_for_a_while(
    unanswered: AnswerTimes, clock: Clock
) -> None:
    send(unanswered, "slow")
    assert unanswered.state_of("slow", 0.0) == "full"
    # If nothing at all is answered, what it should get does not wait for it either.
    clock.now += 1.0
    assert unanswered.state_of("slow", 1.0) == "silent"
    unanswered.note_slow("slow")
    assert unanswered.state_of("slow", 0.0) == "silent"
    unanswered.settled(0, "slow")
    assert unanswered.state_of("slow", 0.0) == "ready"
    for number in range(1, ROOM):
        unanswered.settled(number, "slow")
    clock.now += 10.0
    send(unanswered, "slow")
    assert unanswered.state_of("slow", 0.0) == "full"


def test_a_destination_that_answers_promptly_gets_more_and_one_that_does_not_fewer(
    unanswered: AnswerTimes, clock: Clock
) -> None:
    numbers, in_flight = count(), list[int]()

    def fill() -> int:
        while unanswered.state_of("busy", 0.0) == "ready":
            in_flight.append(next(numbers))
            unanswered.sent(in_flight[-1], "busy")
        return len(in_flight)

    def answer(many: int) -> None:
        for _ in range(many):
            unanswered.settled(in_flight.pop(0), "busy")

    assert fill() == ROOM
    assert unanswered.state_of("other", 0.0) == "ready"
    answer(10)
    assert fill() == ROOM + 10
    for _ in range(5):
        clock.now += 0.09
        answer(fill())  # all at once, as RabbitMQ may confirm them
    assert fill() == MOST
    clock.now += 0.2
    answer(MOST - 5)
    assert fill() == ROOM


def test_the_broker_is_stuck_if_it_owes_one_destination_too_many_answers_for_long(
    clock: Clock,
) -> None:
    unanswered = AnswerTimes(clock)
    send(unanswered, "lost")
    for number in range(ROOM):
        unanswered.sent(-number, None)
    assert unanswered.give_up_if_stuck(3.0) == []
    unanswered.sent("one more", "lost")
    assert (unanswered.give_up_if_stuck(2.9), unanswered.give_up_if_stuck(3.0)) == ([], ["lost"])
    # On another connection, it gets one message at a time.
    unanswered.begin()
    assert unanswered.state_of("lost", 0.0) == "ready"
    unanswered.sent("first", "lost")
    assert unanswered.state_of("lost", 0.0) == "silent"


def test_names_that_nobody_has_seen_before_cost_a_bounded_number_of_questions(clock: Clock) -> None:
    asked = []

    def ask(exchange: str) -> bool:
        asked.append(exchange)
        return not exchange.startswith("forged")

    missing = MissingExchanges(ask, {""}, clock)
    assert missing.why_missing("office") is None
    for number in range(100):
        assert missing.why_missing(f"forged.{number}") is not None
    assert len(asked) == 1 + 20
    trouble = missing.why_missing("late")
    assert trouble is not None
    assert "the exchange 'late' was not looked up" in trouble
    # What is known, and what no sender names, is not affected.
    assert missing.why_missing("office") is None
    assert missing.why_missing("levels", is_limited=False) is None
    clock.now += 1.0
    assert missing.why_missing("late") is None


def test_what_is_known_of_destinations_does_not_grow_with_their_number(
    unanswered: AnswerTimes, clock: Clock
) -> None:
    missing = MissingExchanges(lambda exchange: True, {""}, clock)
    for number in range(1100):
        name = f"forged.{number}"
        send(unanswered, name)
        assert unanswered.state_of(name, 0.0) == "full"
        unanswered.note_slow(name)
        for message in range(ROOM):
            unanswered.settled(message, name, in_time=False)
        missing.add(f"gone.{number}")
        assert missing.why_missing(f"shop.{number}", is_limited=False) is None
        clock.now += 0.01
    assert len(unanswered._known) <= 1000
    assert (len(missing._known), len(missing._missing)) == (1000, 100)


def test_what_is_in_flight_is_never_forgotten(unanswered: AnswerTimes) -> None:
    for number in range(1100):
        unanswered.sent(number, f"forged.{number}")
    unanswered.sent("last", None)
    for number in range(1100):
        unanswered.settled(number, f"forged.{number}")
    unanswered.settled("last", None)
    unanswered.sent("other", "shop")
    assert len(unanswered._known) == 1101
