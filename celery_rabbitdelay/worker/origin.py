"""Where a retry of a delayed task goes: what its message says is believed within the reach only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from celery.utils.log import get_logger
from kombu import Message

from celery_rabbitdelay.app.destinations import distribution_reach
from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.levels.headers import DelayHeaders
from celery_rabbitdelay.worker.celery_internals import name_of_queue

logger = get_logger(__name__)

#: Takes a message, what its headers say, and the exchange and the routing key that they name;
#: returns those that a retry of its task goes to.
Origin: TypeAlias = Callable[[Message, DelayHeaders, Any, Any], tuple[str, str]]


def as_it_says(
    message: Message, headers: DelayHeaders, exchange: Any, routing_key: Any
) -> tuple[str, str]:
    """Return what the headers name."""
    return exchange, routing_key


class Origins:
    """Checks the exchange and the routing key that a message from the levels claims to have had.

    Celery publishes a retry of a task to where the task came from, and anybody who can put a
    message into the levels can write there what he likes. So a worker believes what distribution
    would publish to, and with a key, what is signed. For any other message, the origin is the queue
    that it was consumed from.

    Args:
        consumer: The worker's consumer.
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._reach = distribution_reach(consumer.app)
        settings = consumer.app.rabbitdelay.settings
        self._signing_keys = settings.signing_keys if settings.signing_required else None

    def checked(
        self, message: Message, headers: DelayHeaders, exchange: Any, routing_key: Any
    ) -> tuple[str, str]:
        """Return where a retry goes: an :data:`Origin`."""
        queue = name_of_queue(self._consumer, message) or ""
        if (exchange, routing_key) == ("", queue):
            return exchange, routing_key
        if not self._is_signed(message, headers):
            why = "is not signed: see rabbitdelay_signing_key"
        elif not self._reaches(exchange, routing_key):
            why = "may not be published there: see rabbitdelay_distribution_allowed"
        else:
            return exchange, routing_key
        logger.warning(
            "Task %s claims the origin %r, and its retries go to the queue %r: it %s.",
            message.headers.get("id"),
            (exchange, routing_key),
            queue,
            why,
        )
        return "", queue

    def _is_signed(self, message: Message, headers: DelayHeaders) -> bool:
        keys = self._signing_keys
        return keys is None or keys.verifies(b"", message.properties, headers)

    def _reaches(self, exchange: object, routing_key: object) -> bool:
        if not isinstance(exchange, str) or not isinstance(routing_key, str):
            return False
        try:
            return self._reach.names(exchange, routing_key)
        except UnprocessableMessage:
            return False
