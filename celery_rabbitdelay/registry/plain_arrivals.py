"""Delayed tasks without an option of the registry: the event loop asks whether one is noted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from celery_rabbitdelay.registry.connection import Asker
from celery_rabbitdelay.worker.celery_internals import call_after, stop_watching, watch

#: Tasks of one question, at most.
MAX_ASKED: Final = 200

DueT = TypeVar("DueT")


@dataclass(eq=False, repr=False)
class PlainArrivals(Generic[DueT]):
    """Asks about tasks without an option of the registry; of nearly all of them nothing is noted.

    In the event loop, a question takes a third of the processor time that it takes in a thread. If
    something is noted or paused, or Redis does not answer, the thread decides.

    Attributes:
        consumer: The worker's consumer, on one connection.
        key_of: Returns the key of a task's record.
        paused: The key of what is paused.
        run: Lets a task run.
        decide: Lets the thread decide about a task.
        gather_for: Returns for how many seconds to wait for more tasks after a number of them.
        timeout: Seconds in which Redis has to answer.
    """

    consumer: Any
    key_of: Callable[[DueT], str]
    paused: str
    run: Callable[[DueT], None]
    decide: Callable[[DueT], None]
    gather_for: Callable[[int], float]
    timeout: float
    _asker: Asker | None = None
    _asked: list[DueT] = field(default_factory=list)
    _asked_at: float = 0.0
    _waiting: list[DueT] = field(default_factory=list)
    _gathers: bool = False

    @property
    def is_open(self) -> bool:
        """Whether there is a connection to ask over."""
        return self._asker is not None

    def open(self, asker: Asker) -> None:
        """Ask over a connection, from now on."""
        if self._asker is not None:
            asker.close()
            return
        self._asker = asker
        watch(self.consumer.hub, asker.file_descriptor, self._answered)
        call_after(self.consumer, self.timeout, self._watch_time)

    def give(self, due: DueT) -> None:
        """Ask about a task, as soon as the question before is answered."""
        self._waiting.append(due)
        if self._asked or self._gathers:
            return
        pause = self.gather_for(len(self._waiting))
        if pause:
            self._gathers = True
            call_after(self.consumer, pause, self._ask)
        else:
            self._ask()

    def close(self) -> None:
        """Close the connection, and let the thread decide about the tasks that wait."""
        if self._asker is None:
            return
        stop_watching(self.consumer, self._asker.file_descriptor)
        self._asker.close()
        self._asker = None
        left = [*self._asked, *self._waiting]
        self._asked, self._waiting = [], []
        for due in left:
            self.decide(due)

    def _ask(self) -> None:
        self._gathers = False
        self._asked, self._waiting = self._waiting[:MAX_ASKED], self._waiting[MAX_ASKED:]
        if self._asker is None or not self._asked:
            return
        self._asked_at = time.monotonic()
        try:
            self._asker.ask([self.paused, *(self.key_of(due) for due in self._asked)])
        except Exception:  # noqa: BLE001 - the thread finds out, and says so
            self.close()

    def _answered(self) -> None:
        if self._asker is None:
            return
        try:
            is_noted = self._asker.answer()
        except Exception:  # noqa: BLE001 - likewise
            self.close()
            return
        asked, self._asked = self._asked, []
        self._ask()
        for due in asked:
            (self.decide if is_noted else self.run)(due)

    def _watch_time(self) -> None:
        if self._asked and time.monotonic() - self._asked_at >= self.timeout:
            self.close()
        elif self._asker is not None:
            call_after(self.consumer, self.timeout, self._watch_time)
