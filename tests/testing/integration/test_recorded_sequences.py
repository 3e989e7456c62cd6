"""Random sequences of calls, on the real system that travels in time and on the recorded one.

Each call has to say the same in both, the same has to run in the same order, and every result has
to end in the same state. ``RABBITDELAY_SEQUENCES`` says how many are played;
``make travel`` plays 200.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from itertools import zip_longest
from random import Random
from typing import Any, Final
from uuid import uuid4

import pytest
from celery import chain, chord, group
from celery.result import GroupResult

from celery_rabbitdelay import Outcome
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.registry.record import record_of
from celery_rabbitdelay.testing import Travel, recorded
from celery_rabbitdelay.testing.servers import PATIENCE
from tests.testing.integration import playing
from tests.testing.integration.playing import app

SEQUENCES: Final = int(os.environ.get("RABBITDELAY_SEQUENCES", "8"))

#: Sequences that are played side by side: a travel takes its time however many do.
TOGETHER: Final = 20

DELAYS = (60, 600, 3600, 7200)
KEYS, JOBS = ("a", "b"), ("i", "j")
PAUSED = ({"task": "work"}, {"task": "try_again"}, {"queue": "playing"})

#: The options of a send, and the values of each.
OPTIONS: Final = {
    "key": KEYS,
    "once": (True,),
    "track": (True, True, True),
    "job": JOBS,
    "task_id": ("x", "y"),
    "expires": (300, 5000),
    "link": ("work",),
    "link_error": ("errback",),
}


class Writer(Random):
    """Writes sequences of calls, always the same for the same seed."""

    def sequence(self) -> list[tuple[Any, ...]]:
        """Return the calls: three sends at first, so that there is something to decide about."""
        calls = [self.send() for _ in range(3)]
        verbs = (
            [self.send] * 4 + [self.travel] * 4 + [self.decision] * 5 + [self.question, self.canvas]
        )
        return calls + [self.choice(verbs)() for _ in range(self.randint(4, 10))]

    def some(self, values: Mapping[str, Sequence[Any]], most: int) -> dict[str, Any]:
        """Return values for at most so many names."""
        names = self.sample(sorted(values), self.randint(0, most))
        return {name: self.choice(values[name]) for name in names}

    def send(self) -> tuple[Any, ...]:
        options = self.some(OPTIONS, 3)
        if self.random() < 0.9:
            options["delay"] = self.choice(DELAYS)
        name = self.choice(("work", "work", "work", "fail", "try_again"))
        return "send", name, options, self.choice(("delay", "countdown", "eta"))

    def travel(self) -> tuple[Any, ...]:
        return "travel", self.choice((30, 120, 1800, 4000))

    def canvas(self) -> tuple[Any, ...]:
        members = [
            (self.choice(("work", "work", "fail")), self.choice((0, 60, 600)), self.random() < 0.5)
            for _ in range(self.randint(2, 3))
        ]
        return "canvas", self.choice(("chain", "group", "chord")), members

    def meant(self) -> dict[str, Any]:
        """Return what means a task: its number, or its key."""
        if self.random() < 0.5:
            return {"key": self.choice(KEYS)}
        return {"sent": self.randrange(6)}

    def decision(self) -> tuple[Any, ...]:
        which = {**self.meant(), "also_future": self.random() < 0.75}
        job = {"job": self.choice(JOBS)}
        return self.choice(
            (
                ("cancel", which),
                ("cancel", which),
                ("cancel", job),
                ("postpone", {**which, "delay": self.choice(DELAYS)}),
                ("postpone", {**which, "delay": self.choice(DELAYS)}),
                ("open_job", {**job, "expires": self.choice((300, 4000))}),
                ("open_job", {**job, "expires": 4000}),
                ("commit_job", job),
                ("abort_job", job),
                ("pause", self.choice(PAUSED)),
                ("resume", self.choice(PAUSED)),
                ("cancel_pending", self.filters()),
            )
        )

    def filters(self) -> dict[str, Any]:
        values = {"task": ("work", "fail"), "key": KEYS, "job": JOBS, "due_before": DELAYS}
        return self.some(values, 2)

    def question(self) -> tuple[Any, ...]:
        named = self.choice(("pending", "count"))
        return self.choice((("states",), (named, self.filters())))


class Player:
    """Plays a sequence on one of the systems.

    Args:
        name: Distinguishes the names of this sequence from those of others.
        ids: The names of tasks by their ids: the order in which they were sent.
        settle: Waits until workers know what was told to them.
    """

    def __init__(self, name: str, ids: dict[str, str], settle: Callable[[], object]) -> None:
        self.name, self.ids, self.settle = name, ids, settle
        self.began_ms = wall_clock.ms()
        self.results: list[Any] = []
        self.said: list[Any] = []

    def play(self, call: str, *arguments: Any) -> None:
        """Make a call, and note what it says."""
        try:
            said = getattr(self, call, partial(self.ask, call))(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever it raises, the other one has to raise
            said = type(error).__name__
        if "cancel" in call:
            self.settle()
        self.said.append((call, said))

    def own(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return arguments with the names of this sequence."""
        names = ("key", "job", "task_id")
        return {each: f"{self.name}.{it}" if each in names else it for each, it in given.items()}

    def known(self, task_id: str) -> str:
        return self.ids.setdefault(task_id, f"#{len(self.ids)}")

    def at(self, seconds: float) -> datetime:
        return wall_clock.now() + timedelta(seconds=seconds)

    def _sent(self, result: Any) -> Any:
        self.results.append(result)
        return [self.known(each.id) for each in _all(result)]

    def send(self, name: str, given: dict[str, Any], time: str) -> Any:
        options = self.own(given)
        for each in ("link", "link_error"):
            if each in options:
                options[each] = _task(options[each]).s()
        if "delay" in options and time != "delay":
            seconds = options.pop("delay")
            options[time] = seconds if time == "countdown" else self.at(seconds)
        number = len(self.results)
        return self._sent(_task(name).apply_async((number,), **options))

    def canvas(self, kind: str, members: list[tuple[str, int, bool]]) -> Any:
        number = len(self.results)
        tasks: list[Any] = [
            _task(name)
            .si(number, place)
            .set(**({"track": track, "delay": delay} if delay else {"track": track}))
            for place, (name, delay, track) in enumerate(members)
        ]
        if kind == "chord":
            body = _task("work").si(number, "body").on_error(_task("errback").s())
            return self._sent(chord(tasks, app=app)(body))
        canvas = (chain if kind == "chain" else group)(*tasks, app=app)
        return self._sent(canvas.apply_async())

    def ask(self, method: str, given: dict[str, Any]) -> Any:
        """Call a method of ``app.rabbitdelay``; return what it says, comparable."""
        options = self.own(given)
        if "sent" in options:
            options["task"] = self.results[options.pop("sent") % len(self.results)]
        elif "task" in options:
            options["task"] = _full(options["task"])
        if "due_before" in options:
            options["due_before"] = self.at(options["due_before"])
        said = getattr(app.rabbitdelay, method)(**options)
        match said:
            case Outcome():
                return said.name
            case datetime():
                return self.seconds(said)
            case Iterator():
                return sorted(
                    (self.seconds(it.due), self.known(it.task_id), it.task) for it in said
                )
        return said

    def seconds(self, instant: datetime) -> int:
        return round((instant - instant_of(self.began_ms)).total_seconds())

    def states(self) -> Any:
        return [[(each.state, self.noted(each.id)) for each in _all(it)] for it in self.results]

    def noted(self, task_id: str) -> Any:
        """Return what ``show`` says about a task, without the queues that it may be in."""
        record = record_of(app.rabbitdelay.registry, task_id)
        return record and (record.state.value, self.own_part(record.key), self.own_part(record.job))

    def own_part(self, name: str | None) -> str | None:
        return name and name.removeprefix(f"{self.name}.")


