# ruff: noqa: T201  # a program at the terminal prints
"""The disk, memory and processor time that waiting tasks cost the broker, and its restart time."""

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, quantiles
from typing import Any, Final, NamedTuple

from celery_rabbitdelay import Row
from celery_rabbitdelay.operations.status import status_of
from celery_rabbitdelay.testing import RabbitMQServer
from tests.benchmarks import levels, measure
from tests.chaos.cluster import Cluster
from tests.kernel.integration.shop import make_app
from tests.kernel.integration.worker import Worker
from tests.private_broker import private_broker

#: When the tasks are due: in an hour at the earliest, and over a week.
BEGIN, WEEK = 3600, 7 * 86_400

#: Seconds until the broker has written down, and given back, what it does not need.
CALM: Final = 30

#: The tasks that come due while the broker is watched, with two to four stops: seconds until the
#: first is due, and how many seconds they are spread over.
LEAD, SPREAD = 80, 10

_COLLECT: Final = "[garbage_collect(Process) || Process <- processes()]."
_ROLL_OVER: Final = (
    "[catch ra_log_wal:force_roll_over(W) || W <- [ra_log_wal, ra_quorum_queues_log_wal]]."
)


class Taken(NamedTuple):
    """What a broker takes: bytes, and seconds of the processor."""

    disk: float
    allocated: float
    used: float
    processor: float


def taken(nodes: Sequence[RabbitMQServer]) -> Taken:
    """Look at a broker's nodes, once they are calm; return the mean of a node.

    Memory is given twice: allocated, which the memory alarm counts, and used of that.
    """
    time.sleep(CALM)
    each = [_taken(node) for node in nodes]
    return Taken(*map(mean, zip(*each, strict=True)))


def _taken(broker: RabbitMQServer) -> Taken:
    broker.ctl("eval", _COLLECT)
    own = [each for each in Path("/proc").glob("[0-9]*") if _is_of(each, broker.pid)]
    disk = sum(
        file.stat().st_blocks * 512
        for file in (broker.folder / "data").rglob("*")
        if file.is_file()
    )
    memory = broker.ctl("eval", "{vm_memory_monitor:get_process_memory(), erlang:memory(total)}.")
    allocated, used = map(float, memory.strip().strip("{}").split(","))
    return Taken(disk, allocated, used, sum(map(_processor, own)))


def _is_of(process: Path, group: int) -> bool:
    try:
        return os.getpgid(int(process.name)) == group
    except ProcessLookupError:
        return False


def _processor(process: Path) -> float:
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def waiting(
    *,
    tasks: int = 100_000,
    tolerance: int = 60,
    nodes: int = 1,
    argument: int = 0,
    due: int = 5_000,
    only: str = "",
) -> None:
    """The resources that waiting tasks use on a node, plain and in envelopes.

    ``--tolerance`` is that of envelopes, in seconds. ``--argument`` adds bytes to each task. In the
    end, ``--due`` tasks come due a second, in envelopes with a tolerance of a second. With
    several ``--nodes``, a cluster of RabbitMQ 4.3 is started. ``--only`` takes ``plain`` or
    ``envelopes``.
    """
    ways: dict[str, dict[str, Any]] = {
        "plain": {"envelopes": False},
        "envelopes": {"tolerance": tolerance},
    }
    for name, options in ways.items():
        if only not in ("", name):
            continue
        with ExitStack() as stack:
            if nodes == 1:
                brokers = [stack.enter_context(private_broker())]
            else:
                brokers = [*stack.enter_context(Cluster("4.3", nodes)).nodes]
            print(f"\n{measure.about(brokers[0])}: {tasks:,} tasks, {name}, {nodes} nodes")
            settings = {"broker_url": brokers[0].url, "prefix": "waiting"}
            app = make_app(settings)
            _measure(brokers, app, tasks, argument, options)
            if name == "envelopes":
                modules = "--rabbitdelay-modules=distribution"
                stack.enter_context(Worker(settings, ["waiting.second"], modules))
                options["tolerance"] = 1
            _come_due(brokers, app, due, options)
            app.close()


def _timed(what: str, call: Callable[[], object]) -> None:
    began = time.monotonic()
    call()
    print(f"  {what}: {time.monotonic() - began:,.3f} s", flush=True)


def _measure(
    broker: Sequence[RabbitMQServer], app: Any, tasks: int, argument: int, options: Any
) -> None:
    chance, before = random.Random(7), taken(broker)
    app.rabbitdelay.send_many("look", [Row(delay=86_400)])
    declared = taken(broker)
    for what, bytes_ in (
        ("disk", declared.disk - before.disk),
        ("memory", declared.used - before.used),
    ):
        print(f"  the levels: {bytes_ / 1e6:,.1f} MB of {what}")

    def rows() -> Iterator[Row]:
        text = chance.randbytes(argument // 2).hex()
        return (Row((each, text), delay=BEGIN + WEEK * chance.random()) for each in range(tasks))

    began = time.monotonic()
    report = app.rabbitdelay.send_many("look", rows(), **options)
    print(f"  {tasks / (time.monotonic() - began):,.0f} tasks a second sent", flush=True)
    print(f"  {tasks / report.messages:.1f} tasks a message")

    def show(when: str, since: Taken) -> Taken:
        now = taken(broker)
        each = [(a - b) / tasks for a, b in zip(now, since, strict=True)]
        print(
            "  a task, {}: {:,.0f} B of disk, {:,.0f} of memory, {:,.0f} of it used".format(
                when, *each[:3]
            )
        )
        return now

    sent = show("fresh", declared)
    print(f"  a task, sent: {(sent.processor - declared.processor) / tasks * 1e6:,.0f} us")
    for node in broker:
        node.ctl("eval", _ROLL_OVER)
    show("in segments", declared)
    for node in broker:
        _timed("a node stops", partial(node.ctl, "stop_app"))
        _timed("it starts", partial(node.ctl, "start_app"))
    with app.connection_for_write() as connection:
        _timed("status, without workers", lambda: status_of(app.rabbitdelay, connection, timeout=0))
    for each in ("first", "second"):
        _timed(f"a {each} send", partial(app.tasks["look"].apply_async, (0, ""), delay=86_400))
    show("after the restart", declared)


def _come_due(brokers: Sequence[RabbitMQServer], app: Any, rate: int, options: Any) -> None:
    """Have tasks come due beside those that wait; a consumer in a process of its own takes them."""
    queue, number, before = app.conf.task_default_queue, rate * SPREAD, taken(brokers).processor
    begin, chance = datetime.now(UTC) + timedelta(seconds=LEAD), random.Random(7)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        coming = pool.submit(levels.arrivals, brokers[0].url, queue, number)
        instants = (begin + timedelta(seconds=SPREAD * chance.random()) for _ in range(number))
        app.rabbitdelay.send_many("look", (Row(eta=each) for each in instants), **options)
        in_time = datetime.now(UTC) < begin
        late = coming.result()
    cuts = quantiles(late, n=100, method="inclusive")
    print(
        "  {:,} due a second{}: {:,.0f} ms late in the median, {:,.0f} at 99 %, {:,.0f} at most, "
        "{:,.0f} at least".format(
            rate, "" if in_time else " (sent too late)", cuts[49], cuts[98], max(late), min(late)
        )
    )
    spent = (taken(brokers).processor - before) / number
    print(f"  a task, sent, due and delivered: {spent * 1e6:,.0f} us")
