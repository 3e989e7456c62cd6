"""A connection to publish over: opened when needed, dropped when in doubt."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Final

from kombu import Connection

from celery_rabbitdelay.publishing.confirm_channel import ConfirmChannel, OnSettled
from celery_rabbitdelay.publishing.kombu_internals import drop_connection, wait_without_limit
from celery_rabbitdelay.publishing.wire import Wire

#: Seconds that opening a connection may take if the connection sets no limit of its own.
CONNECT_TIMEOUT: Final = 5.0

#: Seconds that closing a channel may take; all its messages are settled before.
CLOSE_TIMEOUT: Final = 2.0


class PublishingConnection:
    """One connection with one channel in confirm mode. For one thread at a time.

    Args:
        connection: A kombu connection to RabbitMQ by py-amqp; opened when it is first needed, and
            again whenever it was lost.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._channel: ConfirmChannel | None = None

    def channel(self, deadline: float, on_settled: OnSettled) -> ConfirmChannel:
        """Return a channel that can be used, and open the connection if needed.

        Args:
            deadline: When to give up, on the clock of :func:`time.monotonic`. Each wait for a host
                ends before that; a host that answers each step of connecting late may exceed it.
            on_settled: What the channel calls with each publication that is settled.
        """
        if self._channel is not None and self._channel.open:
            self._channel.unconfirmed.on_settled = on_settled
            return self._channel
        self._connect(deadline)
        with Wire(self.connection).all_answers_within(remaining(deadline)):
            self._channel = ConfirmChannel(self.connection, on_settled)
        return self._channel

    def _connect(self, deadline: float) -> None:
        """Try each broker of a fail-over list once; that does not count as a resend."""
        own_timeout = self.connection.connect_timeout
        try:
            for hosts_left in range(max(len(self.connection.alt), 1), 0, -1):
                # A host that does not answer leaves time for the others. To switch to the next one
                # resets kombu's timeout.
                share = remaining(deadline) / hosts_left
                self.connection.connect_timeout = min(own_timeout or CONNECT_TIMEOUT, share)
                try:
                    # Left to itself, kombu waits two seconds and tries again.
                    self.connection.ensure_connection(
                        max_retries=0, reraise_as_library_errors=False
                    )
                except self.connection.recoverable_connection_errors:
                    if hosts_left == 1:
                        raise
                    self.connection.maybe_switch_next()
                else:
                    # What is left of the limit for connecting is none for answers.
                    wait_without_limit(self.connection)
                    return
        finally:
            self.connection.connect_timeout = own_timeout

    def discard(self) -> None:
        """Drop the connection without AMQP's handshake; :meth:`channel` opens a new one."""
        self._channel = None
        drop_connection(self.connection)

    def close_channel(self) -> None:
        """Close the channel; the connection stays open for others."""
        channel, self._channel = self._channel, None
        if channel is not None:
            # Everything that was published is settled; a close that fails changes nothing.
            with suppress(*self.connection.connection_errors, *self.connection.channel_errors):
                channel.close(CLOSE_TIMEOUT)

    def close(self) -> None:
        """Close the connection in order; it cannot be used any more."""
        self.close_channel()
        self.connection.release()


def remaining(deadline: float) -> float:
    """Return the seconds until a deadline, at least 1 ms, for one read."""
    return max(deadline - time.monotonic(), 0.001)