def _runs_at_once(call: Any) -> bool:
    return call[0] == "canvas" or (call[0] == "send" and "delay" not in call[2])


def _travels(call: Any) -> int:
    """Return for how many seconds to travel after a call."""
    seconds: int = call[1] if call[0] == "travel" else int(_runs_at_once(call))
    return seconds


def _full(name: str) -> str:
    return f"tests.testing.integration.playing.{name}"


def _without(entries: list[Any], others: list[Any]) -> list[Any]:
    return [each for each in entries if each not in others]


def _task(name: str) -> Any:
    return app.tasks[_full(name)]


def _all(result: Any) -> list[Any]:
    """Return the results of a canvas, from its start."""
    if isinstance(result, GroupResult):
        return [each for part in result.results or () for each in _all(part)]
    before = _all(result.parent) if result.parent is not None else []
    return [*before, result]


def _ran(player: Player, entries: list[Any], calls: Sequence[Any]) -> Any:
    """Return what has run when; in any order at the same time, and at any time after a pause."""
    is_timed = not any(call[0] == "pause" for sequence in calls for call in sequence)

    def known(task_id: Any) -> Any:
        return player.ids.get(task_id, "another") if isinstance(task_id, str) else task_id

    found = [
        (
            (at_ms - player.began_ms) if is_timed else 0,
            known(task_id),
            name,
            retries,
            str([*map(known, what)]),
        )
        for at_ms, task_id, name, retries, *what in entries
    ]
    return sorted(found)


