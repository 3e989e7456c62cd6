"""A fake: a module's consumer without a broker, and what the broker may answer.

It stands in where each answer of the broker is played; the integration tests let real queues
refuse, vanish and fall silent.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import amqp
import pytest
from amqp.exceptions import NotFound

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION, encode_destination
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules import attempts as attempts_module
from celery_rabbitdelay.modules.attempts import Forwarder
from celery_rabbitdelay.modules.deliveries import Received
from celery_rabbitdelay.modules.destinations import AnswerTimes, MissingExchanges
from celery_rabbitdelay.modules.forwarding import Outgoing
from celery_rabbitdelay.modules.module import Module, ModuleStatistics
from celery_rabbitdelay.publishing.message import headers_of
from celery_rabbitdelay.publishing.publication import Publication
from tests.unit.clock import Clock
from tests.unit.waiting import waiting

TOPOLOGY = Topology()
UNDELIVERABLE = TOPOLOGY.module_queues.undeliverable.exchange.name
A_DAY = 86_400.0
TIMEOUT = 60.0
FRAME_MAX = 131_072

#: The answer of the broker, or of the publish loop, about a message.
NACKED = exceptions.MessageNacked("", "", "nacked")
TIMED_OUT = exceptions.ConfirmTimeout("", "", "too late")
REFUSED = exceptions.MessageRefused("", "", "too large")
RETURNED = exceptions.MessageReturned("", "", "NO_ROUTE")
NO_EXCHANGE = exceptions.MessageReturned("", "", "NOT_FOUND")
NO_EXCHANGE.__cause__ = NotFound("no exchange")


class Consumer:
    """Publishes to no broker; a test says what is answered, and what time it is.

    Args:
        monkeypatch: Sets the clock.
        seconds: How long a message is tried again.
        frame_max: The bytes of a frame.
        silent: Destinations that have not answered on former connections.

    Attributes:
        exchanges: The exchanges that exist.
        asked: The exchanges that the broker was asked for.
        silent_for: For how many seconds the broker has answered nothing at all.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        seconds: float = A_DAY,
        frame_max: int = FRAME_MAX,
        silent: Iterable[str] = (),
    ) -> None:
        self.clock = clock = Clock()
        monkeypatch.setattr(attempts_module, "time", clock)
        for kind in (AnswerTimes, MissingExchanges):
            timed = partial(kind, clock=clock.monotonic)
            monkeypatch.setattr(attempts_module, kind.__name__, timed)
        self.exchanges = {"office", "rabbitdelay.seconds.x1"}
        self.asked: list[str] = []
        self.silent_for = 0.0
        self.statistics = ModuleStatistics()
        queue = TOPOLOGY.module_queues.distribution
        module = Module(
            "distribution", TOPOLOGY, queue, lambda message: iter(()), 1, 1, TIMEOUT, seconds
        )
        self.attempts = Forwarder(module, self.statistics, self._exists, frame_max, set(silent))

    def _exists(self, exchange: str) -> bool:
        self.asked.append(exchange)
        return exchange in self.exchanges

    def has_to_wait(self, outgoing: Outgoing) -> bool:
        """Whether a message is not published before its destination has answered others."""
        received = Received(outgoing.message.amqp(), iter(()))
        publication = self.attempts.first(received, outgoing, self.silent_for)
        assert received.pending == 1 + (publication is not None)
        return publication is None

    def publish(self, outgoing: Outgoing) -> Publication:
        received = Received(outgoing.message.amqp(), iter(()))
        publication = self.attempts.first(received, outgoing, self.silent_for)
        assert publication is not None
        return publication

    def answer(self, publication: Publication, error: exceptions.PublishError) -> Publication:
        """Let a publication fail; return what is published in its place."""
        publication.error = error
        in_its_place = self.attempts.settled(publication)
        assert in_its_place is not None
        return in_its_place

    def confirm(self, publication: Publication) -> None:
        assert self.attempts.settled(publication) is None

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many messages were published, put into the levels, and into ``undeliverable``."""
        counted = self.statistics
        return counted.published, counted.redelivered, counted.undeliverable


def for_exchange(exchange: str = "office", **headers: Any) -> Outgoing:
    return Outgoing(exchange, "paper", waiting(amqp.Message(b"body", application_headers=headers)))


def for_queue(queue: str = "letters") -> Outgoing:
    return Outgoing("", queue, waiting(amqp.Message(b"body")))


def for_levels(exchange: str = "rabbitdelay.seconds.x1") -> Outgoing:
    """A message for the levels, whose key is another one each time it is computed."""
    seconds = iter("9876543210")

    def address() -> tuple[str, str]:
        return exchange, f"0.0.0.0.0.0.{next(seconds)}.0.letters"

    return Outgoing(*address(), waiting(amqp.Message(b"body")), address)


def for_undeliverable() -> Outgoing:
    return Outgoing(UNDELIVERABLE, "paper", waiting(amqp.Message(b"body")))


def pending(publication: Publication) -> int:
    """How many publications are not settled of the message that it was received for."""
    received: Received = publication.context.received
    return received.pending - 1  # that all its messages are known


def headers(publication: Publication) -> dict[str, Any]:
    return headers_of(publication.content.message())


def reason(publication: Publication) -> str:
    text: str = headers(publication)[header_names.REASON]
    return text


def is_tried_again(publication: Publication) -> bool:
    """Whether it goes into the levels, and from there to distribution."""
    _, key = publication.address()
    return key.split(".")[-1] == encode_destination(DISTRIBUTION)


def is_undeliverable(publication: Publication) -> bool:
    exchange, _ = publication.address()
    return exchange == UNDELIVERABLE
