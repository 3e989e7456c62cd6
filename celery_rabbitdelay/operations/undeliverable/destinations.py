"""Where an application lets undeliverable messages go, whatever their headers say."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Final

import amqp
from amqp.exceptions import ResourceLocked
from kombu import Connection, Queue

from celery_rabbitdelay.app.application import Celery
from celery_rabbitdelay.app.destinations import (
    checkin_destinations,
    configured_destinations,
    configured_queues,
)
from celery_rabbitdelay.exceptions import InvalidDelay, InvalidDestination, UnprocessableMessage
from celery_rabbitdelay.levels.delay import Delay, milliseconds
from celery_rabbitdelay.levels.entities import CHECK_IN
from celery_rabbitdelay.levels.headers import shortened
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.allowed import AllowedDestinations
from celery_rabbitdelay.operations.moving.destinations import Destinations
from celery_rabbitdelay.operations.undeliverable.redriving import MAX_ATTEMPTS, Redriving
from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.publishing.destination import may_refuse
from celery_rabbitdelay.publishing.message import MAX_SHORTSTR_BYTES

#: Names of queues and exchanges for replies. They get no message unless the application has a queue
#: or an exchange of such a name.
NEVER_UNLESS_OWN: Final = "reply.*"


def redriving_for(
    app: Celery,
    *,
    delay: Delay | None = None,
    to: str | None = None,
    allow: Iterable[str] = (),
    max_attempts: int = MAX_ATTEMPTS,
    ensure: Callable[[str], None] = lambda queue: None,
    vouches: bool = False,
) -> Redriving:
    """Return what decides how the undeliverable messages of an application are redriven.

    Args:
        app: The application.
        delay: Seconds, or a timedelta, that each message waits at least. None: not longer than
            until it is due.
        to: The queue that gets all messages instead of their own.
        allow: Names of further queues and exchanges that messages may go to; ``*`` and ``?`` stand
            for any characters and for one.
        max_attempts: How often a message may be redriven, this time included.
        ensure: Binds a queue to the levels; see :func:`.bound_by`.
        vouches: Whether messages without a valid signature are redriven, and signed.

    Raises:
        InvalidDestination: Nothing is published to the queue ``to``.
        InvalidDelay: The delay is negative or has no meaning.
        DelayTooLong: It is above the layout's capacity, and workers do not serve check-in.
    """
    settings = app.rabbitdelay.settings
    topology: Topology = settings.topology
    delay_ms = None if delay is None else milliseconds(delay)
    if delay_ms is not None and delay_ms < 0:
        raise InvalidDelay(delay, "must not be negative")
    if delay_ms is not None and CHECK_IN not in settings.modules:
        topology.layout.check_capacity(delay_ms)
    queues = configured_queues(app)
    allow = tuple(allow)
    allowed = redrive_destinations(app, allow)
    checkin = checkin_destinations(app)
    if to is not None:
        _check_name(to, allowed)
    return Redriving(
        topology,
        allowed,
        checkin_allowed=replace(checkin, patterns=(*checkin.patterns, *allow)),
        modules=settings.modules,
        refuses=cache(
            lambda name: may_refuse(queues.get(name) or Queue(name), settings.may_refuse)
        ),
        delay_ms=delay_ms,
        to=to,
        max_attempts=max_attempts,
        ensure=ensure,
        signing_keys=settings.signing_keys,
        vouches=vouches or not settings.signing_required,
        bounds=settings.bounds,
    )


def redrive_destinations(app: Celery, allow: Iterable[str] = ()) -> AllowedDestinations:
    """Return where undeliverable messages may go.

    These are the queues of ``task_queues``, ``task_routes`` and the tasks, with their exchanges,
    and what ``rabbitdelay_checkin_allowed`` names. Never the queues and exchanges of the levels, of
    the broker and of Celery's remote control and events, whoever allows them.

    Args:
        app: The application.
        allow: Patterns for the names of further queues and exchanges.
    """
    named = configured_destinations(app)
    names = named.queues | named.exchanges
    has_own = any(name.startswith(NEVER_UNLESS_OWN.rstrip("*")) for name in names)
    return replace(
        named,
        patterns=(*named.patterns, *allow),
        never_patterns=(*named.never_patterns, *(() if has_own else (NEVER_UNLESS_OWN,))),
    )


def check_exists(connection: Connection, queue: str) -> None:
    """Check that a queue exists before messages are redirected to it.

    Raises:
        InvalidDestination: It does not.
    """
    # If it is an exclusive queue of another connection, it exists.
    with suppress(ResourceLocked):
        if queue_counts(connection, [Queue(queue)])[queue] is None:
            raise InvalidDestination(queue, "does not exist: declare it first")


def bound_by(destinations: Destinations) -> Callable[[str], None]:
    """Return what binds a queue to the levels before a message is redriven to it.

    Where the configuration does not name a queue, it is reached by its binding alone.

    Args:
        destinations: Binds it.
    """

    def ensure(queue: str) -> None:
        try:
            destinations.ensure(queue)
        except (OSError, amqp.AMQPError) as error:
            reason = f"the queue {shortened(queue)} cannot be bound to the levels: {error}"
            raise UnprocessableMessage(reason) from error

    return ensure


def _check_name(queue: str, allowed: AllowedDestinations) -> None:
    size = len(queue.encode(errors="surrogatepass"))
    if not 0 < size <= MAX_SHORTSTR_BYTES:
        raise InvalidDestination(queue, f"has no name of 1 to {MAX_SHORTSTR_BYTES} bytes")
    if allowed.forbids(queue):
        raise InvalidDestination(
            queue, "belongs to the levels, to the broker or to Celery: name one of your own"
        )
