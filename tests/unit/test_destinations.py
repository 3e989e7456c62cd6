"""Which destinations do not answer, and which exchanges are missing; the clock is a fake."""

from __future__ import annotations

from celery_rabbitdelay.modules.destinations import (
    ASK_AGAIN,
    MAX_PROMPT,
    MAX_UNANSWERED,
    PROMPT,
    SILENCE,
    SLOW_FOR,
    STUCK_AFTER,
    MissingExchanges,
    Unanswered,
)


class Clock:
    """A fake clock, because no real one can be told how late it is."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_destination_is_silent_if_what_was_sent_a_second_later_is_answered() -> None:
    clock = Clock()
    unanswered = Unanswered(clock)
    unanswered.sent("first", "lost")
    clock.now += SILENCE
    unanswered.sent("second", "sound")
    assert not unanswered.is_silent("lost", 0.0)
    unanswered.answered("second", "sound")
    assert unanswered.is_silent("lost", 0.0)
    assert not unanswered.is_silent("sound", 0.0)
    unanswered.answered("first", "lost")
    assert not unanswered.is_silent("lost", 0.0)


def test_messages_for_the_levels_tell_it_too() -> None:
    clock = Clock()
    unanswered = Unanswered(clock)
    unanswered.sent("first", "lost")
    clock.now += SILENCE
    unanswered.sent("second", None)
    unanswered.answered("second", None)
    assert unanswered.is_silent("lost", 0.0)


def test_where_the_broker_is_slow_for_all_no_destination_is_silent() -> None:
    clock = Clock()
    unanswered = Unanswered(clock)
    for number in range(10):
        unanswered.sent(number, "busy")
        clock.now += SILENCE
    for number in range(9):
        unanswered.answered(number, "busy")
        assert not unanswered.is_silent("busy", 0.0)


def test_if_nothing_at_all_is_answered_each_may_be_the_cause() -> None:
    clock = Clock()
    unanswered = Unanswered(clock)
    unanswered.sent("first", "lost")
    assert not unanswered.is_silent("lost", SILENCE)
    clock.now += SILENCE
    assert not unanswered.is_silent("lost", 0.9 * SILENCE)
    assert unanswered.is_silent("lost", SILENCE)
    assert not unanswered.is_silent("other", SILENCE)


def test_after_a_timeout_a_destination_gets_one_message_at_a_time_until_it_answers() -> None:
    clock = Clock()
    unanswered = Unanswered(clock)
    unanswered.sent("first", "lost")
    unanswered.timed_out("first", "lost")
    assert not unanswered.is_silent("lost", 0.0)
    unanswered.sent("second", "lost")
    assert unanswered.is_silent("lost", 0.0)
    unanswered.answered("second", "lost")
    unanswered.sent("third", "lost")
    assert not unanswered.is_silent("lost", 0.0)


def test_the_broker_is_asked_for_an_exchange_once_and_again_if_it_was_missing() -> None:
    clock = Clock()
    asked: list[str] = []
    there = {"news"}

    def ask(exchange: str) -> bool:
        asked.append(exchange)
        return exchange in there

    missing = MissingExchanges(ask, {""}, clock)
    assert not missing.has("")
    assert [missing.has(exchange) for exchange in ("news", "gone", "news", "gone")] == [
        *(False, True),
        *(False, True),
    ]
    assert asked == ["news", "gone"]
    clock.now += ASK_AGAIN
    there.add("gone")
    assert not missing.has("gone")
    missing.add("news")
    assert missing.has("news")
    clock.now += ASK_AGAIN
    assert not missing.has("news")
    assert asked == ["news", "gone", "gone", "news"]


def test_a_destination_may_have_so_many_messages_that_the_broker_goes_on_reading() -> None:
    clock = Clock()
    unanswered = Unanswered(clock)
    for number in range(MAX_UNANSWERED):
        assert not unanswered.is_full("busy", 0.0)
        unanswered.sent(number, "busy")
    assert unanswered.is_full("busy", 0.0)
    assert not unanswered.is_full("other", 0.0)
    unanswered.answered(0, "busy")
    assert not unanswered.is_full("busy", 0.0)


def test_what_a_silent_destination_should_get_does_not_wait_for_it() -> None:
    clock = Clock()
    unanswered = Unanswered(clock)
    for number in range(MAX_UNANSWERED):
        unanswered.sent(number, "lost")
    clock.now += SILENCE
    assert unanswered.is_full("lost", 0.0)
    assert not unanswered.is_full("lost", SILENCE)
    assert unanswered.is_silent("lost", SILENCE)


def test_a_slow_destination_gets_no_more_than_it_answers_for_a_while() -> None:
    clock = Clock()
    unanswered = Unanswered(clock)
    for number in range(MAX_UNANSWERED):
        unanswered.sent(number, "slow")
    assert not unanswered.is_silent("slow", 0.0)
    unanswered.note_slow("slow")
    assert unanswered.is_silent("slow", 0.0)
    assert not unanswered.is_full("slow", 0.0)
    unanswered.answered(0, "slow")
    assert not unanswered.is_silent("slow", 0.0)
    for number in range(1, MAX_UNANSWERED):
        unanswered.answered(number, "slow")
    clock.now += SLOW_FOR
    for number in range(MAX_UNANSWERED):
        unanswered.sent(number, "slow")
    assert unanswered.is_full("slow", 0.0)


class Destination:
    """A destination that always gets as many messages as it may have."""

    def __init__(self, unanswered: Unanswered) -> None:
        self._unanswered = unanswered
        self._in_flight: list[int] = []
        self._sent = 0

    def fill(self) -> int:
        """Send as many as may be; return how many are in flight."""
        while not self._unanswered.is_full("busy", 0.0):
            self._sent += 1
            self._unanswered.sent(self._sent, "busy")
            self._in_flight.append(self._sent)
        return len(self._in_flight)

    def answer(self, number: int) -> None:
        for _ in range(number):
            self._unanswered.answered(self._in_flight.pop(0), "busy")


def test_a_destination_that_answers_promptly_gets_more_and_one_that_does_not_fewer() -> None:
    clock = Clock()
    destination = Destination(Unanswered(clock))
    assert destination.fill() == MAX_UNANSWERED
    destination.answer(10)
    assert destination.fill() == MAX_UNANSWERED + 10
    for _ in range(5):
        clock.now += 0.9 * PROMPT
        # All at once, as RabbitMQ may confirm them.
        destination.answer(destination.fill())
    assert destination.fill() == MAX_PROMPT
    clock.now += 2 * PROMPT
    destination.answer(MAX_PROMPT - 5)
    assert destination.fill() == MAX_UNANSWERED


def test_a_destination_that_was_prompt_a_while_ago_starts_anew() -> None:
    clock = Clock()
    unanswered = Unanswered(clock)
    destination = Destination(unanswered)
    destination.fill()
    destination.answer(MAX_UNANSWERED)
    clock.now += 2 * PROMPT
    unanswered.sent("lone", "busy")
    unanswered.answered("lone", "busy")
    assert destination.fill() == MAX_UNANSWERED


def test_the_broker_is_stuck_if_it_owes_one_destination_too_many_answers_for_long() -> None:
    clock = Clock()
    silent: set[str | None] = set()
    unanswered = Unanswered(clock, silent)
    for number in range(MAX_UNANSWERED):
        unanswered.sent(number, "lost")
        unanswered.sent(-number, None)
    assert unanswered.give_up_if_stuck(STUCK_AFTER) == []
    unanswered.sent("one more", "lost")
    assert unanswered.give_up_if_stuck(0.9 * STUCK_AFTER) == []
    assert unanswered.give_up_if_stuck(STUCK_AFTER) == ["lost"]
    assert silent == {"lost"}
    on_another_connection = Unanswered(clock, silent)
    on_another_connection.sent("first", "lost")
    assert on_another_connection.is_silent("lost", 0.0)
