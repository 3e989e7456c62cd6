"""The queues in which messages wait: Celery's levels, counting, emptying; processor time."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kombu import Connection, Exchange, Queue
from kombu.transport.native_delayed_delivery import (
    MAX_LEVEL,
    bind_queue_to_native_delayed_delivery_exchange,
    declare_native_delayed_delivery_exchanges_and_queues,
    level_name,
)

from celery_rabbitdelay.testing import wait_for

#: Seconds in a week.
WEEK: Final = 7 * 86_400

#: Celery's exchange of the highest level: every delayed message enters here.
NATIVE_ENTRANCE: Final = level_name(MAX_LEVEL)

#: The queues of Celery's native delayed delivery.
NATIVE_QUEUES: Final = tuple(level_name(level) for level in range(MAX_LEVEL + 1))

#: Seconds until all that was sent has to be there.
PATIENCE: Final = 300.0

#: Seconds in which the broker may clear away what was in a queue.
PAUSE: Final = 1.0


def quorum_queue(name: str) -> Queue:
    """A quorum queue on a topic exchange of its own, which native delayed delivery needs."""
    exchange = Exchange(name, type="topic")
    return Queue(name, exchange, name, queue_arguments={"x-queue-type": "quorum"})


def declare_native(connection: Connection, queue: Queue) -> None:
    """Declare Celery's 28 levels, and a queue behind them, as its workers do."""
    declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum")
    queue(connection.default_channel).declare()
    bind_queue_to_native_delayed_delivery_exchange(connection, queue)


def count(connection: Connection, queues: Sequence[str]) -> int:
    """Return how many messages are ready in the queues."""
    channel: Any = connection.default_channel
    return sum(channel.queue_declare(name, passive=True).message_count for name in queues)


def purge(connection: Connection, queues: Sequence[str], expected: int) -> None:
    """Empty queues of exactly so many messages, and give the broker a moment.

    Raises:
        TimeoutError: They did not hold as many, also a while later.
    """
    channel: Any = connection.default_channel
    purged = 0

    def purge_all() -> bool:
        nonlocal purged
        # Purging writes to the queue's log, also when it is empty; looking does not.
        full = [name for name in queues if count(connection, [name])]
        purged += sum(int(channel.queue_purge(name)) for name in full)
        return purged >= expected

    try:
        wait_for(purge_all, f"{expected} messages", PATIENCE, interval=0.1)
    except TimeoutError as late:
        raise TimeoutError(f"{late}; there were {purged}") from None
    assert purged == expected, f"{purged} messages, not {expected}"
    time.sleep(PAUSE)


def _process_tree(pid: int) -> list[int]:
    """Return a process's id and those of all that descend from it."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [pid, *(below for child in children for below in _process_tree(child))]


def cpu(pid: int) -> float:
    """Return the seconds of processor time of a process and its descendants, by proc(5)."""
    ticks = 0
    for process in _process_tree(pid):
        after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(after_name[11]) + int(after_name[12])
    return ticks / os.sysconf("SC_CLK_TCK")
