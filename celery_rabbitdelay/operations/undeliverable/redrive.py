"""Redrives messages: publishes them into the levels, and removes them from ``undeliverable``.

A message is acknowledged only after the broker has confirmed it in the levels. If the process dies
in between, the broker has the message twice, but never loses it. The messages that stay keep their
order. :func:`redriving_for` says where an application lets them go.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from typing import Final, TypeAlias

import amqp
from amqp.exceptions import ResourceLocked
from kombu import Connection, Queue

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app import destinations
from celery_rabbitdelay.app.application import Celery
from celery_rabbitdelay.levels.delay import Delay, milliseconds
from celery_rabbitdelay.levels.entities import CHECK_IN
from celery_rabbitdelay.levels.headers import shortened
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.allowed import AllowedDestinations
from celery_rabbitdelay.modules.forwarding import encoded
from celery_rabbitdelay.operations.undeliverable import messages as undeliverable
from celery_rabbitdelay.operations.undeliverable.reader import Reader
from celery_rabbitdelay.operations.undeliverable.redriving import MAX_ATTEMPTS, Redriving
from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.publishing.destination import may_refuse
from celery_rabbitdelay.publishing.message import MAX_SHORTSTR_BYTES
from celery_rabbitdelay.publishing.publication import (
    DEFAULT_POLICY,
    Declaration,
    Publication,
    PublishPolicy,
)
from celery_rabbitdelay.publishing.publisher import Publisher

logger = logging.getLogger(__name__)

#: The longest delay of a slow broker that a limited rate makes up for, in seconds.
MOST_BEHIND: Final = 1.0

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


def redrive_destinations(app: Celery, allow: Iterable[str] = ()) -> AllowedDestinations:
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


def check_exists(connection: Connection, queue: str) -> None:
    """Check that a queue exists before messages are redirected to it.

    Raises:
        InvalidDestination: It does not.
    """
    # If it is an exclusive queue of another connection, it exists.
    with suppress(ResourceLocked):
        if queue_counts(connection, [Queue(queue)])[queue] is None:
            raise exceptions.InvalidDestination(queue, "does not exist: declare it first")


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
        present: The number of messages at the start; None if the user may not ask.
        examined: How many of them were read.
        matched: How many of the read messages were chosen.
        removed: How many messages have left the queue: published again and confirmed, or deleted.
            In a dry run, how many would have left it.
        left: How many of the chosen messages stay, by the reason.
        uncertain: How many messages may be published and still be in the queue, because a
            connection was lost; each of them may come twice.
        stopped: The reason for ending before the last message; None at a regular end.
        seconds: The duration.
    """

    present: int | None = None
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

    def leave(self, reason: str) -> None:
        """Count a message that stays."""
        self.left[undeliverable.counted_as(reason, self.left)] += 1


#: Returns whether a message is chosen; see :class:`.UndeliverableFilter`.
Matches: TypeAlias = Callable[[undeliverable.UndeliverableMessage], bool]


@dataclass
class Removal:
    """Removes chosen messages from ``undeliverable``.

    Attributes:
        reader: Reads the messages, and acknowledges those that leave.
        topology: The topology.
        matches: Returns whether a message is chosen.
        report: The report.
        in_flight: How many messages are published and not confirmed.
    """

    reader: Reader
    topology: Topology
    matches: Matches
    report: RemovalReport = field(default_factory=RemovalReport)
    in_flight: int = 0

    def matching(self) -> Iterator[amqp.Message]:
        """Yield the chosen messages among those that were in the queue at the start.

        If the broker goes away or reading takes too long, it ends early and notes the reason.
        """
        present = self.report.present
        most = undeliverable.LIMIT if present is None else min(present, undeliverable.LIMIT)
        messages = self.reader.messages(most)
        errors: tuple[type[BaseException], ...] = (*self.reader.errors, exceptions.ReadTooLong)
        while self.report.stopped is None:
            try:
                message = next(messages, None)
            except errors as error:
                self.stop(f"the messages cannot be read further: {error}")
                return
            if message is None:
                return
            self.report.examined += 1
            if self.matches(undeliverable.copy_of(message, self.topology)):
                self.report.matched += 1
                yield message

    def publications(
        self, redriving: Redriving, rate: float | None = None
    ) -> Iterator[Publication]:
        """Yield a publication for each message that may leave; count those that stay.

        Args:
            redriving: Converts each message.
            rate: At most so many a second.
        """
        next_at = time.monotonic()
        for message in self.matching():
            try:
                outgoing = redriving.redriven(message)
                content = encoded(outgoing, self.reader.frame_max)
            except exceptions.UnprocessableMessage as stays:
                self.report.leave(stays.reason)
                continue
            except Exception as error:
                logger.debug("A message cannot be redriven.", exc_info=True)
                self.report.leave(f"it cannot be read: {shortened(error)}")
                continue
            if rate is not None:
                time.sleep(max(next_at - time.monotonic(), 0))
                next_at = max(next_at, time.monotonic() - MOST_BEHIND) + 1 / rate
            self.in_flight += 1
            assert outgoing.reroute is not None
            yield Publication(content, outgoing.reroute, message)

    def done(self, publication: Publication) -> None:
        """Remove a message from the queue once it is confirmed."""
        self.in_flight -= 1
        error = publication.error
        if error is None:
            self.settle(publication.context)
            return
        self.report.leave(error.reason)
        self.report.uncertain += error.may_have_arrived

    def settle(self, message: amqp.Message) -> None:
        """Let a message leave the queue; nothing else may still need it."""
        self.report.removed += 1
        try:
            self.reader.acknowledge(message)
        except self.reader.errors as error:
            # The report counts it at the end.
            self.stop(f"the messages cannot be acknowledged: {error}")

    def stop(self, why: str) -> None:
        """Read no further messages."""
        self.report.stopped = self.report.stopped or why


