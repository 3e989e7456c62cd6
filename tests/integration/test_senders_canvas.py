"""Groups, chains, chords, callbacks, replacements: a delay is applied once, where it was set."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import celery
import pytest
from celery import chain, chord, group
from kombu import Connection

from celery_rabbitdelay.testing import wait_for
from tests.integration.arrivals import count
from tests.integration.notes import Notes
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

in_every_way = pytest.mark.parametrize("send", WHOLES.values(), ids=WHOLES)


#: Celery's own signatures by name cannot tell their delay from one that the whole chord has too.
by_signatures_that_know_their_own_delay = pytest.mark.parametrize(
    "make", list(SIGNATURES)[:2], indirect=True
)


def a_chord(header: Any, body: Any, app: Any) -> Any:
    return chord(header, body, app=app)


#: How a chord gets a delay as a whole; each takes header, body and application.
CHORDS: dict[str, Callable[..., Any]] = {
    "apply_async": lambda *whole: a_chord(*whole).apply_async(delay=DELAY),
    "set": lambda *whole: a_chord(*whole).set(delay=DELAY).apply_async(),
    "set a timedelta": lambda *whole: (
        a_chord(*whole).set(delay=timedelta(seconds=DELAY)).apply_async()
    ),
    "called": lambda header, body, app: chord(header, app=app)(body, delay=DELAY),
    "a chain that begins with a group": lambda header, body, app: chain(
        group(header, app=app), body, app=app
    ).apply_async(delay=DELAY),
}


@pytest.fixture(params=SIGNATURES)
def make(request: pytest.FixtureRequest, served_shop: Any) -> Callable[..., Any]:
    """Makes signatures, in every way."""
    return partial(SIGNATURES[request.param], served_shop)


@in_every_way
def test_a_delay_of_a_group_is_each_member_s(served_shop: Any, make: Any, send: Any) -> None:
    before = time.time()
    result = send(group(make(1), make(2), app=served_shop))
    for seen in result.get(timeout=PATIENCE):
        assert_waited(seen, before, DELAY)


@pytest.mark.parametrize("option", ["delay", "countdown"])
def test_members_of_a_group_wait_each_for_itself(served_shop: Any, make: Any, option: str) -> None:
    before = time.time()
    members = [make(), make().set(**{option: DELAY})]
    first, second = group(members, app=served_shop).apply_async().get(timeout=PATIENCE)
    assert_not_delayed(first)
    assert_waited(second, before, DELAY)


@in_every_way
def test_a_delay_of_a_chain_is_its_first_task_s(served_shop: Any, make: Any, send: Any) -> None:
    before = time.time()
    result: Any = send(chain(make(), make(), app=served_shop))
    following = result.get(timeout=PATIENCE)
    assert_waited(result.parent.get(timeout=PATIENCE), before, DELAY)
    assert_not_delayed(following)


@pytest.mark.parametrize("option", ["delay", "countdown"])
def test_a_task_in_a_chain_waits_after_its_predecessor(
    served_shop: Any, make: Any, option: str
) -> None:
    waiting = make().set(**{option: DELAY})
    result: Any = chain(make(), waiting, make(), app=served_shop).apply_async()
    following = result.get(timeout=PATIENCE)
    delayed, first = result.parent.get(), result.parent.parent.get()
    assert_not_delayed(first)
    assert_waited(delayed, first["at"], DELAY)
    assert_not_delayed(following)


def test_each_task_of_a_chain_waits_for_its_own_delay(served_shop: Any, make: Any) -> None:
    before = time.time()
    waiting = make().set(delay=0.2)
    result: Any = chain(make(), waiting, app=served_shop).apply_async(delay=DELAY)
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
    noted = Notes(served_shop)
    errback = served_shop.tasks["note"].s(key=noted.key).set(**{option: DELAY})
    before = time.time()
    failed = served_shop.tasks["fail"].apply_async(link_error=errback, delay=0.3)
    (seen,) = noted.wait(1)
    assert seen["given"] == [failed.id]
    assert_waited(seen, before + 0.3, DELAY)
    noted.forget()


@pytest.mark.parametrize("option", ["delay", "countdown"])
def test_a_task_s_replacement_waits(served_shop: Any, make: Any, option: str) -> None:
    before = time.time()
    replacement = make().set(**{option: DELAY}, queue=named(served_shop, "second"))
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


# Chords: a delay of the whole is the header's, and the body waits only where it is told to.


def ends(result: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
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
    look, noted = served_shop.tasks["look"], Notes(served_shop)
    second = named(served_shop, "second")
    delays = [1 + 2 * number / 9 for number in range(10)]
    before = time.time()
    header = [look.si(delay).set(delay=delay, queue=second) for delay in delays]
    body = served_shop.tasks["note"].s(key=noted.key) | look.si()
    after = chord(header, body).apply_async().get(timeout=PATIENCE)

    (note,) = noted.wait(1)
    (given,) = note["given"]
    assert sorted(seen["given"][0] for seen in given) == delays
    for seen in given:
        assert_waited(seen, before, seen["given"][0])
        assert seen["routing_key"] == second
    assert note["at"] >= max(seen["at"] for seen in given)
    assert_not_delayed(after)
    noted.forget()


@pytest.mark.parametrize("send", CHORDS.values(), ids=CHORDS)
def test_a_delay_of_a_whole_chord_is_the_header_s_alone(
    served_shop: Any, make: Any, send: Any
) -> None:
    before = time.time()
    result = send([make(), make()], make(), served_shop)
    assert_header_waited_and_body_did_not(result, before)


def test_a_chord_with_a_delay_behind_another_task_waits_after_it(
    served_shop: Any, make: Any
) -> None:
    whole: Any = chord([make(), make()], make(), app=served_shop)
    result: Any = chain(make(), whole.set(delay=DELAY), app=served_shop).apply_async()
    result.get(timeout=PATIENCE)
    first = result.parent.parent.get(timeout=PATIENCE)
    assert_not_delayed(first)
    assert_header_waited_and_body_did_not(result, first["at"])


@pytest.mark.parametrize("header_delay", [0, 0.2], ids=["no", "another"])
@pytest.mark.parametrize("option", ["delay", "countdown"])
def test_a_body_with_a_delay_waits_after_the_header(
    served_shop: Any, make: Any, option: str, header_delay: float
) -> None:
    _header_and_body_wait(served_shop, make, option, header_delay)


@by_signatures_that_know_their_own_delay
@pytest.mark.parametrize("option", ["delay", "countdown"])
def test_a_body_with_the_very_same_delay_waits_after_the_header(
    served_shop: Any, make: Any, option: str
) -> None:
    _header_and_body_wait(served_shop, make, option, DELAY)


def _header_and_body_wait(served_shop: Any, make: Any, option: str, header_delay: float) -> None:
    before = time.time()
    members = [make().set(**{option: header_delay}) for _ in range(2)]
    body = make().set(**{option: DELAY})
    header, seen = ends(chord(members, body, app=served_shop).apply_async())
    for member in header:
        if header_delay:
            assert_waited(member, before, header_delay)
        else:
            assert_not_delayed(member)
    assert_waited(seen, max(member["at"] for member in header), DELAY)


@by_signatures_that_know_their_own_delay
def test_header_and_body_wait_each_for_their_own_where_the_whole_has_the_same_delay(
    served_shop: Any, make: Any
) -> None:
    before = time.time()
    members = [make(), make()]
    whole: Any = chord(members, make().set(delay=DELAY), app=served_shop)
    header, body = ends(whole.apply_async(delay=DELAY))
    for member in header:
        assert_waited(member, before, DELAY)
    assert_waited(body, max(member["at"] for member in header), DELAY)


def test_a_body_takes_a_timedelta_and_gets_the_header_s_results(served_shop: Any) -> None:
    look = served_shop.tasks["look"]
    body = look.s("body").set(delay=timedelta(seconds=DELAY))
    header, seen = ends(chord([look.si(1), look.si(2)], body).apply_async())
    assert [each["given"] for each in header] == [[1], [2]]
    assert [each["given"] for each in seen["given"][0]] == [[1], [2]]
    assert seen["given"][1] == "body"
    assert_waited(seen, max(member["at"] for member in header), DELAY)


def test_the_unlocking_of_a_chord_waits_in_the_levels(
    serve: Any, connection: Connection, tmp_path: Path
) -> None:
    shop = serve(only="default", result_backend=tmp_path.as_uri())
    look, second = shop.tasks["look"], named(shop, "second")
    digit_queues = shop.rabbitdelay.topology.digit_queues

    def one_waits() -> bool:
        return sum(count(connection, queue.name) for queue in digit_queues) == 1

    # Nobody serves the header yet. Celery polls a backend that cannot count: with a task that
    # it sends with a countdown of a second, and which is retried until the header is done.
    header = [look.si().set(queue=second) for _ in range(2)]
    result = chord(header, look.s().set(delay=DELAY)).apply_async()
    retried = re.compile(r"celery\.chord_unlock\[.*\] retry: Retry in 1")
    for polls in range(3):
        wait_for(lambda: len(retried.findall(shop.worker.log)) >= polls, f"{polls} polls")  # noqa: B023
        wait_for(one_waits, f"poll {polls} in the levels")
    shop.control.add_consumer(second, destination=[shop.worker.name], reply=True)
    body = result.get(timeout=PATIENCE)
    (members,) = body["given"]
    assert len(members) == 2
    assert_waited(body, max(seen["at"] for seen in members), DELAY)
    # The log lags behind the results.
    wait_for(lambda: shop.worker.log.count(f"look[{result.id}] succeeded") == 1, "its line")
