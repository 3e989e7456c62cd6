"""The schedules of two applications, and who puts and edits them."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from threading import Event, Lock, Thread
from typing import Any, Final

from kombu.exceptions import OperationalError

from celery_rabbitdelay.exceptions import RabbitDelayError
from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.schedules.occurrence import Overlap
from tests.chaos.application import Part, TaskQueue, make_app
from tests.chaos.instants import CatchUp, Edit, Planned
from tests.chaos.notes import now_ms
from tests.chaos.scenario import SOUND
from tests.chaos.stage import Stage

#: The queue of the second application.
BESIDE: Final = "beside"

#: Seconds that each run of a schedule takes whose runs must not overlap.
LASTS: Final = 0.2

#: What each of ten schedules promises: its group, ``catch_up`` and ``overlap``.
KINDS: Final[Sequence[tuple[str, CatchUp, Overlap]]] = (
    *(("all", "all", "allow"),) * 6,
    ("last", "last", "allow"),
    ("seconds", 20.0, "allow"),
    ("skip", "last", "skip"),
    ("queue-one", "last", "queue-one"),
)

#: Seconds between two edits.
EDIT_EVERY: Final = 10.0

#: Seconds in which a put has to succeed, and between two attempts.
TO_PUT: Final = 300.0
PAUSE: Final = 1.0


def task_of(queue: str) -> str:
    """Return the name of the task of the application that has a queue."""
    return f"note-{queue}"


def planned(number_of: int, begin_ms: int, minutes: float) -> list[Planned]:
    """Return so many schedules; a quarter has no end, and a fifth is the second application's."""
    plans: list[Planned] = []
    for number in range(number_of):
        group, catch_up, overlap = KINDS[(number + 3 * (number // 60)) % len(KINDS)]
        plans.append(
            Planned(
                f"s{number}",
                group,
                queue=BESIDE if number % 5 == 4 else SOUND,
                seconds=1 + number % 60,
                catch_up=catch_up,
                overlap=overlap,
                lasts=0.0 if overlap == "allow" else LASTS,
                begin_ms=begin_ms,
                end_ms=begin_ms + int(minutes * 60_000),
                is_open=number % 4 == 3,
            )
        )
    return plans


class Author:
    """Puts the schedules of two applications, and edits one every ten seconds, in a thread.

    Args:
        parts: What each application has to know, by its queue.
        plans: The schedules.

    Attributes:
        edits: All puts that have returned.
        raised: How many puts have raised, by the name of the error.
    """

    def __init__(self, parts: Mapping[str, Part], plans: Sequence[Planned]) -> None:
        self._apps = {queue: make_app(part) for queue, part in parts.items()}
        self._plans = plans
        self._revisions = [0] * len(plans)
        self._lock = Lock()
        self._ends = Event()
        self._thread = Thread(target=self._edit, name="edits", daemon=True)
        self.edits: list[Edit] = []
        self.raised: Counter[str] = Counter()

    def begin(self) -> None:
        """Begin to edit."""
        self._thread.start()

    def end(self) -> None:
        """Edit no more."""
        self._ends.set()
        self._thread.join()

    def schedules(self, queue: str) -> Any:
        """Return the schedules as one application has them: all under the prefix."""
        return self._apps[queue].rabbitdelay.schedules

    def control(self, queue: str) -> Any:
        """Return Celery's remote control of an application."""
        return self._apps[queue].control

    def put_all(self) -> None:
        """Put all schedules, as applications do when they start."""
        for number in range(len(self._plans)):
            self._put(number, 0)

    def close(self) -> None:
        """Close the connections."""
        for app in self._apps.values():
            app.close()

    def _edit(self) -> None:
        while not self._ends.wait(EDIT_EVERY):
            self._put(random.randrange(len(self._plans)), 1)

    def _put(self, number: int, change: int) -> None:
        """Put a schedule until that succeeds."""
        with self._lock:
            self._revisions[number] += change
            plan, revision = self._plans[number], self._revisions[number]
            deadline = time.monotonic() + TO_PUT
            while True:
                try:
                    self._try(plan, revision)
                    break
                except (RabbitDelayError, OperationalError) as error:
                    self.raised[type(error).__name__] += 1
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(PAUSE)
            self.edits.append(Edit(plan.name, revision, now_ms()))

    def _try(self, plan: Planned, revision: int) -> None:
        app = self._apps[plan.queue]
        app.rabbitdelay.schedules.put(
            *(plan.name, task_of(plan.queue), timedelta(seconds=plan.seconds)),
            *((plan.queue, revision), {"seconds": plan.lasts}),
            start=instant_of(plan.begin_ms),
            end=None if plan.is_open else instant_of(plan.end_ms),
            catch_up=plan.catch_up,
            overlap=plan.overlap,
        )


def part_of(stage: Stage, queue: str, first_node: int = 0) -> Part:
    """Return what a process of the application that has a queue has to know."""
    return replace(
        stage.part(first_node), queues=[TaskQueue(queue)], task=task_of(queue), place=queue
    )
