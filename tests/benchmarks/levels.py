# ruff: noqa: T201  # a program at the terminal prints
"""What the layout costs: publishing into our levels and Celery's 28, and how late messages come.

Only exchange and routing key differ. Our levels are entered at the first digit that is not zero,
Celery's at the highest. Celery's native delayed delivery can only wait whole seconds; its lateness
is measured against those, so that rounding is no part of it.
"""

import gc
import random
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import product
from multiprocessing import get_context
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, TypeAlias

import amqp
from kombu import Connection
from kombu.transport.native_delayed_delivery import calculate_routing_key

from celery_rabbitdelay.levels.headers import DUE
from celery_rabbitdelay.levels.layout import Layout, Level, binary, clock
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.declaration import declare, declare_destination
from celery_rabbitdelay.publishing.message import Content
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.testing import wait_for
from tests.benchmarks import measure
from tests.private_broker import private_broker

#: Messages that are published together while the lateness is measured.
BATCH: Final = 16

NATIVE: Final = "Celery's 28 levels"

#: Where a message goes, and when it is then due (milliseconds since 1970).
Place: TypeAlias = tuple[str, str, float]


class Way(NamedTuple):
    """A way to wait: where a message goes, now, that is to be due then; and its queues.

    The last of the queues is the destination.
    """

    place: Callable[[int], Place]
    queues: list[str]


def now_ms() -> float:
    """Return the time of day in milliseconds since 1970."""
    return time.time() * 1000


