# ruff: noqa: T201  # a program at the terminal prints
"""How long after the return of its node the tasks of a classic queue come that fell due meanwhile.

``python -m tests.benchmarks.absence`` starts a cluster of three nodes. A classic queue is on one of
them, which is away when the tasks become due, and for 40 seconds. A worker on the other two serves
distribution. Nothing else is changed: neither a broker's timeout nor a setting, but with
``--straight`` the worker and the producer know a single host, and so do not know that there is a
cluster. Tasks for a quorum queue are due at the same time, and show whether they are held up.

``--root`` is the folder of a Debian system with another RabbitMQ, see :mod:`tests.brokers`.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any

from amqp.exceptions import NotFound
from kombu import Connection, Queue

from celery_rabbitdelay import Row
from celery_rabbitdelay.publishing.declaration import declare_destination
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.benchmarks.measure import version_of
from tests.chaos.cluster import Node
from tests.integration.arrivals import count, take
from tests.integration.conftest import LEVELS
from tests.integration.modules import wait_until_served
from tests.integration.shop import make_app, named
from tests.integration.worker import Worker

#: Seconds: until the tasks are due, and how long the node is away.
DELAY, AWAY = 12.0, 40.0

#: Seconds after the node's return in which all tasks are meant to come, and in which they have to.
GOAL, PATIENCE = 15.0, 600.0


def main() -> int:
    """Measure once; return whether all tasks came in time, and once."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.absence", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--root", type=Path)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--how", choices=("kill", "stop"), default="kill")
    parser.add_argument("--straight", action="store_true")
    given = parser.parse_args()
    with ExitStack() as stack:
        first = stack.enter_context(RabbitMQServer(given.root))
        joining = [Node(given.root, cluster_with=first) for _ in range(2)]
        second, home = (stack.enter_context(node) for node in joining)
        urls = first.url if given.straight else f"{first.url};{second.url}"
        sound, late = measure(
            stack, urls, home, given.tasks, home.kill if given.how == "kill" else home.shut_down
        )
        words = f"RabbitMQ {version_of(first)}, {given.how}, {given.tasks} tasks"
    after = sorted(at for at, _ in late)
    twice = len(late) - len({task_id for _, task_id in late})
    print(
        f"{words}{', straight' * given.straight}: seconds after the node's return: median "
        f"{median(after):.1f}, latest {after[-1]:.1f}; {twice} twice; those for the other queue at "
        f"most {sound:.1f} s late"
    )
    return 0 if after[-1] <= GOAL and not twice else 1


def measure(
    stack: ExitStack, urls: str, home: RabbitMQServer, tasks: int, leave: Any
) -> tuple[float, list[tuple[float, str]]]:
    """Return how late the other tasks were at most; and of each arrival when it was, and its id."""
    configuration: dict[str, Any] = {
        "prefix": "away",
        "broker_url": urls,
        "worker_enable_remote_control": False,
        "task_ignore_result": True,
        "rabbitdelay_prefix": "away",
        "rabbitdelay_layout": LEVELS,
        "rabbitdelay_distribution_allowed": ["away-*"],
    }
    shop = make_app(configuration)
    stack.callback(shop.close)
    classic = Queue("away-classic")
    quorum = Queue("away-quorum", queue_arguments={"x-queue-type": "quorum"})
    topology = shop.rabbitdelay.topology
    with Connection(home.url) as connection:
        declare_destination(connection, topology, classic)
    elsewhere = stack.enter_context(Connection(urls.split(";")[0]))
    declare_destination(elsewhere, topology, quorum)
    for queue in (classic, quorum):
        shop.amqp.queues.add(queue)
    worker = stack.enter_context(Worker(configuration, [named(shop, "default")]))
    wait_until_served(worker)
    due = time.time() + DELAY
    for queue in (classic, quorum):
        rows = (Row((n,), delay=due - time.time()) for n in range(tasks))
        shop.rabbitdelay.send_many("x", rows, queue=queue.name)
    assert time.time() < due - 2, "sending has taken too long"
    leave()
    sound = max(each.at for each in take(elsewhere, [quorum], tasks, PATIENCE)) - due
    time.sleep(max(due + AWAY - time.time(), 0.0))
    home.start()
    returned = time.time()
    with Connection(home.url) as connection:
        # RabbitMQ 4.0 takes connections before it knows its queues.
        wait_for(lambda: is_there(connection, classic), "the queue", PATIENCE)
        came = take(connection, [classic], tasks, PATIENCE)
        # Whether a task comes a second time is seen a little later.
        time.sleep(GOAL)
        came += take(connection, [classic], count(connection, classic.name))
    return sound, [(each.at - returned, each.message.headers["id"]) for each in came]


def is_there(connection: Connection, queue: Queue) -> bool:
    """Return whether a queue is there."""
    with connection.channel() as channel, suppress(NotFound):
        queue(channel).queue_declare(passive=True)
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
