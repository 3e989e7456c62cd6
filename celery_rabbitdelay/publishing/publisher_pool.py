"""Publishers that threads share: one each at a time, and none across a fork."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

from kombu import Connection
from kombu.exceptions import LimitExceeded

from celery_rabbitdelay.exceptions import NoPublisherFree
from celery_rabbitdelay.publishing.kombu_internals import LazyPool
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
        self._publishers = self._new_pool()
        _pools.add(self)

    @contextmanager
    def acquire(self, timeout: float | None = None) -> Iterator[Publisher]:
        """Borrow a publisher for the length of a ``with`` block.

        Args:
            timeout: Seconds to wait for one to be free; None for as long as it takes.

        Raises:
            NoPublisherFree: All of them were in use for that long.
        """
        # Returned to where it came from: a fork or a close may have replaced the pool meanwhile.
        publishers = self._publishers
        try:
            publisher = publishers.acquire(block=True, timeout=timeout)
        except LimitExceeded as exceeded:
            raise NoPublisherFree(self._limit, timeout) from exceeded
        try:
            yield publisher
        finally:
            publishers.release(publisher)

    def close(self) -> None:
        """Close the connections of the pool; it can be used again."""
        publishers, self._publishers = self._publishers, self._new_pool()
        publishers.force_close_all()

    def _forget(self) -> None:
        # In a forked process the sockets are the parent's: closing them in order would end the
        # parent's connections, so the child drops its references.
        self._publishers = self._new_pool()

    def _new_pool(self) -> LazyPool:
        return LazyPool(lambda: Publisher(self._connection.clone(), is_alone=True), self._limit)


_pools: WeakSet[PublisherPool] = WeakSet()


def _forget_parents_connections() -> None:
    for pool in _pools:
        pool._forget()


os.register_at_fork(after_in_child=_forget_parents_connections)
