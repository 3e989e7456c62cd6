"""What metrics cost the hot paths: sends and arrivals, with and without them, in one run.

``python -m tests.benchmarks.metrics`` starts a private RabbitMQ. Each contestant runs in a forked
process, as a worker's pool does: with metrics, it tells its parent each count through the pipe. The
sends are those of ``tests.benchmarks.sends``. For the arrivals, tasks that have come due lie in
their queue; the rate is that of a worker with the pool ``solo`` from the first one to the last. The
rates depend on whatever else the machine does; the processor time of the forked process hardly.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from multiprocessing import get_context
from typing import Any, Final, NamedTuple

from celery.contrib.testing.worker import start_worker
from kombu import Connection

from celery_rabbitdelay import Celery, Row
from celery_rabbitdelay.app.instruments import CONFIRMED
from celery_rabbitdelay.app.metrics import ChildCounts
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from celery_rabbitdelay.testing.servers import free_port
from tests.benchmarks import measure
from tests.benchmarks.measure import Target
from tests.benchmarks.sends import TEXT, make_app, random_delays
from tests.benchmarks.waiting import PATIENCE, count, purge

WITH: Final = "with metrics"
WITHOUT: Final = "without"

ONE: Final = "apply_async(delay=)"
MANY: Final = "send_many, envelopes"
ARRIVALS: Final = "arrivals"


def in_a_fork(measured: Callable[[], Figure]) -> Figure:
    """Return what a function returns in a forked process."""
    context = get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sending.send(measured()))
    process.start()
    sending.close()
    # If the process ends without an answer, this raises EOFError.
    figure: Figure = receiving.recv()
    process.join()
    return figure


class Figure(NamedTuple):
    """What is measured: tasks a second, and microseconds of processor time for each task."""

    rate: float
    cost: float

    @classmethod
    def of(cls, tasks: int, seconds: float, processor_seconds: float) -> Figure:
        return cls(tasks / seconds, processor_seconds / tasks * 1e6)


class Bench:
    """The contestants.

    Args:
        broker: Where to.
        one: How many tasks are sent one by one.
        many: How many rows are sent at once.
        arrivals: How many tasks arrive.
    """

    def __init__(self, broker: RabbitMQServer, one: int, many: int, arrivals: int) -> None:
        self.url, self._ctl = broker.url, broker.ctl
        self.one, self.many, self.number = one, many, arrivals
        #: Microseconds of processor time for each task.
        self.cost: dict[str, list[float]] = {}
        self.delays = [*islice(random_delays(), max(one, many))]
        self.connection = Connection(broker.url)
        self.app = make_app(Celery, broker.url, "ours")
        self.app.tasks["remind"].apply_async((0, TEXT), delay=self.delays[0])
        topology = self.app.rabbitdelay.topology
        self.queues = [queue.name for queue in topology.queues] + ["ours"]
        purge(self.connection, self.queues, 1)

    def contestants(self) -> dict[str, Callable[[], float]]:
        """What is measured, by its name."""
        return {
            f"{name}, {how}": partial(self._measure, f"{name}, {how}", measured, how == WITH)
            for name, measured in (
                (ONE, self.send_one_by_one),
                (MANY, self.send_many),
                (ARRIVALS, self.arrive),
            )
            for how in (WITHOUT, WITH)
        }

    def _measure(self, name: str, measured: Callable[[bool], Figure], with_metrics: bool) -> float:
        figure = measured(with_metrics)
        self.cost.setdefault(name, []).append(figure.cost)
        return figure.rate

    def send_one_by_one(self, with_metrics: bool) -> Figure:
        """Send tasks, each with a call of its own."""

        def send(app: Any) -> int:
            for order, delay in enumerate(self.delays[: self.one]):
                app.tasks["remind"].apply_async((order, TEXT), delay=delay)
            return self.one

        return self._sent(with_metrics, self.one, send)

    def send_many(self, with_metrics: bool) -> Figure:
        """Send rows, in envelopes."""

        def send(app: Any) -> int:
            rows = (Row((n, TEXT), delay=delay) for n, delay in enumerate(self.delays[: self.many]))
            messages: int = app.rabbitdelay.send_many("remind", rows, tolerance=60).messages
            return messages

        return self._sent(with_metrics, self.many, send)

    def _sent(self, with_metrics: bool, tasks: int, send: Callable[[Any], int]) -> Figure:
        app = make_app(Celery, self.url, "ours")
        messages = get_context("fork").Value("i")

        def measured() -> Figure:
            app.tasks["remind"].apply_async((0, TEXT), delay=self.delays[0])
            began, spent = time.monotonic(), time.process_time()
            messages.value = send(app) + 1
            return Figure.of(tasks, time.monotonic() - began, time.process_time() - spent)

        if with_metrics:
            metrics = app.rabbitdelay.metrics
            children = metrics.children = ChildCounts(metrics.count)
            children.start()
        figure = in_a_fork(measured)
        if with_metrics:
            confirmed = f"celery_rabbitdelay_{CONFIRMED.name}"
            wait_for(
                lambda: (
                    [
                        sample.value == tasks + 1
                        for family in metrics.collect()
                        if family.name == confirmed
                        for sample in family.samples
                    ]
                    == [True]
                ),
                "all counts",
            )
            children.stop()
        app.close()
        purge(self.connection, self.queues, messages.value)
        return figure

    def arrive(self, with_metrics: bool) -> Figure:
        """Let tasks arrive at a worker."""
        rows = (Row((order, TEXT), delay=1) for order in range(self.number))
        self.app.rabbitdelay.send_many("remind", rows, envelopes=False)
        wait_for(lambda: count(self.connection, ["ours"]) == self.number, "the arrivals", PATIENCE)
        return in_a_fork(partial(self._work, with_metrics))

    def _work(self, with_metrics: bool) -> Figure:
        app = make_app(Celery, self.url, "ours")
        app.conf.update(worker_hijack_root_logger=False, worker_prefetch_multiplier=100)
        if with_metrics:
            app.conf.rabbitdelay_metrics_port = free_port()
        at: list[tuple[float, float]] = []
        app.tasks["remind"].run = lambda *_: at.append((time.monotonic(), time.process_time()))
        worker = start_worker(
            app, pool="solo", loglevel="error", perform_ping_check=False, shutdown_timeout=120
        )
        with worker:
            wait_for(lambda: len(at) == self.number, "all runs", PATIENCE, interval=0.2)
            # A worker in a thread drops its connection in the end, and the last acknowledgements
            # with it.
            wait_for(self._is_acknowledged, "the last acknowledgement", interval=0.2)
        (began, spent_before), (ended, spent) = at[0], at[-1]
        return Figure.of(self.number - 1, ended - began, spent - spent_before)

    def _is_acknowledged(self) -> bool:
        queues = self._ctl("list_queues", "name", "messages").splitlines()
        return ["ours", "0"] in [queue.split() for queue in queues]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.metrics")
    parser.add_argument("--rounds", type=int, default=5, help="(5)")
    parser.add_argument("--one", type=int, default=2_000, help="tasks one by one (2000)")
    parser.add_argument("--many", type=int, default=50_000, help="rows of send_many (50000)")
    parser.add_argument("--arrivals", type=int, default=4_000, help="tasks that arrive (4000)")
    options = parser.parse_args(arguments)
    with measure.private_broker() as broker:
        bench = Bench(broker, options.one, options.many, options.arrivals)
        figures = measure.in_turn(bench.contestants(), options.rounds)
        targets = []
        for name in (ONE, MANY, ARRIVALS):
            pair = {each: figures[each] for each in (f"{name}, {WITHOUT}", f"{name}, {WITH}")}
            measure.show(name, "tasks/s", pair, f"{name}, {WITHOUT}")
            spent = {each: bench.cost[each] for each in pair}
            measure.show(name, "microseconds of processor time", spent, f"{name}, {WITHOUT}")
            ratio = measure.ratios(spent, f"{name}, {WITHOUT}")[f"{name}, {WITH}"]
            claim = f"{name}: processor time {WITH} / {WITHOUT}"
            targets.append(Target(claim, ratio, 1.1, at_most=True))
        results = {
            "unit": "tasks/s",
            "figures": figures,
            "microseconds_of_processor_time": bench.cost,
            "targets": measure.judge(targets),
        }
        measure.save("metrics", broker, results)
        bench.app.close()
        bench.connection.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
