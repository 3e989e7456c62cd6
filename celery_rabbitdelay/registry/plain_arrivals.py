"""Asks Redis about tasks without an option of the registry, in the worker's event loop."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.registry.registry import Registry
from celery_rabbitdelay.worker.batch_thread import MAX_BATCH
from celery_rabbitdelay.worker.celery_internals import Hub

#: The answer of Redis if nothing is recorded and nothing is paused.
NOTHING: Final = b":0\r\n:0\r\n"

#: The bytes of a valid answer. Errors and pushes of Redis contain other bytes.
OF_ANSWERS: Final = b":0123456789\r\n"

#: Seconds from one attempt to connect to the next.
CONNECT_EVERY: Final = 10.0

#: How many times the age of an unanswered question is checked before the timeout.
CHECKS: Final = 4

TaskT = TypeVar("TaskT")


class PlainArrivals(Generic[TaskT]):
    """Asks Redis whether a decision about arrived tasks is recorded, or anything is paused.

    For nearly all tasks without an option, nothing is recorded, and they may run. In all other
    cases, including a missing answer of Redis, the thread of :class:`.Decisions` decides. A
    question in the event loop takes a third of the processor time of a question in a thread.

    There is one question at a time. Tasks that arrive before the answer make up the next question.
    If the prefetch count allows it, a question waits some milliseconds for more tasks. A question
    begins with a command that a replica refuses: after a failover, the former primary does not know
    the decisions of the new primary.

    Args:
        hub: The worker's event loop.
        registry: The registry.
        run: Called with the tasks that run.
        decide: Called with the tasks that need a decision from the thread.
        gather_for: Given the number of tasks so far, returns how many seconds to wait for more.
    """

    def __init__(
        self,
        hub: Hub,
        registry: Registry,
        run: Callable[[Sequence[TaskT]], object],
        decide: Callable[[Sequence[TaskT]], object],
        gather_for: Callable[[int], float],
    ) -> None:
        self._hub = hub
        self._store = registry.store
        self._names = registry.names
        self._run = run
        self._decide = decide
        self._gather_for = gather_for
        self._gathers = False
        self._connection: Any = None
        self._connect_at = 0.0
        self._asked: list[tuple[str, TaskT]] = []
        self._waiting: list[tuple[str, TaskT]] = []
        self._asked_at = 0.0
        self._answer = b""

    @property
    def is_open(self) -> bool:
        """Whether there is a connection to Redis."""
        return self._connection is not None

    def connected(self) -> Any:
        """Return a new connection for :meth:`open`; None if it is not needed or not possible now.

        The thread calls this method, because connecting may take a while.
        """
        now = time.monotonic()
        if self.is_open or now < self._connect_at:
            return None
        self._connect_at = now + CONNECT_EVERY
        with suppress(RegistryUnavailable):
            return self._store.own_connection()
        return None

    def open(self, connection: Any) -> None:
        """Ask over a connection of redis-py from now on, if its socket is not encrypted."""
        own = getattr(connection, "_sock", None)
        if type(own) is not socket.socket:
            self._connect_at = math.inf
        if self.is_open or type(own) is not socket.socket:
            connection.disconnect()
            return
        own.setblocking(False)
        timeout = connection.socket_timeout
        self._hub.add_reader(own, self._read)
        self._timer = self._hub.call_repeatedly(timeout / CHECKS, self._check_time, timeout)
        self._connection, self._answer = connection, b""

    def give(self, task_id: str, task: TaskT) -> None:
        """Ask Redis about a task once the previous question is answered."""
        self._waiting.append((self._names.of("task", task_id), task))
        if self._asked or self._gathers:
            return
        pause = self._gather_for(len(self._waiting))
        if pause:
            self._gathers = True
            self._hub.call_later(pause, self._ask)
        else:
            self._ask()

    def close(self) -> None:
        """Close the connection, and let the thread decide about the waiting tasks."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        self._timer.cancel()
        self._hub.remove_reader(connection._sock)
        connection.disconnect()
        left = [*self._asked, *self._waiting]
        self._asked, self._waiting = [], []
        self._decide([task for _, task in left])

    def _ask(self) -> None:
        self._gathers = False
        if self._asked or not self._waiting:
            return
        self._asked, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
        nothing, paused = map(self._names.only, ("nothing", "paused"))
        commands = [("DEL", nothing), ("EXISTS", paused, *(key for key, _ in self._asked))]
        self._asked_at = time.monotonic()
        try:
            self._connection._sock.sendall(b"".join(self._connection.pack_commands(commands)))
        except Exception:  # noqa: BLE001 - must not end the worker; the thread asks again
            self.close()

    def _read(self) -> None:
        try:
            received = self._connection._sock.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        self._answer += received
        missing = NOTHING.count(b"\n") - self._answer.count(b"\n")
        is_strange = not self._asked or self._answer.translate(None, OF_ANSWERS) or missing < 0
        if not received or is_strange:
            self.close()
        elif not missing:
            self._answered(is_nothing=self._answer == NOTHING)

    def _answered(self, is_nothing: bool) -> None:
        if self._store.on_call is not None:
            self._store.on_call(time.monotonic() - self._asked_at, True)
        tasks = [task for _, task in self._asked]
        self._asked, self._answer = [], b""
        self._ask()
        (self._run if is_nothing else self._decide)(tasks)

    def _check_time(self, timeout: float) -> None:
        # The answer may have arrived while the loop was busy.
        self._read()
        if self._asked and time.monotonic() - self._asked_at >= timeout:
            self.close()
