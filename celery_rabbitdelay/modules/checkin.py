"""Check-in: what any AMQP client publishes with ``x-delay`` enters the levels. Pure.

A delay above the levels' capacity meditates first: it waits one capacity and is checked in again.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import amqp

from celery_rabbitdelay.exceptions import Refused
from celery_rabbitdelay.levels import headers as names
from celery_rabbitdelay.levels.delay import LATEST
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.envelope import CONTENT_TYPE
from celery_rabbitdelay.modules.forwarding import Outgoing, changed
from celery_rabbitdelay.publishing.message import capped, headers_of, shortened, task_id_of

__all__ = ["CheckIn"]

#: Headers by which RabbitMQ routes a message with further keys, past any check of its key
#: (https://www.rabbitmq.com/docs/sender-selected).
COPIES: Final = ("CC", "BCC")


_INTEGER: Final = re.compile("-?[0-9]+")


class CheckIn:
    """Checks messages in.

    Args:
        topology: The topology that they enter.
        allowed: Whether a message may go to an exchange (empty: the default one) with a key.
        now_ms: The time, in milliseconds since 1970.
    """

    def __init__(
        self,
        topology: Topology,
        allowed: Callable[[str, str], bool],
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._topology = topology
        self._meditated = topology.modules.meditated.name
        self._allowed = allowed
        self._now_ms = now_ms

    def receive(self, message: amqp.Message) -> Iterator[Outgoing]:
        """Say what becomes of a message.

        Raises:
            Refused: Its delay is none, or its destination is none or not allowed.
        """
        info: Any = message.delivery_info
        headers = headers_of(message)
        if info["exchange"] == self._meditated:
            # Its due time is the truth, and not the time that it has meditated: it may also have
            # waited for this module.
            due = headers.get(names.DUE)
            if not isinstance(due, int):
                raise Refused(f"it has meditated, but {names.DUE} is {shortened(due)}")
            left = due - self._now_ms()
            stripped = {n: v for n, v in headers.items() if n not in names.BROKER_HEADERS}
            word = headers.get(names.QUEUE) or DISTRIBUTION
            yield self._enter(left, word, changed(message, stripped))
            return
        if message.properties.get("content_type") == CONTENT_TYPE:
            raise Refused("it is an envelope, which clients may not check in")
        copies = [name for name in COPIES if name in headers]
        if copies:
            raise Refused(f"it has the header {copies[0]}, by which it could reach any queue")
        exchange, routing_key = headers.get(names.EXCHANGE) or "", info["routing_key"]
        self._check_destination(exchange, routing_key)
        delay = _milliseconds(headers.pop(names.X_DELAY, 0))
        headers = names.strip(headers)
        if not delay:
            yield Outgoing(exchange, routing_key, changed(message, headers))
            return
        due = self._now_ms() + delay
        if due > LATEST:
            raise Refused(
                f"{names.X_DELAY} is {shortened(delay)}, which is more than 64 bits can count"
            )
        prepared = _for_distribution(message, headers, due, exchange, routing_key)
        yield self._enter(delay, DISTRIBUTION, prepared)

    def _enter(self, left_ms: int, word: str, message: amqp.Message) -> Outgoing:
        address = self._topology.address(left_ms, word, task_id_of(message))
        return Outgoing(*address, message)

    def _check_destination(self, exchange: Any, routing_key: str) -> None:
        if not isinstance(exchange, str):
            raise Refused(f"{names.EXCHANGE} is {shortened(exchange)}, and not an exchange's name")
        if not exchange and not routing_key:
            raise Refused(f"it has no destination: no routing key, and no header {names.EXCHANGE}")
        if not self._allowed(exchange, routing_key):
            name = shortened(exchange or routing_key)
            where = f"the exchange {name}" if exchange else f"the queue {name}"
            raise Refused(f"check-in may not reach {where}: see rabbitdelay_checkin_allowed")


def _for_distribution(
    message: amqp.Message, headers: dict[str, Any], due: int, exchange: str, routing_key: str
) -> amqp.Message:
    """Return a message as distribution takes it: with all that it has to restore in headers."""
    priority, kept = capped(message.properties.get("priority"))
    own = {names.DUE: due, names.EXCHANGE: exchange, names.ROUTING_KEY: routing_key, **kept}
    expiration = message.properties.get("expiration")
    if expiration is not None:
        own[names.EXPIRATION] = expiration
    return changed(message, {**headers, **own}, priority=priority, expiration=None)


def _milliseconds(delay: Any) -> int:
    reason = f"{names.X_DELAY} is {shortened(delay)}, and not a number of milliseconds"
    if isinstance(delay, bool) or not isinstance(delay, int | float | str):
        raise Refused(reason)
    if isinstance(delay, str) and _INTEGER.fullmatch(delay) is None:
        # int() takes more: blanks, underscores, digits of any script.
        raise Refused(reason)
    try:
        number = math.ceil(delay) if isinstance(delay, float) else int(delay)
    except (ValueError, OverflowError) as error:
        raise Refused(reason) from error
    if number < 0:
        raise Refused(f"{names.X_DELAY} is {shortened(number)}, which is negative")
    return number
