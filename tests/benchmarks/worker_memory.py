# ruff: noqa: T201  # a program at the terminal prints
"""How much memory of a worker tasks take that wait an hour: in the levels, and with Celery's eta.

``python -m tests.benchmarks.worker_memory`` starts a private RabbitMQ and then, for our application
and for a plain one, a real worker. It measures the worker, sends the tasks with ``countdown=3600``
while it runs, waits until it has taken what it takes, and measures again. The same tasks are sent
to both by ``apply_async``, in several threads at once, since ours waits for each task's confirm.

The exit status is 1 where our worker grows by more than 5 % or 10 MB, whichever is greater.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, Final

import celery
from kombu import Connection

from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.benchmarks.memory import KINDS, Samples, settle
from tests.benchmarks.memory_app import CASES, make_app, queue_name
from tests.celery_process import CeleryProcess

COUNTDOWN: Final = 3600
MEGABYTE: Final = 1_000_000

#: How many threads send.
THREADS: Final = 8

#: Processes of the worker's pool, beside its main process.
CONCURRENCY: Final = 2

#: Tasks without a delay that a worker does before it is measured: what it loads with its first
#: tasks is no growth.
WARM_UP: Final = 200

#: What our worker may grow by: a part of what it has at its start, or bytes where that is less.
ALLOWED_PART: Final = 0.05
ALLOWED_BYTES: Final = 10 * MEGABYTE

#: Seconds until everything that was sent lies where it is to wait.
PATIENCE: Final = 300.0

#: The exit status where our worker has grown.
GROWN: Final = 1


class Worker(CeleryProcess):
    """``celery -A tests.benchmarks.memory_app worker``."""

    module = "tests.benchmarks.memory_app"
    variable = "MEMORY_APP"

    def __init__(self, case: str, broker: RabbitMQServer) -> None:
        super().__init__({"case": case, "broker_url": broker.url})

    def _command(self) -> list[str]:
        return self.celery(f"worker -c {CONCURRENCY} -l INFO -n memory-{self.port}@localhost")

    def _ready(self) -> bool:
        return " ready." in self.log


class Messages:
    """The messages on a broker, by queue: (ready, unacknowledged), as ``rabbitmqctl`` counts."""

    def __init__(self, broker: RabbitMQServer) -> None:
        columns = ("name", "messages_ready", "messages_unacknowledged")
        lines = broker.ctl("list_queues", *columns).splitlines()
        self.of = {name: (int(a), int(b)) for name, a, b in (line.split("\t") for line in lines)}

    def ready(self, prefix: str) -> int:
        """How many are ready in the queues whose names begin with ``prefix``."""
        return sum(ready for name, (ready, _) in self.of.items() if name.startswith(prefix))


@dataclass(frozen=True)
class Outcome:
    """What was seen of one application.

    Attributes:
        case: Which.
        before: The worker's memory before the tasks were sent, by kind.
        after: The same when they all lie where they wait.
        unacknowledged: How many messages the broker counts as being held by the worker.
        in_levels: How many wait in the levels.
        sending: Seconds that it took to send them.
    """

    case: str
    before: dict[str, Samples]
    after: dict[str, Samples]
    unacknowledged: int
    in_levels: int
    sending: float

    def growth(self, kind: str) -> float:
        """Bytes that the worker has grown by."""
        return self.after[kind].median - self.before[kind].median

    def allowed(self, kind: str) -> float:
        """Bytes that it may grow by."""
        return max(ALLOWED_PART * self.before[kind].median, ALLOWED_BYTES)


def send(app: celery.Celery, count: int, countdown: float | None) -> None:
    """Send tasks, each confirmed where the application waits for that."""
    remind: Any = app.tasks["remind"]

    def one(order: int, text: str) -> None:
        remind.apply_async((order, text), countdown=countdown, ignore_result=True)

    with ThreadPoolExecutor(THREADS) as threads:
        for _ in threads.map(one, range(count), repeat("Your order is waiting for you.")):
            pass


def run(case: str, broker: RabbitMQServer, tasks: int) -> Outcome:
    """Measure one application's worker before and after ``tasks`` are sent that wait an hour."""
    app: Any = make_app(case, broker.url)
    queue = queue_name(case)
    levels = f"{app.rabbitdelay.topology.prefix}." if hasattr(app, "rabbitdelay") else None
    with Worker(case, broker) as worker:
        send(app, WARM_UP, None)
        wait_for(
            lambda: worker.log.count("succeeded in") == WARM_UP, "the first tasks", PATIENCE, 0.5
        )
        before = settle(worker.pid)
        began = time.monotonic()
        send(app, tasks, COUNTDOWN)
        sending = time.monotonic() - began

        def waits() -> bool:
            messages = Messages(broker)
            taken = messages.ready(levels) if levels else messages.of[queue][1]
            return taken == tasks and messages.of[queue][0] == 0

        wait_for(waits, f"{tasks} tasks where they wait", PATIENCE, interval=0.5)
        after = settle(worker.pid)
        messages = Messages(broker)
        assert worker.running, "the worker has ended"
    in_levels = messages.ready(levels) if levels else 0
    with Connection(broker.url) as connection:
        channel: Any = connection.default_channel
        for name in messages.of:
            channel.queue_delete(name)
    app.close()
    return Outcome(case, before, after, messages.of[queue][1], in_levels, sending)


