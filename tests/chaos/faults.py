"""The faults of the soak, as a table, and the generator that draws a timeline from a seed.

A fault is a context: it begins, and ends. The faults of a lane come one after the other; those of
different lanes overlap, so that one node at most is down at a time, while workers, producers and
Redis are in trouble of their own.
"""

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from operator import methodcaller
from typing import Any, Final, NamedTuple, TypeAlias

from kombu import Connection

from celery_rabbitdelay.kombu import Topology, bind_destination
from celery_rabbitdelay.testing import wait_for
from tests import node_control
from tests.chaos.application import PREFIX, SOUND
from tests.chaos.kinds import FANNED, SCHEDULED
from tests.chaos.network import CUTS
from tests.chaos.preloads import off_by
from tests.chaos.stage import done, frozen, killed
from tests.redis_servers import ConfiguredRedis

#: Makes a fault of a soak; the random numbers choose its target.
Make: TypeAlias = Callable[[Any, random.Random], AbstractContextManager[None]]

#: The queues of the levels alone; and the default of ``rabbitdelay_early_tolerance``.
LEVELS: Final = rf"^{PREFIX}\.(days|hours|minutes|seconds|ms)\."
TOLERATED_MS: Final = 1000.0

#: Seconds between two faults of a lane. What Redis may have forgotten is not judged, so it rests.
REST: Final = {"brokers": (5.0, 20.0), "others": (5.0, 20.0), "redis": (30.0, 90.0)}

#: What a worker logs when it takes tasks.
READY: Final = " ready."

#: Milliseconds by which a replica of Redis may lag behind.
LAG_MS: Final = 2000.0


class Fault(NamedTuple):
    """A kind of fault.

    Attributes:
        lane: Faults of one lane never overlap.
        seconds: The shortest and the longest time that it lasts.
        make: Makes it.
        copies: Whether it explains that a message comes twice.
        registry: Whether the registry is away meanwhile.
        early_ms: The milliseconds by which tasks may then be early.
        forgets_ms: The registry forgets what it was told so long before the fault, and during it.
        refuses: Whether queues refuse messages.
        needs: What it needs: ``nodes``, several; ``network``, that of its own.
    """

    lane: str
    seconds: tuple[float, float]
    make: Make
    copies: bool = False
    registry: bool = False
    early_ms: float = 0.0
    forgets_ms: float | None = None
    refuses: bool = False
    needs: str = ""


class Planned(NamedTuple):
    """A fault on the timeline: when it begins, and for how long; and the seed of its target."""

    at: float
    seconds: float
    name: str
    target: int

    def __str__(self) -> str:
        return f"{self.at:7.1f} s  {self.seconds:5.1f} s  {self.name}"


def plan(seed: int, seconds: float, names: Sequence[str]) -> list[Planned]:
    """Return the timeline of a seed: in a lane, every fault comes once before one comes again."""
    drawn, planned = random.Random(seed), []
    for lane in sorted({FAULTS[name].lane for name in names}):
        of_lane, deck = [name for name in names if FAULTS[name].lane == lane], list[str]()
        at = drawn.uniform(*REST[lane])
        while at < seconds:
            if not deck:
                deck = drawn.sample(of_lane, len(of_lane))
            name = deck.pop()
            lasts = drawn.uniform(*FAULTS[name].seconds)
            planned.append(Planned(at, lasts, name, drawn.getrandbits(32)))
            at += lasts + drawn.uniform(*REST[lane])
    return sorted(planned)


def node(soak: Any, drawn: random.Random) -> Any:
    """Choose a node."""
    return drawn.choice(soak.cluster.nodes)


def worker(soak: Any, drawn: random.Random) -> Any:
    """Choose a worker."""
    return drawn.choice(soak.workers)


def without_schedules(soak: Any) -> list[Any]:
    """Return the workers that do not serve the queue of schedules."""
    return [each for each in soak.workers if SCHEDULED not in each.queues]


@contextmanager
def away(soak: Any, workers: Sequence[Any], end: str = "end") -> Iterator[None]:
    """Workers are ended, and stay away until the block ends."""
    with soak.looking:
        soak.workers = [each for each in soak.workers if each not in workers]
    with ThreadPoolExecutor() as pool:  # each takes some seconds to end
        list(pool.map(methodcaller(end), workers))
    yield
    with soak.looking:
        for each in workers:
            each.begin()
        soak.workers += workers


