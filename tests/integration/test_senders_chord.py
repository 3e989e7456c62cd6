"""Chords: a delay of the whole is the header's, and the body waits only where it is told to."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import chain, chord, group
from kombu import Connection

from celery_rabbitdelay.testing import wait_for
from tests.integration.arrivals import count
from tests.integration.shop import PATIENCE, named
from tests.integration.test_senders_canvas import SIGNATURES, by_every_signature
from tests.integration.waited import assert_not_delayed, assert_waited
from tests.integration.worker import Worker

#: Seconds.
DELAY = 0.3

Seen = dict[str, Any]

#: Celery's own signatures by name cannot tell their delay from one that the whole chord has too.
by_signatures_that_know_their_own_delay = pytest.mark.parametrize(
    "make", list(SIGNATURES.values())[:2], ids=list(SIGNATURES)[:2]
)


def ends(result: Any) -> tuple[list[Seen], Seen]:
    """Return what the tasks of a chord's header saw, and what its body did."""
    body = result.get(timeout=PATIENCE)
    return result.parent.get(timeout=PATIENCE), body


def assert_header_waited_and_body_did_not(result: Any, since: float) -> None:
    header, body = ends(result)
    for seen in header:
        assert_waited(seen, since, DELAY)
    assert_not_delayed(body)
    assert body["at"] >= max(seen["at"] for seen in header)


def test_the_body_runs_once_after_the_last_of_ten_delayed_tasks(served_shop: Any) -> None:
    look, note = served_shop.tasks["look"], served_shop.tasks["note"]
    key = f"body-{uuid4().hex}"
    redis = served_shop.backend.client
    second = named(served_shop, "second")
    delays = [1 + 2 * number / 9 for number in range(10)]
    before = time.time()
    header = [look.si(delay).set(delay=delay, queue=second) for delay in delays]
    body = note.s(key=key) | look.si()
    after = chord(header, body).apply_async().get(timeout=PATIENCE)

    # The worker runs one task at a time: what came before this one has run.
    look.apply_async().get(timeout=PATIENCE)
    assert redis.llen(key) == 1
    (given,) = _noted(redis, key)["given"]
    assert sorted(seen["given"][0] for seen in given) == delays
    for seen in given:
        assert_waited(seen, before, seen["given"][0])
        assert seen["routing_key"] == second
    assert _noted(redis, key)["at"] >= max(seen["at"] for seen in given)
    assert_not_delayed(after)
    redis.delete(key)


def _noted(redis: Any, key: str) -> Seen:
    noted: Seen = json.loads(redis.lindex(key, 0))
    return noted


@by_every_signature
def test_a_delay_given_with_apply_async_is_the_header_s_alone(
    served_shop: Any, make: Callable[..., Any]
) -> None:
    before = time.time()
    whole: Any = chord([make(served_shop), make(served_shop)], make(served_shop), app=served_shop)
    assert_header_waited_and_body_did_not(whole.apply_async(delay=DELAY), before)


@by_every_signature
@pytest.mark.parametrize("delay", [DELAY, timedelta(seconds=DELAY)], ids=["seconds", "timedelta"])
def test_a_delay_set_on_the_whole_is_the_header_s_alone(
    served_shop: Any, make: Callable[..., Any], delay: float | timedelta
) -> None:
    before = time.time()
    whole: Any = chord([make(served_shop), make(served_shop)], make(served_shop), app=served_shop)
    assert_header_waited_and_body_did_not(whole.set(delay=delay).apply_async(), before)


@by_every_signature
def test_a_delay_given_when_the_chord_is_called_is_the_header_s_alone(
    served_shop: Any, make: Callable[..., Any]
) -> None:
    before = time.time()
    header = [make(served_shop), make(served_shop)]
    result = chord(header, app=served_shop)(make(served_shop), delay=DELAY)
    assert_header_waited_and_body_did_not(result, before)


@by_every_signature
def test_a_delay_of_a_chain_that_begins_with_a_group_is_the_group_s_alone(
    served_shop: Any, make: Callable[..., Any]
) -> None:
    before = time.time()
    members = group([make(served_shop), make(served_shop)], app=served_shop)
    whole: Any = chain(members, make(served_shop), app=served_shop)
    assert_header_waited_and_body_did_not(whole.apply_async(delay=DELAY), before)


