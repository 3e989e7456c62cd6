"""Publishing that ends only once the broker has confirmed: one message, or a million.

Messages are written without waiting for the confirm of the one before, up to a window of them. Each
has its own outcome. What the broker refuses is sent again after a pause; what was in flight when a
connection was lost is sent again on the next one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

import amqp
from amqp.exceptions import FrameSyntaxError

from celery_rabbitdelay.exceptions import PublishError
from celery_rabbitdelay.publishing.connection import Line
from celery_rabbitdelay.publishing.message import PERSISTENT
from celery_rabbitdelay.publishing.posting import (
    BACKOFF,
    PATIENCE,
    RESENDS,
    TIMEOUT,
    Address,
    Patience,
    Posting,
)
from celery_rabbitdelay.publishing.publish_loop import Batch, Declaration
from celery_rabbitdelay.publishing.wire import Content

__all__ = ["Publisher"]


class Publisher(Line):
    """Publishes over one connection, and waits for the confirms. For one thread at a time.

    Args:
        connection: A kombu connection to RabbitMQ by py-amqp; opened when it is first needed, and
            again whenever it was lost.
    """

    def publish(
        self,
        message: amqp.Message,
        address: Address,
        *,
        timeout: float = TIMEOUT,
        resends: int | None = RESENDS,
        backoff: tuple[float, float, float] = BACKOFF,
        declare: Declaration | None = None,
        redeclare: Declaration | None = None,
    ) -> None:
        """Publish a message and return once the broker has it on disk.

        A lost connection is opened again and the message sent again; the broker may then have it
        twice. After an error, regard it as not sent: after a timeout or a lost connection it may
        have been taken all the same.

        Args:
            message: The message with its properties; sent persistent and mandatory.
            address: Returns the exchange and the routing key; asked at each attempt.
            timeout: Seconds for everything, from connecting over resends to the confirm.
            resends: How often the message is sent again after the broker has refused it, or the
                connection was lost; None for as often as the time allows.
            backoff: Seconds before the first resend, the step by which they grow, their maximum.
            declare: Called with each new connection, and at least once, to declare what is missing.
            redeclare: Called once if no queue takes the message or its exchange does not exist;
                it is then sent once more.

        Raises:
            MessageNacked: The broker refused the message, also each time it was sent again.
            MessageReturned: No queue takes it, or the exchange does not exist.
            DeclarationRefused: The broker refused what ``declare`` declares.
            ConfirmTimeout: No confirm within ``timeout``.
            ConnectionBlocked: The broker blocked the connection for all of that time.
            ConnectionLost: The connection could not be opened or broke, also at each resend.
            PublishError: AMQP has no way to write one of the message's headers or properties.
        """
        message.properties["delivery_mode"] = PERSISTENT
        try:
            content = Content.of(message)
        except (FrameSyntaxError, struct.error) as unwritable:
            raise PublishError(*address(), f"cannot be written in AMQP: {unwritable}") from (
                unwritable
            )
        posting = Posting(content, address)
        patience = Patience(timeout, resends, backoff)
        self.publish_all([posting], patience, declare=declare, redeclare=redeclare)
        if posting.error is not None:
            raise posting.error

    def publish_all(
        self,
        postings: Iterable[Posting],
        patience: Patience = PATIENCE,
        *,
        declare: Declaration | None = None,
        redeclare: Declaration | None = None,
        done: Callable[[Posting], None] | None = None,
    ) -> None:
        """Publish messages, many of them in flight, and return once each has its outcome.

        Args:
            postings: The messages. No more of them are taken than may be in flight.
            patience: How long and how often each is tried.
            declare: Called with each new connection, and at least once, to declare what is missing.
            redeclare: Called if no queue takes a message or an exchange does not exist; the
                message is then sent once more.
            done: Called with each message that is confirmed, or has an error.

        What ``postings`` or ``done`` raise is raised as it is; what is in flight then has no
        outcome, and may have been taken by the broker. The time that ``postings`` takes counts for
        no message.

        Raises:
            PublishError: Nothing can be published any more. All messages that were taken and have
                no outcome have this error; further ones were not taken.
        """
        Batch(self, iter(postings), patience, declare, redeclare, done).run()
