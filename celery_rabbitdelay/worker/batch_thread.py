"""A thread beside the worker's event loop, which works on what the loop gives it, in batches."""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from heapq import heappop, heappush
from itertools import count
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, ClassVar, Final, Generic, TypeAlias, TypeVar

from celery.utils.log import get_logger

from celery_rabbitdelay.worker import celery_internals

logger = get_logger(__name__)

#: Something that only the worker's event loop may run.
Action: TypeAlias = Callable[[], None]

#: Acknowledges a message: the function that Celery passes to a strategy.
Ack: TypeAlias = Callable[..., object]

#: Items of one batch, at most.
MAX_BATCH: Final = 200

#: Seconds that a stopping worker waits for the batch that is being worked on.
STOP_TIMEOUT: Final = 2.0

ItemT = TypeVar("ItemT")


class BatchThread(ABC, Generic[ItemT]):
    """Keeps what has to wait for a server away from the worker's event loop.

    Items that arrive while one batch is worked on make up the next one. Actions that only the event
    loop may run are handed back to it; a pipe wakes it. With gevent and eventlet, the thread is a
    greenlet.

    Args:
        consumer: The worker's consumer, on one connection.

    Attributes:
        name: The name of the thread.
    """

    name: ClassVar[str]

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        #: The items, each with the time from which on it may be worked on (:func:`time.monotonic`).
        self._given: SimpleQueue[tuple[float, ItemT] | None] = SimpleQueue()
        #: The same, taken out of there: a heap by these times, and then by the order of arrival.
        self._ordered: list[tuple[float, int, ItemT]] = []
        self._numbers = count()
        self._stopping = Event()
        self._thread = Thread(target=self._run, name=self.name, daemon=True)
        self._acknowledgements: deque[Action] = deque()
        self._actions: deque[Action] = deque()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._ends = Lock()
        self._first_has_ended = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def register(self, hub: Any) -> None:
        """Let the worker's event loop run the actions, which must run in it."""
        celery_internals.watch(hub, self._wake_reader, self._run_actions)

    def give(self, item: ItemT, seconds: float = 0.0) -> None:
        """Give the thread an item to work on, or to work on some seconds later."""
        self._given.put((time.monotonic() + seconds, item))

    def stop(self) -> None:
        """End the thread, and run acknowledgements only; called by the worker.

        The broker delivers again what was not worked on, and what the other actions are about.
        """
        self._stopping.set()
        self._given.put(None)
        self._thread.join(STOP_TIMEOUT)
        _do_all(self._acknowledgements)
        celery_internals.stop_watching(self._consumer, self._wake_reader)
        self._end()

    def act(self, action: Action, is_acknowledgement: bool = False) -> None:
        """Have the event loop run an action soon; called in any thread."""
        actions = self._acknowledgements if is_acknowledgement else self._actions
        actions.append(action)
        if not celery_internals.has_event_loop(self._consumer):
            # gevent and eventlet: this thread is a greenlet, which may run them.
            _do_all(actions)
        else:
            with suppress(BlockingIOError):  # the pipe is full, so the loop wakes anyway
                os.write(self._wake_writer, b"\0")

    def acknowledge(self, ack: Ack) -> None:
        """Acknowledge a message with the function that Celery passes to a strategy: an action."""
        ack(logger, self._consumer.connection_errors)
        celery_internals.write_pending_acknowledgements(self._consumer)

    def begin(self) -> None:
        """Do what comes before the first batch; called in the thread."""

    @abstractmethod
    def work(self, batch: list[ItemT]) -> None:
        """Work on items; called in the thread, must not raise."""

    def own_work_in(self) -> float:
        """Return after how many seconds to call :meth:`work` even if nothing was given."""
        return math.inf

    def gather_for(self, first: int) -> float:
        """Return for how many seconds to wait for more items, after the first ones have come."""
        return 0.0

    def _run(self) -> None:
        try:
            self.begin()
        except Exception:  # the thread has to live on
            logger.exception("%s", self.name)
        while not self._stopping.is_set():
            batch = self._next_batch()
            if not self._stopping.is_set():
                try:
                    self.work(batch)
                except Exception:  # the thread has to live on
                    logger.exception("%s", self.name)
        self._end()

    def _end(self) -> None:
        """Close the pipe once thread and worker have both called this."""
        with self._ends:
            if self._first_has_ended:
                os.close(self._wake_reader)
                os.close(self._wake_writer)
            self._first_has_ended = True

    def _run_actions(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_reader, 4096)
        _do_all(self._acknowledgements)
        _do_all(self._actions)

    def _next_batch(self) -> list[ItemT]:
        batch: list[ItemT] = []
        while not batch and not self._stopping.is_set():
            patience = self.own_work_in()
            self._take(batch, patience)
            if patience <= 0:
                return batch
        pause = self.gather_for(len(batch))
        if pause:
            time.sleep(pause)
            self._take(batch)
        return batch

    def _take(self, batch: list[ItemT], patience: float = 0.0) -> None:
        """Add the items that may be worked on by now.

        Args:
            batch: The batch, which takes at most :data:`MAX_BATCH` items.
            patience: For how many seconds to wait, at most, for the next item.
        """
        if self._ordered:
            patience = min(patience, self._ordered[0][0] - time.monotonic())
        with suppress(Empty):
            given = self._given.get(timeout=None if patience == math.inf else max(patience, 0.0))
            while True:
                if given is not None:
                    at, item = given
                    heappush(self._ordered, (at, next(self._numbers), item))
                given = self._given.get_nowait()
        now = time.monotonic()
        while self._ordered and self._ordered[0][0] <= now and len(batch) < MAX_BATCH:
            batch.append(heappop(self._ordered)[-1])


def _do_all(actions: deque[Action]) -> None:
    while actions:
        action = actions.popleft()
        try:
            action()
        except Exception:  # the caller goes on with its other actions
            logger.exception("An action for a delayed task failed; RabbitMQ will redeliver it")