@contextmanager
def changed(soak: Any, workers: Sequence[Any], further: dict[str, str]) -> Iterator[None]:
    """Workers are restarted with further variables of the environment, one by one, and back."""

    def restart(each: Any, variables: dict[str, str]) -> None:
        times = each.log.count(READY)
        with away(soak, [each]):
            each.further = variables
        wait_for(lambda: each.log.count(READY) > times, "a worker", 180, 0.2)

    former = [each.further for each in workers]
    for each in workers:
        restart(each, {**each.further, **further})
    yield
    if further:
        for each, own in zip(workers, former, strict=True):
            restart(each, own)


def clock(seconds: int) -> Make:
    """The clock of a worker is off."""
    return lambda soak, drawn: changed(soak, [worker(soak, drawn)], off_by(seconds))


def clock_of_node(seconds: int) -> Make:
    """A node is restarted with a clock that is off, and later with the right one."""

    @contextmanager
    def make(soak: Any, drawn: random.Random) -> Iterator[None]:
        of = node(soak, drawn)
        right = of.further
        for variables in (off_by(seconds), right):
            of.end()
            of.further = variables
            of.start()
            wait_for(soak.cluster.is_together, "the whole cluster", 180, interval=2.0)
            if variables is not right:
                yield

    return make


@contextmanager
def rolling(soak: Any, _: random.Random) -> Iterator[None]:
    """All nodes are restarted, one by one."""
    for each in soak.cluster.nodes:
        each.end()
        each.start()
        wait_for(soak.cluster.is_together, "the whole cluster", 180, interval=2.0)
    yield


def alarm(limit: Callable[[Any, str], None], low: str, usual: str) -> Make:
    """A node blocks publishers, because a limit is low."""

    @contextmanager
    def make(soak: Any, drawn: random.Random) -> Iterator[None]:
        of = node(soak, drawn)
        limit(of, low)
        yield
        limit(of, usual)

    return make


def policy(pattern: str, **keys: int | str) -> Make:
    """A policy on the queues of a pattern."""

    @contextmanager
    def make(soak: Any, _: random.Random) -> Iterator[None]:
        where = soak.cluster.running
        name = node_control.set_policy(where, "/", pattern, **keys)
        yield
        node_control.clear_policy(where, "/", name)

    return make


@contextmanager
def connections_closed(soak: Any, _: random.Random) -> Iterator[None]:
    """The operator closes all connections."""
    for each in soak.cluster.nodes:
        node_control.close_all_connections(each, "soak")
    yield


@contextmanager
def unbound(soak: Any, _: random.Random) -> Iterator[None]:
    """The bindings of the tasks' queues to the delivery exchange are deleted."""
    topology = Topology(PREFIX)
    with Connection(soak.cluster.running.url) as connection:
        for name in (SOUND, SCHEDULED, *FANNED):
            key = topology.keys.destination_pattern(name)
            channel: Any = connection.default_channel
            channel.queue_unbind(name, topology.delivery.name, key)
    yield
    with Connection(soak.cluster.running.url) as connection:
        for name in (SOUND, SCHEDULED, *FANNED):
            bind_destination(connection, topology, name)


def cut(name: str, one_way: bool = False) -> Make:
    """Packets are dropped."""
    return lambda soak, _: soak.cluster.cut(CUTS[name], one_way)


def master(soak: Any) -> ConfiguredRedis:
    """Return the Redis that is the master now."""
    address = soak.redis_setup.sentinels[0].ask(
        "sentinel", "get-master-addr-by-name", soak.redis_setup.master_name
    )
    servers: list[ConfiguredRedis] = [soak.redis_setup.master, soak.redis_setup.replica]
    return next(each for each in servers if address.split()[1] == f"{each.port}")


@contextmanager
def redis_killed(soak: Any, _: random.Random) -> Iterator[None]:
    """The master of Redis is killed, and comes back with all that it has confirmed."""
    with killed([master(soak)]):
        yield


@contextmanager
def redis_restored(soak: Any, _: random.Random) -> Iterator[None]:
    """A while later, Redis is killed, and comes back with what it had at the beginning."""
    of = master(soak)
    data, copy = of.folder / "appendonlydir", of.folder / "older"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(data, copy)
    yield
    of.kill()
    shutil.rmtree(data)
    copy.rename(data)
    of.start()


@contextmanager
def redis_fails_over(soak: Any, _: random.Random) -> Iterator[None]:
    """The master of Redis is frozen, and the replica takes its place."""
    of, setup = master(soak), soak.redis_setup
    of.suspend()
    setup.sentinels[0].ask("sentinel", "failover", setup.master_name)
    yield
    of.resume()
    wait_for(lambda: master(soak) is not of, "another master", 60, 0.5)
    new = master(soak)
    of.kill()  # it would come back as the master that it was
    of.options = (*soak.redis_options, "--replicaof", f"127.0.0.1 {new.port}")
    new.options = soak.redis_options
    of.start()