@contextmanager
def _removal(
    connection: Connection,
    topology: Topology,
    matches: Matches,
    rate: float | None = None,
    report: RemovalReport | None = None,
) -> Iterator[Removal]:
    """At the end of the block, write the last acknowledgements and report, even on an error."""
    with Reader(connection, topology, is_removing=True, rate=rate) as reader:
        report = RemovalReport() if report is None else report
        removal, began = Removal(reader, topology, matches, report), time.monotonic()
        report.present = reader.ready()
        try:
            yield removal
        finally:
            try:
                reader.finish()
            except reader.errors as error:
                report.uncertain += len(reader.to_acknowledge)
                removal.stop(f"the messages cannot be acknowledged: {error}")
            report.seconds = time.monotonic() - began


def redrive(
    connection: Connection,
    topology: Topology,
    redriving: Redriving,
    matches: Matches = lambda message: True,
    *,
    limit: int | None = None,
    rate: float | None = None,
    dry_run: bool = False,
    policy: PublishPolicy = DEFAULT_POLICY,
    declare: Declaration | None = None,
    redeclare: Declaration | None = None,
    report: RemovalReport | None = None,
) -> RemovalReport:
    """Publish undeliverable messages into the levels, and remove them from ``undeliverable``.

    Only messages that are in the queue at the start are read, so that a message that comes back at
    once is not redriven twice. Messages that another consumer holds at this moment are left out.
    With a limit, messages that were read and stay stand behind the others afterwards.

    Args:
        connection: A connection to the broker; others like it are opened to read and to publish.
        topology: The topology whose messages are redriven.
        redriving: Converts each message.
        matches: Returns whether a message is chosen.
        limit: The most messages that are published; None for all.
        rate: The most messages that are published in a second; an envelope counts as one. None for
            no limit.
        dry_run: Whether to report only, and publish nothing.
        policy: How long and how often to try each message, and how many are in flight.
        declare: Called with each new connection that publishes, to declare missing exchanges and
            queues.
        redeclare: Called if the levels do not take a message, which is then published once more.
        report: What is counted in; None for a new report. A text in its ``stopped`` ends the
            removal before the next message.

    Returns:
        The report. If the broker goes away after the start, the report says so.

    Raises:
        amqp.exceptions.NotFound: The queue does not exist.
        OSError: The broker cannot be reached.
        RabbitDelayError: What ``declare`` raises.
    """
    with _removal(connection, topology, matches, rate, report) as removal:
        report = removal.report
        if dry_run:
            report.removed = sum(1 for _ in islice(removal.publications(redriving), limit))
            return report
        # Without heartbeats: nothing is published while messages are read and not chosen.
        publisher = Publisher(connection.clone(heartbeat=0))
        try:
            publisher.publish_all(
                islice(removal.publications(redriving, rate), limit),
                policy,
                declare=declare,
                redeclare=redeclare,
                done=removal.done,
            )
        except exceptions.PublishError as error:
            removal.stop(f"nothing more can be published: {error}")
        finally:
            # After an interrupt, the broker may have these.
            report.uncertain += removal.in_flight
            publisher.close()
    return report


def purge(
    connection: Connection,
    topology: Topology,
    matches: Matches = lambda message: True,
    *,
    limit: int | None = None,
    dry_run: bool = False,
    report: RemovalReport | None = None,
) -> RemovalReport:
    """Delete undeliverable messages.

    Args:
        connection: A connection to the broker; another one like it is opened.
        topology: The topology whose messages are deleted.
        matches: Returns whether a message is chosen.
        limit: The most messages that are deleted; None for all.
        dry_run: Whether to count the messages only.
        report: As for :func:`redrive`.

    Returns:
        The report. If the broker goes away after the start, the report says so.

    Raises:
        amqp.exceptions.NotFound: The queue does not exist.
        OSError: The broker cannot be reached.
    """
    with _removal(connection, topology, matches, report=report) as removal:
        for message in islice(removal.matching(), limit):
            if dry_run:
                removal.report.removed += 1
            else:
                removal.settle(message)
    return removal.report
