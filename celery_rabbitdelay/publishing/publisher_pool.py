"""Publishers that threads share: one each at a time, and none across a fork."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, LifoQueue
from weakref import WeakSet

from kombu import Connection

from celery_rabbitdelay.exceptions import NoPublisherFree
from celery_rabbitdelay.publishing.publisher import Publisher


class PublisherPool:
    """Lends publishers to threads, one each, and keeps them for the next.

    Args:
        connection: Template; each publisher uses a clone of it, opened when needed.
        limit: Maximum publishers; a thread that finds none free waits. None opens a new connection
            for every use.
    """

    def __init__(self, connection: Connection, limit: int | None = 10) -> None:
        self._connection = connection
        self._limit = limit
        self._begin()
        _pools.add(self)

    def _begin(self) -> None:
        """Begin with no publishers.

        In a forked process those of the parent are dropped and not closed: that would end the
        parent's connections.
        """
        #: Those that are free; None for one that is not made yet.
        self._free: LifoQueue[Publisher | None] = LifoQueue()
        for _ in range(self._limit or 0):
            self._free.put(None)
        self._made: list[Publisher] = []

    @contextmanager
    def acquire(self, timeout: float | None = None) -> Iterator[Publisher]:
        """Borrow a publisher for the length of a ``with`` block.

        Args:
            timeout: Seconds to wait for one to be free; None for as long as it takes.

        Raises:
            NoPublisherFree: All of them were in use for that long.
        """
        # Returned to where it came from: a fork or a close may have begun anew meanwhile.
        free, made, publisher = self._free, self._made, None
        if self._limit:
            try:
                publisher = free.get(timeout=timeout)
            except Empty as none_free:
                raise NoPublisherFree(self._limit, timeout) from none_free
        try:
            if publisher is None:
                publisher = Publisher(self._connection.clone(), is_alone=True)
                if self._limit:
                    made.append(publisher)
            yield publisher
        finally:
            if self._limit:
                free.put(publisher)
            elif publisher is not None:
                publisher.close()

    def close(self) -> None:
        """Close the connections of the pool; it can be used again."""
        made = self._made
        self._begin()
        for publisher in made:
            publisher.close()


_pools: WeakSet[PublisherPool] = WeakSet()


def _forget_parents_connections() -> None:
    for pool in _pools:
        pool._begin()


os.register_at_fork(after_in_child=_forget_parents_connections)
