# ruff: noqa: T201  # a program at the terminal prints
"""The disk, memory and processor time that waiting tasks cost the broker, and its restart time."""

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, Final, NamedTuple

from kombu import Queue

from celery_rabbitdelay import Row
from celery_rabbitdelay.operations.status import status_of
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.benchmarks import measure
from tests.chaos.cluster import Cluster
from tests.kernel.integration.shop import make_app
from tests.private_broker import private_broker

#: When the tasks are due: in an hour at the earliest, and over a week.
BEGIN, WEEK = 3600, 7 * 86_400

#: Seconds until the broker has written down, and given back, what it does not need.
CALM: Final = 30

#: Plain tasks that come due while the broker is watched, and their delays of three stops.
DUE, DUE_AFTER = 20_000, [61.3 + second for second in range(40)]

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
    only: str = "",
) -> None:
    """The resources that waiting tasks use on a node, plain and in envelopes.

    ``--tolerance`` is that of envelopes, in seconds. ``--argument`` adds bytes to each task. With
    several ``--nodes``, a cluster of RabbitMQ 4.3 is started. ``--only`` takes ``plain`` or
    ``envelopes``.
    """
    for name, options in {
        "plain": {"envelopes": False},
        "envelopes": {"tolerance": tolerance},
    }.items():
        if only not in ("", name):
            continue
        with ExitStack() as stack:
            if nodes == 1:
                brokers = [stack.enter_context(private_broker())]
            else:
                brokers = [*stack.enter_context(Cluster("4.3", nodes)).nodes]
            print(f"\n{measure.about(brokers[0])}: {tasks:,} tasks, {name}, {nodes} nodes")
            app = make_app({"broker_url": brokers[0].url, "prefix": "waiting"})
            _measure(brokers, app, tasks, argument, options)
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
    levels = taken(broker)
    for what, bytes_ in (
        ("disk", levels.disk - before.disk),
        ("memory", levels.used - before.used),
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

    sent = show("fresh", levels)
    print(f"  a task, sent: {(sent.processor - levels.processor) / tasks * 1e6:,.0f} us")
    for node in broker:
        node.ctl("eval", _ROLL_OVER)
    show("in segments", levels)
    for node in broker:
        _timed("a node stops", partial(node.ctl, "stop_app"))
        _timed("it starts", partial(node.ctl, "start_app"))
    with app.connection_for_write() as connection:
        _timed("status, without workers", lambda: status_of(app.rabbitdelay, connection, timeout=0))
    for each in ("first", "second"):
        _timed(f"a {each} send", partial(app.tasks["look"].apply_async, (0, ""), delay=86_400))
    settled = show("after the restart", levels)
    if report.envelopes:
        return
    delays = (DUE_AFTER[number % len(DUE_AFTER)] for number in range(DUE))
    app.rabbitdelay.send_many("look", (Row(delay=each) for each in delays), envelopes=False)
    with app.connection_for_write() as connection:
        queue = Queue(app.conf.task_default_queue)
        wait_for(lambda: measure.count(connection, [queue.name]) >= DUE, "the tasks", interval=5)
    spent = taken(broker).processor - settled.processor
    print(f"  a task with three stops, sent and delivered: {spent / DUE * 1e6:,.0f} us")