def ways(connection: Connection, scale: int) -> dict[str, Way]:
    """Declare all levels, with every time divided by the scale, and a queue behind each."""
    found: dict[str, Way] = {}
    second_ms = 1000 // scale
    for name, layout in {"clock": clock(), "binary, entered at its first bit": binary()}.items():
        scaled = (
            Level(f"{each.unit}x{each.multiple}", 1, each.base, each.place_ms // scale)
            for each in layout.levels
        )
        topology = Topology(f"bench-{name[:5]}", Layout(name, tuple(scaled), layout.zeros))
        end = measure.quorum_queue(f"{topology.prefix}-end")
        declare(connection, topology)
        declare_destination(connection, topology, end)

        def ours(due_ms: int, topology: Topology = topology, end: str = end.name) -> Place:
            exchange, key, _ = topology.route((due_ms - now_ms()) / 1000, end)
            return exchange, key, due_ms

        found[name] = Way(ours, [*(queue.name for queue in topology.queues), end.name])
    end = measure.quorum_queue("bench-native-end")
    channel: Any = connection.channel()
    declare_queue = channel.queue_declare

    def shorter(arguments: dict[str, Any], **options: Any) -> Any:
        ttl = {"x-message-ttl": arguments["x-message-ttl"] // scale}
        return declare_queue(arguments={**arguments, **ttl}, **options)

    channel.queue_declare = shorter
    measure.declare_native(connection, end, SimpleNamespace(channel=lambda: channel))

    def native(due_ms: int) -> Place:
        now = now_ms()
        seconds = max(1, round((due_ms - now) / second_ms))  # what ends closest to the instant
        key = calculate_routing_key(seconds, end.name)
        return measure.NATIVE_ENTRANCE, key, now + seconds * second_ms

    found[NATIVE] = Way(native, [*measure.NATIVE_QUEUES, end.name])
    return found


def publish(publisher: Publisher, places: list[Place], window: int) -> float:
    """Publish messages; return when the first is due."""
    made = partial(amqp.Message, b"x" * 200, delivery_mode=2)
    messages = (
        (exchange, key, Content.of(made(application_headers={DUE: int(due_ms)})))
        for exchange, key, due_ms in places
    )
    measure.publish(publisher, messages, window)
    return min(due_ms for _, _, due_ms in places)


def levels(*, rounds: int = 3, messages: int = 10_000, window: int = 1000) -> None:
    """Confirmed publishing into the clock and our 28 binary levels, beside Celery's 28 levels.

    The shorter a delay, the more of Celery's levels are zeros that a message passes before it lies
    in a queue.
    """
    with private_broker() as broker, Connection(broker.url) as connection:
        publisher, every = Publisher(Connection(broker.url)), ways(connection, 1)

        def rate(way: Way, shortest: int, longest: int) -> float:
            delays = random.choices(range(shortest, longest), k=messages)
            places = [way.place(int(now_ms() + delay * 1000)) for delay in delays]
            began = time.monotonic()
            publish(publisher, places, window)
            taken = time.monotonic() - began
            measure.purge(connection, way.queues, messages)
            return messages / taken

        drawn: dict[str, list[float]] = {}
        kinds = {"a minute to an hour": (60, 3600), "an hour to a week": (3600, 7 * 86_400)}
        for kind, between in kinds.items():
            contestants = {name: partial(rate, way, *between) for name, way in every.items()}
            figures = measure.in_turn(contestants, rounds)
            measure.show(kind, "messages/s", figures, NATIVE, {("clock", NATIVE): 5})
            drawn |= {f"{name}, {kind}": found for name, found in figures.items()}
        measure.draw("levels", "messages/s", drawn, measure.about(broker))
        publisher.close()


def arrivals(url: str, queue: str, count: int) -> list[float]:
    """Consume messages; return how late each came, in milliseconds."""
    late: list[float] = []
    deadline = time.monotonic() + measure.PATIENCE
    gc.disable()
    with Connection(url) as connection:
        channel: Any = connection.default_channel
        channel.basic_consume(
            queue, no_ack=True, callback=lambda got: late.append(now_ms() - got.headers[DUE])
        )
        while len(late) < count:
            assert time.monotonic() < deadline, f"{len(late)} of {count} messages came"
            with suppress(TimeoutError):
                connection.drain_events(timeout=1.0)
    return late


def lateness(
    *,
    rounds: int = 3,
    rates: tuple[int, ...] = (200, 500, 1000, 2000, 3000, 5000),
    seconds: float = 10.0,
    lead: float = 60.0,
    scale: int = 100,
) -> None:
    """How late messages come, beside Celery's native delayed delivery.

    All are sent in ``--lead`` seconds, at the same pace: who sends ten times as fast puts ten times
    as many messages into the queue of one digit, which then leave it as fast. Then so many come due
    a second, at random instants, for ``--seconds``. A consumer in a process of its own takes the
    time. Each time to live is divided by ``--scale``, 1, 10 or 100, of all alike: with 100, 36 s
    are what an hour is in use, with the same digits and stops. The lateness is not scaled.
    """
    with (
        private_broker() as broker,
        Connection(broker.url) as connection,
        ProcessPoolExecutor(1, get_context("spawn")) as pool,
    ):
        publisher, every = Publisher(Connection(broker.url)), ways(connection, scale)
        channel: Any = connection.default_channel

        def late_of(way: Way, due_ms: list[int]) -> list[float]:
            """Return how late messages came; nothing, if some were due before all were sent."""
            end, number = way.queues[-1], len(due_ms)
            late = pool.submit(arrivals, broker.url, end, number)
            consumers = partial(channel.queue_declare, end, passive=True)
            wait_for(lambda: consumers().consumer_count, "the consumer")
            began, first_ms = time.monotonic(), float("inf")
            # With more at a time, messages would enter their queues later than they were placed.
            for start in range(0, number, BATCH):
                time.sleep(max(began + 0.8 * lead * start / number - time.monotonic(), 0))
                places = [way.place(each) for each in due_ms[start : start + BATCH]]
                first_ms = min(first_ms, publish(publisher, places, BATCH))
            is_in_time = now_ms() < first_ms
            return late.result() if is_in_time else late.result()[:0]

        found: dict[tuple[str, int], list[list[float]]] = defaultdict(list)
        for rate, (name, way) in product([*rates] * rounds, every.items()):
            begin = int(now_ms() + lead * 1000)
            instants = range(begin, begin + int(seconds * 1000))
            late = late_of(way, random.choices(instants, k=int(rate * seconds)))
            if late:
                cuts = quantiles(late, n=100, method="inclusive")
                found[name, rate].append([cuts[49], cuts[98], max(late)])
                assert name == NATIVE or min(late) >= 0, f"{name}: {-min(late)} ms early"
            seen = found[name, rate][-1:] or "due before it is in"
            print(f"  {name}, {rate}/s: {seen}", flush=True)
        about = f"{measure.about(broker)}, times to live divided by {scale}"
        publisher.close()
    by_rate: dict[str, dict[int, float]] = defaultdict(dict)
    print("\nlateness in ms, median of the rounds: p50, p99, max")
    for (name, rate), figures in sorted(found.items()):
        if figures:
            p50, p99, latest = (median(each) for each in zip(*figures, strict=True))
            print(f"  {name:34} {rate:5}/s {p50:8,.0f} {p99:8,.0f} {latest:8,.0f}")
            by_rate[name][rate] = p99
    measure.draw("lateness-p99", "99 of 100 are no later than so many ms", by_rate, about)