def table(outcomes: list[Outcome], tasks: int) -> str:
    """The figures, as lines of text."""
    heads = ("before", "noise", "after", "noise", "growth", "per task")
    widths = (9, 7, 9, 7, 9, 10)
    head = " ".join(f"{name:>{width}}" for name, width in zip(heads, widths, strict=True))
    lines = [f"{'':12} {'memory':8} {head}"]
    for outcome in outcomes:
        for kind in KINDS:
            before, after = outcome.before[kind], outcome.after[kind]
            growth = outcome.growth(kind)
            megabytes = [
                f"{value / MEGABYTE:{width}.2f}"
                for value, width in zip(
                    (before.median, before.spread, after.median, after.spread), widths, strict=False
                )
            ]
            grown = (f"{growth / MEGABYTE:+9.2f}", f"{growth / tasks:+8.0f} B")
            lines.append(" ".join([f"{outcome.case:12} {kind:8}", *megabytes, *grown]))
    lines.append("MB, median of several measurements; noise is the largest less the smallest.")
    lines += [
        f"{outcome.case}: {outcome.unacknowledged} messages unacknowledged at the worker, "
        f"{outcome.in_levels} in the levels; sent in {outcome.sending:.1f} s"
        for outcome in outcomes
    ]
    return "\n".join(lines)


def report(outcomes: list[Outcome], tasks: int, passed: bool) -> dict[str, Any]:
    """The figures, for a program."""
    return {
        "tasks": tasks,
        "countdown_s": COUNTDOWN,
        "worker_processes": CONCURRENCY + 1,
        "celery": celery.__version__,
        "passed": passed,
        "cases": {
            outcome.case: {
                "unacknowledged": outcome.unacknowledged,
                "in_levels": outcome.in_levels,
                "sending_s": outcome.sending,
                "bytes": {
                    kind: {
                        "before": outcome.before[kind]._asdict(),
                        "after": outcome.after[kind]._asdict(),
                        "growth": outcome.growth(kind),
                        "growth_per_task": outcome.growth(kind) / tasks,
                    }
                    for kind in KINDS
                },
            }
            for outcome in outcomes
        },
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.worker_memory")
    parser.add_argument("--tasks", type=int, default=20_000, help="how many tasks wait (20000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE too")
    options = parser.parse_args(arguments)
    # It wins over every broker that a program names; the workers' environment is without it.
    os.environ.pop("CELERY_BROKER_URL", None)
    print(
        f"{options.tasks} tasks with countdown={COUNTDOWN}, sent by {THREADS} threads; "
        f"Celery {celery.__version__}, a worker of {CONCURRENCY} + 1 processes"
    )
    outcomes = []
    with RabbitMQServer() as broker:
        for case in CASES:
            outcomes.append(run(case, broker, options.tasks))
            print(f"{case}: measured", flush=True)
    ours = outcomes[0]
    grown = [kind for kind in KINDS if ours.growth(kind) > ours.allowed(kind)]
    print(table(outcomes, options.tasks))
    for kind in KINDS:
        verdict = "too much" if kind in grown else "within"
        print(
            f"{ours.case}, {kind}: {ours.growth(kind) / MEGABYTE:+.2f} MB, {verdict}: "
            f"{ours.allowed(kind) / MEGABYTE:.2f} MB allowed"
        )
    if options.json:
        figures = report(outcomes, options.tasks, not grown)
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return GROWN if grown else 0


if __name__ == "__main__":
    sys.exit(main())
