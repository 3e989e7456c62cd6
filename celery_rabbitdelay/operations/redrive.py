"""Redriving: messages leave ``undeliverable`` and are published into the levels again.

Each message is published and confirmed first, and acknowledged then. If the program dies between
the two, the broker has the message twice, but never loses it. The messages that stay keep their
order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Final

from kombu import Connection

from celery_rabbitdelay.exceptions import PublishError, UnprocessableMessage
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.forwarding import encoded
from celery_rabbitdelay.modules.redriving import Redriving
from celery_rabbitdelay.operations.removal import Matches, Progress, Removal, RemovalReport
from celery_rabbitdelay.operations.undeliverable_reader import reading
from celery_rabbitdelay.publishing.message import shortened
from celery_rabbitdelay.publishing.policy import DEFAULT_POLICY, PublishPolicy
from celery_rabbitdelay.publishing.publication import Publication
from celery_rabbitdelay.publishing.publisher import Declaration, Publisher

__all__ = ["redrive"]

logger = logging.getLogger(__name__)

#: Seconds that a rate makes up for at most, after the broker was slow.
MOST_BEHIND: Final = 1.0


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
    progress: Progress = lambda report: None,
) -> RemovalReport:
    """Publish undeliverable messages into the levels, and take them out of ``undeliverable``.

    Only those that are there at the start are read, so that a message which comes back at once is
    not redriven twice. Messages that another consumer has at this moment are left out. With a
    limit, those that were read and stay stand behind the others afterwards.

    Args:
        connection: Where; connections like it are opened for reading and for publishing.
        topology: The topology whose messages are redriven.
        redriving: Decides what is published for each message.
        matches: Returns whether a message is meant.
        limit: How many messages are published at most; None: all.
        rate: How many messages are published in a second at most; an envelope counts as one. None:
            as many as possible.
        dry_run: Whether only to report what would be done.
        policy: How long, and how often, each is tried, and how many are in flight.
        declare: Called with each new connection that publishes, to declare what is missing.
        redeclare: Called if the levels do not take a message, which is then published once more.
        progress: Called with the report now and then, and at the end.

    Returns:
        The report. If the broker goes away after the start, the report says so.

    Raises:
        amqp.exceptions.NotFound: The queue does not exist.
        OSError: The broker cannot be reached.
        RabbitDelayError: What ``declare`` raises.
    """
    with reading(connection, topology, is_removing=True, rate=rate) as reader:
        removal = Removal(reader, topology, matches, progress)
        run = _Run(removal, redriving, reader.frame_max, limit)
        with removal.reporting() as report:
            if dry_run:
                report.removed = sum(1 for _ in run.outgoing())
            else:
                # Without heartbeats: while messages are read that are not meant, none is published.
                publisher = Publisher(connection.clone(heartbeat=0))
                try:
                    publisher.publish_all(
                        run.publications(rate),
                        policy,
                        declare=declare,
                        redeclare=redeclare,
                        done=run.done,
                    )
                except PublishError as error:
                    removal.stop(f"nothing more can be published: {error}")
                finally:
                    # After an interrupt, the broker may have these.
                    report.uncertain += run.in_flight
                    publisher.close()
    return removal.report


class _Run:
    """One call of :func:`redrive`.

    Args:
        removal: Takes the messages out of the queue.
        redriving: Decides what is published for each.
        frame_max: The bytes of a frame of the connection.
        limit: How many messages are published at most.
    """

    def __init__(
        self, removal: Removal, redriving: Redriving, frame_max: int, limit: int | None
    ) -> None:
        self.in_flight = 0
        self._removal = removal
        self._redriving = redriving
        self._frame_max = frame_max
        self._limit = limit

    def outgoing(self) -> Iterator[Publication]:
        """Yield what to publish for each message that is to leave; count those that stay."""
        number = 0
        for message in self._removal.matching():
            try:
                outgoing = self._redriving.redriven(message)
                content = encoded(outgoing, self._frame_max)
            except UnprocessableMessage as stays:
                self._removal.report.leave(stays.reason)
                continue
            except Exception as error:
                logger.debug("A message cannot be redriven.", exc_info=True)
                self._removal.report.leave(f"it cannot be read: {shortened(error)}")
                continue
            assert outgoing.reroute is not None
            yield Publication(content, outgoing.reroute, message)
            number += 1
            if number == self._limit:
                return

    def publications(self, rate: float | None) -> Iterator[Publication]:
        """Yield what is published, no faster than it may be."""
        next_at = time.monotonic()
        for publication in self.outgoing():
            if rate is not None:
                time.sleep(max(next_at - time.monotonic(), 0))
                next_at = max(next_at, time.monotonic() - MOST_BEHIND) + 1 / rate
            self.in_flight += 1
            yield publication

    def done(self, publication: Publication) -> None:
        """Let a message leave the queue once it is confirmed."""
        self.in_flight -= 1
        error = publication.error
        if error is None:
            self._removal.settle(publication.subject)
            return
        self._removal.report.leave(error.reason)
        self._removal.report.uncertain += error.may_have_arrived
