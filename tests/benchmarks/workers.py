# ruff: noqa: T201  # a program at the terminal prints
"""How fast workers are: their modules, and what the registry and schedules cost them.

Messages wait in their queue before a worker is started; what is measured begins when the first has
left it.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import product, repeat
from typing import Any, Final
from uuid import uuid4

import amqp
from kombu import Connection, Queue

from celery_rabbitdelay import Row
from celery_rabbitdelay.levels import headers as names
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.modules.envelope import Item, packed
from celery_rabbitdelay.publishing.message import Content, WaitingMessage
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.publishing.signature import SigningKeys
from celery_rabbitdelay.registry.decision import Registration
from celery_rabbitdelay.registry.index import Filter
from celery_rabbitdelay.testing import RedisServer
from tests.benchmarks import measure
from tests.kernel.integration.worker import Worker
from tests.private_broker import private_broker

DAY: Final = timedelta(days=1)

#: Tasks in an envelope.
PER_ENVELOPE: Final = 50

#: What the workers of the benchmark of the registry have.
WORDS: Final = ("no", "with")

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
        shop = measure.Shop.at(
            *(broker.url, redis.url),
            rabbitdelay_layout=[("hours", 6, 3600), ("seconds", 10, 360)],
            rabbitdelay_checkin_allowed=["bench-*"],
            rabbitdelay_signing_key=key,
        )
        topology = shop.app.rabbitdelay.topology
        end = Queue(f"{topology.prefix}-end", queue_arguments={"x-queue-type": "quorum"})
        end(connection.default_channel).declare()
        publisher = Publisher(Connection(broker.url))

        def message(headers: dict[str, Any], body: bytes = b"x" * 200, **more: str) -> Content:
            made = amqp.Message(body, application_headers=headers, delivery_mode=2, **more)
            if key is not None and names.DUE in headers:
                waiting = WaitingMessage.of(made, names.parse(headers)[0])
                made = SigningKeys(key).sign(waiting).amqp()
            return Content.of(made)

        told = {names.DUE: 0, names.EXCHANGE: "", names.ROUTING_KEY: end.name}
        five_hours = message({"x-delay": 5 * 3_600_000})
        items = tuple(Item(b"x" * 200, {"id": str(each)}) for each in range(PER_ENVELOPE))
        envelope = message(told, packed(items), content_type=names.ENVELOPE)

        def publish(*sent: Any, times: int = messages) -> float:
            began = time.monotonic()
            measure.publish(publisher, repeat(sent, times))
            return times / (time.monotonic() - began)

        def raw() -> float:
            rate = publish("", end.name, five_hours)
            measure.purge(connection, [end.name], messages)
            return rate

        def served(
            module: str, reached: str, to: str, key: str, sent: Content, tasks: int = 1
        ) -> float:
            """Fill the module's queue; return how many messages a second reach another one."""
            publish(to, key, sent, times=messages // tasks)

            def rate() -> float:
                with Connection(broker.url) as own:
                    return measure.growth(lambda: measure.count(own, [reached]), 0, messages)

            # The module begins while the rest of the worker still starts.
            counting = threads.submit(rate)
            with Worker(shop.settings, [shop.queue], f"--rabbitdelay-modules={module}"):
                found = counting.result()
            measure.purge(connection, [reached], messages)
            return found

        check_in = f"{topology.prefix}.hours.5", topology.module_queues.checkin.exchange.name
        routed = topology.route(0, DISTRIBUTION)[:2]
        by_distribution = partial(served, "distribution", end.name, *routed)
        contestants: dict[str, Callable[[], float]] = {
            RAW: raw,
            "check-in (messages/s)": partial(served, "check-in", *check_in, end.name, five_hours),
            "distribution (messages/s)": partial(by_distribution, message(told)),
            "distribution, enveloped (tasks/s)": partial(by_distribution, envelope, PER_ENVELOPE),
        }
        figures = measure.in_turn(contestants, rounds)
        measure.show("Through one worker", "a second", figures, RAW)
        publisher.close()
        shop.app.close()


def registry(
    *, rounds: int = 5, arrivals: int = 10_000, rows: int = 50_000, listed: int = 1_000_000
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
            without, with_it = (f"worker, {word} registry, prefetch {prefetch}" for word in WORDS)
            contestants[without] = partial(arriving, plain, prefetch)
            contestants[with_it] = partial(arriving, registered, prefetch)
            goals[with_it, without] = 0.85
        for track, keys in product((False, True), repeat=2):
            name = f"send_many{', tracked' * track}{', with keys' * keys}"
            contestants[name] = partial(sending, keys, track)
            goals[name, "send_many"] = 0.7
        figures = measure.in_turn(contestants, rounds)
        measure.show("The registry", "tasks/s", figures, goals=goals)
        registry, start_ms = registered.app.rabbitdelay.registry, int(time.time() + 86_400) * 1000
        many = (Registration(uuid4().hex, "copy", start_ms + n, name="many") for n in range(listed))
        print(measure.registered(registry, many))
        began = time.monotonic()
        found = sum(1 for _ in registry.index.pending(Filter(task="many")))
        print(f"listed {found:,}: {found / (time.monotonic() - began):,.0f} a second")
        began = time.monotonic()
        counted = registry.index.count(Filter(task="many"))
        print(f"counted {counted:,} in {(time.monotonic() - began) * 1000:,.1f} ms")


def schedules(*, rounds: int = 3, tasks: int = 5000) -> None:
    """What schedules cost: an occurrence beside a delayed task with a key."""
    with private_broker() as broker, RedisServer() as redis:
        print(measure.about(broker))
        own: dict[str, Any] = {"rabbitdelay_registry_options": {"socket_timeout": 20}}
        shop = measure.Shop.at(broker.url, redis.url, rabbitdelay_registry_url=redis.url, **own)

        def send(due: datetime) -> None:
            rows = (Row(eta=due, key=uuid4().hex) for _ in range(tasks))
            shop.app.rabbitdelay.send_many("at", rows, envelopes=False)

        def put(due: datetime, **options: Any) -> None:
            for _ in range(tasks):
                shop.app.rabbitdelay.schedules.put(uuid4().hex, "at", DAY, start=due, **options)

        def rate(send: Callable[[datetime], None]) -> float:
            due = datetime.now(UTC) + timedelta(seconds=10 + tasks / 20)
            send(due)
            assert datetime.now(UTC) < due, "sending has taken too long"
            return shop.drained(tasks, "--prefetch-multiplier=100")

        contestants = {
            "delayed tasks, with a key each": partial(rate, send),
            "occurrences": partial(rate, partial(put, overlap="allow")),
            "occurrences, overlap skip": partial(rate, put),
        }
        figures = measure.in_turn(contestants, rounds)
        measure.show("Due when a worker starts", "a second", figures, next(iter(contestants)))
