"""A message to publish, its outcome, and how hard it is tried."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import amqp
from amqp.exceptions import FrameSyntaxError
from kombu import Connection

from celery_rabbitdelay.exceptions import PublishError
from celery_rabbitdelay.publishing.message import PERSISTENT
from celery_rabbitdelay.publishing.wire import Content

#: Returns the exchange and the routing key of a message.
Address: TypeAlias = Callable[[], tuple[str, str]]

#: Called with a connection, to declare what is missing.
Declaration: TypeAlias = Callable[[Connection], None]


@dataclass(slots=True, eq=False, repr=False)
class Publication:
    """A message to publish, and its outcome.

    Args:
        content: The message as bytes; it should be persistent.
        address: Returns the exchange and the routing key. It is called for each attempt, because
            those of a delayed message depend on the time that is left.
        context: The caller's context, for example row numbers.
        declare: Called before each attempt of a message that has a queue of its own, unlike others
            of the same loop, to declare what is missing.

    Attributes:
        exchange: The exchange of the last attempt.
        routing_key: The routing key of the last attempt.
        error: Why the broker has not confirmed the message; None if it has. If its ``declare`` has
            raised, that error, which may be another one of this package.
        resent: How often the message was sent again.
        deadline: When to give up, on the clock of :func:`time.monotonic`. The publish loop sets it
            for all attempts together, and a module for each of them.
        single_attempt: Whether its source publishes something else in its place if the broker nacks
            it, or does not answer in time. It is not sent again then, and others go on.
        redeclared: Whether what the message needs was declared again because no queue took it.
        unanswered: Whether it was written at least once without any answer: the connection was
            lost, or time was up.
        suspected: Whether it was in flight when the broker closed the channel for another message;
            the broker may have taken those before that one.
    """

    content: Content
    address: Address
    context: Any = None
    declare: Declaration | None = None
    exchange: str = ""
    routing_key: str = ""
    error: PublishError | None = None
    resent: int = 0
    deadline: float = math.inf
    single_attempt: bool = False
    redeclared: bool = False
    unanswered: bool = False
    suspected: bool = False

    @classmethod
    def of(cls, message: amqp.Message, address: Address, context: Any = None) -> Publication:
        """Encode a message, and make it persistent.

        Raises:
            PublishError: AMQP cannot encode one of the message's headers or properties.
        """
        message.properties["delivery_mode"] = PERSISTENT
        try:
            content = Content.of(message)
        except (FrameSyntaxError, struct.error) as error:
            raise PublishError(*address(), f"cannot be written in AMQP: {error}") from error
        return cls(content, address, context)

    @property
    def may_have_arrived(self) -> bool:
        """Whether the broker may have the message although it did not confirm."""
        return self.unanswered or self.suspected


#: Default timeout of one message in seconds, from connecting to the confirm.
TIMEOUT: Final = 30.0

#: Default maximum of resends: none, so the timeout alone ends them.
RESENDS: Final = None

#: Default seconds before the first resend, the step by which they grow, and their maximum.
BACKOFF: Final = (0.0, 0.2, 1.0)

#: Default maximum of messages in flight.
WINDOW: Final = 1000

#: Default part of a pause that is random, so that the producers that lost the same node do not all
#: come back at the same instant.
JITTER: Final = 0.25

#: Minimum seconds before the second resend and later ones, whatever the backoff: a port that
#: refuses connections answers thousands of times a second.
MIN_PAUSE: Final = 0.01


class PublishPolicy(NamedTuple):
    """How long, and how often, publishing is tried.

    Attributes:
        timeout: Seconds for everything about one message, from connecting through resends to the
            confirm.
        resends: Maximum resends of one message after a nack, and maximum consecutive lost
            connections. None: no limit but the timeout.
        backoff: Seconds before the first resend, the step by which they grow, and their maximum.
        window: How many messages may be in flight.
        jitter: The part of a pause, from 0 to 1, that is random: it may be shorter by so much.
        reconnects: Maximum further attempts to connect after one that failed; all of them together
            then take no longer than the connection's ``connect_timeout``. None: no limit but
            ``resends`` and the timeout.
    """

    timeout: float = TIMEOUT
    resends: int | None = RESENDS
    backoff: tuple[float, float, float] = BACKOFF
    window: int = WINDOW
    jitter: float = JITTER
    reconnects: int | None = None

    def pause(self, attempt: int) -> float:
        """Return the seconds to wait before a resend, counted from 1."""
        first, step, longest = self.backoff
        seconds = first if attempt == 1 else min(first + step * (attempt - 1), longest)
        seconds *= 1 - self.jitter * random.random()  # noqa: S311 - jitter is no secret
        return seconds if attempt == 1 else max(seconds, MIN_PAUSE)

    def is_over(self, attempt: int) -> bool:
        """Return whether a resend, counted from 1, is one too many."""
        return self.resends is not None and attempt > self.resends


DEFAULT_POLICY: Final = PublishPolicy()
