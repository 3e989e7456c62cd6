"""A connection that messages are published over: opened when needed, dropped when in doubt."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Final

from kombu import Connection

from celery_rabbitdelay.publishing.confirm_channel import ConfirmChannel

__all__ = ["Line", "remaining"]

#: Seconds that opening a connection may take where the connection sets no bound of its own.
CONNECT_TIMEOUT: Final = 5.0

#: Seconds that closing a channel may take; nothing depends on it any more.
CLOSE_TIMEOUT: Final = 2.0


class Line:
    """One connection with one channel in confirm mode. For one thread at a time.

    Args:
        connection: A kombu connection to RabbitMQ by py-amqp; opened when it is first needed, and
            again whenever it was lost.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._confirming: ConfirmChannel | None = None

    @property
    def connection_errors(self) -> tuple[type[BaseException], ...]:
        """The errors that mean that the connection is lost."""
        errors: tuple[type[BaseException], ...] = self.connection.connection_errors
        return errors

    @property
    def channel_errors(self) -> tuple[type[BaseException], ...]:
        """The errors with which the broker closes a channel."""
        errors: tuple[type[BaseException], ...] = self.connection.channel_errors
        return errors

    def open(self, deadline: float) -> ConfirmChannel:
        """Return a channel that can be used, on a connection that is opened if need be."""
        if self._confirming is None or not self._confirming.open:
            own_timeout = self.connection.connect_timeout
            self.connection.connect_timeout = min(
                own_timeout or CONNECT_TIMEOUT, remaining(deadline)
            )
            try:
                # Each broker of a fail-over list once: nothing was sent yet, so that this is no
                # resend. Left to itself, kombu waits two seconds and tries again.
                self.connection.ensure_connection(
                    max_retries=max(len(self.connection.alt) - 1, 0),
                    timeout=remaining(deadline),  # type: ignore[arg-type]
                    reraise_as_library_errors=False,
                )
                self._confirming = ConfirmChannel(self.connection)
            finally:
                self.connection.connect_timeout = own_timeout
        return self._confirming

    def discard(self) -> None:
        """Drop the connection without a word to the broker; `open` makes a new one."""
        self._confirming = None
        self.connection.collect(socket_timeout=0.1)

    def close_channel(self) -> None:
        """Close the channel; the connection stays open for others."""
        confirming, self._confirming = self._confirming, None
        if confirming is not None:
            # What was published is confirmed; a close that fails changes nothing about that.
            with suppress(*self.connection_errors, *self.channel_errors):
                confirming.close(CLOSE_TIMEOUT)

    def close(self) -> None:
        """Close the connection in order; it can be used no more."""
        self.close_channel()
        self.connection.release()


def remaining(deadline: float) -> float:
    """Seconds until the deadline, but enough for one look at the socket."""
    return max(deadline - time.monotonic(), 0.001)
