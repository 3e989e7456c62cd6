"""Takes messages out of ``undeliverable``: publishes them into the levels, or deletes them.

A message is acknowledged only after the broker has confirmed it in the levels; see :class:`.Mover`.
:func:`redriving_for` says where an application lets them go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final, TypeAlias

import amqp
from kombu import Queue

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app import destinations
from celery_rabbitdelay.app.delays import DelayingCelery
from celery_rabbitdelay.levels.delay import Delay, milliseconds
from celery_rabbitdelay.levels.topology import CHECK_IN, Topology
from celery_rabbitdelay.modules.allowed import AllowedDestinations
from celery_rabbitdelay.modules.forwarding import Outgoing
from celery_rabbitdelay.operations.moving.mover import Mover, Place, Stay
from celery_rabbitdelay.operations.moving.source import ready_in
from celery_rabbitdelay.operations.undeliverable import messages as undeliverable
from celery_rabbitdelay.operations.undeliverable.redriving import MAX_ATTEMPTS, Redriving
from celery_rabbitdelay.publishing.destination import may_refuse
from celery_rabbitdelay.publishing.message import MAX_SHORTSTR_BYTES

#: Names of queues and exchanges for replies. They get no message unless the application has a queue
#: or an exchange of such a name.
NEVER_UNLESS_OWN: Final = "reply.*"


def redriving_for(
    app: DelayingCelery,
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
        ensure: Binds a queue to the levels; see :meth:`.Destinations.ensure`.
        vouches: Whether messages without a valid signature are redriven, and signed.

    Raises:
        InvalidDestination: Nothing is published to the queue ``to``.
        InvalidDelay: The delay has no meaning.
        DelayTooLong: It is above the layout's capacity, and workers do not serve check-in.
    """
    settings = app.rabbitdelay.settings
    connection = app.connection_for_write()
    topology: Topology = settings.topology
    delay_ms = None if delay is None else milliseconds(delay)
    if delay_ms is not None and CHECK_IN not in settings.modules:
        topology.layout.check_capacity(delay_ms)
    queues = destinations.configured_queues(app)
    allow = tuple(allow)
    allowed = redrive_destinations(app, allow)
    checkin = destinations.checkin_destinations(app)
    if to is not None:
        _check_name(to, allowed)
    return Redriving(
        topology,
        allowed,
        checkin_allowed=replace(checkin, patterns=(*checkin.patterns, *allow)),
        trusts_clients=settings.checkin_trusted,
        modules=settings.modules,
        refuses=cache(
            lambda name: may_refuse(
                queues.get(name) or Queue(name), settings.may_refuse, connection
            )
        ),
        delay_ms=delay_ms,
        to=to,
        max_attempts=max_attempts,
        ensure=ensure,
        signing_keys=settings.signing_keys,
        vouches=vouches or not settings.signing_required,
    )


def redrive_destinations(app: DelayingCelery, allow: Iterable[str] = ()) -> AllowedDestinations:
    """Return where undeliverable messages may go.

    These are the queues of ``task_queues``, ``task_routes`` and the tasks, with their exchanges,
    and what ``rabbitdelay_checkin_allowed`` names. Never the queues and exchanges of the levels, of
    the broker and of Celery's remote control and events, whoever allows them.

    Args:
        app: The application.
        allow: Patterns for the names of further queues and exchanges.
    """
    named = destinations.configured_destinations(app)
    names = named.queues | named.exchanges
    has_own = any(name.startswith(NEVER_UNLESS_OWN.rstrip("*")) for name in names)
    return replace(
        named,
        patterns=(*named.patterns, *allow),
        never_patterns=(*named.never_patterns, *(() if has_own else (NEVER_UNLESS_OWN,))),
    )


def _check_name(queue: str, allowed: AllowedDestinations) -> None:
    size = len(queue.encode(errors="surrogatepass"))
    if not 0 < size <= MAX_SHORTSTR_BYTES:
        raise exceptions.InvalidDestination(
            queue, f"has no name of 1 to {MAX_SHORTSTR_BYTES} bytes"
        )
    if allowed.forbids(queue):
        raise exceptions.InvalidDestination(
            queue, "belongs to the levels, to the broker or to Celery: name one of your own"
        )


@dataclass
class RemovalReport:
    """The result of a removal.

    Attributes:
        present: The number of messages at the start.
        examined: How many of them were read.
        matched: How many of the read messages were chosen.
        removed: How many messages have left the queue: published again and confirmed, or deleted.
            In a dry run, how many would have left it.
        left: How many of the chosen messages stay, by the reason.
        uncertain: How many messages may be published and still be in the queue, because a
            connection was lost; each of them may come twice.
        stopped: The reason for ending before the last message; None at a regular end. A text that
            is set meanwhile ends the removal before the next message.
        seconds: The duration.
    """

    present: int = 0
    examined: int = 0
    matched: int = 0
    removed: int = 0
    left: Counter[str] = field(default_factory=Counter)
    uncertain: int = 0
    stopped: str | None = None
    seconds: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether all chosen messages have left the queue, or would have left it."""
        return self.stopped is None and not self.left


#: Returns whether a message is chosen; see :class:`.UndeliverableFilter`.
Matches: TypeAlias = Callable[[undeliverable.UndeliverableMessage], bool]


def redrive(
    place: Place,
    redriving: Redriving | None,
    matches: Matches = lambda message: True,
    *,
    report: RemovalReport | None = None,
    **options: Any,
) -> RemovalReport:
    """Publish undeliverable messages into the levels, or delete them; they leave ``undeliverable``.

    Only as many messages as are in the queue at the start are read, so that a message that comes
    back at once is not redriven twice. Messages that another consumer holds are left out.

    Args:
        place: The topology whose messages are redriven; other connections to its broker are opened
            to read and to publish.
        redriving: Converts each message; None to delete it.
        matches: Returns whether a message is chosen.
        report: The report to fill; None for a new one.
        **options: Those of :class:`.Mover`: ``timeout``, ``limit``, ``rate`` (an envelope counts as
            one message), ``dry_run``, ``declare`` and ``redeclare``.

    Returns:
        The report. If the broker goes away after the start, the report says so.

    Raises:
        amqp.exceptions.NotFound: The queue does not exist.
        OSError: The broker cannot be reached.
    """
    report = report or RemovalReport()
    queue = place.topology.module_queues.undeliverable.name
    with place.connection.clone(heartbeat=0) as own:
        report.present = ready_in(own, queue)

    def convert(message: amqp.Message, _: str) -> Outgoing | None:
        report.removed = mover.result.moved
        chosen = matches(undeliverable.copy_of(message, place.topology))
        if report.stopped is not None:
            mover.stopping.set()
            raise Stay
        report.examined += 1
        if not chosen:
            raise Stay
        report.matched += 1
        try:
            return None if redriving is None else redriving.redriven(message)
        except exceptions.UnprocessableMessage as stays:
            raise Stay(stays.reason) from stays

    mover = Mover(place.connection, [queue], place, convert, is_once=True, **options)
    try:
        mover.move()
    except exceptions.PublishError as error:
        report.stopped = f"nothing more can be published: {error}"
    except (OSError, amqp.AMQPError) as error:
        report.stopped = f"the messages cannot be read further: {error}"
    finally:
        result = mover.result
        report.removed, report.left, report.uncertain = result.moved, result.left, result.copies
        report.seconds = result.seconds
    return report
