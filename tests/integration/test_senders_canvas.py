"""Groups, chains, callbacks, maps, replacements: a delay is applied once, where it was set."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import celery
import pytest
from celery import chain, group

from celery_rabbitdelay.testing import wait_for
from tests.integration.shop import PATIENCE, named
from tests.integration.waited import SLACK, assert_not_delayed, assert_waited

#: Seconds.
DELAY = 0.3

#: For maps, whose tasks see the time alone: longer than a task without a delay would take.
MAP_DELAY = 0.8

#: How signatures are made; each takes the application and what ``Task.si`` takes.
SIGNATURES: dict[str, Callable[..., Any]] = {
    "task.si": lambda app, *args: app.tasks["look"].si(*args),
    "app.signature": lambda app, *args: app.signature("look", args, immutable=True),
    "celery.signature": lambda app, *args: celery.signature("look", args, app=app, immutable=True),
}

#: How a whole canvas is sent with a delay.
WHOLES: dict[str, Callable[[Any], Any]] = {
    "apply_async(delay)": lambda canvas: canvas.apply_async(delay=DELAY),
    "apply_async(countdown)": lambda canvas: canvas.apply_async(countdown=DELAY),
    "set(delay)": lambda canvas: canvas.set(delay=DELAY).apply_async(),
    "set(countdown)": lambda canvas: canvas.set(countdown=DELAY).apply_async(),
}

by_every_signature = pytest.mark.parametrize("make", SIGNATURES.values(), ids=SIGNATURES)
in_every_way = pytest.mark.parametrize("send", WHOLES.values(), ids=WHOLES)


@by_every_signature
@in_every_way
def test_a_delay_of_a_group_is_each_member_s(
    served_shop: Any, make: Callable[..., Any], send: Callable[[Any], Any]
) -> None:
    before = time.time()
    result = send(group(make(served_shop, 1), make(served_shop, 2), app=served_shop))
    for seen in result.get(timeout=PATIENCE):
        assert_waited(seen, before, DELAY)


@by_every_signature
@pytest.mark.parametrize("option", ["delay", "countdown"])
def test_members_of_a_group_wait_each_for_itself(
    served_shop: Any, make: Callable[..., Any], option: str
) -> None:
    before = time.time()
    members = [make(served_shop), make(served_shop).set(**{option: DELAY})]
    first, second = group(members, app=served_shop).apply_async().get(timeout=PATIENCE)
    assert_not_delayed(first)
    assert_waited(second, before, DELAY)


@by_every_signature
@in_every_way
def test_a_delay_of_a_chain_is_its_first_task_s(
    served_shop: Any, make: Callable[..., Any], send: Callable[[Any], Any]
) -> None:
    before = time.time()
    result: Any = send(chain(make(served_shop), make(served_shop), app=served_shop))
    following = result.get(timeout=PATIENCE)
    assert_waited(result.parent.get(timeout=PATIENCE), before, DELAY)
    assert_not_delayed(following)


@by_every_signature
@pytest.mark.parametrize("option", ["delay", "countdown"])
def test_a_task_in_a_chain_waits_after_its_predecessor(
    served_shop: Any, make: Callable[..., Any], option: str
) -> None:
    waiting = make(served_shop).set(**{option: DELAY})
    result: Any = chain(
        make(served_shop), waiting, make(served_shop), app=served_shop
    ).apply_async()
    following = result.get(timeout=PATIENCE)
    delayed, first = result.parent.get(), result.parent.parent.get()
    assert_not_delayed(first)
    assert_waited(delayed, first["at"], DELAY)
    assert_not_delayed(following)


@by_every_signature
def test_each_task_of_a_chain_waits_for_its_own_delay(
    served_shop: Any, make: Callable[..., Any]
) -> None:
    before = time.time()
    waiting = make(served_shop).set(delay=0.2)
    result: Any = chain(make(served_shop), waiting, app=served_shop).apply_async(delay=DELAY)
    second = result.get(timeout=PATIENCE)
    first = result.parent.get()
    assert_waited(first, before, DELAY)
    assert_waited(second, first["at"], 0.2)


@pytest.mark.parametrize("option", ["delay", "countdown"])
def test_a_group_behind_a_task_waits_after_it(served_shop: Any, option: str) -> None:
    look = served_shop.tasks["look"]
    members = group(look.si().set(**{option: DELAY}), look.si())
    result: Any = chain(look.si(), members).apply_async()
    delayed, undelayed = result.get(timeout=PATIENCE)
    assert_waited(delayed, result.parent.get()["at"], DELAY)
    assert_not_delayed(undelayed)


def test_a_result_reaches_the_next_task_through_the_levels(served_shop: Any) -> None:
    look = served_shop.tasks["look"]
    result: Any = chain(look.s(1), look.s(2).set(delay=DELAY)).apply_async()
    before, own = result.get(timeout=PATIENCE)["given"]
    assert before["given"] == [1]
    assert own == 2


@pytest.mark.parametrize("where", ["chain", "link"])
def test_a_nested_signature_takes_a_timedelta(served_shop: Any, where: str) -> None:
    look = served_shop.tasks["look"]
    waiting = look.si().set(delay=timedelta(seconds=DELAY))
    if where == "chain":
        result: Any = chain(look.si(), waiting).apply_async()
        first, second = result.parent, result
    else:
        second = waiting.freeze()
        first = look.apply_async(link=waiting)
    seen = second.get(timeout=PATIENCE)
    assert_waited(seen, first.get(timeout=PATIENCE)["at"], DELAY)


@pytest.mark.parametrize("way", ["delay", "countdown"])
@pytest.mark.parametrize("kind", ["map", "starmap", "chunks"])
def test_maps_and_chunks_wait(served_shop: Any, kind: str, way: str) -> None:
    at = served_shop.tasks["at"]
    before = time.time()
    match kind:
        case "map":
            seen = at.map([1, 2]).apply_async(**{way: MAP_DELAY}).get(timeout=PATIENCE)
        case "starmap":
            seen = at.starmap([(1,), (2,)]).apply_async(**{way: MAP_DELAY}).get(timeout=PATIENCE)
        case _:
            chunks = at.chunks([(1,), (2,)], 1).apply_async(**{way: MAP_DELAY})
            seen = [one for chunk in chunks.get(timeout=PATIENCE) for one in chunk]
    assert [one["given"] for one in seen] == [[1], [2]]
    assert all(before + MAP_DELAY <= one["at"] < before + MAP_DELAY + SLACK for one in seen)


@pytest.mark.parametrize("option", ["delay", "countdown"])
def test_a_callback_waits_after_the_task_it_is_linked_to(served_shop: Any, option: str) -> None:
    look = served_shop.tasks["look"]
    callback = look.s("linked").set(**{option: DELAY})
    called = callback.freeze()
    look.apply_async(link=callback)
    seen = called.get(timeout=PATIENCE)
    before, own = seen["given"]
    assert own == "linked"
    assert_waited(seen, before["at"], DELAY)


def test_a_delayed_task_s_callback_is_not_delayed_as_well(served_shop: Any) -> None:
    look = served_shop.tasks["look"]
    callback = look.si()
    called = callback.freeze()
    before = time.time()
    result = look.apply_async(link=callback, delay=DELAY)
    assert_waited(result.get(timeout=PATIENCE), before, DELAY)
    assert_not_delayed(called.get(timeout=PATIENCE))


@pytest.mark.parametrize("option", ["delay", "countdown"])
def test_an_errback_waits_after_the_task_that_failed(served_shop: Any, option: str) -> None:
    key = f"failed-{uuid4().hex}"
    redis = served_shop.backend.client
    errback = served_shop.tasks["note"].s(key=key).set(**{option: DELAY})
    before = time.time()
    failed = served_shop.tasks["fail"].apply_async(link_error=errback, delay=0.3)
    wait_for(lambda: redis.llen(key), "the errback")
    (noted,) = redis.lrange(key, 0, -1)
    seen = json.loads(noted)
    assert seen["given"] == [failed.id]
    assert_waited(seen, before + 0.3, DELAY)
    redis.delete(key)


@by_every_signature
@pytest.mark.parametrize("option", ["delay", "countdown"])
def test_a_task_s_replacement_waits(
    served_shop: Any, make: Callable[..., Any], option: str
) -> None:
    before = time.time()
    replacement = make(served_shop).set(**{option: DELAY}, queue=named(served_shop, "second"))
    seen = served_shop.tasks["replace"].delay(replacement).get(timeout=PATIENCE)
    assert_waited(seen, before, DELAY)
    assert seen["routing_key"] == named(served_shop, "second")


def test_a_delayed_task_s_replacement_is_not_delayed_as_well(served_shop: Any) -> None:
    look, replace = served_shop.tasks["look"], served_shop.tasks["replace"]
    before = time.time()
    seen = replace.apply_async((look.si(),), delay=DELAY).get(timeout=PATIENCE)
    assert seen["at"] >= before + DELAY
    assert_not_delayed(seen)


def test_a_delayed_replacement_keeps_its_place_in_a_chain(served_shop: Any) -> None:
    look, replace = served_shop.tasks["look"], served_shop.tasks["replace"]
    replacement = look.si("replacement").set(delay=DELAY)
    result: Any = chain(look.si(), replace.s(replacement), look.s()).apply_async()
    following = result.get(timeout=PATIENCE)
    (replaced,) = following["given"]
    assert replaced["given"] == ["replacement"]
    assert_waited(replaced, result.parent.parent.get()["at"], DELAY)
    assert_not_delayed(following)
