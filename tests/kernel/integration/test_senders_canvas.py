"""Groups, chains, chords, callbacks, replacements: a delay is applied once, where it was set.

What travels in whose message is decided in ``app/canvas.py``; see
``tests/kernel/unit/test_canvas.py``.
"""

import itertools
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord, group
from kombu import Connection

from celery_rabbitdelay.testing import wait_for
from tests.kernel.integration.arrivals import count
from tests.kernel.integration.notes import Notes
from tests.kernel.integration.shop import PATIENCE, named
from tests.kernel.integration.waited import SLACK, assert_not_delayed, assert_waited

#: Seconds.
DELAY = 0.3

#: For maps, whose tasks see the time alone: longer than a task without a delay would take.
MAP_DELAY = 0.8


@pytest.fixture
def make(served_shop: Any) -> Callable[..., Any]:
    """Makes signatures of the task, and by its name, in turns."""
    numbers = itertools.count()

    def make(*args: Any) -> Any:
        if next(numbers) % 2:
            return served_shop.signature("look", args, immutable=True)
        return served_shop.tasks["look"].si(*args)

    return make


def test_a_delay_of_a_group_is_each_member_s(served_shop: Any, make: Any) -> None:
    before = time.time()
    whole: Any = group(make(1), make(2), app=served_shop)
    whole = whole.set(delay=DELAY).apply_async()
    members = [make(), make().set(countdown=DELAY)]
    single = group(members, app=served_shop).apply_async()
    for seen in whole.get(timeout=PATIENCE):
        assert_waited(seen, before, DELAY)
    undelayed, delayed = single.get(timeout=PATIENCE)
    assert_not_delayed(undelayed)
    assert_waited(delayed, before, DELAY)


def test_each_task_of_a_chain_waits_for_its_own_delay(served_shop: Any, make: Any) -> None:
    before = time.time()
    second = make().set(delay=timedelta(seconds=0.2))
    last = group(make().set(countdown=DELAY), make(), app=served_shop)
    result: Any = chain(make(), second, last, app=served_shop).apply_async(delay=DELAY)
    delayed, undelayed = result.get(timeout=PATIENCE)
    second, first = result.parent.get(), result.parent.parent.get()
    assert_waited(first, before, DELAY)
    assert_waited(second, first["at"], 0.2)
    assert_waited(delayed, second["at"], DELAY)
    assert_not_delayed(undelayed)


def test_maps_and_chunks_wait(served_shop: Any) -> None:
    at, before = served_shop.tasks["at"], time.time()
    ways = (at.map([1, 2]), at.starmap([(1,), (2,)]), at.chunks([(1,), (2,)], 1))
    mapped, star, chunks = [way.apply_async(delay=MAP_DELAY) for way in ways]
    chunked = [one for chunk in chunks.get(timeout=PATIENCE) for one in chunk]
    for seen in (mapped.get(timeout=PATIENCE), star.get(timeout=PATIENCE), chunked):
        assert [one["given"] for one in seen] == [[1], [2]]
        assert all(before + MAP_DELAY <= one["at"] < before + MAP_DELAY + SLACK for one in seen)


def test_a_callback_waits_after_the_task_it_is_linked_to_if_it_has_a_delay(
    served_shop: Any,
) -> None:
    look, before = served_shop.tasks["look"], time.time()
    own = look.s("linked").set(delay=timedelta(seconds=DELAY))
    delayed, undelayed = own.freeze(), (none := look.s("linked")).freeze()
    look.apply_async(link=[own, none], delay=DELAY)
    seen = delayed.get(timeout=PATIENCE)
    first, text = seen["given"]
    assert text == "linked"
    assert_waited(first, before, DELAY)
    assert_waited(seen, first["at"], DELAY)
    assert_not_delayed(undelayed.get(timeout=PATIENCE))


def test_an_errback_waits_after_the_task_that_failed(served_shop: Any) -> None:
    noted, before = Notes(served_shop), time.time()
    errback = served_shop.tasks["note"].s(key=noted.key).set(countdown=DELAY)
    failed = served_shop.tasks["fail"].apply_async(link_error=errback, delay=DELAY)
    (seen,) = noted.wait(1)
    assert seen["given"] == [failed.id]
    assert_waited(seen, before + DELAY, DELAY)
    noted.forget()


def test_a_task_s_replacement_waits(served_shop: Any, make: Any) -> None:
    look, replace = served_shop.tasks["look"], served_shop.tasks["replace"]
    replacement = make("replacement").set(delay=DELAY, queue=named(served_shop, "second"))
    result: Any = chain(look.si(), replace.s(replacement), look.s()).apply_async()
    # A delayed task's replacement is not delayed as well.
    undelayed = replace.apply_async((look.si(),), delay=0.2)
    following = result.get(timeout=PATIENCE)
    (replaced,) = following["given"]
    assert replaced["given"] == ["replacement"]
    assert replaced["routing_key"] == named(served_shop, "second")
    assert_waited(replaced, result.parent.parent.get()["at"], DELAY)
    assert_not_delayed(following)
    assert_not_delayed(undelayed.get(timeout=PATIENCE))


# Chords: a delay of the whole is the header's, and the body waits only where it is told to.


def test_a_delay_of_a_whole_chord_is_the_header_s_alone(served_shop: Any, make: Any) -> None:
    """Also behind another task."""
    whole: Any = chord([make(), make()], make(), app=served_shop)
    result: Any = chain(make(), whole.set(delay=DELAY), app=served_shop).apply_async()
    body = result.get(timeout=PATIENCE)
    since = result.parent.parent.get(timeout=PATIENCE)["at"]
    for seen in result.parent.get(timeout=PATIENCE):
        assert_waited(seen, since, DELAY)
    assert_not_delayed(body)


def test_the_body_runs_once_after_the_last_delayed_task_and_waits_for_its_own_delay(
    served_shop: Any,
) -> None:
    look, noted, before = served_shop.tasks["look"], Notes(served_shop), time.time()
    delays = [0.2, 0.5, 0.8, 1.1, 1.4]
    header = [look.si(each).set(delay=each) for each in delays]
    body = served_shop.tasks["note"].s(key=noted.key).set(delay=timedelta(seconds=DELAY))
    chord(header, body).apply_async()
    (note,) = noted.wait(1)
    (given,) = note["given"]
    assert sorted(seen["given"][0] for seen in given) == delays
    for seen in given:
        assert_waited(seen, before, seen["given"][0])
    assert_waited(note, max(seen["at"] for seen in given), DELAY)
    noted.forget()


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
    wait_for(one_waits, "the first poll in the levels")
    wait_for(lambda: retried.search(shop.worker.log), "a poll")
    wait_for(one_waits, "the next poll in the levels")
    shop.control.add_consumer(second, destination=[shop.worker.name], reply=True)
    body = result.get(timeout=PATIENCE)
    (members,) = body["given"]
    assert len(members) == 2
    assert_waited(body, max(seen["at"] for seen in members), DELAY)
