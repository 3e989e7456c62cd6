"""Every way to send one task: whichever is taken, the delay waits in the levels."""

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise, product
from typing import Any
from uuid import uuid4

import celery
import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.levels import headers, wall_clock
from celery_rabbitdelay.testing import wait_for
from tests.kernel.integration.arrivals import take
from tests.kernel.integration.notes import Notes
from tests.kernel.integration.shop import LOST, PATIENCE, QUEUES, make_app, named
from tests.kernel.integration.waited import assert_not_delayed, assert_waited
from tests.kernel.integration.worker import Beat
from tests.kernel.unit.clock import frozen

#: Seconds.
DELAY = 0.3

#: By the task itself, and by its name alone.
SENDERS: dict[str, Callable[..., Any]] = {
    "apply_async": lambda app, **options: app.tasks["look"].apply_async(**options),
    "signature": lambda app, **options: app.tasks["look"].s().apply_async(**options),
    "set": lambda app, **options: app.tasks["look"].s().set(**options).delay(),
}
BY_NAME: dict[str, Callable[..., Any]] = {
    "send_task": lambda app, **options: app.send_task("look", **options),
    "set by name": lambda app, **options: app.signature("look").set(**options).delay(),
    "dictionary": lambda app, **options: app.signature(
        json.loads(json.dumps(celery.signature("look", app=app, options=options)))
    ).apply_async(),
}


@pytest.fixture
def stranger(served_configuration: Any) -> Iterator[Any]:
    """An application that sends to the worker's queues and knows none of its tasks."""
    app: Any = make_app({**served_configuration, "knows_tasks": False})
    yield app
    app.close()


def test_a_task_waits_however_it_is_sent(served_shop: Any, stranger: Any) -> None:
    assert "look" not in stranger.tasks
    sent: dict[Any, tuple[float, float, Any]] = {}
    for app, senders in ((served_shop, {**SENDERS, **BY_NAME}), (stranger, BY_NAME)):
        for sender, option in product(senders, ("delay", "countdown")):
            before = time.time()
            result = senders[sender](app, **{option: DELAY})
            sent[app is stranger, sender, option] = (before, DELAY, result)
    for option, value in (("delay", timedelta(seconds=DELAY)), ("countdown", 0.1)):
        before, result = time.time(), served_shop.tasks["look"].apply_async(**{option: value})
        sent[str(value)] = (before, 0.1, result)
    for before, delay, result in sent.values():
        assert_waited(result.get(timeout=PATIENCE), before, delay)


def test_an_eta_waits_in_the_levels(served_shop: Any) -> None:
    results = []
    # However long it takes to send it, it is not due yet.
    with frozen():
        now = wall_clock.now()
        for sender, zone in product(("apply_async", "set by name"), (UTC, None)):
            instant = (now + timedelta(seconds=DELAY)).replace(tzinfo=zone)
            for eta in (instant, instant.isoformat()):
                results.append({**SENDERS, **BY_NAME}[sender](served_shop, eta=eta))
    for result in results:
        assert_waited(result.get(timeout=PATIENCE), now.timestamp(), DELAY)


def test_more_than_eight_years_wait_in_full(
    make_shop: Any, connection: Connection, prefix: str
) -> None:
    shop = make_shop(rabbitdelay_layout="clock", rabbitdelay_confirm_timeout=150)
    before = time.time()
    shop.tasks["look"].apply_async(delay=2**28)
    (arrival,) = take(connection, [Queue(f"{prefix}.days.3000")], 1)
    # 3,106 days, 21 h, 24 min and 16 s.
    key = arrival.message.delivery_info["routing_key"]
    assert key == f"3.1.0.6.21.24.16.0.{prefix}%2Edefault"
    assert -0.001 < arrival.message.headers[headers.DUE] / 1000 - before - 2**28 < 20


def test_a_task_that_another_task_sends_waits_and_its_retries_do(served_shop: Any) -> None:
    before, tasks = time.time(), served_shop.tasks
    sending = tasks["send"].delay("look", {"countdown": DELAY})
    # The worker sends it with a delay of 0.3 s, through whatever the current application is.
    sharing = tasks["send-shared"].delay({"countdown": DELAY})
    seen = served_shop.AsyncResult(sending.get(timeout=PATIENCE)).get(timeout=PATIENCE)
    assert_waited(seen, before, DELAY)
    seen = served_shop.AsyncResult(sharing.get(timeout=PATIENCE)).get(timeout=PATIENCE)
    assert seen["retries"] == 1
    assert_waited(seen, before + 0.3, DELAY)


def test_beat_hands_its_entries_delay_on(served_shop: Any, served_configuration: Any) -> None:
    noted = Notes(served_shop)
    entry = {"task": "note", "schedule": 1.0, "kwargs": {"key": noted.key}, "options": {"delay": 1}}
    before = time.time()
    with Beat({**served_configuration, "beat_schedule": {"remind": entry}}):
        wait_for(lambda: len(noted.found()) >= 2, "two tasks of beat's")
    for seen in noted.found():
        assert_waited(seen, before, 1)
    noted.forget()


