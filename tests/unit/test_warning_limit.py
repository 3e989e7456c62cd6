"""Warnings about messages that anybody may send: a few by name each minute, then a count."""

from __future__ import annotations

import logging

import pytest

from celery_rabbitdelay.levels.warning_limit import LOGGED, WarningLimit
from tests.unit.clock import Clock


def test_the_first_few_are_logged_and_others_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    limit = WarningLimit(logging.getLogger(__name__), "shop: letters", clock.monotonic)
    assert limit.allows("gone")
    assert not limit.allows("gone")
    allowed = [limit.allows(str(number)) for number in range(100)]
    assert allowed == [True] * (LOGGED - 1) + [False] * (100 - LOGGED + 1)
    for clock.now in (59.0, 60.0):
        limit.log_count()
    assert caplog.messages == ["shop: letters: 97 more within 60 s, without a warning each"]
    assert limit.allows("gone")
    clock.now = 120.0
    limit.log_count()
    assert len(caplog.messages) == 1
