"""Questions of a worker's event loop about tasks without an option: kombu's loop, a real Redis."""

import select
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from kombu.asynchronous.hub import Hub

from celery_rabbitdelay import Outcome
from celery_rabbitdelay.registry.plain_arrivals import PlainArrivals
from celery_rabbitdelay.testing import RedisServer, wait_for
from celery_rabbitdelay.worker.batch_thread import MAX_BATCH
from tests.kernel.integration.notes import Notes
from tests.kernel.integration.shop import PATIENCE
from tests.redis_servers import ConfiguredRedis
from tests.registry.integration.registering import TIMEOUT
from tests.registry.integration.test_registry_trouble import registry_in

#: Seconds; long enough for a test to cancel a task before it is due.
DELAY = 10.0

#: Seconds, after which a question to a suspended Redis goes to the thread.
SHORT = 0.3


class Loop:
    """An event loop that asks Redis, and the groups of tasks that it ran or gave to the thread."""

    def __init__(self, registry: Any) -> None:
        self.registry = registry
        self.ran: list[Sequence[str]] = []
        self.decided: list[Sequence[str]] = []
        self.pause = 0.0
        self.hub = Hub()
        self.plain: PlainArrivals[str] = PlainArrivals(
            self.hub, registry, self.ran.append, self.decided.append, self.gather_for
        )
        self.plain.open(registry.store.own_connection())

    def answers(self, *tasks: str) -> None:
        """Ask about tasks, and turn the loop until all have run or the thread has them."""
        for task in tasks:
            self.plain.give(task, task)
        before = self.seen
        wait_for(lambda: self.turned() - before >= len(tasks), "the answers", PATIENCE)

    def gather_for(self, first: int) -> float:
        """Return for how long a question waits for more tasks, as a worker does."""
        return self.pause

    @property
    def seen(self) -> int:
        """The number of tasks that have run, or that the thread has."""
        return sum(map(len, self.ran + self.decided))

    def turned(self) -> int:
        """Turn the loop once; return :attr:`seen`."""
        self.hub.call_soon(lambda: None)  # do not wait for an event
        self.hub.run_once()
        return self.seen


@contextmanager
def loop_on(redis: RedisServer, timeout: float = TIMEOUT) -> Iterator[Loop]:
    """A loop that asks a server; both are closed at the end."""
    with registry_in(redis.url, timeout) as registry:
        loop = Loop(registry)
        yield loop
        loop.plain.close()
        loop.hub.close()


def test_tasks_that_arrive_during_a_question_make_up_the_next_one() -> None:
    with RedisServer() as redis, loop_on(redis) as loop:
        loop.answers("a", "b", "c")
        assert (loop.ran, loop.decided) == ([["a"], ["b", "c"]], [])
        loop.pause = 0.01
        tasks = [str(number) for number in range(MAX_BATCH + 1)]
        loop.answers(*tasks)
        assert loop.ran[2:] == [tasks[:-1], tasks[-1:]]


def decide_about_one(registry: Any) -> Callable[[], object]:
    assert registry.cancel(["b"]) == [Outcome.NOTED]
    return lambda: registry.store.commands(lambda pipe: pipe.flushall())


def pause(registry: Any) -> Callable[[], object]:
    registry.pauses.pause("some task", None)
    return lambda: registry.pauses.resume("some task", None)


@pytest.mark.parametrize("begin", [decide_about_one, pause])
def test_the_thread_decides_if_anything_is_recorded_or_paused(begin: Any) -> None:
    with RedisServer() as redis, loop_on(redis) as loop:
        end = begin(loop.registry)
        loop.answers("b")
        assert (loop.ran, loop.decided) == ([], [["b"]])
        end()
        loop.answers("b")
        assert (loop.ran, loop.decided) == ([["b"]], [["b"]])


@pytest.mark.parametrize(
    "trouble", ["killed", "suspended", "a replica", "a push", "no text", "closed"]
)
def test_the_thread_decides_about_every_task_once_if_redis_is_in_trouble(trouble: str) -> None:
    with ConfiguredRedis() as redis, ConfiguredRedis() as other:
        timeout = {"suspended": SHORT, "a push": 2 * PATIENCE}.get(trouble, TIMEOUT)
        with loop_on(redis, timeout) as loop:
            match trouble:
                case "killed":
                    redis.kill()
                case "suspended":
                    redis.suspend()
                case "a replica":
                    host, port = "127.0.0.1", other.url.rpartition(":")[2].partition("/")[0]
                    loop.registry.store.commands(lambda pipe: pipe.replicaof(host, port))
                case "a push":
                    loop.plain._connection.send_command("SUBSCRIBE", "news")
                case "no text":
                    loop.plain._connection.pack_commands = mock.Mock(side_effect=UnicodeError)
            for task in "ab":
                if not loop.plain.is_open:  # as in the worker
                    loop.decided.append([task])
                else:
                    loop.plain.give(task, task)
            if trouble == "closed":
                loop.plain.close()
            wait_for(lambda: not loop.plain.is_open or loop.turned() < 0, "the end", PATIENCE)
            together = [["a"], ["b"]] if trouble == "no text" else [["a", "b"]]
            assert (loop.ran, loop.decided) == ([], together)
            if trouble == "suspended":
                redis.resume()
            if trouble != "killed":
                return
            # Another connection takes its place.
            redis.start()
            loop.plain.open(loop.registry.store.own_connection())
            loop.answers("c")
            assert loop.ran == [["c"]]


def test_a_late_look_at_an_answer_is_no_timeout() -> None:
    with RedisServer() as redis, loop_on(redis) as loop:
        loop.plain.give("a", "a")
        select.select([loop.plain._connection._sock], [], [], PATIENCE)
        loop.plain._asked_at -= 2 * TIMEOUT
        loop.plain._check_time(TIMEOUT)
        assert (loop.ran, loop.plain.is_open) == ([["a"]], True)


def test_the_loop_takes_one_plain_socket_and_connects_now_and_then() -> None:
    with RedisServer() as redis, loop_on(redis) as loop:
        assert loop.plain.connected() is None  # there is one
        loop.plain.close()
        connection = loop.plain.connected()
        assert loop.plain.connected() is None  # too soon
        loop.plain._connect_at = 0.0
        encrypted = mock.Mock(_sock=mock.Mock(spec=ssl.SSLSocket))
        loop.plain.open(encrypted)
        encrypted.disconnect.assert_called_once_with()
        assert (loop.plain.is_open, loop.plain.connected()) == (False, None)
        loop.plain.open(connection)
        loop.answers("a")
        assert loop.ran == [["a"]]


def test_a_worker_asks_in_its_event_loop(serve: Any, noted: Notes) -> None:
    with RedisServer() as redis:
        noted.shop = shop = serve(rabbitdelay_registry_url=redis.url)
        registry = shop.rabbitdelay.registry

        def asks() -> bool:
            (clients,) = registry.store.commands(lambda pipe: pipe.client_list())
            noted.send("again", delay=0.1)
            return any(client["cmd"] == "exists" for client in clients)

        wait_for(asks, "a question of the event loop", PATIENCE)
        cancelled = noted.send("cancelled", delay=DELAY)
        noted.send("another", delay=DELAY + 1)
        assert shop.rabbitdelay.cancel(cancelled) is Outcome.NOTED
        wait_for(lambda: "another" in noted(), "the task", PATIENCE)
        assert "cancelled" not in noted()