# Retries, by the task, by Celery and after a lost worker: they wait, and return to their queue.


def test_a_retry_returns_to_the_queue_it_came_from(served_shop: Any) -> None:
    retry, sent = served_shop.tasks["retry"], []
    for name, first in product(QUEUES, ({}, {"delay": 0.2})):
        queue = named(served_shop, name)
        given: Any = ([], 2, {"countdown": DELAY})
        own = {"queue": queue, "headers": {"x-tenant": "shop"}, **first}
        sent.append((queue, retry.apply_async(given, **own)))
    for queue, result in sent:
        attempts = result.get(timeout=PATIENCE)
        assert [attempt["retries"] for attempt in attempts] == [0, 1, 2]
        # The same exchange and key each time, which do not grow with the retries.
        assert len({(a["exchange"], a["routing_key"]) for a in attempts}) == 1
        # What the caller gave and when it is due, and nothing of the broker's.
        for attempt in attempts:
            assert attempt["headers"].keys() - {headers.DUE, headers.QUEUE} == {"x-tenant"}
        assert all(attempt["headers"][headers.QUEUE] == queue for attempt in attempts[1:])
        for earlier, later in pairwise(attempts):
            assert_waited(later, earlier["at"], DELAY)


def test_a_retry_takes_every_kind_of_delay(served_shop: Any) -> None:
    before, retry = datetime.now(UTC), served_shop.tasks["retry"]
    with_eta = retry.apply_async(([], 1, {"eta": before + timedelta(seconds=10)}))
    with_delay = retry.apply_async(([], 1, {"delay": 0.4}))
    # A delayed task's retry without a delay comes back at once.
    second = named(served_shop, "second")
    at_once = retry.apply_async(([], 1, {"delay": 0}), delay=DELAY, queue=second)

    first, again = with_delay.get(timeout=PATIENCE)
    assert_not_delayed(first)
    assert_waited(again, first["at"], 0.4)
    _, again = at_once.get(timeout=PATIENCE)
    assert_not_delayed(again)
    assert (again["routing_key"], again["headers"]) == (second, {})
    _, again = with_eta.get(timeout=PATIENCE)
    assert_waited(again, before.timestamp(), 10)


def test_autoretry_waits_for_its_delay_or_its_backoff_and_returns(served_shop: Any) -> None:
    queue, sent = named(served_shop, "second"), []
    waits = {"autoretry": 1, "autoretry-delay": 0.4, "autoretry-both": 1}
    for name, seconds in waits.items():
        before = time.time()
        sent.append((before, seconds, served_shop.tasks[name].apply_async(queue=queue)))
    for before, seconds, result in sent:
        seen = result.get(timeout=PATIENCE)
        assert (seen["retries"], seen["routing_key"]) == (1, queue)
        assert_waited(seen, before, seconds)

    # A retry that is refused fails the task, with the reason and the task's own error.
    result = served_shop.tasks["autoretry-wrong"].apply_async()
    with pytest.raises(Exception, match="soon") as caught:
        result.get(timeout=PATIENCE)
    assert type(caught.value).__name__ == "InvalidDelayType"
    assert "the mail gateway does not answer" in result.traceback


def test_a_backoff_above_ten_minutes_waits_in_full_below_its_maximum(
    serve: Any, connection: Connection, prefix: str
) -> None:
    shop = serve(rabbitdelay_layout=[("hours", 3, 3600), ("minutes", 60, 60)])
    before = time.time()
    shop.tasks["backoff"].apply_async()
    (arrival,) = take(connection, [Queue(f"{prefix}.hours.1")], 1)
    message = arrival.message
    assert (message.headers["retries"], message.headers["eta"]) == (1, None)
    assert 4000 <= message.headers[headers.DUE] / 1000 - before < 4060


@pytest.mark.parametrize("name", LOST)
def test_a_task_whose_worker_was_lost_runs_again(served_shop: Any, name: str) -> None:
    key, redis = f"lost-{uuid4().hex}", served_shop.backend.client
    before, own = time.time(), {"x-tenant": "shop"}
    to = {"queue": named(served_shop, "second"), "headers": own}
    again = served_shop.tasks[name].apply_async((key,), delay=0.5, **to).get(timeout=PATIENCE)
    first, noted = (json.loads(text) for text in redis.lrange(key, 0, -1))
    assert_waited(first, before, 0.5)
    for name_of in ("exchange", "routing_key"):
        assert first[name_of] == noted[name_of] == again[name_of]
    assert again["headers"].keys() == first["headers"].keys() == {*own, headers.DUE, headers.QUEUE}
    if name == "lost":
        # The broker has kept the message, which is due since the first time.
        assert (again["headers"], again["retries"]) == (first["headers"], 0)
    else:
        assert_waited(again, first["at"], 1)
        assert again["retries"] == 1
    redis.delete(key)
