"""Whose delay is whose in groups, chains and chords, and what travels in a message of it."""

import json
import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import celery
import pytest
from celery import chain, chord, group, signature
from celery.signals import before_task_publish

from celery_rabbitdelay import Celery, InvalidDelayType

#: Makes a signature of a task by its name.
Make = Callable[[str], Any]


class Sent(NamedTuple):
    """A task that was sent: its name, seconds of delay (in hundreds), what its message carries."""

    name: str
    seconds: int | None
    embedded: dict[str, Any]


@pytest.fixture
def app() -> Any:
    """An application whose messages stay in this process; what canvas does is the same."""
    app: Any = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    # The memory is the whole process's: what is sent here must not be found elsewhere.
    app.conf.task_default_queue = "canvas"

    def work(*arguments: Any) -> None: ...

    for name in ("count", "total", "mail"):
        app.task(work, name=name, shared=False)
    return app


@pytest.fixture(params=["of a task", "of the application", "plain"])
def make(request: pytest.FixtureRequest, app: Any) -> Make:
    """Makes signatures in each of the ways in which users make them."""
    ways: dict[str, Make] = {
        "of a task": lambda name: app.tasks[name].s(),
        "of the application": app.signature,
        "plain": lambda name: signature(name, app=app),
    }
    return ways[request.param]


@pytest.fixture
def sent() -> Iterator[list[Sent]]:
    """What is sent while the test runs."""
    seen: list[Sent] = []

    def note(sender: str, headers: dict[str, Any], body: Any, **rest: Any) -> None:
        seconds = None
        if headers["eta"]:
            left = datetime.fromisoformat(headers["eta"]) - datetime.now(UTC)
            # Rounded up to hundreds: a slow machine has used up some of it by now.
            seconds = 100 * math.ceil(left.total_seconds() / 100)
        # As JSON brings it to a worker.
        seen.append(Sent(sender, seconds, json.loads(json.dumps(body[2]))))

    before_task_publish.connect(note)
    yield seen
    before_task_publish.disconnect(note)


def times(signature: Any) -> dict[str, Any]:
    """Return what a signature in a message says about its time."""
    found = {name: signature["options"].get(name) for name in ("delay", "countdown", "eta")}
    return {name: value for name, value in found.items() if value is not None}


def times_of(name: str, embedded: Any) -> list[dict[str, Any]]:
    """Return the times of every signature of a task, wherever it is in a message."""
    if isinstance(embedded, list):
        return [found for each in embedded for found in times_of(name, each)]
    if not isinstance(embedded, dict):
        return []
    found = [each for part in embedded.values() for each in times_of(name, part)]
    return [*found, times(embedded)] if embedded.get("task") == name else found


def test_the_outermost_body_waits_once_however_deep_it_is(make: Make, sent: list[Sent]) -> None:
    inner: list[Any] = [chord([make("count"), make("count")], make("total")) for _ in range(2)]
    chord([inner[0], make("count") | inner[1]], make("mail")).apply_async(delay=300)
    assert {task.seconds for task in sent} == {300}
    for name in ("mail", "total"):
        found = [each for task in sent for each in times_of(name, task.embedded)]
        assert found
        assert not any(found)


@pytest.mark.parametrize("whole", [None, "apply_async", "set"])
@pytest.mark.parametrize("own", [{"delay": 300}, {"countdown": 400}], ids=str)
def test_a_body_keeps_its_own_delay(
    app: Any, sent: list[Sent], own: dict[str, int], whole: str | None
) -> None:
    body = app.tasks["total"].s().set(**own, link=[app.signature("mail")])
    header = [app.tasks["count"].s().set(**({} if whole else {"delay": 300})) for _ in range(2)]
    canvas: Any = chord(header, body)
    if whole == "set":
        canvas.set(delay=300)
    canvas.apply_async(**({"delay": 300} if whole == "apply_async" else {}))
    assert [task.seconds for task in sent] == [300, 300]
    (seconds,) = own.values()
    assert all(times(task.embedded["chord"]) == {"countdown": seconds} for task in sent)


def test_a_delay_of_a_chord_behind_a_task_is_its_header_s(make: Make, sent: list[Sent]) -> None:
    whole: Any = chord([make("count"), make("count").set(countdown=5)], make("total"))
    chain(make("mail"), whole.set(delay=timedelta(seconds=300))).apply_async()
    (task,) = sent
    assert task.seconds is None
    (waiting,) = task.embedded["chain"]
    assert times(waiting) == times(waiting["kwargs"]["body"]) == {}
    assert [times(each) for each in waiting["kwargs"]["header"]] == [{"countdown": 300}] * 2


@pytest.mark.parametrize("option", ["link", "link_error"])
def test_a_callback_has_a_countdown(app: Any, make: Make, sent: list[Sent], option: str) -> None:
    callback = make("mail").set(delay=timedelta(hours=1))
    several: Any = group(make("mail").set(delay=5), make("count"))
    several.set(delay=60)
    app.tasks["count"].apply_async(**{option: [callback, several]})
    one, more = sent[0].embedded["callbacks" if option == "link" else "errbacks"]
    assert (times(one), times(more)) == ({"countdown": 3600}, {"countdown": 60})
    assert times(more["kwargs"]["tasks"][0]) == {"countdown": 5}
    # The caller's own stays as it is.
    assert callback.options["delay"] == timedelta(hours=1)


def test_without_takeover_a_nested_delay_stays_one(app: Any, make: Make, sent: list[Sent]) -> None:
    app.conf.rabbitdelay_takeover = False
    chain(make("count"), make("mail").set(delay=timedelta(seconds=5))).apply_async()
    assert times(sent[0].embedded["chain"][0]) == {"delay": 5}


def test_a_wrong_delay_of_a_callback_is_refused(app: Any, make: Make, sent: list[Sent]) -> None:
    with pytest.raises(InvalidDelayType):
        app.tasks["count"].apply_async(link=make("mail").set(delay="5"))
    assert sent == []


def test_of_several_times_the_last_one_holds(app: Any, sent: list[Sent]) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=99)
    for ours in (app.tasks["count"].s(), app.signature("count")):
        ours.set(countdown=99).set(eta=soon).set(delay=300).apply_async()
        ours.set(delay=99).apply_async(countdown=300)
        ours.clone(countdown=300).apply_async()
    assert [task.seconds for task in sent] == [300] * 6


def test_a_signature_stays_ours_when_it_is_cloned_and_plain_when_it_is_pickled(app: Any) -> None:
    ours = app.tasks["count"].s(1).set(delay=5)
    assert type(ours.clone((2,))) is type(ours)
    assert ours.clone((2,)).args == (2, 1)
    assert ours.clone().type is app.tasks["count"]
    rebuild, arguments = ours.__reduce__()
    assert type(rebuild(*arguments)) is celery.canvas.Signature
