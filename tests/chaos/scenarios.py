"""The scenarios. Of a docstring, ``list`` shows the first line; ``all`` plays each of the cases."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from typing import Any, Final, NamedTuple, TypeAlias

from tests.chaos.clocks import off_by
from tests.chaos.cluster import Cluster, Node
from tests.chaos.network import MACHINE, NetworkedCluster
from tests.chaos.programs import PREFIX, Stream, TaskQueue, Way
from tests.chaos.proxy import ProxiedCluster
from tests.chaos.schedules import play_schedules
from tests.chaos.stage import SOUND, Stage

#: The default of ``rabbitdelay_early_tolerance``, in seconds.
TOLERATED: Final = 1.0

#: Seconds that no task may be late that the trouble does not concern.
LATE: Final = 2.0


@dataclass
class Play:
    """How a scenario is played: the version of RabbitMQ, the case, how many tasks and how long."""

    version: str
    name: str
    case: str
    tasks: int
    minutes: float
    stages: list[Stage] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The scenario and its case."""
        return f"{self.name} {self.case}".strip()

    @property
    def seconds(self) -> float:
        """For how long tasks are sent."""
        return self.minutes * 60

    def on(self, cluster: Cluster, *queues: TaskQueue, **options: Any) -> Stage:
        """Return the stage, not set up; see :class:`Stage`."""
        self.stages.append(Stage(cluster, *queues, **options))
        return self.stages[-1]


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


#: What happens in a round of trouble: it begins, and ends.
Round: TypeAlias = AbstractContextManager[None]


@contextmanager
def done(begin: Callable[[Node], object], end: Callable[[Node], object], *nodes: Node) -> Any:
    """Something is done to nodes, and undone."""
    for node in nodes:
        begin(node)
    yield
    for node in nodes:
        end(node)


killed = partial(done, Node.kill, Node.start)
frozen = partial(done, Node.suspend, Node.resume)


@contextmanager
def slow(cluster: ProxiedCluster) -> Iterator[None]:
    """Each connection takes half a second, each way."""
    for delay in (0.5, 0.0):
        for proxy in cluster.proxies:
            proxy.delay = delay
        if delay:
            yield


@contextmanager
def half_open(cluster: ProxiedCluster) -> Iterator[None]:
    """All present connections are dead, and nobody is told."""
    for proxy in cluster.proxies:
        proxy.forget()
    yield


CONNECTIONS: Final = {"half-open": half_open, "slow": slow}


