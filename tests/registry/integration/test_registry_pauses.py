"""Paused tasks, as the registry decides about them, on each kind of Redis.

Which messages wait is what test_registry_rule.py compares with the rule in Python.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from celery_rabbitdelay import RegistryUnavailable
from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.registry.decision import Arrival, Decision, Verdict
from celery_rabbitdelay.registry.index import Filter
from celery_rabbitdelay.registry.registry import Registry
from celery_rabbitdelay.testing import wait_for
from tests.registry.integration.registering import (
    KEEP_MS,
    MARGIN_MS,
    MINUTE_MS,
    RedisSetup,
    arrival,
    expiry_ms,
    now_ms,
    tracked,
    verdict,
)


@pytest.fixture
def registry(registry: Registry) -> Iterator[Registry]:
    """The registry, in which nothing is paused when the test is over."""
    yield registry
    for each in registry.pauses.all():
        registry.pauses.resume(each.task, each.queue)


def decision(registry: Registry, arrived: Arrival) -> Decision:
    [found] = registry.decide([arrived])
    return found


def test_what_is_paused_is_listed_since_it_was_paused_first(registry: Registry) -> None:
    pauses = registry.pauses
    assert (pauses.all(), pauses.known()) == ([], {})
    began = datetime.now(UTC) - timedelta(milliseconds=1)  # Redis counts whole ones
    since = pauses.pause("shop.remind", None)
    assert began <= since <= datetime.now(UTC)
    assert pauses.pause("shop.remind", None) == since
    of_queue = pauses.pause(None, "mails: für \ud83d")
    assert {*pauses.all()} == {
        ("shop.remind", None, since, None),
        (None, "mails: für \ud83d", of_queue, None),
    }
    assert [pauses.resume("shop.remind", None) for _ in range(2)] == [True, False]
    assert pauses.resume(None, "shop.remind") is False
    assert [each.queue for each in pauses.all()] == ["mails: für \ud83d"]


def test_a_pause_ends_by_itself_at_its_instant(registry: Registry) -> None:
    pauses, soon_ms = registry.pauses, registry.now_ms() + 200
    since = pauses.pause("shop.remind", None, soon_ms + MINUTE_MS)
    of_queue = pauses.pause(None, "mails")
    assert pauses.pause("shop.remind", None, soon_ms) == since, "its end is another one"
    assert {*pauses.all()} == {
        ("shop.remind", None, since, instant_of(soon_ms)),
        (None, "mails", of_queue, None),
    }
    wait_for(lambda: [each.queue for each in pauses.all()] == ["mails"], "its end")
    assert soon_ms <= registry.now_ms()
    assert pauses.resume("shop.remind", None) is False
    assert pauses.pause("shop.remind", None) > since


def test_a_paused_task_asks_again_soon_and_another_message_of_it_may_run_meanwhile(
    registry: Registry,
) -> None:
    message = tracked(after_ms=-8 * MINUTE_MS)
    registry.register([message])
    paused = arrival(message, paused_ms=now_ms() - 4 * MINUTE_MS)
    asked_at = now_ms()
    found = decision(registry, paused)
    assert (found.verdict, found.is_new_due) == (Verdict.LATER, False)
    # Few that are held ask again soon, however long the pause has lasted.
    assert asked_at < found.until_ms <= now_ms() + 1_000
    assert [each.task_id for each in registry.index.tasks(["task"])] == ["task"]
    assert verdict(registry, message._replace(copy="another")) is Verdict.RUN
    assert decision(registry, paused).verdict is Verdict.REPLACED


def test_a_task_that_is_held_for_long_is_listed_as_long_as_it_is(registry: Registry) -> None:
    paused = {"task:shop.remind": now_ms() - 2 * MARGIN_MS}
    registry.store.commands(lambda pipe: pipe.hset(registry.names.only("paused"), mapping=paused))
    registry.register([tracked(after_ms=-2 * MARGIN_MS)])
    assert registry.index.count(Filter()) == 1
    assert [each.task_id for each in registry.index.pending(Filter())] == ["task"]
    registry.pauses.resume("shop.remind", None)
    wait_for(lambda: registry.index.count(Filter()) == 0, "the end of the pause")


def test_a_task_that_is_paused_for_longer_than_decisions_are_kept_is_not_forgotten(
    registry: Registry, redis_setup: RedisSetup
) -> None:
    message = tracked(after_ms=-2 * KEEP_MS)
    held = arrival(message, put_back_ms=now_ms(), paused_ms=now_ms() - KEEP_MS)
    assert decision(registry, held).verdict is Verdict.LATER
    # And while it asks, its record is kept.
    other = tracked("other", -KEEP_MS + MINUTE_MS)
    registry.register([other])
    record = registry.names.of("task", "other")
    look = registry.decide([arrival(other, paused_ms=now_ms())], notes=False)
    assert look[0].verdict is Verdict.LATER
    assert expiry_ms(redis_setup, record) < now_ms() + 2 * MINUTE_MS
    assert decision(registry, arrival(other, paused_ms=now_ms())).verdict is Verdict.LATER
    assert expiry_ms(redis_setup, record) > now_ms() + KEEP_MS - MINUTE_MS


def test_what_is_paused_and_cannot_be_read_holds_up_no_task(
    registry: Registry, redis_setup: RedisSetup
) -> None:
    key = registry.names.only("paused")
    redis_setup.client.set(key, "garbage")
    assert registry.pauses.known() == {}
    for call in (registry.pauses.all, lambda: registry.pauses.pause("remind", None)):
        with pytest.raises(RegistryUnavailable, match="the list of pauses cannot be read"):
            call()
    redis_setup.client.delete(key)
    registry.pauses.pause("remind", None)
    wait_for(registry.pauses.known, "a pause that can be read")
