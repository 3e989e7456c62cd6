# ruff: noqa: T201  # a program at the terminal prints
"""How late messages come that waited on the broker, and tasks that a worker held for their eta.

``python -m tests.benchmarks.lateness`` starts a private broker. Every message is confirmed before
the first is due; then so many come due a second, at random instants. Queues are quorum queues, the
destination too. A consumer in a process of its own, which acknowledges nothing and does nothing
else, takes the time at which each message arrives; the lateness is that less the instant at which
it was due, which the message carries. The contestants:

- ``clock``: our default layout, with ticks of 0.1 s. Rounding up to a tick is part of its lateness,
  50 ms on average (unscaled): what counts is the instant that was asked for.
- ``binary``: our layout of 28 levels of one bit, with the same ticks.
- ``native``: Celery's native delayed delivery. It can only wait whole seconds and is measured
  against the whole second it was given, so that rounding is no part of its lateness.
- ``eta``: a plain Celery worker that holds all tasks until their eta, in a pool of two threads; the
  time that counts is the start of the task.

In one rate, all have the same lead: what the slowest of them needs to be confirmed, and some more.
So delays are as long as a lead, and up to ``--seconds`` longer. And all send at the same pace, that
of the slowest: who sends ten times as fast puts ten times as many messages into the queue of one
digit, which then leave it as fast. With ``--burst`` each sends as fast as it can.

Time is scaled, or messages would make fewer stops than delays in use do: with ``--scale 100``, the
default, each time to live is divided by 100, of clock, binary and native alike, so that 36 s are
what an hour is in use, with the same digits and stops. The clock's tick is then 1 ms, native's
second 10 ms. The lateness is not scaled: it is what the stops cost, and rounding has little part in
it. With ``--scale 1`` nothing is scaled. Where a way would need too long a lead it is left out, and
the benchmark says so.

Only ``--window`` messages are in flight while they are sent. A delay begins where the publisher
takes the time, but the wait on the broker where the message enters its first queue: with 1,000
messages in flight and 400 confirms a second, that alone is two and a half seconds.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from multiprocessing import get_context
from statistics import median, quantiles
from typing import Any, Final, NamedTuple
from uuid import uuid4

import amqp
from kombu import Connection
from kombu.utils.json import dumps

from celery_rabbitdelay.levels.headers import DUE
from celery_rabbitdelay.levels.layout import binary, clock
from celery_rabbitdelay.publishing.declaration import Counts, queue_counts
from celery_rabbitdelay.publishing.publication import Publication, PublishPolicy
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.publishing.wire import Content
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.benchmarks import measure
from tests.benchmarks.starts import Worker, make_app
from tests.benchmarks.ways import MS_PER_S, Batch, Levels, Native, Way
from tests.private_broker import private_broker

#: Seconds that all messages may take to arrive after the last was due.
PATIENCE: Final = 120.0

#: How many messages say how fast a way confirms, and how many seconds each of them waits: about as
#: long as the others, since it depends on the digits.
PROBE: Final = 1000
PROBE_SECONDS: Final = 12.0

#: By how much the lead is longer than the time that confirms are expected to take.
MARGIN: Final = 1.5
SECONDS_MORE: Final = 3.0

#: How much slower all send than the slowest is expected to send at the most.
PACE: Final = 1.2

#: Tasks a second that a Celery worker takes from its queue to hold them for their eta, at least.
TAKES: Final = 500

#: How many messages come due a second.
RATES: Final = [200, 500, 1000, 2000, 3000, 5000]

ETA: Final = "eta"
FIGURES: Final = ("p50", "p99", "max")

#: The names of the contestants in the picture.
LABELS: Final = {
    "clock": "celery_rabbitdelay, clock (default)",
    "binary": "celery_rabbitdelay, binary",
    "native": "Celery's native delayed delivery",
    ETA: "eta, held by a worker",
}


class Lateness(NamedTuple):
    """How late messages came, in milliseconds; how many came early; stops on the way of one."""

    p50: float
    p99: float
    max: float
    early: int
    stops: float
    confirms: float

    @classmethod
    def of(cls, late: list[float], batch: Batch) -> Lateness:
        cuts = quantiles(late, n=100, method="inclusive")
        early = sum(each < 0 for each in late)
        confirms = len(late) / batch.seconds
        return cls(cuts[49], cuts[98], max(late), early, batch.stops / len(late), confirms)


def arrivals(url: str, queue: str, count: int, seconds: float) -> list[float]:
    """Consume ``count`` messages; return how late each came, in milliseconds.

    Raises:
        TimeoutError: They did not come within ``seconds``.
    """
    late: list[float] = []
    deadline = time.monotonic() + seconds
    gc.disable()
    with Connection(url) as connection:
        channel: Any = connection.default_channel

        def arrived(message: Any) -> None:
            late.append(time.time() * MS_PER_S - message.headers[DUE])

        channel.basic_consume(queue, no_ack=True, callback=arrived)
        while len(late) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(late)} of {count} messages came")
            with suppress(TimeoutError):
                connection.drain_events(timeout=1.0)
    return late


def instants(rate: int, lead: float, seconds: float) -> list[int]:
    """Random instants that begin after the lead, in milliseconds since 1970."""
    begin = (time.time() + lead) * MS_PER_S
    return [int(begin + random.uniform(0, seconds * MS_PER_S)) for _ in range(int(rate * seconds))]


class Bench:
    """A broker with everything declared, and a publisher."""

    def __init__(
        self, broker: RabbitMQServer, pool: ProcessPoolExecutor, options: argparse.Namespace
    ) -> None:
        self.broker = broker
        self.seconds: float = options.seconds
        self._patience = PublishPolicy(window=options.window)
        self._in_burst: bool = options.burst
        self._pool = pool
        self._connection = Connection(broker.url)
        self._publisher = Publisher(Connection(broker.url))
        scale = options.scale
        self.ways: dict[str, Way] = {
            "clock": Levels("clock", clock(), scale),
            "binary": Levels("binary", binary(), scale),
            "native": Native(scale),
        }
        for way in self.ways.values():
            way.declare(self._connection)

    def confirms(self, way: Way) -> float:
        """How many messages a second the broker confirms."""
        due_ms = instants(PROBE, PROBE_SECONDS, 1.0)
        speed = PROBE / way.publish(self._publisher, due_ms, self._patience).seconds
        wait_for(
            lambda: self._counts(way).messages == PROBE, "the first ones", PATIENCE, interval=0.2
        )
        channel: Any = self._connection.default_channel
        channel.queue_purge(way.queue.name)
        return speed

    def _counts(self, way: Way) -> Counts:
        found = queue_counts(self._connection, [way.queue])[way.queue.name]
        assert found is not None
        return found

    def measure(self, name: str, rate: int, lead: float) -> Lateness | None:
        """Measure once; None where messages came due before the last one was confirmed."""
        due_ms = instants(rate, lead, self.seconds)
        if name == ETA:
            return self._measure_eta(due_ms)
        way = self.ways[name]
        within = lead + self.seconds + PATIENCE
        arrived = self._pool.submit(arrivals, self.broker.url, way.queue.name, len(due_ms), within)
        wait_for(lambda: self._counts(way).consumers, "the consumer")
        over = 0.0 if self._in_burst else (lead - SECONDS_MORE) * PACE / MARGIN
        batch = way.publish(self._publisher, due_ms, self._patience, over)
        late = Lateness.of(arrived.result(), batch)
        assert isinstance(way, Native) or not late.early, f"{name}: {late.early} came early"
        return late if batch.in_time else None

    def _measure_eta(self, due_ms: list[int]) -> Lateness | None:
        queue = f"bench-eta-{uuid4().hex[:8]}"
        settings = {"worker_prefetch_multiplier": 0}
        batch, app = Batch(), make_app(self.broker.url, queue, settings)

        def posting(each: int) -> Publication:
            batch.first_due_ms = min(batch.first_due_ms, each)
            eta = datetime.fromtimestamp(each / MS_PER_S, UTC)
            told = app.amqp.as_task_v2(str(uuid4()), "note", (each,), eta=eta, ignore_result=True)
            message = amqp.Message(
                dumps(told.body),
                content_type="application/json",
                content_encoding="utf-8",
                application_headers=told.headers,
                delivery_mode=2,
                **told.properties,
            )
            return Publication(Content.of(message), lambda: ("", queue))

        options = ("-P", "threads", "-c", "2")
        with Worker(self.broker, queue, settings, *options) as worker:
            began = time.monotonic()
            self._publisher.publish_all(map(posting, due_ms), self._patience)
            batch.seconds = time.monotonic() - began
            batch.confirmed_at_ms = time.time() * MS_PER_S
            wait_for(
                lambda: worker.count() == len(due_ms),
                "the start of every task",
                max(due_ms) / MS_PER_S - time.time() + PATIENCE,
                interval=0.25,
            )
            late = [start.at_ms - start.due_ms for start in worker.starts()]
        return Lateness.of(late, batch) if batch.in_time else None

    def close(self) -> None:
        """Close the connections."""
        self._publisher.close()
        self._connection.release()


def leads(
    rate: int, seconds: float, confirms: dict[str, float], longest: float
) -> dict[str, float]:
    """The seconds before the first message is due that each way needs, where not too many."""
    count = rate * seconds
    needs = {name: count / speed * MARGIN + SECONDS_MORE for name, speed in confirms.items()}
    return {name: need for name, need in needs.items() if need <= longest}


def one_round(
    bench: Bench, options: argparse.Namespace, confirms: dict[str, float]
) -> Iterator[tuple[str, int, Lateness | None]]:
    """Measure every contestant at every rate."""
    for rate in options.rates:
        needs = leads(rate, options.seconds, confirms, options.longest_lead)
        if rate in options.eta_rates:
            needs[ETA] = rate * options.seconds / TAKES + SECONDS_MORE
        lead = max(needs.values())
        for name in (*confirms, *([ETA] if ETA in needs else [])):
            if name not in needs:
                speed = confirms[name]
                print(f"  {name}, {rate}/s: comes due before it is in ({speed:,.0f} confirms/s)")
                continue
            late = bench.measure(name, rate, lead)
            if late is None:
                print(f"  {name}, {rate}/s: came due before it was in")
            else:
                print(
                    f"  {name}, {rate}/s, lead {lead:.0f} s: p50 {late.p50:,.0f} "
                    f"p99 {late.p99:,.0f} max {late.max:,.0f} ms, early {late.early}; "
                    f"{late.stops:.1f} stops, {late.confirms:,.0f} sent/s",
                    flush=True,
                )
            yield name, rate, late


def show(found: dict[tuple[str, int], list[Lateness]]) -> None:
    """Print medians and spread."""
    print("\nlateness in ms, median (lowest to highest)")
    for (name, rate), rounds in sorted(found.items(), key=lambda each: (each[0][1], each[0][0])):
        cells = []
        for figure in FIGURES:
            seen: Iterable[float] = [getattr(late, figure) for late in rounds]
            cells.append(f"{figure} {median(seen):8,.0f} ({min(seen):,.0f} to {max(seen):,.0f})")
        print(f"  {rate:5}/s {name:8} " + "  ".join(cells))


def draw(found: dict[tuple[str, int], list[Lateness]], footnote: str) -> None:
    """Draw a line for each contestant: the 99th percentiles over the rate."""
    by_rate: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for (name, rate), rounds in found.items():
        by_rate[LABELS[name]][rate] = [late.p99 for late in rounds]
    measure.lines_over_rate(
        "lateness-p99",
        "99 of 100 of the tasks are no later than this",
        "tasks due a second",
        "milliseconds late",
        by_rate,
        footnote,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.lateness")
    parser.add_argument("--rates", type=int, nargs="+", default=RATES)
    parser.add_argument("--eta-rates", type=int, nargs="*", default=[200, 500])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each rate (10)")
    parser.add_argument("--longest-lead", type=float, default=90.0, help="seconds (90)")
    parser.add_argument("--scale", type=int, default=100, choices=(1, 10, 100))
    parser.add_argument("--window", type=int, default=16, help="messages in flight (16)")
    parser.add_argument("--burst", action="store_true", help="send as fast as each can")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    found: dict[tuple[str, int], list[Lateness]] = defaultdict(list)
    late_in: list[tuple[str, int]] = []
    with ProcessPoolExecutor(1, get_context("spawn")) as pool, private_broker() as broker:
        bench = Bench(broker, pool, options)
        confirms = {name: bench.confirms(way) for name, way in bench.ways.items()}
        for name, speed in confirms.items():
            print(f"{name}: {speed:,.0f} confirms/s")
        for number in range(options.rounds):
            print(f"round {number + 1}")
            for name, rate, late in one_round(bench, options, confirms):
                if late is None:
                    late_in.append((name, rate))
                else:
                    found[name, rate].append(late)
        bench.close()
        show(found)
        results = {
            **vars(options),
            "confirms_per_s": confirms,
            "came_due_before_in": late_in,
            "lateness_ms": [
                {"contestant": name, "rate": rate, "rounds": [late._asdict() for late in rounds]}
                for (name, rate), rounds in found.items()
            ],
        }
        measure.save("lateness", broker, results)
        footnote = (
            f"RabbitMQ {measure.version_of(broker)}, {os.cpu_count()} cores, quorum queues; times "
            f"to live divided by {options.scale}. Medians of rounds: {options.rounds}."
        )
    draw(found, footnote)
    return 0


if __name__ == "__main__":
    sys.exit(main())
