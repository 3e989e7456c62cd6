"""Binding the queues that messages are for to the levels, before the messages go there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import amqp
from amqp.exceptions import AccessRefused
from kombu import Connection, Queue

from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.declaration import (
    bind_destination,
    connect,
    declare_destination,
    declare_if_missing,
    queue_counts,
)


class Place(NamedTuple):
    """A topology on a broker.

    Attributes:
        connection: The broker, with its virtual host.
        topology: The topology.
    """

    connection: Connection
    topology: Topology


class Destinations:
    """Binds the destination queues of messages to the levels of the target, each once.

    Args:
        target: The target.
        known: The queues that the application knows, by their names. They are declared with the
            application's arguments.
        may_declare: Whether queues may be declared and bound.
        may_bind: Returns whether another queue may be bound. Anybody may have written its name into
            a routing key, and what is bound to the levels can be reached by every producer.

    Attributes:
        missing: Destination queues that do not exist, or cannot be bound. Distribution tries to
            deliver their messages when they are due.
        unnamed: Destination queues that may not be bound. Their messages wait until the queue is
            bound by a worker that consumes from it, or by a producer; but no longer than
            ``rabbitdelay_retry_for`` after they are due.
    """

    def __init__(
        self,
        target: Place,
        known: Mapping[str, Queue],
        may_declare: bool = True,
        may_bind: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self._connection = target.connection.clone(heartbeat=0)
        self._topology = target.topology
        self._known = known
        self._may_declare = may_declare
        self._may_bind = may_bind
        self._seen: set[str] = set()
        self.missing: set[str] = set()
        self.unnamed: set[str] = set()

    def ensure(self, name: str) -> None:
        """Declare a queue that the application knows, and bind it; bind any other one.

        Raises:
            OSError: The broker cannot be reached.
            amqp.exceptions.AccessRefused: The user lacks a permission.
        """
        if name in self._seen or not self._may_declare:
            return
        if name not in self._known and not self._may_bind(name):
            self.unnamed.add(name)
            return
        connect(self._connection)
        queue = self._known.get(name)
        declare_if_missing(self._connection, self._topology)
        is_bound = (
            queue is not None
            and not getattr(queue, "no_declare", False)
            and self._try(partial(declare_destination, queue=queue))
        )
        # It may exist with other arguments than the application gives it.
        if not is_bound and not self._try(partial(bind_destination, queue_name=name)):
            self.missing.add(name)
        self._seen.add(name)

    def _try(self, declare: Callable[..., None]) -> bool:
        """Declare or bind a queue; return whether the broker has accepted it."""
        try:
            declare(self._connection, self._topology)
        except amqp.ChannelError as refused:
            if isinstance(refused, AccessRefused):
                raise
            return False
        return True

    def exists(self, name: str) -> bool:
        """Return whether a queue exists; add it to ``missing`` if it does not.

        Raises:
            OSError: The broker cannot be reached.
        """
        if name not in self._seen:
            self._seen.add(name)
            if queue_counts(self._connection, [Queue(name)])[name] is None:
                self.missing.add(name)
        return name not in self.missing

    def close(self) -> None:
        """Close the connection."""
        with suppress(*self._connection.connection_errors, *self._connection.channel_errors):
            self._connection.release()
