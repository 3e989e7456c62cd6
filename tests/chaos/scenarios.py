"""The scenarios. Of a docstring, ``list`` shows the first line; ``all`` plays each of the cases."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from kombu import Queue

from tests.chaos.application import PREFIX, SOUND, Stream, task_queue
from tests.chaos.cluster import Cluster
from tests.chaos.faults import FAULTS
from tests.chaos.preloads import off_by
from tests.chaos.soak import CALM, play_soak
from tests.chaos.stage import Stage, frozen, killed

#: The default of ``rabbitdelay_early_tolerance``, in seconds.
TOLERATED: Final = 1.0

#: Seconds that no task may be late that the trouble does not concern.
LATE: Final = 2.0


@dataclass
class Play:
    """How a scenario is played: the version of RabbitMQ, the case, how many tasks and how long.

    The soak has a seed, numbers of nodes, processes and schedules, and of rows of a Spark stream a
    second, and can keep its notes.
    """

    version: str
    name: str
    case: str
    tasks: int
    minutes: float
    seed: int = 1
    nodes: int = 3
    workers: int = 4
    producers: int = 3
    schedules: int = 30
    spark: int = 0
    keep: Path | None = None
    stage: Stage | None = None

    @property
    def title(self) -> str:
        """The scenario and its case."""
        return f"{self.name} {self.case}".strip()

    @property
    def seconds(self) -> float:
        """For how long tasks are sent."""
        return self.minutes * 60

    def on(self, cluster: Cluster, *queues: Queue, **options: Any) -> Stage:
        """Return the stage, not set up; see :class:`Stage`."""
        self.stage = Stage(cluster, *queues, **options)
        return self.stage


class Scenario(NamedTuple):
    """Something that goes wrong while delayed tasks are on their way.

    Attributes:
        play: Sends, makes trouble, and ends it.
        what: What happens, in words.
        tasks: How many tasks, of those that come in any number.
        minutes: For how long they are sent, if they are sent all along.
        cases: The first is the default.
    """

    play: Callable[[Play], None]
    what: str
    tasks: int
    minutes: float
    cases: Sequence[str]


def full_destination(play: Play) -> None:
    """A queue is full and refuses the tasks that are due for it; room is made 100 s later.

    ``full`` are the tasks for it, ``sound`` those that are due at the same time for another queue,
    ``later`` those for the other queue that are sent 75 s later.
    """
    most, delays = 5, (10.0, 10.0)  # all wait in the queue of one digit
    bound = {"x_max_length": most, "x_overflow": "reject-publish"}
    queues = task_queue(SOUND), task_queue("full", **bound if play.case == "argument" else {})
    limits = {SOUND: LATE, "later": LATE}
    with play.on(Cluster(play.version), *queues, limits=limits) as stage:
        if play.case == "policy":
            set_policy(stage, "^full$", {"max-length": most, "overflow": "reject-publish"})
        stage.worker(SOUND)
        stage.send(Stream("filling", "full", most, delays=(0.5, 0.5)), wait=True)
        listed = partial(stage.cluster.running.ctl, "list_queues")
        stage.wait(lambda: f"full\t{most}\n" in listed(), "a full queue", 60)
        with stage.trouble("full queue"):
            # The sound ones stand behind the others in the queue of the same digit.
            stage.send(Stream("full", "full", play.tasks, delays=delays), wait=True)
            stage.send(Stream(SOUND, SOUND, 20, delays=delays), wait=True)
            stage.pause(75)
            stage.send(Stream("later", SOUND, 20, delays=delays), wait=True)
            stage.pause(25)
        stage.worker("full")


def set_policy(stage: Stage, pattern: str, keys: Any, priority: int = 0) -> None:
    """Set a policy on queues; its name is its pattern."""
    words = "--priority", str(priority), pattern, pattern, json.dumps(keys), "--apply-to", "queues"
    stage.cluster.running.ctl("set_policy", *words)


POLICIES: Final = {"message-ttl": 2000, "max-length": 10, "expires": 5000}


def policies(play: Play, is_guarded: bool = False) -> None:
    """A policy on ``.*`` shortens TTLs, bounds queues or deletes those without consumers, for 40 s.

    ``sound`` are tasks that are sent while the policy is there, ``after`` those that are sent when
    it is gone.
    """
    limits = {"after": LATE, **({SOUND: LATE} if is_guarded else {})}
    early = 0.0 if is_guarded else TOLERATED
    with play.on(Cluster(play.version), limits=limits, early=early, patience=240) as stage:
        if is_guarded:  # as in docs/how-to/production.md
            set_policy(stage, rf"^{PREFIX}\.", {"overflow": "reject-publish"}, 1000)
        stage.worker(SOUND)
        with stage.trouble(play.title):
            set_policy(stage, ".*", {play.case: POLICIES[play.case]})
            stage.send(Stream(SOUND, SOUND, play.tasks, delays=(5.0, 75.0)), wait=True)
            stage.pause(40)
            stage.cluster.running.ctl("clear_policy", ".*")
        stage.send(Stream("after", SOUND, 20, delays=(3.0, 6.0)), wait=True)


def registry_away(play: Play) -> None:
    """The Redis of the registry is frozen, or killed and back without its data, for 20 s.

    The levels hold a task for at most a minute longer than that. ``at-once`` are tasks without a
    delay, which nobody asks the registry about.
    """
    prefetch = 4 if play.case == "frozen-prefetch-4" else 64
    limits = {"at-once": LATE} if prefetch == 64 else {}
    with play.on(Cluster(play.version), limits=limits) as stage:
        redis = stage.redis()
        stage.worker(SOUND, f"--prefetch-multiplier={prefetch}")
        stage.send(Stream("held", SOUND, play.tasks, play.seconds, (0.5, 20.0), "rows"))
        stage.send(Stream("at-once", SOUND, play.tasks // 50, play.seconds, (0.0, 0.0)))
        stage.pause(play.seconds / 3)
        away = killed if play.case == "killed" else frozen
        with stage.trouble(play.title), away([redis]):
            stage.pause(20)


#: In which direction a clock is off.
OFF: Final = ("ahead", "behind")


def clock_off(play: Play) -> None:
    """The clock of a producer, a worker, all nodes or a node that is killed is off by an hour.

    It is a minute where tasks are late by the difference: if the worker's clock is behind the
    producer's, each task is, once; and if it entered a queue by the clock of a node that is ahead,
    and leaves it by another. By one that is behind, it leaves early, and the worker puts it back,
    unless that is by less than ``rabbitdelay_early_tolerance``.
    """
    whose, _, off = play.case.partition("-")
    is_late = play.case in ("producer-ahead", "worker-behind", "node-ahead")
    size = 60 if is_late else 3600
    seconds = size if off == "ahead" else -size
    # The others join the node that has the earliest start, by its own clock.
    wrong = {"broker": (0, 1, 2), "node": (int(off == "ahead"),)}.get(whose, ())
    cluster, early = Cluster(play.version, 3, clocks=dict.fromkeys(wrong, seconds)), 0.0
    limits = {SOUND: LATE + size * is_late}
    if whose == "node":
        limits, early = {}, TOLERATED
    with play.on(cluster, limits=limits, early=early, patience=120) as stage:
        environment = {whose: off_by(seconds)}
        stage.worker(SOUND, environment=environment.get("worker"))
        stream = Stream(SOUND, SOUND, play.tasks, play.seconds, (5.0, 30.0))
        stage.send(stream, environment=environment.get("producer"))
        if whose == "node":
            stage.pause(play.seconds / 2)
            with stage.trouble(play.title), killed([cluster.nodes[wrong[0]]]):
                stage.pause(5)


def told(play: Callable[..., None], tasks: int, minutes: float = 0.0, *cases: str) -> Scenario:
    """Return a scenario with the docstring of the function that plays it."""
    return Scenario(play, (play.__doc__ or ""), tasks, minutes, cases or ("",))


SCENARIOS: Final[dict[str, Scenario]] = {
    "full-destination": told(full_destination, 60, 0.0, "argument", "policy"),
    "policies": told(policies, 120, 0.0, *POLICIES),
    "policies-guarded": Scenario(
        partial(policies, is_guarded=True),
        "The same, but another policy keeps it away from the levels: nobody notices.",
        *(120, 0.0, list(POLICIES)),
    ),
    "registry-away": told(registry_away, 30_000, 1.0, "frozen", "killed", "frozen-prefetch-4"),
    "clock-off": told(
        *(clock_off, 300, 0.5),
        *(f"{whose}-{off}" for whose in ("producer", "worker", "broker", "node") for off in OFF),
    ),
    "soak": told(play_soak, 4000, 3.0, "", CALM, *FAULTS),
}