def producer(begin: str, end: str) -> Make:
    """Something is done to a producer, unless it has sent everything, and undone."""

    @contextmanager
    def make(soak: Any, drawn: random.Random) -> Iterator[None]:
        of = drawn.choice(soak.producers)
        with done(begin, end, [of] if of.running else []):
            yield

    return make


FAULTS: Final = {
    "node killed": Fault("brokers", (3, 15), lambda s, d: killed([node(s, d)]), copies=True),
    "node frozen": Fault("brokers", (5, 14), lambda s, d: frozen([node(s, d)]), copies=True),
    "two nodes killed": Fault(
        *("brokers", (3, 10), lambda s, d: killed(d.sample(s.cluster.nodes, 2)), True),
        needs="nodes",
    ),
    "nodes restarted one by one": Fault("brokers", (0, 0), rolling, copies=True),
    "node's clock ahead": Fault(
        "brokers", (10, 30), clock_of_node(20), copies=True, early_ms=TOLERATED_MS
    ),
    "node's clock behind": Fault(
        "brokers", (10, 30), clock_of_node(-20), copies=True, early_ms=TOLERATED_MS
    ),
    "slow disk": Fault("brokers", (10, 30), lambda s, d: node(s, d).with_slow_disk(), copies=True),
    "memory alarm": Fault(
        *("brokers", (5, 25)),
        alarm(node_control.set_memory_limit, "{absolute, 1000000}", "0.4"),
    ),
    "disk alarm": Fault(
        *("brokers", (5, 25)),
        alarm(node_control.set_disk_limit, "{mem_relative, 1.0e6}", "50000000"),
    ),
    "connections closed": Fault("brokers", (0, 1), connections_closed, copies=True),
    "policy with a short TTL": Fault(
        "brokers", (10, 30), policy(LEVELS, message_ttl=2000), early_ms=TOLERATED_MS
    ),
    "levels are full": Fault(
        *("brokers", (5, 15), policy(LEVELS, max_length=10, overflow="reject-publish")),
        refuses=True,
    ),
    "queue is full": Fault(
        *("brokers", (5, 15), policy(f"^{SOUND}$", max_length=2, overflow="reject-publish")),
        refuses=True,
    ),
    "bindings deleted": Fault("brokers", (5, 20), unbound),
    "node cut off": Fault("brokers", (5, 14), cut("node"), copies=True, needs="network"),
    "halves cut off": Fault("brokers", (5, 14), cut("halves"), copies=True, needs="network"),
    "ring cut": Fault("brokers", (5, 14), cut("ring"), copies=True, needs="network"),
    "node does not answer": Fault(
        "brokers", (5, 14), cut("node", one_way=True), copies=True, needs="network"
    ),
    "half-open connections": Fault(
        "brokers", (5, 14), lambda s, _: s.cluster.half_open(), copies=True, needs="network"
    ),
    "slow network": Fault(
        *("brokers", (10, 30), lambda s, d: s.cluster.slow(d.randint(1, 3), "1mbit"), True),
        needs="network",
    ),
    "worker killed": Fault(
        "others", (0, 5), lambda s, d: away(s, [worker(s, d)], "kill"), copies=True
    ),
    "worker frozen": Fault("others", (5, 20), lambda s, d: frozen([worker(s, d)])),
    "workers stopped": Fault("others", (5, 20), lambda s, _: away(s, [*s.workers])),
    "workers restarted one by one": Fault(
        "others", (0, 0), lambda s, _: changed(s, [*s.workers], {})
    ),
    "workers of the version before": Fault(
        "others", (20, 60), lambda s, _: changed(s, without_schedules(s), s.former)
    ),
    "worker's clock behind": Fault("others", (10, 20), clock(-20)),
    "worker's clock ahead": Fault("others", (10, 20), clock(20)),
    "producer killed": Fault("others", (0, 5), producer("kill", "begin"), copies=True),
    "producer frozen": Fault("others", (5, 20), producer("suspend", "resume")),
    "Redis killed": Fault("redis", (2, 15), redis_killed, registry=True),
    "Redis frozen": Fault("redis", (2, 15), lambda s, _: frozen([master(s)]), registry=True),
    "Redis restored": Fault("redis", (5, 20), redis_restored, registry=True, forgets_ms=0.0),
    "Redis fails over": Fault("redis", (2, 5), redis_fails_over, registry=True, forgets_ms=LAG_MS),
}
