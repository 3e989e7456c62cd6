# ruff: noqa: T201  # a program at the terminal prints
"""Kill the worker that distributes, again and again, under a stream of delayed messages.

``python -m tests.chaos.kill_distribution`` starts a private RabbitMQ and publishes messages, half
of them in envelopes, that fall due while a worker with the modules is killed with SIGKILL at random
moments and started again. Every message has to arrive, none of them early. Those that arrive more
than once are counted and printed: a crash between publishing and acknowledging repeats.

The exit status is 1 where one is lost or early.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final
from uuid import uuid4

import amqp
from kombu import Connection, Consumer, Exchange, Queue

from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.headers import ENVELOPE
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.envelope import Envelope, Item
from celery_rabbitdelay.publishing.declaration import declare
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.testing import RabbitMQServer, RedisServer, wait_for
from tests.integration.conftest import LEVELS, SHORT
from tests.integration.worker import Worker

#: How many messages an envelope holds.
HELD: Final = 100

#: Seconds within which messages fall due; all delays are below the short levels' 5.9 s.
DELAYS: Final = (0.5, 5.5)

#: Seconds between two kills, at random.
PAUSES: Final = (0.3, 3.0)

#: Seconds of the stream for each kill: the pause, and the worker's start.
EACH: Final = 4.0

#: Seconds until the rest has to be there.
PATIENCE: Final = 300.0


class Arrivals:
    """What arrives, and when, taken in a thread."""

    def __init__(self, url: str, queue: Queue) -> None:
        self.count: Counter[str] = Counter()
        self.early: list[str] = []
        self._url = url
        self._queue = queue
        self._stopping = Event()
        self._thread = Thread(target=self._take, daemon=True)

    def __enter__(self) -> Arrivals:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _take(self) -> None:
        def came(message: Any) -> None:
            identity = message.headers["id"]
            self.count[identity] += 1
            if time.time() * 1000 < message.headers[header_names.DUE]:
                self.early.append(identity)
            message.ack()

        with Connection(self._url) as connection, connection.channel() as channel:
            consumer = Consumer(channel, [self._queue], on_message=came, prefetch_count=500)
            consumer.consume()
            while not self._stopping.is_set():
                with suppress(TimeoutError):
                    connection.drain_events(timeout=0.2)


def messages(count: int) -> Iterator[tuple[float, list[str]]]:
    """What is to be published: seconds of delay, and the ids of one message or of an envelope."""
    left = [str(number) for number in range(count)]
    while left:
        size = random.choice([1] * HELD + [HELD])
        ids, left = left[:size], left[size:]
        yield random.uniform(*DELAYS), ids


def publish(
    publisher: Publisher, topology: Topology, exchange: str, delay: float, ids: list[str]
) -> None:
    """Publish one message, or an envelope, so that distribution gets it when it is due."""
    due = time.time_ns() // 1_000_000 + round(delay * 1000)
    told: dict[str, Any] = {
        header_names.DUE: due,
        header_names.EXCHANGE: exchange,
        header_names.ROUTING_KEY: "paper",
    }
    if len(ids) == 1:
        message = amqp.Message(b"x", application_headers={**told, "id": ids[0]})
    else:
        held = Envelope(tuple(Item(b"x", {"id": each}) for each in ids))
        message = amqp.Message(held.pack(), content_type=ENVELOPE, application_headers=told)
    publisher.publish(message, lambda: topology.route(delay + 0.001, DISTRIBUTION)[:2])


def main(given: Sequence[str] | None = None, root: Path | None = None) -> int:
    """Run it with these arguments, on the RabbitMQ of a system; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args(given)
    seed = arguments.seed if arguments.seed is not None else random.randrange(2**32)
    random.seed(seed)
    print(f"seed {seed}")
    prefix = f"chaos-{uuid4().hex[:8]}"
    topology = Topology(prefix, SHORT)
    target = Exchange(f"{prefix}-office", type="topic")
    queue = Queue(f"{prefix}-paper", target, "#", queue_arguments={"x-queue-type": "quorum"})
    with (
        RabbitMQServer(root) as broker,
        RedisServer() as redis,
        Connection(broker.url) as connection,
    ):
        declare(connection, topology)
        queue(connection.default_channel).declare()
        configuration = {
            "prefix": prefix,
            "broker_url": broker.url,
            "result_backend": redis.url,
            "rabbitdelay_prefix": prefix,
            "rabbitdelay_layout": LEVELS,
        }
        worker = Worker(configuration, [f"{prefix}.default"])
        publisher = Publisher(connection)
        done = Event()
        kills = 0

        def stream() -> None:
            began, sent = time.monotonic(), 0
            for delay, ids in messages(arguments.messages):
                # Spread over all kills.
                due = began + EACH * arguments.kills * sent / arguments.messages
                time.sleep(max(due - time.monotonic(), 0))
                publish(publisher, topology, target.name, delay, ids)
                sent += len(ids)
            done.set()

        with worker, Arrivals(broker.url, queue) as arrivals:
            Thread(target=stream, daemon=True).start()
            while kills < arguments.kills:
                time.sleep(random.uniform(*PAUSES))
                worker.kill()
                kills += 1
                worker.start()
            wait_for(done.is_set, "the stream's end", PATIENCE)
            with suppress(TimeoutError):
                wait_for(
                    lambda: len(arrivals.count) == arguments.messages, "all messages", PATIENCE
                )
            time.sleep(1)  # what comes a second time may come a little later
    lost = arguments.messages - len(arrivals.count)
    again = sum(times - 1 for times in arrivals.count.values())
    print(
        f"published {arguments.messages}, kills {kills}, arrived {len(arrivals.count)}, "
        f"lost {lost}, early {len(arrivals.early)}, duplicates {again}"
    )
    return int(bool(lost or arrivals.early))


if __name__ == "__main__":
    sys.exit(main())
