"""Actions of another thread that only the worker's event loop may run."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Any, TypeAlias

from celery.utils.log import get_logger

from celery_rabbitdelay.worker.celery_internals import has_event_loop, stop_watching, watch

logger = get_logger(__name__)

#: Something that only the worker's event loop may run.
Action: TypeAlias = Callable[[], None]


class LoopActions:
    """Hands actions from a thread to the worker's event loop, which a pipe wakes.

    Args:
        consumer: The worker's consumer, on one connection.
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._acknowledgements: deque[Action] = deque()
        self._others: deque[Action] = deque()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._ends = Lock()
        self._first_has_ended = False

    def register(self, hub: Any) -> None:
        """Let the worker's event loop run the actions."""
        watch(hub, self._wake_reader, self._run_in_loop)

    def add(self, action: Action, is_acknowledgement: bool = False) -> None:
        """Have an action run soon; called by the thread."""
        actions = self._acknowledgements if is_acknowledgement else self._others
        actions.append(action)
        if not has_event_loop(self._consumer):
            # gevent and eventlet: this thread is a greenlet, which may run them.
            _do_all(actions)
        else:
            with suppress(BlockingIOError):  # the pipe is full, so the loop wakes anyway
                os.write(self._wake_writer, b"\0")

    def stop(self) -> None:
        """Run the acknowledgements only, and no action after them; called by the worker.

        What the other actions are about is delivered again by the broker.
        """
        _do_all(self._acknowledgements)
        stop_watching(self._consumer, self._wake_reader)
        self.end()

    def end(self) -> None:
        """Close the pipe once thread and worker have both called this."""
        with self._ends:
            if self._first_has_ended:
                os.close(self._wake_reader)
                os.close(self._wake_writer)
            self._first_has_ended = True

    def _run_in_loop(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_reader, 4096)
        _do_all(self._acknowledgements)
        _do_all(self._others)


def _do_all(actions: deque[Action]) -> None:
    while actions:
        action = actions.popleft()
        try:
            action()
        except Exception:  # the caller goes on with its other actions
            logger.exception("An action for a delayed task failed; RabbitMQ will redeliver it")
