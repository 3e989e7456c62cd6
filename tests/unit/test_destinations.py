"""Which destinations do not answer, and which exchanges are missing; the clock is a fake."""

from __future__ import annotations

from celery_rabbitdelay.modules.destinations import (
    ASK_AGAIN,
    SILENCE,
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
