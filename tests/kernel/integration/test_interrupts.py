"""Conversations that are interrupted behind any operation of their sockets.

A soft time limit is an exception that a signal handler raises, once a call of the operating system
has returned. The sockets are real, and so are the servers.
"""

import gc
import socket
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any, Final
from uuid import uuid4
from weakref import WeakSet

import pytest
from celery import group
from celery.exceptions import SoftTimeLimitExceeded
from kombu import Connection, pools

from celery_rabbitdelay import Row
from celery_rabbitdelay.publishing.declaration import backlog_of, declare
from celery_rabbitdelay.registry.connection import connect
from celery_rabbitdelay.registry.registry import Registry
from celery_rabbitdelay.registry.store import ScriptCall, Store
from tests.registry.integration.registering import KINDS, TIMEOUT, RedisSetup

#: Seconds; no task comes due meanwhile.
DELAY = 5.0


#: One that is an ``Exception``, and one that is not, as those of gevent, greenlet and asyncio.
INTERRUPTS: Final = (SoftTimeLimitExceeded, KeyboardInterrupt)

#: What a conversation consists of. Closing is not among it.
OPERATIONS: Final = ("connect", "send", "sendall", "recv", "recv_into")


class Interrupter:
    """Raises an exception at one of the operations on the sockets that it watches."""

    def __init__(self) -> None:
        self.sockets: WeakSet[socket.socket] = WeakSet()
        #: The socket that was interrupted, and how often it was used after that.
        self.struck: socket.socket | None = None
        self.is_connecting = False
        self.used_later: list[str] = []
        self._error: BaseException | None = None
        self._left = 0

    def watched(self, name: str) -> Callable[..., Any]:
        """Return a method of sockets that may be interrupted."""
        method = getattr(socket.socket, name)

        def call(own: socket.socket, *arguments: Any, **options: Any) -> Any:
            if name == "connect" and own.family in (socket.AF_INET, socket.AF_INET6):
                self.sockets.add(own)
            if own not in self.sockets:
                return method(own, *arguments, **options)
            if own is self.struck:
                self.used_later.append(name)
            answer = method(own, *arguments, **options)
            self._left -= 1
            if self._left == 0 and self._error is not None:
                error, self._error, self.struck = self._error, None, own
                self.is_connecting = name == "connect"
                raise error
            return answer

        return call

    @property
    def open(self) -> int:
        """How many sockets are open."""
        return sum(each.fileno() >= 0 for each in self.sockets)

    def interrupt(self, call: Callable[[], object], at: int, error: BaseException) -> bool:
        """Call, and raise an error behind an operation; return False if there are not so many.

        What arrives at the caller is that error, as soon as the connection is closed.
        """
        self._error, self._left, self.struck, self.used_later = error, at, None, []
        raised: BaseException | None = None
        try:
            call()
        except type(error) as own:
            raised = own
        is_over, self._error = self._error is not None, None
        if is_over:
            return False
        assert raised is error, f"swallowed at operation {at}"
        assert self.struck is not None
        # The frame that connects has the socket, until the error is handled.
        is_closed = self.is_connecting or self.struck.fileno() < 0
        assert is_closed, f"the connection is open after operation {at}"
        assert not self.used_later, f"used after operation {at}: {self.used_later}"
        self.struck = None
        return True


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Interrupter:
    """Watches all sockets that the test connects; Celery's pool has none from before.

    Objects of former tests are collected first: Spark's tell their JVM over a connection.
    """
    pools.reset()
    gc.collect()
    watching = Interrupter()
    for name in OPERATIONS:
        monkeypatch.setattr(socket.socket, name, watching.watched(name))
    return watching


def interrupt_anywhere(watching: Interrupter, call: Callable[[], object]) -> int:
    """Interrupt a call at each of its operations, and call again; return how many it has.

    The call checks that the answer is its own.
    """
    call()
    most, at = watching.open, 1
    # An answer is read in several operations: both kinds strike in nearly each frame.
    while watching.interrupt(call, at, INTERRUPTS[at % 2]()):
        call()
        if watching.open > most:
            gc.collect()  # a frame that has its own error keeps itself
        assert watching.open <= most, f"a connection is left open after operation {at}"
        at += 1
    return at


def with_a_connection(ask: Callable[[Any, Connection], object]) -> Callable[[Any], None]:
    """The caller's own connection, whose end is none of our conversations."""

    def call(shop: Any) -> None:
        connection = Connection(shop.conf.broker_url)
        ask(shop, connection)
        connection.collect()

    return call


def send_many(shop: Any) -> None:
    rows = [Row(delay=DELAY + number) for number in range(5)]
    assert shop.rabbitdelay.send_many("look", rows).confirmed == 5


#: Conversations with the broker.
WITH_THE_BROKER: dict[str, Callable[[Any], object]] = {
    "apply_async": lambda shop: shop.tasks["look"].apply_async(delay=DELAY),
    "own-connection": with_a_connection(
        lambda shop, own: shop.tasks["look"].apply_async(delay=DELAY, connection=own)
    ),
    "group": lambda shop: group([shop.tasks["look"].si() for _ in range(3)], app=shop).apply_async(
        countdown=DELAY
    ),
    "send_many": send_many,
    "check": lambda shop: shop.rabbitdelay.check(timeout=20),
    "declare": with_a_connection(lambda shop, own: declare(own, shop.rabbitdelay.topology)),
    "backlog": with_a_connection(lambda shop, own: backlog_of(own, shop.rabbitdelay.topology)),
}


@pytest.mark.parametrize("name", WITH_THE_BROKER)
def test_an_interrupt_ends_a_conversation_with_the_broker_at_once(
    make_shop: Any, watching: Interrupter, name: str
) -> None:
    shop = make_shop(result_backend=None)
    shop.tasks["look"].apply_async(delay=DELAY)

    def call() -> None:
        shop.rabbitdelay.close()
        WITH_THE_BROKER[name](shop)

    assert interrupt_anywhere(watching, call) > 10


def ask_redis(store: Store) -> None:
    """Ask with commands, with scripts, and for a lock; the answers have to be its own."""
    token = uuid4().hex
    asked = store.commands(lambda pipe: (pipe.set(token, token), pipe.get(token)))
    assert asked == [True, token]

    def lease(holder: str) -> ScriptCall:
        return ScriptCall("lease", [f"{token}-lease"], [(holder, 60_000, "")])

    calls = [lease(each) for each in "abaa"]
    assert store.of_each(*calls) == [[True], [False], [True], [True]]
    with Registry(store, token, 60_000, 60_000).alone("lock"):
        pass


@pytest.fixture(scope="module")
def any_redis(request: pytest.FixtureRequest) -> Iterator[RedisSetup]:
    """A Redis of the kind that the test names."""
    with KINDS[request.param]() as setup:
        yield setup


@pytest.mark.parametrize("any_redis", KINDS, indirect=True)
def test_an_interrupt_ends_a_conversation_with_redis_at_once(
    any_redis: RedisSetup, watching: Interrupter
) -> None:
    store = connect(any_redis.url, {"socket_timeout": TIMEOUT, **any_redis.options})

    def call() -> None:
        ask_redis(store)
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