def cut(shape: str, cluster: NetworkedCluster) -> Round:
    """Packets between nodes are dropped.

    ``halves``: the clients reach all nodes. ``node``: one node is cut off from the others and from
    the clients. ``ring``: each node reaches its two neighbors only; of three, the last and the
    first do not reach each other.
    """
    size = len(cluster.nodes)
    nodes = range(1, size + 1)
    if shape == "node":
        return cluster.parted(nodes[:1], [MACHINE, *nodes[1:]])
    if shape == "halves":
        return cluster.parted(nodes[: size // 2], nodes[size // 2 :])
    apart = range(2, size - 1 if size > 3 else size)
    return cluster.cut((a, b) for a, b in permutations(nodes, 2) if abs(a - b) in apart)


def three(version: str, _: str) -> Cluster:
    """A cluster of three nodes."""
    return Cluster(version, 3)


def streamed(
    what: str,
    tasks: int,
    cases: Mapping[str, float],
    rounds: Callable[[Any, str], Sequence[Round]],
    cluster: Callable[[str, str], Cluster] = three,
    workers: Sequence[str] = (),
) -> Scenario:
    """Return a scenario in which tasks are sent and come due all along, while there is trouble.

    Args:
        what: What happens, in words.
        tasks: How many tasks.
        cases: The cases, and the seconds that each trouble lasts.
        rounds: Makes the troubles of a case, which come one after the other, of a cluster.
        cluster: Makes the brokers of a version, for a case.
        workers: Further options of the workers.
    """

    def stream(play: Play) -> None:
        ways: dict[str, Way] = {"rows": "rows", "envelopes": "envelopes"}
        way = ways.get(play.case, "task")
        brokers = cluster(play.version, play.case)
        with play.on(brokers) as stage:
            for number in range(2):
                node = number % len(brokers.nodes)
                stage.worker(SOUND, *workers, first_node=node)
                half = Stream("tasks", SOUND, play.tasks // 2, play.seconds, (0.5, 30.0), way)
                stage.send(half, first_node=node)
            troubles = rounds(brokers, play.case)
            for each in troubles:
                stage.pause(play.seconds / 2 / len(troubles))
                with stage.trouble(play.title):
                    with each:
                        stage.pause(cases[play.case])
                    stage.wait_for_cluster()

    return Scenario(stream, what, tasks, 2.0, list(cases))


def full_destination(play: Play) -> None:
    """A queue is full and refuses the tasks that are due for it; room is made 100 s later.

    ``full`` are the tasks for it, ``sound`` those that are due at the same time for another queue,
    ``later`` those for the other queue that are sent 75 s later.
    """
    most, full, delays = 5, "full", (10.0, 10.0)  # all wait in the queue of one digit
    arguments: dict[str, Any] = {"x-queue-type": "classic" if play.case == "classic" else "quorum"}
    if play.case != "policy":
        arguments |= {"x-max-length": most, "x-overflow": "reject-publish"}
    limits = {SOUND: LATE, "later": LATE}
    queues = TaskQueue(SOUND), TaskQueue(full, arguments)
    with play.on(Cluster(play.version), *queues, limits=limits) as stage:
        if play.case == "policy":
            policy = {"max-length": most, "overflow": "reject-publish"}
            set_policy(stage, "bound", f"^{full}$", policy)
        stage.worker(SOUND)
        stage.send(Stream("filling", full, most, delays=(0.5, 0.5)), wait=True)
        stage.wait(lambda: stage.count(full) >= most, "a full queue", 60)
        with stage.trouble("full queue"):
            # The sound ones stand behind the others in the queue of the same digit.
            stage.send(Stream(full, full, play.tasks, delays=delays), wait=True)
            stage.send(Stream(SOUND, SOUND, 20, delays=delays), wait=True)
            stage.pause(75)
            stage.send(Stream("later", SOUND, 20, delays=delays), wait=True)
            stage.pause(25)
        stage.worker(full)


def host_away(play: Play) -> None:
    """The only node of a task queue is killed before its tasks are due, and back after 50 s.

    The queue is a classic one, or a quorum queue with a single member. ``away`` are the tasks for
    it, ``sound`` those that are due at the same time for another queue.
    """
    away, delays = "away", (20.0, 20.0)
    arguments: dict[str, Any] = {"x-queue-type": "classic"}
    if play.case == "single":
        # Its quorum is lost, that of the levels is not.
        arguments = {"x-queue-type": "quorum", "x-quorum-initial-group-size": 1}
    queues = TaskQueue(SOUND), TaskQueue(away, arguments)
    told = {"rabbitdelay_may_refuse": [away]}
    with play.on(Cluster(play.version, 3), *queues, limits={SOUND: LATE}, **told) as stage:
        host = stage.cluster.nodes[1]  # not the first, which the others have joined
        with stage.cluster.connection(host) as connection:
            queues[1].entity()(connection.default_channel).declare()
        column = "pid" if play.case == "classic" else "leader"
        assert host.node in host.ctl("list_queues", "name", column)
        stage.worker(SOUND)
        # The sound ones stand behind the others in the queue of the same digit.
        stage.send(Stream(away, away, play.tasks, delays=delays), wait=True)
        stage.send(Stream(SOUND, SOUND, 20, delays=delays), wait=True)
        with stage.trouble("host away"):
            with killed(host):
                stage.pause(50)
            stage.wait_for_cluster()
        stage.worker(away)


def set_policy(stage: Stage, name: str, pattern: str, keys: Any, *options: str) -> None:
    """Set a policy on queues."""
    words = (*options, name, pattern, json.dumps(keys), "--apply-to", "queues")
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
        if is_guarded:
            # As in docs/how-to/broker_settings.md.
            keep, priority = {"overflow": "reject-publish"}, ("--priority", "1000")
            set_policy(stage, "guard", rf"^{PREFIX}\.", keep, *priority)
        stage.worker(SOUND)
        with stage.trouble(play.title):
            set_policy(stage, "chaos", ".*", {play.case: POLICIES[play.case]})
            stage.send(Stream(SOUND, SOUND, play.tasks, delays=(5.0, 75.0)), wait=True)
            stage.pause(40)
            stage.cluster.running.ctl("clear_policy", "chaos")
        stage.send(Stream("after", SOUND, 20, delays=(3.0, 6.0)), wait=True)


#: How tasks are sent in cases of this scenario.
WAYS: Final[dict[str, Way]] = {
    "send-many": "rows",
    "envelopes": "envelopes",
    "distribution": "envelopes",
}


def process_killed(play: Play) -> None:
    """A worker is killed five times, or a producer once in the middle of its stream.

    ``distribution``: the worker is killed while it takes tasks out of envelopes.
    """
    way = WAYS.get(play.case, "task")
    with play.on(Cluster(play.version)) as stage:
        worker, _ = stage.worker(SOUND), stage.worker(SOUND)
        stream = Stream("tasks", SOUND, play.tasks, play.seconds, (0.5, 20.0), way)
        producer = stage.send(stream)
        if play.case in ("worker", "distribution"):
            for _ in range(5):
                stage.pause(play.seconds / 6)
                with stage.trouble("worker killed"):
                    stage.kill(worker)
        else:
            stage.pause(play.seconds / 2)
            with stage.trouble(play.title):
                producer.end(signal.SIGKILL)
            stage.send(Stream("after", SOUND, 100, delays=(0.5, 20.0)), wait=True)


def redis_away(play: Play) -> None:
    """Redis, the result backend, is killed for 30 s while tasks with results come due."""
    with play.on(Cluster(play.version), task_ignore_result=False) as stage:
        redis = stage.redis()
        stage.settings["result_backend"] = redis.url
        stage.worker(SOUND)
        stage.send(Stream(SOUND, SOUND, play.tasks, play.seconds, (0.5, 20.0)))
        stage.pause(play.seconds / 4)
        with stage.trouble("Redis away"):
            redis.kill()
            stage.pause(30)
            redis.start()


def registry_away(play: Play) -> None:
    """The Redis of the registry is frozen, or killed and back without its data, for 20 s.

    The levels hold a task for at most a minute longer than that. ``at-once`` are tasks without a
    delay, which nobody asks the registry about.
    """
    prefetch = 4 if play.case == "frozen-prefetch-4" else 64
    is_killed = play.case == "killed"
    limits = {"at-once": LATE} if prefetch == 64 else {}
    with play.on(Cluster(play.version), limits=limits) as stage:
        redis = stage.redis()
        stage.settings["rabbitdelay_registry_url"] = redis.url
        stage.worker(SOUND, f"--prefetch-multiplier={prefetch}")
        stage.send(Stream("held", SOUND, play.tasks, play.seconds, (0.5, 20.0), "rows"))
        stage.send(Stream("at-once", SOUND, play.tasks // 50, play.seconds, (0.0, 0.0)))
        stage.pause(play.seconds / 3)
        with stage.trouble(play.title):
            redis.kill() if is_killed else redis.suspend()
            stage.pause(20)
            redis.start() if is_killed else redis.resume()


#: In which direction a clock is off.
OFF: Final = ("ahead", "behind")


def clock_off(play: Play) -> None:
    """The clock of a producer, a worker, all nodes or one node of three is off by an hour.

    It is a minute where tasks are late by the difference: if the worker's clock is behind the
    producer's, each task is, once.

    ``node``: the node is also killed and started again, so that queues change their leader from a
    clock to another. A message that entered a queue by a clock that is ahead is late by the
    difference. By a clock that is behind, it leaves early, and the worker puts it back, unless that
    is by less than ``rabbitdelay_early_tolerance``.
    """
    whose, _, off = play.case.partition("-")
    is_late = play.case in ("producer-ahead", "worker-behind", "node-ahead")
    size = 60 if is_late else 3600
    seconds = size if off == "ahead" else -size
    # The others join the node that has the earliest start, by its own clock.
    victim = 1 if off == "ahead" else 0
    wrong = {"broker": (0, 1, 2), "node": (victim,)}.get(whose, ())
    is_killed = whose == "node"
    with play.on(
        Cluster(play.version, 3, clocks=dict.fromkeys(wrong, seconds)),
        limits={} if is_killed else {SOUND: LATE + size * is_late},
        early=TOLERATED if is_killed else 0.0,
        patience=120,
    ) as stage:
        crooked = off_by(seconds)
        stage.worker(SOUND, environment=crooked if whose == "worker" else None)
        stream = Stream(SOUND, SOUND, play.tasks, play.seconds, (5.0, 30.0))
        stage.send(stream, environment=crooked if whose == "producer" else None)
        if is_killed:
            stage.pause(play.seconds / 2)
            with stage.trouble("node with a wrong clock killed"):
                with killed(stage.cluster.nodes[victim]):
                    stage.pause(5)
                stage.wait_for_cluster()


def schedules(play: Play) -> None:
    """Two hundred schedules, of one second to a minute, while everything is killed in turn (root).

    See :mod:`tests.chaos.schedules`.
    """
    queues = TaskQueue(SOUND), TaskQueue("beside")
    with play.on(NetworkedCluster(play.version, 3), *queues, patience=10) as stage:
        play_schedules(stage, play.tasks, play.seconds)


def told(play: Callable[..., None], tasks: int, minutes: float = 0.0, *cases: str) -> Scenario:
    """Return a scenario with the docstring of the function that plays it."""
    return Scenario(play, (play.__doc__ or ""), tasks, minutes, cases or ("",))


SCENARIOS: Final[dict[str, Scenario]] = {
    "full-destination": told(full_destination, 60, 0.0, "argument", "policy", "classic"),
    "node-crash": streamed(
        "Each node of three is killed with SIGKILL in turn, and started again.",
        12_000,
        {"task": 15, "rows": 15, "envelopes": 15},
        lambda cluster, _: [killed(node) for node in cluster.nodes],
    ),
    "tls": streamed(
        "Each node of three is killed in turn, and everything is over TLS.",
        4000,
        {"": 15},
        lambda cluster, _: [killed(node) for node in cluster.nodes],
        lambda version, _: Cluster(version, 3, tls=True),
    ),
    "freeze": streamed(
        "One node of three is frozen (SIGSTOP) for 12 s, twice.",
        12_000,
        {"": 12},  # longer than the heartbeat of Raft, and shorter than that of AMQP
        lambda cluster, _: [frozen(node) for node in cluster.nodes[1:]],
    ),
    "quorum-lost": streamed(
        "Two nodes of three are killed, or frozen, for 40 s: nothing has a quorum.",
        4000,
        {"kill": 40, "freeze": 40},  # longer than the confirm timeout of 30 s
        lambda cluster, case: [{"kill": killed, "freeze": frozen}[case](*cluster.nodes[1:])],
    ),
    "connections": streamed(
        "Connections become slow (0.5 s each way), or are all half-open at a moment, twice.",
        2000,
        dict.fromkeys(CONNECTIONS, 24),
        lambda cluster, case: [
            {"half-open": half_open, "slow": slow}[case](cluster) for _ in range(2)
        ],
        lambda version, _: ProxiedCluster(version),
        # With a connection for events, a worker of Celery 5.7 waits for ever for the answer of a
        # half-open one (celery/worker/consumer/events.py), and takes no more tasks.
        ("--without-gossip", "--without-mingle", "--without-heartbeat"),
    ),
    "partition": streamed(
        "Packets are dropped between halves of a cluster, around a node, or across a ring (root).",
        8000,
        {
            "halves": 10,
            "node": 10,
            "ring": 10,
            "halves-long": 30,
            "halves-of-5": 10,
            "ring-of-5": 10,
        },
        lambda cluster, case: [cut(case.partition("-")[0], cluster) for _ in range(2)],
        lambda version, case: NetworkedCluster(version, 5 if case.endswith("-5") else 3),
    ),
    "host-away": told(host_away, 80, 0.0, "classic", "single"),
    "policies": told(policies, 120, 0.0, *POLICIES),
    "policies-guarded": Scenario(
        partial(policies, is_guarded=True),
        "The same, but another policy keeps it away from the levels: nobody notices.",
        *(120, 0.0, list(POLICIES)),
    ),
    "process-killed": told(process_killed, 6000, 1.0, "worker", "producer", *WAYS),
    "redis-away": told(redis_away, 1200, 1.0),
    "registry-away": told(registry_away, 30_000, 1.0, "frozen", "killed", "frozen-prefetch-4"),
    "clock-off": told(
        *(clock_off, 300, 0.5),
        *(f"{whose}-{off}" for whose in ("producer", "worker", "broker", "node") for off in OFF),
    ),
    "schedules": told(schedules, 200, 20.0),
}

#: A few of them, for a first look, with their tasks and minutes.
SHORT: Final = {"full-destination": (60, 0.0), "host-away": (80, 0.0), "node-crash": (1500, 1.0)}
