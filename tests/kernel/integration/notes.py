"""What the runs of the task ``note`` have noted in Redis, and what receivers of signals note."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from celery_rabbitdelay.testing import wait_for
from tests.kernel.integration.shop import PATIENCE


class Notes:
    """The notes of a test, in the order of the runs.

    Args:
        shop: The application.

    Attributes:
        shop: The application.
        redis: A client of the Redis that the task writes to.
        key: The keyword argument that the task is sent with.
    """

    def __init__(self, shop: Any) -> None:
        self.shop = shop
        self.redis = shop.backend.client
        self.key = f"notes-{uuid4()}"

    def row(self, given: Any, **more: Any) -> dict[str, Any]:
        """Return a row of ``send_many``."""
        return {"args": (given,), "kwargs": {"key": self.key}, **more}

    def send(self, *given: Any, **options: Any) -> Any:
        """Send the task."""
        return self.shop.tasks["note"].apply_async(given, {"key": self.key}, **options)

    def until(self, delay: float, patience: float = PATIENCE) -> list[Any]:
        """Wait until a task that is sent now has run; return what others were given.

        Args:
            delay: The seconds in which all others are due that have to run.
            patience: How many more seconds this may take.
        """
        later = f"later-{uuid4()}"
        self.shop.tasks["note"].apply_async(kwargs={"key": later}, delay=max(delay, 0) + 3)
        wait_for(lambda: self.redis.llen(later), "a later task", max(delay, 0) + patience)
        self.redis.delete(later)
        return self()

    def found(self) -> list[dict[str, Any]]:
        """Return the notes."""
        return [json.loads(note) for note in self.redis.lrange(self.key, 0, -1)]

    def given(self) -> list[list[Any]]:
        """Return the positional arguments of each run."""
        return [note["given"] for note in self.found()]

    def __call__(self) -> list[Any]:
        """Return the first positional argument of each run."""
        return [given[0] for given in self.given()]

    def wait(self, number: int, timeout: float = PATIENCE) -> list[dict[str, Any]]:
        """Wait for so many notes, and until the worker has nothing left to run."""
        wait_for(lambda: self.redis.llen(self.key) >= number, f"{number} notes", timeout)
        self.shop.tasks["look"].apply_async().get(timeout=PATIENCE)
        return self.found()

    def forget(self) -> None:
        """Delete the notes."""
        self.redis.delete(self.key)


def instants(noted: Notes, name: str) -> list[int]:
    """When the occurrences of a schedule were due that ran, in seconds."""
    split = [each["correlation_id"].rsplit(":", 2) for each in noted.found()]
    return sorted(int(words[1]) // 1000 for words in split if words[0] == name)


@contextmanager
def listening(receiver: Callable[..., object], *signals: Any) -> Iterator[None]:
    """Some signals have a receiver until the block ends."""
    for each in signals:
        each.connect(receiver, weak=False)
    try:
        yield
    finally:
        for each in signals:
            each.disconnect(receiver)
