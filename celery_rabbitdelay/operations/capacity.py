"""``celery rabbitdelay capacity``: estimate RabbitMQ's resources for a number of waiting tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import ceil, inf
from typing import Final, NamedTuple

import click

from celery_rabbitdelay.command import shared
from celery_rabbitdelay.levels.delay import milliseconds
from celery_rabbitdelay.levels.layout import Layout
from celery_rabbitdelay.levels.topology import Topology

#: The costs of a message on a single node, measured on RabbitMQ 4.3.6 by ``make bench
#: NAME=waiting``: bytes of disk, and microseconds of processor time on arrival and for each stop.
DISK: Final = 1000
RECEIVED_US: Final = 96
STOP_US: Final = 270

#: The maximum bytes of the arguments that Celery repeats in the header ``argsrepr``.
REPEATED: Final = 1024

#: The factor by which a replicated message costs each of its nodes more processor time.
REPLICATED: Final = 1.45

#: Bytes of memory: for a message that is not yet written into a segment; the maximum for all such
#: messages together; and for a message in a segment. New messages use up to twice as much.
FRESH_MEMORY: Final = 1000
MOST_FRESH_MEMORY: Final = 365_000_000
MEMORY: Final = 95

#: The bytes of disk of a task with small arguments in an envelope, and of the envelope itself.
ROW_DISK: Final = 45
ENVELOPE_DISK: Final = 600

#: The messages per second that one queue dead-letters, measured on two cores.
QUEUE_RATE: Final = 2500

#: The number of replicas that RabbitMQ gives a quorum queue, unless it has fewer nodes.
REPLICAS: Final = 3

#: The number of delays from which the stops are computed.
SAMPLES: Final = 9973

_UNITS: Final = {"k": 1e3, "m": 1e6, "g": 1e9}


class Load(NamedTuple):
    """The tasks of an application.

    Attributes:
        tasks: How many tasks wait at the same time.
        rate: How many tasks are sent, and come due, per second.
        per_message: How many tasks an envelope holds on average; 1 without envelopes.
        argument_bytes: The size of the tasks' arguments in bytes, beyond a number or two.
        longest: The longest delay, in seconds. All delays up to the longest are equally frequent.
    """

    tasks: float
    rate: float
    per_message: float
    argument_bytes: int
    longest: float


class Capacity(NamedTuple):
    """The resources that a load needs.

    Attributes:
        messages: The number of waiting messages.
        stops: The mean number of queues in which a message waits.
        replicas: The number of replicas of a queue.
        disk_bytes: Bytes of disk per node.
        memory_bytes: Bytes of memory per node.
        cores: The number of busy cores per node.
        busiest_rate: The messages per second that pass the busiest queue, without shards.
        shards: The number of shards that the rate needs.
    """

    messages: float
    stops: float
    replicas: int
    disk_bytes: float
    memory_bytes: float
    cores: float
    busiest_rate: float
    shards: int


def capacity_of(load: Load, layout: Layout, nodes: int) -> Capacity:
    """Estimate the resources that a load needs on each node of a cluster.

    Args:
        load: The tasks.
        layout: The levels.
        nodes: The number of nodes, over which RabbitMQ spreads the replicas.
    """
    passed: Counter[tuple[int, int]] = Counter()
    longest_ms = min(milliseconds(load.longest), layout.capacity_ms)
    for sample in range(1, SAMPLES + 1):
        digits = layout.digits(longest_ms * sample // SAMPLES)
        passed.update((level, digit) for level, digit in enumerate(digits) if digit)
    stops, (_, busiest) = passed.total() / SAMPLES, passed.most_common(1)[0]
    messages, rate = load.tasks / load.per_message, load.rate / load.per_message
    disk: float = DISK + load.argument_bytes + min(load.argument_bytes, REPEATED)
    memory = min(messages * FRESH_MEMORY, MOST_FRESH_MEMORY + messages * MEMORY)
    if load.per_message > 1:
        disk = ENVELOPE_DISK + load.per_message * (ROW_DISK + load.argument_bytes)
    processor_us = RECEIVED_US + stops * STOP_US
    if nodes > 1:
        processor_us *= REPLICATED
    replicas = min(REPLICAS, nodes)
    share = replicas / nodes
    busiest_rate = rate * busiest / SAMPLES
    return Capacity(
        messages=messages,
        stops=stops,
        replicas=replicas,
        disk_bytes=messages * disk * share,
        memory_bytes=memory * share,
        cores=rate * processor_us / 1e6 * share,
        busiest_rate=busiest_rate,
        shards=max(ceil(busiest_rate / QUEUE_RATE), 1),
    )


def _count(text: str, what: str) -> float:
    """Parse a number such as ``100M``."""
    unit = _UNITS.get(text[-1:].lower())
    try:
        number = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < inf:
        raise ValueError(f"{what} = {text!r}: takes a number above 0, such as 500, 20k or 100M")
    return number


_number: Final = shared.ParameterType("number", _count)


@shared.command()
@click.option("--nodes", type=click.IntRange(min=1), default=1, show_default=True)
@shared.as_one(
    "load",
    Load,
    click.option("--tasks", type=_number, required=True, help="Waiting tasks, such as 100M."),
    click.option("--rate", type=_number, required=True, help="Tasks a second that come due."),
    click.option(
        "--per-message",
        type=click.FloatRange(min=1),
        default=1.0,
        show_default=True,
        help="Tasks in an envelope, on average.",
    ),
    click.option(
        "--argument-bytes",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="The size of a task's arguments, beyond a few numbers.",
    ),
    click.option(
        "--longest",
        type=shared.seconds_type,
        default="7d",
        show_default=True,
        help="The longest delay; all shorter delays are as frequent.",
    ),
)
@shared.topology_options()
def capacity(nodes: int, load: Load, **options: object) -> None:
    """Estimate RabbitMQ's resources for waiting tasks. No broker is contacted."""
    topology = shared.topology(options)
    found = capacity_of(load, topology.layout, nodes)
    shared.answer(found._asdict(), _lines(found, load.tasks, topology))


def _lines(found: Capacity, tasks: float, topology: Topology) -> Iterator[str]:
    yield (
        f"{tasks:,.0f} tasks in {found.messages:,.0f} messages, "
        f"in {len(topology.queues)} queues of {found.replicas} replicas; each node takes"
    )
    yield f"  disk       {found.disk_bytes / 1e9:,.1f} GB"
    yield f"  memory     {found.memory_bytes / 1e9:,.1f} GB"
    yield f"  processor  {found.cores:,.1f} cores, for {found.stops:.1f} stops a message"
    yield (
        f"The busiest queue passes on {found.busiest_rate:,.0f} messages a second, "
        f"of {QUEUE_RATE:,}: rabbitdelay_shards = {found.shards}"
    )
