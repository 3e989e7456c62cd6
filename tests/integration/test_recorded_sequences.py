"""Random sequences of calls, on the real system that travels in time and on the recorded one.

Each call has to say the same in both, the same has to run in the same order, and every result has
to end in the same state. ``RABBITDELAY_SEQUENCES`` says how many are played;
``make travel`` plays 200.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from itertools import zip_longest
from typing import Any, Final
from uuid import uuid4

import pytest
from celery import chain, chord, group
from celery.result import GroupResult
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.testing import Travel, recorded
from celery_rabbitdelay.testing.servers import PATIENCE
from tests.integration import playing
from tests.integration.playing import app

SEQUENCES: Final = int(os.environ.get("RABBITDELAY_SEQUENCES", "20"))
PARTS: Final = 2

#: Sequences that are played side by side: a travel takes its time however many do.
TOGETHER: Final = min(20, SEQUENCES // PARTS)

DELAYS = st.sampled_from([60, 600, 3600, 7200])
NAMES = st.sampled_from(["work", "work", "work", "fail", "try_again"])
KEYS = st.sampled_from(["a", "b"])
JOBS = st.sampled_from(["i", "j"])
WHICH = st.integers(0, 5)

#: What is sent: a task and options.
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "delay": DELAYS,
        "key": KEYS,
        "once": st.just(True),
        "track": st.just(True),
        "job": JOBS,
        "task_id": st.sampled_from(["x", "y"]),
        "expires": st.sampled_from([300, 5000]),
        "unique": st.just("first"),
        "unique_for": st.just(5000),
        "link": st.just("work"),
        "link_error": st.just("errback"),
    },
)
TIMES = st.sampled_from(["delay", "countdown", "eta"])
MEMBERS = st.lists(
    st.tuples(
        st.sampled_from(["work", "work", "fail"]),
        st.sampled_from([0, 60, 600]),
        st.booleans(),
    ),
    min_size=2,
    max_size=3,
)
#: A task: by its number, its key, or a job.
MEANT = st.one_of(
    st.tuples(st.just("sent"), WHICH),
    st.tuples(st.just("key"), KEYS),
)
FILTERS = st.fixed_dictionaries(
    {}, optional={"task": NAMES, "key": KEYS, "job": JOBS, "due_before": DELAYS}
)
PAUSED = st.sampled_from([{"task": "work"}, {"task": "try_again"}, {"queue": "playing"}])

CALLS = st.one_of(
    *[st.tuples(st.just("send"), NAMES, OPTIONS, TIMES)] * 5,
    *[st.tuples(st.just("travel"), st.sampled_from([30, 120, 1800, 4000]))] * 3,
    st.tuples(st.just("canvas"), st.sampled_from(["chain", "group", "chord"]), MEMBERS),
    st.tuples(st.just("cancel"), MEANT, st.booleans()),
    st.tuples(st.just("cancel"), MEANT, st.just(True)),
    st.tuples(st.just("cancel_job"), JOBS),
    st.tuples(st.just("postpone"), MEANT, DELAYS, st.booleans()),
    st.tuples(st.just("cancel_pending"), FILTERS),
    st.tuples(st.just("open_job"), JOBS, st.sampled_from([300, 4000])),
    st.tuples(st.sampled_from(["commit_job", "abort_job"]), JOBS),
    st.tuples(st.sampled_from(["pause", "resume"]), PAUSED),
    st.tuples(st.sampled_from(["pending", "count"]), FILTERS),
    st.tuples(st.just("states")),
)

SEQUENCE = st.lists(CALLS, max_size=12)


class Player:
    """Plays a sequence on one of the systems.

    Args:
        name: Distinguishes the names of this sequence from those of others.
        ids: The names of tasks by their ids: the order in which they were sent.
        settle: Waits until workers know what was told to them.
    """

    def __init__(
        self,
        name: str,
        ids: dict[str, str],
        settle: Callable[[], object],
    ) -> None:
        self.name = name
        self.ids = ids
        self.settle = settle
        self.began_ms = wall_clock.ms()
        self.results: list[Any] = []
        self.said: list[Any] = []

    def play(self, call: str, *arguments: Any) -> None:
        """Make a call, and note what it says."""
        try:
            said = getattr(self, call)(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever it raises, the other one has to raise
            said = type(error).__name__
        if "cancel" in call:
            self.settle()
        self.said.append((call, said))

    def own(self, value: Any) -> Any:
        """Return a value with the names of this sequence, or its ids by the order of the sends."""
        return None if value is None else f"{self.name}.{value}"

    def known(self, task_id: str) -> str:
        return self.ids.setdefault(task_id, f"#{len(self.ids)}")

    def at(self, seconds: float) -> datetime:
        return wall_clock.now() + timedelta(seconds=seconds)

    def _sent(self, result: Any) -> Any:
        self.results.append(result)
        return [self.known(each.id) for each in _all(result)]

    def send(self, name: str, given: dict[str, Any], time: str) -> Any:
        options: dict[str, Any] = dict(given)
        for each in ("key", "job", "task_id"):
            if each in options:
                options[each] = self.own(options[each])
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

    def _meant(self, meant: tuple[str, Any]) -> dict[str, Any]:
        kind, which = meant
        if kind == "key":
            return {"key": self.own(which)}
        return {"task": self.results[which % len(self.results)]}

    def cancel(self, meant: tuple[str, Any], also_future: bool) -> Any:
        return app.rabbitdelay.cancel(**self._meant(meant), also_future=also_future).name

    def cancel_job(self, job: str) -> Any:
        return app.rabbitdelay.cancel(job=self.own(job)).name

    def postpone(self, meant: tuple[str, Any], delay: int, also_future: bool) -> Any:
        meant_task = self._meant(meant)
        return app.rabbitdelay.postpone(**meant_task, delay=delay, also_future=also_future).name

    def _filter(self, given: dict[str, Any]) -> dict[str, Any]:
        options = dict(given)
        for each in ("key", "job"):
            if each in options:
                options[each] = self.own(options[each])
        if "task" in options:
            options["task"] = _full(options["task"])
        if "due_before" in options:
            options["due_before"] = self.at(options["due_before"])
        return options

    def cancel_pending(self, given: dict[str, Any]) -> Any:
        return app.rabbitdelay.cancel_pending(**self._filter(given))

    def pending(self, given: dict[str, Any]) -> Any:
        found = app.rabbitdelay.pending(**self._filter(given))
        return sorted(
            (
                round((each.due - instant_of(self.began_ms)).total_seconds()),
                self.known(each.task_id),
                each.task,
            )
            for each in found
        )

    def count(self, given: dict[str, Any]) -> Any:
        return app.rabbitdelay.count(**self._filter(given))

    def open_job(self, job: str, expires: int) -> Any:
        return app.rabbitdelay.open_job(self.own(job), expires=expires)

    def commit_job(self, job: str) -> Any:
        return app.rabbitdelay.commit_job(self.own(job))

    def abort_job(self, job: str) -> Any:
        return app.rabbitdelay.abort_job(self.own(job))

    def pause(self, what: dict[str, str]) -> Any:
        named = {kind: _full(name) if kind == "task" else name for kind, name in what.items()}
        return round((app.rabbitdelay.pause(**named) - instant_of(self.began_ms)).total_seconds())

    def resume(self, what: dict[str, str]) -> Any:
        named = {kind: _full(name) if kind == "task" else name for kind, name in what.items()}
        return app.rabbitdelay.resume(**named)

    def states(self) -> Any:
        return [[each.state for each in _all(result)] for result in self.results]


def _runs_at_once(call: Any) -> bool:
    return call[0] == "canvas" or (call[0] == "send" and "delay" not in call[2])


def _travels(call: Any) -> int:
    """Return for how many seconds to travel after a call."""
    seconds: int = call[1] if call[0] == "travel" else int(_runs_at_once(call))
    return seconds


def _full(name: str) -> str:
    return f"tests.integration.playing.{name}"


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


@pytest.fixture
def trip(rabbitdelay_worker: Any, travel: Travel) -> Travel:
    """Travel, with a clock that stands while nothing travels."""
    return travel


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
@pytest.mark.parametrize("part", range(PARTS))
def test_the_recorded_system_does_what_the_real_one_does(trip: Travel, part: int) -> None:
    @seed(part)
    @settings(
        max_examples=SEQUENCES // PARTS // TOGETHER,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(SEQUENCE, min_size=TOGETHER, max_size=TOGETHER))
    def play(sequences: list[Any]) -> None:
        name = uuid4().hex[:8]
        real, ran = play_for_real(trip, sequences, name)
        fake, ran_recorded = play_recorded(sequences, name)
        for one, other in zip(real, fake, strict=True):
            for said, said_recorded in zip(one.said, other.said, strict=True):
                assert said == said_recorded, f"real: {said}, recorded: {said_recorded}"
        real_only, recorded_only = _without(ran, ran_recorded), _without(ran_recorded, ran)
        assert ran == ran_recorded, f"only real: {real_only}, only recorded: {recorded_only}"

    play()
