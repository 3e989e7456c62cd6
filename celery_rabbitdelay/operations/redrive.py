"""Redrives messages: publishes them into the levels, and removes them from ``undeliverable``.

A message is acknowledged only after the broker has confirmed it in the levels. If the process dies
in between, the broker has the message twice, but never loses it. The messages that stay keep their
order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Final

from kombu import Connection

from celery_rabbitdelay.exceptions import PublishError, UnprocessableMessage
from celery_rabbitdelay.levels.headers import shortened
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.forwarding import encoded
from celery_rabbitdelay.modules.redriving import Redriving
from celery_rabbitdelay.operations.removal import Matches, Progress, Removal, RemovalReport
from celery_rabbitdelay.operations.undeliverable_reader import reading
from celery_rabbitdelay.publishing.publication import DEFAULT_POLICY, Publication, PublishPolicy
from celery_rabbitdelay.publishing.publisher import Declaration, Publisher

logger = logging.getLogger(__name__)

#: The longest delay of a slow broker that a limited rate makes up for, in seconds.
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
        progress: Called with the report during the redrive and at its end.

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
                # Without heartbeats: nothing is published while messages are read and not chosen.
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
        removal: Removes the messages from the queue.
        redriving: Converts each message.
        frame_max: The bytes of a frame of the connection.
        limit: The most messages that are published.
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
        """Yield a publication for each message that may leave; count those that stay."""
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
        """Yield the publications, at the given rate at most."""
        next_at = time.monotonic()
        for publication in self.outgoing():
            if rate is not None:
                time.sleep(max(next_at - time.monotonic(), 0))
                next_at = max(next_at, time.monotonic() - MOST_BEHIND) + 1 / rate
            self.in_flight += 1
            yield publication

    def done(self, publication: Publication) -> None:
        """Remove a message from the queue once it is confirmed."""
        self.in_flight -= 1
        error = publication.error
        if error is None:
            self._removal.settle(publication.subject)
            return
        self._removal.report.leave(error.reason)
        self._removal.report.uncertain += error.may_have_arrived