@pytest.fixture(scope="session")
def rabbitdelay_celery_app() -> Any:
    return app


def play_all(
    sequences: Sequence[Sequence[Any]],
    name: str,
    travel: Callable[[float], object],
    settle: Callable[[], object],
) -> list[Player]:
    """Play sequences side by side; they travel together."""
    ids: dict[str, str] = {}
    players = [Player(f"{name}.{number}", ids, settle) for number, _ in enumerate(sequences)]
    for calls in zip_longest(*sequences):
        own = [(player, call) for player, call in zip(players, calls, strict=True) if call]
        # What is sent without a delay runs at once, and nothing else happens meanwhile.
        for player, call in sorted(own, key=lambda each: _runs_at_once(each[1])):
            if call[0] != "travel":
                player.play(*call)
        seconds = max((_travels(call) for _, call in own), default=0)
        if seconds:
            travel(seconds)
    for each in app.rabbitdelay.paused():
        app.rabbitdelay.resume(task=each.task, queue=each.queue)
    travel(20_000)
    for player in players:
        player.play("states")
        player.play("pending", {})
    return players


def play_for_real(trip: Travel, sequences: Sequence[Any], name: str) -> tuple[list[Player], Any]:
    backend: Any = app.backend
    backend.client.delete(playing.NOTES)

    def travel(seconds: float) -> None:
        until_ms = wall_clock.ms() + round(seconds * 1000)
        trip(seconds=seconds)
        # Not some milliseconds later.
        trip.clock.stand_at(until_ms * wall_clock.NS_PER_MS)

    def settle() -> None:
        # Its answer comes behind the revokes.
        app.control.broadcast("ping", reply=True, limit=1, timeout=PATIENCE)

    trip.clock.stand_at(wall_clock.ms() * wall_clock.NS_PER_MS)
    players = play_all(sequences, name, travel, settle)
    entries = [json.loads(each) for each in backend.client.lrange(playing.NOTES, 0, -1)]
    return players, _ran(players[0], entries, sequences)


def play_recorded(sequences: Sequence[Any], name: str) -> tuple[list[Player], Any]:
    playing.noted = []
    try:
        with recorded(app) as sent:

            def travel(seconds: float) -> None:
                until_ms = wall_clock.ms() + round(seconds * 1000)
                while True:
                    left = timedelta(milliseconds=until_ms - wall_clock.ms())
                    try:
                        sent.run_due(within=left)
                    except LookupError:
                        continue
                    return

            players = play_all(sequences, name, travel, lambda: None)
            return players, _ran(players[0], playing.noted, sequences)
    finally:
        playing.noted = None


@pytest.mark.timeout(900)
@pytest.mark.parametrize("begin", range(0, SEQUENCES, TOGETHER))
def test_the_recorded_system_does_what_the_real_one_does(
    rabbitdelay_worker: Any, travel: Travel, begin: int
) -> None:
    numbers = range(begin, min(begin + TOGETHER, SEQUENCES))
    sequences = [
        Writer(f"{number // TOGETHER}.{number % TOGETHER}").sequence() for number in numbers
    ]
    name = uuid4().hex[:8]
    real, ran = play_for_real(travel, sequences, name)
    fake, ran_recorded = play_recorded(sequences, name)
    for one, other in zip(real, fake, strict=True):
        for said, said_recorded in zip(one.said, other.said, strict=True):
            assert said == said_recorded, f"real: {said}, recorded: {said_recorded}"
    real_only, recorded_only = _without(ran, ran_recorded), _without(ran_recorded, ran)
    assert ran == ran_recorded, f"only real: {real_only}, only recorded: {recorded_only}"
