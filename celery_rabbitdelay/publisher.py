"""Publishing that returns only once the broker has confirmed."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeAlias

import amqp
from amqp.exceptions import (
    AccessRefused,
    FrameSyntaxError,
    NotAllowed,
    NotFound,
)
from kombu import Connection

from celery_rabbitdelay.confirms import ConfirmChannel
from celery_rabbitdelay.exceptions import (
    ConfirmTimeout,
    ConnectionBlocked,
    ConnectionLost,
    DeclarationRefused,
    MessageNacked,
    MessageReturned,
    PublishError,
)
from celery_rabbitdelay.parcel import PERSISTENT

__all__ = ["Publisher"]

#: How often a message is sent again after the connection was lost, unless the caller says.
RESENDS: Final = 3

#: Seconds before the first resend, and how many more before each further one, up to the maximum.
BACKOFF: Final = (0.0, 0.2, 1.0)

#: Seconds that opening a connection may take where the connection sets no bound of its own.
CONNECT_TIMEOUT: Final = 5.0

#: Seconds that closing a channel may take; nothing depends on it any more.
CLOSE_TIMEOUT: Final = 2.0

#: Returns the exchange and the routing key of a message.
Address: TypeAlias = Callable[[], tuple[str, str]]


class Publisher:
    """Publishes over one connection, and waits for the broker's confirm. For one thread at a time.

    Args:
        connection: A kombu connection to RabbitMQ by py-amqp; opened when it is first needed, and
            again whenever it was lost.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._confirming: ConfirmChannel | None = None

    def publish(
        self,
        message: amqp.Message,
        address: Address,
        *,
        timeout: float = 30.0,
        resends: int | None = RESENDS,
        backoff: tuple[float, float, float] = BACKOFF,
        prepare: Callable[[Connection], None] | None = None,
    ) -> None:
        """Publish a message and return once the broker has it on disk.

        A lost connection is opened again and the message sent again; the broker may then have it
        twice. After an error, regard it as not sent: after a timeout or a lost connection it may
        have been taken all the same.

        Args:
            message: The message with its properties; sent persistent and mandatory.
            address: Returns the exchange and the routing key. Asked at each attempt, since those
                of a delayed message depend on the time that is left.
            timeout: Seconds for everything, from connecting over resends to the confirm.
            resends: How often the message is sent again after the connection was lost; None for
                as often as the time allows.
            backoff: Seconds before the first resend, the step by which they grow, their maximum.
            prepare: Called with the connection before each attempt, to declare what is missing.

        Raises:
            MessageNacked: The broker refused the message.
            MessageReturned: No queue takes it, or the exchange does not exist.
            DeclarationRefused: The broker refused what ``prepare`` declares.
            ConfirmTimeout: No confirm within ``timeout``.
            ConnectionBlocked: The broker blocked the connection for all of that time.
            ConnectionLost: The connection could not be opened or broke, also at each resend.
            PublishError: AMQP has no way to write one of the message's headers or properties.
        """
        message.properties["delivery_mode"] = PERSISTENT
        deadline = time.monotonic() + timeout
        first_address = address()
        attempts = 0
        pause, step, longest = backoff
        while True:
            attempts += 1
            try:
                return self._attempt(message, address, prepare, deadline)
            except PublishError:
                raise
            except NotAllowed as refused:
                # The virtual host does not exist, or is not the user's: so it is the next time.
                self.discard()
                raise self._lost(first_address, attempts, refused) from refused
            except self._connection_errors as lost:
                self.discard()
                self.connection.maybe_switch_next()
                exhausted = resends is not None and attempts > resends
                if exhausted or time.monotonic() + pause >= deadline:
                    raise self._lost(first_address, attempts, lost) from lost
            except BaseException:
                # Also an interrupt or a time limit: nobody knows what is on its way, and the next
                # message must not be taken for this one.
                self.discard()
                raise
            time.sleep(pause)
            pause = min(pause + step, longest)

    def _lost(
        self, address: tuple[str, str], attempts: int, cause: BaseException
    ) -> ConnectionLost:
        broker = self.connection.as_uri()
        return ConnectionLost(*address, f"no connection to {broker}, attempt {attempts}: {cause!r}")

    @property
    def _connection_errors(self) -> tuple[type[BaseException], ...]:
        errors: tuple[type[BaseException], ...] = self.connection.connection_errors
        return errors

    def _attempt(
        self,
        message: amqp.Message,
        address: Address,
        prepare: Callable[[Connection], None] | None,
        deadline: float,
    ) -> None:
        try:
            confirming = self._open(deadline)
        except AccessRefused as refused:
            raise self._lost(address(), 1, refused) from refused
        if prepare is not None:
            try:
                with confirming.answers_within(_remaining(deadline)):
                    prepare(self.connection)
            except self.connection.channel_errors as refused:
                raise DeclarationRefused(*address(), str(refused)) from refused
        if not confirming.drain(lambda: confirming.blocked is None, deadline):
            raise self._gave_up(confirming, address())
        self._send(confirming, message, address(), deadline)

    def _send(
        self,
        confirming: ConfirmChannel,
        message: amqp.Message,
        address: tuple[str, str],
        deadline: float,
    ) -> None:
        try:
            sent = confirming.send(message, *address, _remaining(deadline))
            if not confirming.drain(lambda: sent.settled, deadline):
                raise self._gave_up(confirming, address)
        except (FrameSyntaxError, struct.error) as unwritable:
            self.discard()
            raise PublishError(*address, f"cannot be written in AMQP: {unwritable}") from unwritable
        except self.connection.channel_errors as closed:
            # py-amqp opens a channel that the broker closed again, but not in confirm mode.
            self.close_channel()
            error = MessageReturned if isinstance(closed, NotFound) else MessageNacked
            raise error(*address, str(closed)) from closed
        if sent.error is not None:
            raise sent.error

    def _open(self, deadline: float) -> ConfirmChannel:
        if self._confirming is None or not self._confirming.open:
            own_timeout = self.connection.connect_timeout
            self.connection.connect_timeout = min(
                own_timeout or CONNECT_TIMEOUT, _remaining(deadline)
            )
            try:
                # Each broker of a fail-over list once: nothing was sent yet, so that this is no
                # resend. Left to itself, kombu waits two seconds and tries again.
                self.connection.ensure_connection(
                    max_retries=max(len(self.connection.alt) - 1, 0),
                    timeout=_remaining(deadline),  # type: ignore[arg-type]
                    reraise_as_library_errors=False,
                )
                self._confirming = ConfirmChannel(self.connection)
            finally:
                self.connection.connect_timeout = own_timeout
        return self._confirming

    def _gave_up(self, confirming: ConfirmChannel, address: tuple[str, str]) -> PublishError:
        # What the broker says about this message later must not be taken for the next one's.
        self.discard()
        if confirming.blocked is not None:
            return ConnectionBlocked(*address, confirming.blocked)
        return ConfirmTimeout(*address, "the broker did not confirm in time")

    def discard(self) -> None:
        """Drop the connection without a word to the broker; the next publish opens a new one."""
        self._confirming = None
        self.connection.collect(socket_timeout=0.1)

    def close_channel(self) -> None:
        """Close the publisher's channel; the connection stays open for others."""
        confirming, self._confirming = self._confirming, None
        if confirming is not None:
            # What was published is confirmed; a close that fails changes nothing about that.
            with suppress(*self._connection_errors, *self.connection.channel_errors):
                confirming.close(CLOSE_TIMEOUT)

    def close(self) -> None:
        """Close the connection in order; the publisher can be used no more."""
        self.close_channel()
        self.connection.release()


def _remaining(deadline: float) -> float:
    """Seconds until the deadline, but enough for one look at the socket."""
    return max(deadline - time.monotonic(), 0.001)
