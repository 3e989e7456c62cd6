"""A redrive that is killed loses nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

from kombu import Connection

from celery_rabbitdelay.testing import wait_for
from tests.integration.arrivals import count, take, wait_until_waiting
from tests.integration.shop import named
from tests.integration.undeliverable_messages import declare_with, message, put, straight
from tests.integration.worker import ShopProcess, run_celery

#: Each kill, by its point and the count of calls before it; see :mod:`.redrive_killed`. Only after
#: the fourth one, fewer messages are there, by 1,000 at most.
KILLS = [("taken", 300), ("confirmed", 1), ("confirmed", 250), ("acknowledged", 1), ("taken", 700)]

#: Messages that a kill may leave as copies: those that were not acknowledged yet.
MOST_COPIES = 2000


def consumers(connection: Connection, queue_name: str) -> int:
    channel: Any
    with connection.channel() as channel:
        number: int = channel.queue_declare(queue_name, passive=True).consumer_count
        return number


def test_five_kills_in_the_middle_of_2000_messages_lose_none(
    connection: Connection, configuration: dict[str, Any], shop: Any
) -> None:
    topology, queue = shop.rabbitdelay.topology, shop.amqp.queues[named(shop, "default")]
    declare_with(connection, topology, queue)
    own = straight(queue.name)
    name = put(connection, topology, *(message(each, own) for each in range(2000)))

    for point, calls in KILLS:
        run = subprocess.run(
            [sys.executable, "-m", "tests.integration.redrive_killed", point, str(calls)],
            env={**os.environ, **ShopProcess.environment(configuration)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == -signal.SIGKILL, run.stderr
        # The broker gives its messages back when it removes the consumer.
        wait_for(lambda: not consumers(connection, name), "the end of its consumer")

    told = run_celery(configuration, "rabbitdelay undeliverable redrive")
    assert told.returncode == 0, told.stderr
    wait_until_waiting(connection, name, 0)
    arrived = take(connection, [queue], count(connection, queue.name))
    assert {int(each.body) for each in arrived} == {*range(2000)}
    assert len(arrived) <= 2000 + MOST_COPIES * len(KILLS)