@by_every_signature
def test_a_chord_with_a_delay_behind_another_task_waits_after_it(
    served_shop: Any, make: Callable[..., Any]
) -> None:
    whole: Any = chord([make(served_shop), make(served_shop)], make(served_shop), app=served_shop)
    result: Any = chain(make(served_shop), whole.set(delay=DELAY), app=served_shop).apply_async()
    result.get(timeout=PATIENCE)
    first = result.parent.parent.get(timeout=PATIENCE)
    assert_not_delayed(first)
    assert_header_waited_and_body_did_not(result, first["at"])


@by_every_signature
@pytest.mark.parametrize("header_delay", [0, 0.2], ids=["no", "another"])
@pytest.mark.parametrize("option", ["delay", "countdown"])
def test_a_body_with_a_delay_waits_after_the_header(
    served_shop: Any, make: Callable[..., Any], option: str, header_delay: float
) -> None:
    _header_and_body_wait(served_shop, make, option, header_delay)


@by_signatures_that_know_their_own_delay
@pytest.mark.parametrize("option", ["delay", "countdown"])
def test_a_body_with_the_very_same_delay_waits_after_the_header(
    served_shop: Any, make: Callable[..., Any], option: str
) -> None:
    _header_and_body_wait(served_shop, make, option, DELAY)


def _header_and_body_wait(
    served_shop: Any, make: Callable[..., Any], option: str, header_delay: float
) -> None:
    before = time.time()
    members = [make(served_shop).set(**{option: header_delay}) for _ in range(2)]
    body = make(served_shop).set(**{option: DELAY})
    header, seen = ends(chord(members, body, app=served_shop).apply_async())
    for member in header:
        if header_delay:
            assert_waited(member, before, header_delay)
        else:
            assert_not_delayed(member)
    assert_waited(seen, max(member["at"] for member in header), DELAY)


@by_signatures_that_know_their_own_delay
def test_header_and_body_wait_each_for_their_own_where_the_whole_has_the_same_delay(
    served_shop: Any, make: Callable[..., Any]
) -> None:
    before = time.time()
    members = [make(served_shop), make(served_shop)]
    whole: Any = chord(members, make(served_shop).set(delay=DELAY), app=served_shop)
    header, body = ends(whole.apply_async(delay=DELAY))
    for member in header:
        assert_waited(member, before, DELAY)
    assert_waited(body, max(member["at"] for member in header), DELAY)


def test_a_body_takes_a_timedelta(served_shop: Any) -> None:
    look = served_shop.tasks["look"]
    body = look.si().set(delay=timedelta(seconds=DELAY))
    header, seen = ends(chord([look.si(), look.si()], body).apply_async())
    assert_waited(seen, max(member["at"] for member in header), DELAY)


def test_the_body_gets_the_header_s_results_through_the_levels(served_shop: Any) -> None:
    look = served_shop.tasks["look"]
    whole: Any = chord([look.si(1), look.si(2)], look.s("body").set(delay=DELAY))
    header, own = whole.apply_async().get(timeout=PATIENCE)["given"]
    assert [seen["given"] for seen in header] == [[1], [2]]
    assert own == "body"


def test_the_unlocking_of_a_chord_waits_in_the_levels(
    make_shop: Callable[..., Any],
    configuration: dict[str, Any],
    connection: Connection,
    tmp_path: Path,
) -> None:
    results = {"result_backend": tmp_path.as_uri()}
    shop = make_shop(**results)
    look = shop.tasks["look"]
    default, second = named(shop, "default"), named(shop, "second")
    digit_queues = shop.rabbitdelay.topology.digit_queues

    def one_waits() -> bool:
        return sum(count(connection, queue.name) for queue in digit_queues) == 1

    with Worker({**configuration, **results}, [default]) as worker:
        # Nobody serves the header yet. Celery polls a backend that cannot count: with a task that
        # it sends with a countdown of a second, and which is retried until the header is done.
        header = [look.si().set(queue=second) for _ in range(2)]
        result = chord(header, look.s().set(delay=DELAY)).apply_async()
        retried = re.compile(r"celery\.chord_unlock\[.*\] retry: Retry in 1")
        for polls in range(3):
            wait_for(lambda: len(retried.findall(worker.log)) >= polls, f"{polls} polls")  # noqa: B023
            wait_for(one_waits, f"poll {polls} in the levels")
        shop.control.add_consumer(second, destination=[worker.name], reply=True)
        body = result.get(timeout=PATIENCE)
        ran = worker.log.count(f"look[{result.id}] succeeded")

    (members,) = body["given"]
    assert len(members) == 2
    assert_waited(body, max(seen["at"] for seen in members), DELAY)
    assert ran == 1
