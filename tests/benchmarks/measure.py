# ruff: noqa: T201  # a program at the terminal prints
"""What benchmarks share: rounds in turn, tables, pictures, and what the servers hold and spend."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple
from uuid import uuid4

from kombu import Connection, Exchange, Queue
from kombu.transport.native_delayed_delivery import (
    MAX_LEVEL,
    bind_queue_to_native_delayed_delivery_exchange,
    declare_native_delayed_delivery_exchanges_and_queues,
    level_name,
)

from celery_rabbitdelay.publishing.declaration import declare, queue_counts
from celery_rabbitdelay.publishing.message import Content, Publication
from celery_rabbitdelay.publishing.publish_loop import PublishPolicy
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.registry.decision import Registration
from celery_rabbitdelay.registry.registry import Registry
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.kernel.integration.shop import make_app
from tests.kernel.integration.worker import Worker

#: Where pictures are written to.
PICTURES: Final = Path(__file__).resolve().parents[2] / "build" / "benchmarks"

#: Seconds until all that was sent has to be there.
PATIENCE: Final = 300.0

#: Celery's exchange of the highest level, where every delayed message enters; and its queues.
NATIVE_ENTRANCE: Final = level_name(MAX_LEVEL)
NATIVE_QUEUES: Final = tuple(level_name(level) for level in range(MAX_LEVEL + 1))

#: The figures of each contestant, one for each round.
Figures = Mapping[str, Sequence[float]]


def in_turn(contestants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure each contestant once a round."""
    figures: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name, measure in contestants.items():
            figures[name].append(measure())
            found = f"  round {number + 1}, {name}: {figures[name][-1]:,.1f}"
            print(found, file=sys.stderr, flush=True)
    return figures


def show(
    title: str,
    unit: str,
    figures: Figures,
    peer: str | None = None,
    goals: Mapping[tuple[str, str], float] | None = None,
) -> None:
    """Print medians and spread, ratios to a peer, and goals: the least ratio of one to another.

    A ratio is the median of those of the rounds.
    """

    def ratio(name: str, other: str) -> float:
        return median(a / b for a, b in zip(figures[name], figures[other], strict=True))

    print(f"\n{title} ({unit})")
    for name, rounds in figures.items():
        spread = f"from {min(rounds):12,.1f} to {max(rounds):12,.1f}"
        compared = f"  {ratio(name, peer):8.2f} x {peer}" if peer else ""
        print(f"  {name:44} median {median(rounds):12,.1f}  {spread}{compared}")
    for (name, other), least in (goals or {}).items():
        met = "met" if ratio(name, other) >= least else "NOT MET"
        print(f"  goal: {name} / {other} is {ratio(name, other):.2f}, at least {least:g}: {met}")


def about(broker: RabbitMQServer) -> str:
    """Return the versions that figures belong to."""
    rabbitmq = broker.ctl("version").strip()
    return f"RabbitMQ {rabbitmq}, Celery {version('celery')}, py-amqp {version('amqp')}"


def draw(name: str, unit: str, points: Mapping[str, Any], footnote: str) -> None:
    """Draw a bar for each contestant, or a line for one whose figures are by their rates."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5))
    for contestant, found in points.items():
        if isinstance(found, Mapping):
            axes.loglog(list(found), list(found.values()), marker="o", label=contestant)
            axes.legend()
        else:
            axes.barh(contestant, median(found), color="#4c72b0")
    axes.set(title=unit, xlabel=footnote)
    PICTURES.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(PICTURES / f"{name}.png", dpi=120)


def quorum_queue(name: str) -> Queue:
    """Return a quorum queue on a topic exchange of its own, which native delayed delivery needs."""
    own = Exchange(name, type="topic")
    return Queue(name, own, name, queue_arguments={"x-queue-type": "quorum"})


def declare_native(connection: Connection, queue: Queue, levels_by: Any = None) -> None:
    """Declare Celery's 28 levels, and a queue behind them, as its workers do."""
    declare_native_delayed_delivery_exchanges_and_queues(levels_by or connection, "quorum")
    queue(connection.default_channel).declare()
    bind_queue_to_native_delayed_delivery_exchange(connection, queue)


def count(connection: Connection, queues: Iterable[str]) -> int:
    """Return how many messages are ready in the queues."""
    counts = queue_counts(connection, [Queue(name) for name in queues]).values()
    return sum(each.messages for each in counts if each is not None)


def purge(connection: Connection, queues: Sequence[str], expected: int) -> None:
    """Empty queues of exactly so many messages, and give the broker a moment."""
    channel: Any = connection.default_channel
    wait_for(lambda: count(connection, queues) >= expected, "all messages", PATIENCE)
    # Purging writes to the queue's log, also when it is empty; looking does not.
    full = [name for name in queues if count(connection, [name])]
    purged = sum(int(channel.queue_purge(name)) for name in full)
    assert purged == expected, f"{purged} messages, not {expected}"
    time.sleep(1)


def publish(
    publisher: Publisher, messages: Iterable[tuple[str, str, Content]], window: int = 1000
) -> None:
    """Publish messages to exchanges with routing keys; all have to be confirmed at once."""

    def done(made: Publication) -> None:
        if made.error or made.resent:
            raise made.error or RuntimeError("sent again")

    made = (
        Publication(content, partial(tuple[str, str], (exchange, key)))
        for exchange, key, content in messages
    )
    publisher.publish_all(made, PublishPolicy(timeout=PATIENCE, window=window), done=done)


def registered(registry: Registry, registrations: Iterator[Registration]) -> str:
    """Register tasks in the registry; return how fast that was."""
    began, number = time.monotonic(), 0
    while chunk := list(islice(registrations, 1000)):
        registry.register(chunk)
        number += len(chunk)
    return f"registered {number:,}: {number / (time.monotonic() - began):,.0f} a second"


class Shop(NamedTuple):
    """An application of the integration tests, and what makes it in a worker."""

    app: Any
    settings: dict[str, Any]

    @classmethod
    def at(cls, broker_url: str, redis_url: str, **settings: Any) -> Shop:
        """Make it, and declare its levels."""
        prefix = f"bench-{uuid4().hex[:8]}"
        given: dict[str, Any] = {"prefix": prefix, "rabbitdelay_prefix": prefix, **settings}
        given |= {"broker_url": broker_url, "result_backend": redis_url, "task_ignore_result": True}
        app: Any = make_app(given)
        with Connection(broker_url) as connection:
            declare(connection, app.rabbitdelay.topology)
        return cls(app, given)

    @property
    def queue(self) -> str:
        """The name of its default queue."""
        return str(self.app.conf.task_default_queue)

    def drained(self, tasks: int, *options: str) -> float:
        """Return how many tasks a second a worker takes that wait in the queue."""
        with Connection(self.settings["broker_url"]) as connection:
            waiting = partial(count, connection, [self.queue])
            wait_for(lambda: waiting() >= tasks, "the tasks", PATIENCE)
            with Worker(self.settings, [self.queue], *options):
                return growth(lambda: -waiting(), -waiting(), 0)


def growth(count: Callable[[], int], before: int, last: int) -> float:
    """Return by how much a count grows a second, from its first step until it is at its last."""
    assert before < last, "all were taken before the worker was ready: take more"
    wait_for(lambda: count() > before, "the first", PATIENCE, 0.005)
    began, first = time.monotonic(), count()
    wait_for(lambda: count() >= last, "the last", PATIENCE)
    return (last - first) / (time.monotonic() - began)
