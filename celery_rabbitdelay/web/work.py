"""Long actions: each runs in a thread of its own, shows its progress, and can be stopped."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from threading import Event, Lock, Thread
from typing import Any, Final, TypeAlias

from starlette.exceptions import HTTPException

from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.web.options import User
from celery_rabbitdelay.web.reading import AWAY, why

logger = logging.getLogger(__name__)

#: How many go on at a time; further ones are refused.
MOST_AT_ONCE: Final = 4

#: How many are remembered.
REMEMBERED: Final = 100


@dataclass(eq=False)
class Work:
    """A long action.

    Attributes:
        user: Who has begun it.
        what: What it does, in the past: "cancelled".
        total: How many tasks it is about, as far as it is known.
        key: A random word that names it.
        began: When it was begun.
        stopping: Set to stop it after the current batch or message.
        done: How many are done.
        state: ``running``, ``done``, ``stopped`` or ``failed``.
        error: Why it has failed.
    """

    user: User
    what: str
    total: int
    key: str = field(default_factory=partial(secrets.token_urlsafe, 9))
    began: datetime = field(default_factory=wall_clock.now)
    stopping: Event = field(default_factory=Event)
    done: int = 0
    state: str = "running"
    error: str | None = None

    def run(self, does: Does) -> None:
        """Do it to its end, and log how it ended.

        Args:
            does: Does it, counts in ``done``, and returns early if it is stopping.
        """
        state = "failed"
        try:
            does(self)
            state = "stopped" if self.stopping.is_set() else "done"
        except AWAY as error:
            self.error = why(error)
        except HTTPException as refused:
            self.error = refused.detail
        except Exception:
            self.error = "an unexpected error, which is in the log"
            logger.exception("The work %s has failed", self.key)
        try:
            log_action(self.user, f"{self.what} ({state}, of {self.total})", self.done)
        finally:
            self.state = state

    def as_json(self) -> dict[str, Any]:
        """Return it as values of JSON."""
        return {
            "key": self.key,
            "user": self.user.name,
            "what": self.what,
            "began": self.began,
            "done": self.done,
            "total": self.total,
            "state": self.state,
            "error": self.error,
        }


#: Does what a work is about.
Does: TypeAlias = Callable[[Work], None]


def in_batches(batches: Iterator[int]) -> Does:
    """Return a function that works through batches, and can be stopped between two of them.

    Args:
        batches: Yields how many were done after each batch.
    """

    def does(work: Work) -> None:
        for number in batches:
            work.done += number
            if work.stopping.is_set():
                return

    return does


class Works:
    """The long actions of this process that run, or have ended lately."""

    def __init__(self) -> None:
        self._works: dict[str, Work] = {}
        self._lock = Lock()

    def begin(self, user: User, what: str, total: int, does: Does) -> Work:
        """Begin a long action.

        Raises:
            HTTPException: Too many run already.
        """
        work = Work(user, what, total)
        with self._lock:
            if sum(each.state == "running" for each in self._works.values()) >= MOST_AT_ONCE:
                raise HTTPException(503, "So much goes on already; wait until some of it is done")
            ended = [key for key, each in self._works.items() if each.state != "running"]
            for key in ended[: max(len(self._works) - REMEMBERED + 1, 0)]:
                del self._works[key]
            self._works[work.key] = work
        name = f"rabbitdelay-web-{work.key}"
        Thread(target=work.run, args=(does,), name=name, daemon=True).start()
        return work

    def get(self, key: str) -> Work | None:
        """Return the action with a key."""
        return self._works.get(key)

    def all(self) -> list[Work]:
        """Return all of them, the last one first."""
        with self._lock:
            return list(self._works.values())[::-1]


def log_action(user: User, what: str, number: int, about: object = None) -> None:
    """Log what a user has done.

    Args:
        user: Who.
        what: What was done, in the past.
        number: To how many.
        about: To which.
    """
    shown = "" if about is None else f" {about!r:.1000}"
    logger.info("%r has %s: %d%s", user.name, what, number, shown)
