"""A thread that works on items in batches, outside the worker's event loop."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from heapq import heappop, heappush
from itertools import count
from socket import socketpair
from threading import Condition, Thread
from typing import ClassVar, Final, Generic, TypeAlias, TypeVar

from celery.utils.log import get_logger

from celery_rabbitdelay.worker.celery_internals import Consumer, Hub

logger = get_logger(__name__)

#: A function that only the worker's event loop may call.
Action: TypeAlias = Callable[[], None]

#: Acknowledges a message: the function that Celery passes to a strategy.
Ack: TypeAlias = Callable[..., object]

#: Maximum items of a batch.
MAX_BATCH: Final = 200

#: Seconds that a stopping worker waits for the current batch.
STOP_TIMEOUT: Final = 2.0

ItemT = TypeVar("ItemT")


class BatchThread(ABC, Generic[ItemT]):
    """A thread that waits for servers, so that the worker's event loop need not wait.

    Items that arrive during a batch make up the next batch. Actions that only the event loop may
    run are queued for the loop, and a socket wakes it. With gevent and eventlet, the thread is a
    greenlet.

    Args:
        consumer: The worker's consumer, on one connection.

    Attributes:
        name: The name of the thread.
    """

    name: ClassVar[str]

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        #: A heap of the items, with their start times (:func:`time.monotonic`) and the order of
        #: their arrival.
        self._given: list[tuple[float, int, ItemT]] = []
        self._numbers = count()
        self._changed = Condition()
        self._is_stopping = False
        self._thread = Thread(target=self._run, name=self.name, daemon=True)
        self._acknowledgements: deque[Action] = deque()
        self._actions: deque[Action] = deque()
        self._wakes, self._waking = socketpair()
        self._wakes.setblocking(False)
        self._waking.setblocking(False)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def register(self, hub: Hub) -> None:
        """Let the worker's event loop run the actions."""
        hub.add_reader(self._wakes, self._run_actions)

    def give(self, item: ItemT, seconds: float = 0.0) -> None:
        """Give the thread an item to work on, optionally after some seconds."""
        with self._changed:
            heappush(self._given, (time.monotonic() + seconds, next(self._numbers), item))
            self._changed.notify()

    def stop(self) -> None:
        """End the thread; of the remaining actions, run only acknowledgements.

        The broker redelivers the messages of unfinished items and of dropped actions.
        """
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self._thread.join(STOP_TIMEOUT)
        _do_all(self._acknowledgements)
        if self._consumer.hub is not None:
            self._consumer.hub.remove_reader(self._wakes)
        self._wakes.close()
        self._waking.close()

    def act(self, action: Action, is_acknowledgement: bool = False) -> None:
        """Let the event loop run an action soon; any thread may call this method."""
        actions = self._acknowledgements if is_acknowledgement else self._actions
        actions.append(action)
        if self._consumer.hub is None:
            # gevent and eventlet: this thread is a greenlet, which may run actions.
            _do_all(actions)
        else:
            # A full socket wakes the loop anyway; if the socket is closed, the worker has stopped.
            with suppress(OSError):
                self._waking.send(b"\0")

    def acknowledge(self, ack: Ack) -> None:
        """Acknowledge a message; only the event loop may call this."""
        ack(logger, self._consumer.connection_errors)
        if self._consumer.hub is None:
            # Without this call, Celery before 5.7 defers the ack until the broker sends a frame.
            self._consumer.perform_pending_operations()

    def begin(self) -> None:
        """Prepare for the first batch; called in the thread."""

    @abstractmethod
    def work(self, batch: list[ItemT]) -> None:
        """Work on items; called in the thread."""

    def own_work_in(self) -> float:
        """Return the seconds after which to call :meth:`work` even without items."""
        return math.inf

    def gather_for(self, first: int) -> float:
        """Return the seconds to wait for more items after the first items."""
        return 0.0

    def _run(self) -> None:
        work: Action = self.begin
        while not self._is_stopping:
            try:
                work()
            except Exception:  # the thread must not end
                logger.exception("%s: unexpected error in a batch; the thread continues", self.name)
            work = partial(self.work, self._next_batch())

    def _run_actions(self) -> None:
        with suppress(BlockingIOError):
            self._wakes.recv(4096)
        _do_all(self._acknowledgements)
        _do_all(self._actions)

    def _next_batch(self) -> list[ItemT]:
        """Wait for items, or for the time of :meth:`own_work_in`."""
        with self._changed:
            while not (self._is_stopping or (batch := self._due(MAX_BATCH))):
                patience = self.own_work_in()
                if patience <= 0:
                    return []
                if self._given:
                    patience = min(patience, self._given[0][0] - time.monotonic())
                self._changed.wait(None if patience == math.inf else max(patience, 0.0))
            if self._is_stopping:
                return []
        pause = self.gather_for(len(batch))
        if pause:
            time.sleep(pause)
            with self._changed:
                batch += self._due(MAX_BATCH - len(batch))
        return batch

    def _due(self, most: int) -> list[ItemT]:
        """Take the items whose start time has come, at most ``most``."""
        due: list[ItemT] = []
        now = time.monotonic()
        while self._given and self._given[0][0] <= now and len(due) < most:
            due.append(heappop(self._given)[-1])
        return due


def _do_all(actions: deque[Action]) -> None:
    while actions:
        action = actions.popleft()
        try:
            action()
        except Exception:  # the caller continues with its other actions
            logger.exception(
                "rabbitdelay worker: handling a delayed task failed; RabbitMQ redelivers its "
                "message once the worker reconnects or stops."
            )
