"""Publishing messages that come one by one, each with its own destination, with many in flight.

:meth:`.Publisher.publish_all` takes messages from an iterable; a pipeline is given them, and keeps
the publish loop between two of them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from celery_rabbitdelay.exceptions import PublishError, RabbitDelayError
from celery_rabbitdelay.publishing.message import Declaration, Publication
from celery_rabbitdelay.publishing.publish_loop import READ_EVERY, PublishPolicy
from celery_rabbitdelay.publishing.publisher import Publisher, Run


class Pipeline:
    """Writes each message at once; its confirm may arrive later. For one thread at a time.

    Args:
        publisher: The publisher, which is used for nothing else while messages are in flight.
        redeclare: As for :meth:`.Publisher.publish_all`, without the destinations of messages.
        done: Called with each message that is confirmed, or has an error. It must not raise, nor
            publish.
    """

    def __init__(
        self,
        publisher: Publisher,
        redeclare: Declaration | None,
        done: Callable[[Publication], None],
    ) -> None:
        self._publisher = publisher
        self._redeclare = redeclare
        self._done = done
        self._given: deque[Publication] = deque()
        #: The messages without an outcome, in their order.
        self._open: dict[Publication, None] = {}
        self._run: Run | None = None
        self._policy: PublishPolicy | None = None
        self._left_at = 0.0

    @property
    def is_running(self) -> bool:
        """Whether a message was published since the last :meth:`confirm`."""
        return self._run is not None

    def publish(self, publication: Publication, policy: PublishPolicy) -> None:
        """Write a message, and return; wait only while as many are in flight as may be.

        Args:
            publication: The message, with its ``declare``.
            policy: How long, and how often, it is tried. If it is not that of the messages before,
                these are confirmed first.

        Raises:
            RabbitDelayError: The message has an error already.
        """
        if policy != self._policy:
            self.confirm()
        if self._run is None:
            self._policy = policy
            self._run = Run(
                self._publisher,
                self._next,
                policy,
                redeclare=self._redeclare,
                done=self._finish,
                declares_each=True,
            )
        else:
            # The caller's own work, during which no answers were read.
            away = time.monotonic() - self._left_at
            if away >= READ_EVERY:
                self._run.loop.excuse(away)
        self._open[publication] = None
        self._given.append(publication)
        loop = self._run.loop
        loop.source_is_empty = False
        self._go_on(self._run, lambda: not self._given and not loop.has_unwritten)
        if publication.error is not None and publication not in self._open:
            raise publication.error

    def confirm(self) -> None:
        """Wait until each message is confirmed, or has an error; others may then publish."""
        if self._run is not None:
            self._run.loop.excuse(max(time.monotonic() - self._left_at, 0.0))
            self._go_on(self._run, None)
            self._abandon(None, "no answer")

    def _go_on(self, run: Run, is_enough: Callable[[], bool] | None) -> None:
        try:
            run.go_on(is_enough)
        except RabbitDelayError as error:
            self._abandon(error)
        except BaseException as error:
            self._abandon(None, repr(error))
            raise
        finally:
            self._left_at = time.monotonic()

    def _next(self) -> Publication | None:
        return self._given.popleft() if self._given else None

    def _finish(self, publication: Publication) -> None:
        self._open.pop(publication, None)
        self._done(publication)

    def _abandon(self, error: RabbitDelayError | None, reason: str = "") -> None:
        """Give up: the messages that have no outcome get an error."""
        self._run = None
        self._given.clear()
        for publication in list(self._open):
            if error is None or isinstance(error, PublishError):
                text = f"interrupted before the broker has confirmed: {reason}"
                why = error or PublishError(*publication.address(), text)
                # Even if it is unknown whether a byte of it was written.
                publication.error = why.copy(may_have_arrived=bool(publication.routing_key))
            else:
                publication.error = error  # type: ignore[assignment]  # see the attribute
            self._finish(publication)
