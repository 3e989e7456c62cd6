"""What the layout costs: confirmed sends into the clock, beside Celery's chain of 28 levels.

``python -m tests.benchmarks.levels`` starts a private RabbitMQ. The same publisher publishes the
same small message, with the same window of confirms and the same random delays (whole seconds),
into quorum queues; the messages and their routing keys are made beforehand. Only exchange and
routing key differ:

- the clock, which a message enters at its first digit that is not zero;
- our binary layout of 28 levels, which it enters at its first bit that is one;
- Celery's native delayed delivery, whose 28 levels it enters at the highest.

Delays are of two kinds, each measured by itself: from a minute to an hour, as retries have, and
from an hour to a week, as reminders have. The shorter a delay, the more of the 28 levels are zeros
that a message passes before it lies in a queue.

Nothing comes due while it is measured: this is the cost of the first stop alone, on one node.
Afterwards all that was sent is counted as it is purged.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import amqp
from kombu import Connection
from kombu.transport.native_delayed_delivery import calculate_routing_key

from celery_rabbitdelay.levels.layout import binary, clock
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.declaration import declare, declare_destination
from celery_rabbitdelay.publishing.publication import Publication, PublishPolicy
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.publishing.wire import Content
from celery_rabbitdelay.testing import RabbitMQServer
from tests.benchmarks import measure, waiting
from tests.benchmarks.measure import Target
from tests.private_broker import private_broker

#: Bytes of the message's body.
SIZE: Final = 200

#: The queue that all levels lead to.
END: Final = "end"

CLOCK: Final = "clock"
BINARY: Final = "binary, entered at its first bit"
NATIVE: Final = "Celery's 28 levels"

#: The shortest and the longest delay of each kind, in seconds.
DELAYS: Final = {"a minute to an hour": (60, 3600), "an hour to a week": (3600, int(waiting.WEEK))}

#: The prefixes of our two layouts on the broker.
LAYOUTS: Final = {CLOCK: Topology("clock", clock()), BINARY: Topology("binary", binary())}


class Contestant(NamedTuple):
    """Where messages are published to, and the queues that they then wait in."""

    addresses: Sequence[tuple[str, str]]
    queues: Sequence[str]


def contestants(delays: Sequence[int]) -> dict[str, Contestant]:
    """Make the addresses of messages with these delays, in seconds."""
    found = {
        name: Contestant(
            [topology.route(delay, END)[:2] for delay in delays],
            [queue.name for queue in topology.queues],
        )
        for name, topology in LAYOUTS.items()
    }
    native = [(waiting.NATIVE_ENTRANCE, calculate_routing_key(delay, END)) for delay in delays]
    return {**found, NATIVE: Contestant(native, waiting.NATIVE_QUEUES)}


def rate(
    connection: Connection, publisher: Publisher, window: int, contestant: Contestant
) -> float:
    """Publish all messages; return how many a second were confirmed. Then remove them."""
    content = Content.of(amqp.Message(b"x" * SIZE, delivery_mode=2))
    made = [
        Publication(content, partial(tuple[str, str], address)) for address in contestant.addresses
    ]
    began = time.monotonic()
    publisher.publish_all(made, PublishPolicy(timeout=waiting.PATIENCE, window=window))
    taken = time.monotonic() - began
    assert not any(posting.error for posting in made)
    waiting.purge(connection, contestant.queues, len(made))
    return len(made) / taken


def compare(broker: RabbitMQServer, messages: int, rounds: int, window: int) -> None:
    """Measure all contestants, and write the results."""
    delays = {
        kind: random.Random(1).choices(range(*own), k=messages) for kind, own in DELAYS.items()
    }
    with Connection(broker.url) as connection:
        waiting.declare_native(connection, waiting.quorum_queue(END))
        for topology in LAYOUTS.values():
            declare(connection, topology)
            declare_destination(connection, topology, waiting.quorum_queue(END))
        publisher = Publisher(Connection(broker.url))
        rating = partial(rate, connection, publisher, window)
        measures: dict[str, Callable[[], float]] = {}
        for kind, seconds in delays.items():
            for each in contestants(seconds[:100]).values():
                rating(each)
            for name, each in contestants(seconds).items():
                measures[f"{name}, {kind}"] = partial(rating, each)
        figures = measure.in_turn(measures, rounds)
        publisher.close()
    title, unit = "Confirmed sends into delay levels", "messages/s"
    targets = []
    for kind in DELAYS:
        ours, peer = f"{CLOCK}, {kind}", f"{NATIVE}, {kind}"
        of_kind = {name: seen for name, seen in figures.items() if name.endswith(kind)}
        measure.show(f"{title}: {kind}", unit, of_kind, peer)
        targets.append(Target(f"{ours} / {NATIVE}", measure.ratios(of_kind, peer)[ours], 5))
    results = {
        "unit": unit,
        "messages": messages,
        "window": window,
        "body_bytes": SIZE,
        "figures": figures,
        "targets": measure.judge(targets),
    }
    measure.save("levels", broker, results)
    footnote = (
        f"RabbitMQ {measure.version_of(broker)}, quorum queues, a window of {window}; medians "
        f"of {rounds} rounds of {messages:,} messages."
    )
    measure.bars("levels", title, unit, figures, footnote)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.levels")
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    parser.add_argument("--messages", type=int, default=10_000, help="a round (10000)")
    parser.add_argument("--window", type=int, default=1000, help="messages in flight (1000)")
    options = parser.parse_args(arguments)
    with private_broker() as broker:
        compare(broker, options.messages, options.rounds, options.window)
    return 0


if __name__ == "__main__":
    sys.exit(main())
