# ruff: noqa: T201  # a program at the terminal prints
"""How fast workers are: their modules, and what the registry and schedules cost them.

Messages wait in their queue before a worker is started; what is measured begins when the first has
left it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final
from uuid import uuid4

import amqp
from kombu import Connection, Queue

from celery_rabbitdelay import Row
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.headers import ENVELOPE, parse
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.modules.envelope import Envelope, Item
from celery_rabbitdelay.publishing.message import WaitingMessage, headers_of
from celery_rabbitdelay.publishing.publication import Publication, PublishPolicy
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.publishing.signature import SigningKeys
from celery_rabbitdelay.publishing.wire import Content
from celery_rabbitdelay.registry.index import Filter
from celery_rabbitdelay.registry.registry import Registration, Registry
from celery_rabbitdelay.testing import RedisServer
from tests.benchmarks import measure
from tests.integration.worker import Worker
from tests.private_broker import private_broker

DAY: Final = timedelta(days=1)

#: The peer of the modules.
RAW: Final = "raw, confirmed (messages/s)"


def modules(*, rounds: int = 3, messages: int = 40_000, signing: bool = False) -> None:
    """Check-in and distribution of one worker, beside raw confirmed publishing.

    With ``--signing``, the worker has a key, and what distribution gets is signed.
    """
    key = "benchmark" * 4 if signing else None
    with (
        private_broker() as broker,
        RedisServer() as redis,
        Connection(broker.url) as connection,
        ThreadPoolExecutor() as threads,
    ):
        layout = [("hours", 6, 3600), ("seconds", 10, 360)]
        shop = measure.Shop.at(
            *(broker.url, redis.url),
            rabbitdelay_layout=layout,
            rabbitdelay_checkin_allowed=["bench-*"],
            rabbitdelay_signing_key=key,
        )
        topology = shop.app.rabbitdelay.topology
        end = Queue(f"{topology.prefix}-end", queue_arguments={"x-queue-type": "quorum"})
        end(connection.default_channel).declare()
        in_levels = f"{topology.prefix}.hours.5"
        publisher = Publisher(Connection(broker.url))
        five_hours = amqp.Message(
            b"x" * 200, application_headers={"x-delay": 5 * 3_600_000}, delivery_mode=2
        )
        told = {
            header_names.DUE: 0,
            header_names.EXCHANGE: "",
            header_names.ROUTING_KEY: end.name,
        }
        due = amqp.Message(b"x" * 200, application_headers=told, delivery_mode=2)
        per_envelope = 50
        items = tuple(Item(b"x" * 200, {"id": str(each)}) for each in range(per_envelope))
        envelope = amqp.Message(
            Envelope(items).pack(), content_type=ENVELOPE, application_headers=told
        )

        def publish(exchange: str, routing_key: str, message: amqp.Message, times: int) -> float:
            if key and header_names.DUE in headers_of(message):
                headers, _ = parse(headers_of(message))
                message = SigningKeys(key).sign(WaitingMessage.of(message, headers)).amqp()
            content, address = Content.of(message), (exchange, routing_key)
            made = [Publication(content, lambda: address) for _ in range(times)]
            began = time.monotonic()
            publisher.publish_all(made, PublishPolicy(timeout=measure.PATIENCE))
            assert not any(each.error for each in made)
            return times / (time.monotonic() - began)

        def raw() -> float:
            rate = publish("", end.name, five_hours, messages)
            measure.purge(connection, [end.name], messages)
            return rate

        def served(
            module: str, reached: str, to: str, key: str, sent: amqp.Message, tasks: int = 1
        ) -> float:
            """Fill the module's queue; return how many messages a second reach another one."""
            publish(to, key, sent, messages // tasks)

            def rate() -> float:
                with Connection(broker.url) as own:
                    return measure.growth(lambda: measure.count(own, [reached]), 0, messages)

            # The module begins while the rest of the worker still starts.
            counting = threads.submit(rate)
            with Worker(shop.settings, [shop.queue], f"--rabbitdelay-modules={module}"):
                found = counting.result()
            measure.purge(connection, [reached], messages)
            return found

        check_in = topology.module_queues.checkin.exchange.name, end.name, five_hours
        distribution = topology.route(0, DISTRIBUTION)[:2]
        by_distribution = partial(served, "distribution", end.name, *distribution)
        contestants: dict[str, Callable[[], float]] = {
            RAW: raw,
            "check-in (messages/s)": partial(served, "check-in", in_levels, *check_in),
            "distribution (messages/s)": partial(by_distribution, due),
            "distribution, enveloped (tasks/s)": partial(
                by_distribution, envelope, tasks=per_envelope
            ),
        }
        figures = measure.in_turn(contestants, rounds)
        measure.show("Through one worker", "a second", figures, RAW)
        publisher.close()
        shop.app.close()


def registry(
    *,
    rounds: int = 5,
    arrivals: int = 10_000,
    rows: int = 50_000,
    listed: int = 1_000_000,
) -> None:
    """What the registry costs: arrivals and sends with it, beside none; listing a million."""
    with private_broker() as broker, RedisServer() as redis, RedisServer() as other:
        print(measure.about(broker))
        plain = measure.Shop.at(broker.url, redis.url)
        registered = measure.Shop.at(broker.url, redis.url, rabbitdelay_registry_url=other.url)

        def arriving(shop: measure.Shop, prefetch: int) -> float:
            due = (Row(delay=0.01) for _ in range(arrivals))
            shop.app.rabbitdelay.send_many("at", due, envelopes=False)
            return shop.drained(arrivals, f"--prefetch-multiplier={prefetch}")

        def sending(keys: bool, track: bool) -> float:
            key = (uuid4().hex if keys else None for _ in range(rows))
            began = time.monotonic()
            given = (Row(delay=86_400, key=each) for each in key)
            registered.app.rabbitdelay.send_many("at", given, envelopes=False, track=track)
            return rows / (time.monotonic() - began)

        contestants: dict[str, Callable[[], float]] = {}
        goals: dict[tuple[str, str], float] = {}
        for prefetch in (4, 100):
            names = [f"worker, {word} registry, prefetch {prefetch}" for word in ("no", "with")]
            contestants[names[0]] = partial(arriving, plain, prefetch)
            contestants[names[1]] = partial(arriving, registered, prefetch)
            goals[names[1], names[0]] = 0.85
        contestants["send_many"] = partial(sending, False, False)
        for word, what in {
            "with keys": (True, False),
            "tracked": (False, True),
            "tracked, with keys": (True, True),
        }.items():
            contestants[f"send_many, {word}"] = partial(sending, *what)
            goals[f"send_many, {word}", "send_many"] = 0.7
        figures = measure.in_turn(contestants, rounds)
        measure.show("The registry", "tasks/s", figures, goals=goals)
        _list(registered.app.rabbitdelay.registry, listed)


def _list(registry: Registry, tasks: int) -> None:
    """Fill the index, and read all of it."""
    start_ms = int(time.time() + 86_400) * 1000
    many = (Registration(str(uuid4()), "copy", start_ms + n, name="many") for n in range(tasks))
    print(measure.registered(registry, many))
    began = time.monotonic()
    found = sum(1 for _ in registry.index.pending(Filter(task="many")))
    print(f"listed {found:,}: {found / (time.monotonic() - began):,.0f} a second")
    began = time.monotonic()
    counted = registry.index.count(Filter(task="many"))
    print(f"counted {counted:,} in {(time.monotonic() - began) * 1000:,.1f} ms")


def schedules(*, rounds: int = 3, tasks: int = 5000, number: int = 10_000) -> None:
    """What schedules cost: an occurrence beside a delayed task, and ten thousand that wait."""
    with private_broker() as broker, RedisServer() as redis:
        print(measure.about(broker))
        settings = {
            "rabbitdelay_registry_url": redis.url,
            "rabbitdelay_registry_options": {"socket_timeout": 20},
        }
        shop, other = (measure.Shop.at(broker.url, redis.url, **settings) for _ in range(2))

        def send(due: datetime) -> None:
            rows = (Row(eta=due, key=uuid4().hex) for _ in range(tasks))
            other.app.rabbitdelay.send_many("at", rows, envelopes=False)

        def put(shop: measure.Shop, number: int, start: datetime, **options: Any) -> None:
            for _ in range(number):
                name = uuid4().hex
                shop.app.rabbitdelay.schedules.put(name, "at", DAY, start=start, **options)

        def rate(send: Callable[[datetime], None]) -> float:
            due = datetime.now(UTC) + timedelta(seconds=10 + tasks / 50)
            send(due)
            assert datetime.now(UTC) < due, "sending has taken too long"
            return other.drained(tasks, "--prefetch-multiplier=100")

        occurrences = partial(put, other, tasks)
        contestants = {
            "delayed tasks, with a key each": partial(rate, send),
            "occurrences": partial(rate, partial(occurrences, overlap="allow")),
            "occurrences, overlap skip": partial(rate, occurrences),
        }
        figures = measure.in_turn(contestants, rounds)
        measure.show("Due when a worker starts", "a second", figures, next(iter(contestants)))

        def ready() -> float:
            began = time.monotonic()
            with Worker(shop.settings):
                return time.monotonic() - began

        alone, registry = ready(), shop.app.rabbitdelay.registry
        before, began = measure.bytes_of_redis(registry), time.monotonic()
        put(shop, number, datetime.now(UTC) + 400 * DAY)
        taken = time.monotonic() - began
        size = (measure.bytes_of_redis(registry) - before) / number
        print(
            f"{number:,} schedules: {number / taken:,.0f} put a second, {size:,.0f} bytes of Redis "
            f"each; a worker is ready after {ready():.1f} s, without them after {alone:.1f} s"
        )
