# ruff: noqa: T201  # a program at the terminal prints
"""How fast a worker's modules are, and two workers', beside raw confirmed publishing.

``python -m tests.benchmarks.modules`` starts private servers. Messages wait in the queue of a
module before a worker is started that serves it; what is measured begins when the first has left.
All publishing is confirmed, into quorum queues, with as many messages in flight as modules have.
Two workers get twice as many messages, and their clock starts when both consume. Per core means for
each second of the workers' processor time, from when they are ready, with what else they do.

At last an envelope of 100,000 tasks is unpacked, while tasks without a delay are sent to the same
worker one after the other: how long each takes to start, and whether a connection was lost.

With ``--signing``, the worker has a key, and what distribution gets is signed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import repeat
from threading import Event
from typing import Any, Final
from uuid import uuid4

import amqp
from kombu import Connection, Queue

from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.headers import ENVELOPE, parse
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.modules.envelope import MAX_ENVELOPE_MESSAGES, Envelope, Item
from celery_rabbitdelay.publishing.confirm_channel import ConfirmChannel
from celery_rabbitdelay.publishing.declaration import declare
from celery_rabbitdelay.publishing.message import WaitingMessage, headers_of
from celery_rabbitdelay.publishing.publication import Publication
from celery_rabbitdelay.publishing.signature import SigningKeys
from celery_rabbitdelay.publishing.wire import Content
from celery_rabbitdelay.testing import RabbitMQServer, RedisServer
from tests.benchmarks import measure, waiting
from tests.integration.arrivals import count
from tests.integration.shop import make_app
from tests.integration.worker import Worker
from tests.private_broker import private_broker

WINDOW: Final = 1000
BODY: Final = b"x" * 200
PATIENCE: Final = 300.0

#: The peer that the modules are compared with.
RAW: Final = "raw, confirmed (messages/s)"

#: The module that unpacks, and how many tasks are in an envelope: so few that a worker does not
#: take all envelopes before the other one starts.
ENVELOPED: Final = "distribution, enveloped"
TASKS: Final = 50

#: How many workers serve a module, and what their rows add to its name.
WORKERS: Final = {1: "", 2: ", two workers"}

#: The key of ``--signing``.
KEY: Final = "benchmark" * 4

#: A message to publish: exchange, routing key, message.
Address = tuple[str, str, amqp.Message]


def publish(connection: Connection, messages: Iterable[Address]) -> float:
    """Publish with a window of confirms; return the seconds that it took."""
    channel = ConfirmChannel(connection, lambda publication: None)
    began = time.monotonic()
    deadline = began + PATIENCE
    for exchange, routing_key, message in messages:
        if len(channel.unconfirmed) >= WINDOW:
            assert channel.drain(lambda: len(channel.unconfirmed) < WINDOW // 2, deadline)
        address = exchange, routing_key
        channel.send(Publication(Content.of(message), partial(tuple[str, str], address)), PATIENCE)
    assert channel.drain(lambda: not channel.unconfirmed, deadline)
    taken = time.monotonic() - began
    channel.close(PATIENCE)
    return taken


def message(keys: SigningKeys | None = None, **headers: Any) -> amqp.Message:
    return signed(amqp.Message(BODY, application_headers=headers, delivery_mode=2), keys)


def signed(message: amqp.Message, keys: SigningKeys | None) -> amqp.Message:
    if keys is None:
        return message
    headers, _ = parse(headers_of(message))
    return keys.sign(WaitingMessage.of(message, headers)).amqp()


def consumers(connection: Connection, queue: str) -> int:
    """Return how many consumers a queue has."""
    channel: Any = connection.default_channel
    number: int = channel.queue_declare(queue, passive=True).consumer_count
    return number


class Bench:
    """An application, its broker, and a queue that everything ends in."""

    def __init__(self, broker: RabbitMQServer, redis: RedisServer, key: str | None = None) -> None:
        self.keys = None if key is None else SigningKeys(key)
        self._url = broker.url
        prefix = f"bench-{uuid4().hex[:8]}"
        self.configuration = {
            "prefix": prefix,
            "broker_url": self._url,
            "result_backend": redis.url,
            "rabbitdelay_prefix": prefix,
            "rabbitdelay_layout": [("hours", 6, 3600), ("seconds", 10, 360)],
            "rabbitdelay_checkin_allowed": ["bench-*"],
            "rabbitdelay_signing_key": key,
        }
        self.app: Any = make_app(self.configuration)
        self.topology = self.app.rabbitdelay.topology
        self.connection = Connection(broker.url)
        self._ends = Event()
        self.end = Queue(f"{prefix}-end", queue_arguments={"x-queue-type": "quorum"})
        declare(self.connection, self.topology)
        self.end(self.connection.default_channel).declare()

    @contextmanager
    def worker(self, modules: str) -> Iterator[Worker]:
        options = (f"--rabbitdelay-modules={modules}",)
        with Worker(self.configuration, [self.app.conf.task_default_queue], *options) as worker:
            yield worker

    def rates(
        self, module: str, source: str, queue: str, expected: int, workers: int
    ) -> tuple[float, float]:
        """Start workers; return how many messages reach a queue, a second and per core.

        The modules begin while the rest of each worker still starts.

        Args:
            module: The module that each worker serves.
            source: The module's queue.
            queue: What the messages reach.
            expected: How many messages.
            workers: How many workers.
        """
        before = self.messages(queue)
        seen: list[tuple[float, int]] = []

        def has_all() -> None:
            with Connection(self._url) as connection:
                arrived = 0
                while arrived < before + expected and not self._ends.wait(0.02):
                    arrived, serving = count(connection, queue), consumers(connection, source)
                    if serving == workers and arrived > before:
                        seen.append((time.monotonic(), arrived))

        self._ends.clear()
        with ThreadPoolExecutor() as threads, ExitStack() as running:
            watching = threads.submit(has_all)
            try:
                served = [self.worker(module) for _ in range(workers)]
                pids = [each.pid for each in threads.map(running.enter_context, served)]
                ready, spent = self.messages(queue), sum(map(waiting.cpu, pids))
                watching.result(PATIENCE)
                spent = sum(map(waiting.cpu, pids)) - spent
            finally:
                self._ends.set()
        (began, first), (ended, last) = seen[0], seen[-1]
        # The smallest time that is measured, if the last message was there before they were ready.
        return (last - first) / (ended - began), (last - ready) / max(spent, 0.01)

    @property
    def told(self) -> dict[str, Any]:
        """The headers of a message for the last queue, as distribution reads them."""
        return {
            header_names.DUE: 0,
            header_names.EXCHANGE: "",
            header_names.ROUTING_KEY: self.end.name,
        }

    def letter(self, body: bytes, tasks: int) -> Address:
        """An envelope for distribution."""
        held = Envelope(tuple(Item(body, {"id": str(each)}) for each in range(tasks)))
        letter = amqp.Message(held.pack(), content_type=ENVELOPE, application_headers=self.told)
        return (*self.topology.route(0, DISTRIBUTION)[:2], signed(letter, self.keys))

    def messages(self, queue: str) -> int:
        return count(self.connection, queue)

    @property
    def waiting(self) -> str:
        """The queue in which what was checked in waits."""
        return f"{self.topology.prefix}.hours.5"

    def empty(self) -> None:
        channel: Any = self.connection.default_channel
        channel.queue_purge(self.end.name)
        channel.queue_purge(self.waiting)


def one_round(bench: Bench, messages: int) -> dict[str, float]:
    """Measure each of them once, in turn."""
    end, topology, queues = bench.end.name, bench.topology, bench.topology.module_queues
    rates = {}
    plain = (("", end, message()) for _ in range(messages))
    rates[RAW] = messages / publish(bench.connection, plain)

    five_hours: dict[str, Any] = {header_names.X_DELAY: 5 * 3_600_000}
    to_check_in = queues.checkin.exchange.name, end, message(**five_hours)
    due = *topology.route(0, DISTRIBUTION)[:2], message(bench.keys, **bench.told)
    letter = bench.letter(BODY, TASKS)
    for workers, by in WORKERS.items():
        for name, module, source, target, unit, sent, tasks in (
            ("check-in", "check-in", queues.checkin, bench.waiting, "messages/s", to_check_in, 1),
            ("distribution", "distribution", queues.distribution, end, "messages/s", due, 1),
            (ENVELOPED, "distribution", queues.distribution, end, "tasks/s", letter, TASKS),
        ):
            expected = messages * workers
            publish(bench.connection, repeat(sent, expected // tasks))
            rate, per_core = bench.rates(module, source.name, target, expected, workers)
            rates[f"{name}{by} ({unit})"] = rate
            if workers == 1:
                rates[f"{name}, per core ({unit})"] = per_core
    bench.empty()
    return rates


def unpacking(bench: Bench) -> None:
    """Unpack 100,000 tasks while the worker gets tasks without a delay."""
    look = bench.app.tasks["look"]
    with bench.worker("distribution") as worker:
        look.apply_async().get(timeout=30)
        publish(bench.connection, [bench.letter(b"x" * 50, MAX_ENVELOPE_MESSAGES)])
        began = time.monotonic()
        late = []
        while bench.messages(bench.end.name) < MAX_ENVELOPE_MESSAGES:
            sent = time.time()
            late.append(look.apply_async().get(timeout=30)["at"] - sent)
            time.sleep(0.05)
        seconds = time.monotonic() - began
        lost = worker.log.count("connects again") + worker.log.count("Connection to broker lost")
    late.sort()
    print(
        f"unpacking {MAX_ENVELOPE_MESSAGES} tasks took {seconds:.1f} s; "
        f"{len(late)} tasks without a delay "
        f"started after p50 {late[len(late) // 2] * 1000:.0f} ms, max {late[-1] * 1000:.0f} ms; "
        f"connections lost: {lost}"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.modules")
    parser.add_argument("--signing", action="store_true", help="with a key")
    parser.add_argument("--messages", type=int, default=40_000, help="for each worker (40000)")
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    options = parser.parse_args(arguments)
    key = KEY if options.signing else None
    with private_broker() as broker, RedisServer() as redis:
        bench = Bench(broker, redis, key)
        rounds = [one_round(bench, options.messages) for _ in range(options.rounds)]
        rates = {name: [each[name] for each in rounds] for name in rounds[0]}
        measure.show("Through one worker, and two", "a second", rates, RAW)
        unpacking(bench)
        bench.app.close()
        bench.connection.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
