"""How long, and how often, publishing is tried."""

from __future__ import annotations

import pytest

from celery_rabbitdelay.publishing.publication import MIN_PAUSE, PublishPolicy

#: Each pause is partly random, so each is looked at so many times.
LOOKS = 200


def test_pauses_begin_at_once_and_grow_to_a_second() -> None:
    policy = PublishPolicy(jitter=0.0)
    pauses = [policy.pause(attempt) for attempt in range(1, 9)]
    assert pauses == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0])


def test_a_pause_is_partly_random_and_never_longer_than_the_backoff_says() -> None:
    policy = PublishPolicy(backoff=(2.0, 0.0, 2.0), jitter=0.25)
    pauses = [policy.pause(attempt) for attempt in (1, 2, 50) for _ in range(LOOKS)]
    assert 1.5 <= min(pauses) < 1.7
    assert 1.8 < max(pauses) <= 2.0


def test_without_a_backoff_a_port_that_refuses_is_not_asked_without_a_pause() -> None:
    policy = PublishPolicy(backoff=(0.0, 0.0, 0.0))
    assert policy.pause(1) == 0.0
    assert min(policy.pause(attempt) for attempt in range(2, LOOKS)) == MIN_PAUSE


@pytest.mark.parametrize(("resends", "over"), [(None, []), (0, [1, 2, 10_000]), (2, [10_000])])
def test_resends_are_counted_if_a_number_is_given(resends: int | None, over: list[int]) -> None:
    policy = PublishPolicy(resends=resends)
    assert [attempt for attempt in (1, 2, 10_000) if policy.is_over(attempt)] == over
