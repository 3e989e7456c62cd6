"""Random sequences of calls, on the real system that travels in time and on the recorded one.

Each call has to say the same in both, the same has to run in the same order, and every result has
to end in the same state. ``RABBITDELAY_SEQUENCES`` says how many are played.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple
from uuid import uuid4

import pytest
from celery import chain, chord, group
from celery.result import AsyncResult, GroupResult
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.testing import Travel, recorded
from tests.integration import playing
from tests.integration.playing import app

SEQUENCES: Final = int(os.environ.get("RABBITDELAY_SEQUENCES", "200"))
PARTS: Final = 4

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
    *[st.tuples(st.just("travel"), st.sampled_from([30, 120, 1800, 7000]))] * 3,
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


class Player:
    """Plays a sequence on one of the systems.

    Args:
        travel: Goes so many seconds ahead; all that is due on the way has run then.
        name: Distinguishes names of this sequence from those of others.
    """

    def __init__(self, travel: Callable[[float], object], name: str) -> None:
        self.travel = travel
        self.name = name
        self.began_ms = wall_clock.ms()
        self.ids: dict[str, str] = {}
        self.results: list[Any] = []
        self.said: list[Any] = []
        self.paused: list[dict[str, str]] = []

    def play(self, calls: list[Any]) -> None:
        """Make calls, and note what each says."""
        for call, *arguments in calls:
            try:
                said = getattr(self, call)(*arguments)
            except Exception as error:
                said = type(error).__name__
            self.said.append((call, said))
        for each in self.paused:
            app.rabbitdelay.resume(**each)
        self.travel(20_000)
        self.said.append(("states", self.states()))
        self.said.append(("left", self.pending({})))

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
                options[each] = app.tasks[_full(options[each])].s()
                options[each].set(task_id=uuid4().hex) if each == "link" else None
        if "delay" in options and time != "delay":
            seconds = options.pop("delay")
            options[time] = seconds if time == "countdown" else self.at(seconds)
        number = len(self.results)
        return self._sent(app.tasks[_full(name)].apply_async((number,), **options))

    def canvas(self, kind: str, members: list[tuple[str, int, bool]]) -> Any:
        number = len(self.results)
        tasks = [
            app.tasks[_full(name)]
            .si(number, place)
            .set(track=track, **({"delay": delay} if delay else {}))
            for place, (name, delay, track) in enumerate(members)
        ]
        if kind == "chord":
            body = (
                app.tasks[_full("work")]
                .si(number, "body")
                .on_error(app.tasks[_full("errback")].s())
            )
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
        self.paused.append(named)
        return round((app.rabbitdelay.pause(**named) - instant_of(self.began_ms)).total_seconds())

    def resume(self, what: dict[str, str]) -> Any:
        named = {kind: _full(name) if kind == "task" else name for kind, name in what.items()}
        return app.rabbitdelay.resume(**named)

    def states(self) -> Any:
        return [[each.state for each in _all(result)] for result in self.results]


def _full(name: str) -> str:
    return f"tests.integration.playing.{name}"


def _all(result: Any) -> list[Any]:
    """Return the results of a canvas, from its start."""
    if isinstance(result, GroupResult):
        return [each for part in result.results or () for each in _all(part)]
    before = _all(result.parent) if result.parent is not None else []
    return [*before, result]


def _ran(player: Player, entries: list[Any]) -> Any:
    """Return what has run; tasks that were held back come in any order."""
    return [
        (player.known(task_id), *[player.ids.get(str(each), each) for each in what])
        for task_id, *what in entries
    ]


@pytest.fixture(scope="session")
def rabbitdelay_celery_app() -> Any:
    return app


@pytest.fixture
def trip(rabbitdelay_worker: Any, travel: Travel) -> Travel:
    """Travel, with a clock that stands while nothing travels."""
    return travel


def _stand(travel: Travel) -> None:
    travel.clock.stand_at(wall_clock.ms() * 1_000_000)


def play_for_real(trip: Travel, calls: list[Any], name: str) -> tuple[Any, Any]:
    backend: Any = app.backend
    backend.client.delete(playing.NOTES)

    def go(seconds: float) -> None:
        trip(seconds=seconds)
        _stand(trip)

    _stand(trip)
    player = Player(go, name)
    player.play(calls)
    entries = [json.loads(each) for each in backend.client.lrange(playing.NOTES, 0, -1)]
    return player.said, _ran(player, entries)


def play_recorded(calls: list[Any], name: str) -> tuple[Any, Any]:
    playing.noted = []
    try:
        with recorded(app) as sent:

            def go(seconds: float) -> None:
                until_ms = wall_clock.ms() + round(seconds * 1000)
                while True:
                    left = timedelta(milliseconds=until_ms - wall_clock.ms())
                    try:
                        sent.run_due(within=left)
                    except LookupError:
                        continue
                    return

            player = Player(go, name)
            player.play(calls)
            return player.said, _ran(player, playing.noted)
    finally:
        playing.noted = None


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_recorded_system_does_what_the_real_one_does(trip: Travel, part: int) -> None:
    @seed(part)
    @settings(
        max_examples=SEQUENCES // PARTS,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(calls=st.lists(CALLS, min_size=3, max_size=12))
    def play(calls: list[Any]) -> None:
        name = uuid4().hex[:8]
        real = play_for_real(trip, calls, name)
        fake = play_recorded(calls, name)
        for one, other in zip(real[0], fake[0], strict=True):
            assert one == other, f"real: {one}, recorded: {other}"
        assert real[1] == fake[1]

    play()
