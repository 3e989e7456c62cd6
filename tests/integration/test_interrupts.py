"""Conversations that are interrupted between any two frames."""

from __future__ import annotations

import asyncio
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import pytest
from celery import group
from celery.exceptions import SoftTimeLimitExceeded
from kombu import Connection

from celery_rabbitdelay import Row
from celery_rabbitdelay.operations.undeliverable.messages import undeliverable_messages
from celery_rabbitdelay.publishing.backlog import backlog_of
from celery_rabbitdelay.publishing.declaration import declare
from celery_rabbitdelay.registry.connection import ScriptCall, Store, connect
from celery_rabbitdelay.testing import RedisServer
from tests.integration.interrupts import Interrupter, interrupt_anywhere, interrupter
from tests.integration.registering import KINDS, TIMEOUT, RedisSetup

#: Seconds; no task comes due meanwhile.
DELAY = 5.0


@pytest.fixture
def watching() -> Iterator[Interrupter]:
    """Watches all sockets of the test."""
    with interrupter() as watching:
        yield watching


@contextmanager
def own_connection(shop: Any) -> Iterator[Connection]:
    """The caller's own connection, whose end is none of our conversations."""
    connection = Connection(shop.conf.broker_url)
    yield connection
    connection.collect()


def over_own_connection(shop: Any) -> None:
    with own_connection(shop) as connection:
        shop.tasks["look"].apply_async(delay=DELAY, connection=connection)


def send_many(shop: Any) -> None:
    rows = [Row(delay=DELAY + number) for number in range(5)]
    assert shop.rabbitdelay.send_many("look", rows).confirmed == 5


def with_a_connection(ask: Callable[[Any, Connection], object]) -> Callable[[Any], None]:
    def call(shop: Any) -> None:
        with own_connection(shop) as connection:
            ask(shop.rabbitdelay.topology, connection)

    return call


def undeliverable(topology: Any, connection: Connection) -> None:
    assert not list(undeliverable_messages(connection, topology, 10))


#: Conversations with the broker.
WITH_THE_BROKER: dict[str, Callable[[Any], object]] = {
    "apply_async": lambda shop: shop.tasks["look"].apply_async(delay=DELAY),
    "own-connection": over_own_connection,
    "asyncio": lambda shop: asyncio.run(shop.rabbitdelay.send("look", delay=DELAY)),
    "group": lambda shop: group([shop.tasks["look"].si() for _ in range(3)], app=shop).apply_async(
        countdown=DELAY
    ),
    "send_many": send_many,
    "check": lambda shop: shop.rabbitdelay.check(timeout=20),
    "declare": with_a_connection(lambda topology, connection: declare(connection, topology)),
    "backlog": with_a_connection(lambda topology, connection: backlog_of(connection, topology)),
    "undeliverable": with_a_connection(undeliverable),
}


@pytest.mark.parametrize("name", WITH_THE_BROKER)
def test_an_interrupt_ends_a_conversation_with_the_broker_at_once(
    make_shop: Callable[..., Any], watching: Interrupter, name: str
) -> None:
    shop = make_shop(result_backend=None)
    shop.tasks["look"].apply_async(delay=DELAY)

    def call() -> None:
        shop.rabbitdelay.close()
        WITH_THE_BROKER[name](shop)

    assert interrupt_anywhere(watching, call) > 10


def ask_redis(store: Store, has_copies: bool = False) -> None:
    """Ask with commands, with scripts, and for a lock; the answers have to be its own."""
    token = uuid4().hex
    asked = store.commands(lambda pipe: (pipe.set(token, token), pipe.get(token)))
    assert asked == [True, token]

    def lease(holder: str) -> ScriptCall:
        return ScriptCall("lease", [f"{token}-lease"], [(holder, 60_000, "")])

    calls = [lease(each) for each in "abaa"]
    assert [bool(each) for each in store.call_each(calls)] == [True, False, True, True]
    if has_copies:
        assert [bool(each) for each in store.call_durably(calls[1:3])] == [False, True]
    with store.alone(f"{token}-lock", 60):
        pass


@pytest.fixture(scope="module")
def any_redis(request: pytest.FixtureRequest) -> Iterator[RedisSetup]:
    """A Redis of the kind that the test names."""
    with KINDS[request.param]() as setup:
        yield setup


@pytest.mark.parametrize("any_redis", KINDS, indirect=True)
def test_an_interrupt_ends_a_conversation_with_redis_at_once(
    request: pytest.FixtureRequest, any_redis: RedisSetup, watching: Interrupter
) -> None:
    store = connect(any_redis.url, {"socket_timeout": TIMEOUT, **any_redis.options}, copies=1)
    # Only behind Sentinel are there replicas.
    has_copies = "sentinel" in request.node.name

    def call() -> None:
        ask_redis(store, has_copies)
        store.close()  # how many nodes of a cluster are asked differs from one call to the next

    assert interrupt_anywhere(watching, call) > 10
    assert not watching.open


class StruckRow(UserDict[str, Any]):
    """A row that a soft time limit interrupts while it is read."""

    def keys(self) -> Any:
        raise SoftTimeLimitExceeded


def test_a_soft_time_limit_is_no_error_of_the_row_that_it_strikes(shop: Any) -> None:
    with pytest.raises(SoftTimeLimitExceeded):
        shop.rabbitdelay.send_many("look", [StruckRow(delay=DELAY)])
    send_many(shop)


def test_an_interrupted_job_raises_what_came_although_redis_is_away(
    make_shop: Callable[..., Any], redis: RedisServer
) -> None:
    shop = make_shop(rabbitdelay_registry_url=redis.url)

    def block() -> None:
        with shop.rabbitdelay.job("import", expires=60):
            redis.kill()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        block()
