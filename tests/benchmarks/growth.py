# ruff: noqa: T201  # a program at the terminal prints
"""Whether sending and lateness depend on how many messages wait already.

``python -m tests.benchmarks.growth`` starts a private RabbitMQ and lets ever more tasks wait in the
clock (quorum queues, random delays of an hour to a week, no envelopes): 1,000, 10,000, 100,000, and
with ``--million`` 1,000,000. At each size,

- lateness: tasks with random delays of one to five seconds are sent and taken from their queue by
  a plain kombu consumer; how much later than due each came. The clock's tick is 0.1 s, to which
  a delay is rounded up: on average, 50 ms of it are that. Nothing else is sent meanwhile.
- sends: a batch is sent by ``send_many``, confirmed, with the delays of those that wait, and so
  into the same queues. It stays, and counts among the next size's.

A round begins with empty queues and takes all sizes in turn. Tasks that wait long do not lie in
the queues of seconds and tenths that those with a short delay go through: that is the layout. They
share the broker's log, memory and processors.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

import celery
from kombu import Connection

from celery_rabbitdelay import Celery, Row
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.testing import RabbitMQServer
from tests.benchmarks import measure
from tests.benchmarks.sends import TEXT, make_app
from tests.benchmarks.waiting import PAUSE, WEEK, purge, quorum_queue
from tests.integration.arrivals import take

SIZES: Final = (1_000, 10_000, 100_000)

MILLION: Final = 1_000_000

#: The queue that the tasks are for.
QUEUE: Final = "growth"

#: How many tasks are sent before anything is measured.
WARM_UP: Final = 20_000

#: Seconds until all short delays have to be over.
PATIENCE: Final = 120.0

RATE: Final = "sends (tasks/s)"
P50: Final = "late p50 (ms)"
P99: Final = "late p99 (ms)"

#: The figures of each size, round by round.
Figures = dict[str, dict[int, list[float]]]


class Bench:
    """An application, and how many of its tasks wait."""

    def __init__(self, broker: RabbitMQServer) -> None:
        self.app = make_app(Celery, broker.url, QUEUE)
        self.connection = Connection(broker.url)
        self.queues = [queue.name for queue in self.app.rabbitdelay.topology.queues]
        self.waiting = 0
        self._random = random.Random(1)

    def _rows(self, tasks: int, shortest: float, longest: float) -> Iterator[Row]:
        for order in range(tasks):
            yield Row((order, TEXT), delay=self._random.uniform(shortest, longest))

    def _send(self, tasks: int, shortest: float, longest: float) -> float:
        """Send tasks; return how many a second were confirmed."""
        rows = self._rows(tasks, shortest, longest)
        report = self.app.rabbitdelay.send_many(self.app.tasks["remind"], rows, envelopes=False)
        rate: float = report.rate
        return rate

    def batch(self, tasks: int) -> float:
        """Let further tasks wait; return how many a second were confirmed."""
        self.waiting += tasks
        return self._send(tasks, 3600, WEEK)

    def fill(self, size: int) -> None:
        """Let so many tasks wait in all."""
        assert self.waiting <= size, "the batch is too large for these sizes"
        if self.waiting < size:
            self.batch(size - self.waiting)
        time.sleep(PAUSE)

    def lateness(self, tasks: int) -> list[float]:
        """Send tasks with a short delay; return how many ms late each came."""
        self._send(tasks, 1, 5)
        arrivals = take(self.connection, [quorum_queue(QUEUE)], tasks, PATIENCE)
        return [each.at * 1000 - each.message.headers[header_names.DUE] for each in arrivals]

    def empty(self) -> None:
        """Remove everything that waits."""
        purge(self.connection, self.queues, self.waiting)
        self.waiting = 0

    def close(self) -> None:
        """Close all connections."""
        self.app.close()
        self.connection.release()


def grow(bench: Bench, sizes: Sequence[int], rounds: int, batch: int, probes: int) -> Figures:
    """Measure each size once a round."""
    figures: Figures = {name: {size: [] for size in sizes} for name in (RATE, P50, P99)}
    # Connects, declares, and warms up the broker, which is slow at first.
    bench.batch(WARM_UP)
    bench.lateness(probes)
    for number in range(rounds):
        bench.empty()
        for size in sizes:
            bench.fill(size)
            percentiles = quantiles(bench.lateness(probes), n=100)
            figures[P50][size].append(percentiles[49])
            figures[P99][size].append(percentiles[98])
            figures[RATE][size].append(bench.batch(batch))
            seen = ", ".join(f"{name} {figures[name][size][-1]:,.0f}" for name in figures)
            print(f"  round {number + 1}, {size:,} waiting: {seen}", flush=True)
    bench.empty()
    return figures


def show(figures: Figures) -> None:
    """Print medians and spread, and what became of them on the way to the largest size."""
    for name, by_size in figures.items():
        print(f"\n{name}")
        first = median(next(iter(by_size.values())))
        for size, seen in by_size.items():
            print(
                f"  {size:12,} waiting  median {median(seen):10,.1f}  from {min(seen):10,.1f} "
                f"to {max(seen):10,.1f}  {median(seen) / first:6.2f} x the smallest size's"
            )


def lines(figures: Figures, footnote: str) -> Path:
    """Draw the medians over the size, with their spread; return the picture."""
    import matplotlib.pyplot as plt

    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(8, 6))
    for axes, drawn in ((upper, (RATE,)), (lower, (P50, P99))):
        for name in drawn:
            _line(axes, name, figures[name])
        axes.set(xscale="log", ylim=(0, None))
        axes.legend(loc="lower left")
    upper.set(title="What sending and lateness cost while messages wait")
    lower.set(xlabel="messages that wait")
    figure.text(0.01, 0.01, footnote, fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    path = measure.RESULTS / "growth.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _line(axes: Any, name: str, by_size: Mapping[int, Sequence[float]]) -> None:
    medians = [median(seen) for seen in by_size.values()]
    spread = [
        [middle - min(seen) for middle, seen in zip(medians, by_size.values(), strict=True)],
        [max(seen) - middle for middle, seen in zip(medians, by_size.values(), strict=True)],
    ]
    axes.errorbar(list(by_size), medians, yerr=spread, marker="o", capsize=3, label=name)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.growth")
    parser.add_argument("--rounds", type=int, default=5, help="(5)")
    parser.add_argument("--batch", type=int, default=5_000, help="tasks in a batch (5000)")
    parser.add_argument("--probes", type=int, default=500, help="tasks of a short delay (500)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="tasks that wait")
    parser.add_argument("--million", action="store_true", help="up to a million tasks that wait")
    options = parser.parse_args(arguments)
    sizes = [*options.sizes, MILLION] if options.million else [*options.sizes]
    with measure.private_broker() as broker:
        bench = Bench(broker)
        figures = grow(bench, sizes, options.rounds, options.batch, options.probes)
        bench.close()
        show(figures)
        measure.save(
            "growth", broker, {"batch": options.batch, "probes": options.probes, "figures": figures}
        )
        lines(
            figures,
            f"RabbitMQ {measure.version_of(broker)}, Celery {celery.__version__}, quorum "
            f"queues; medians of {options.rounds} rounds.",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
