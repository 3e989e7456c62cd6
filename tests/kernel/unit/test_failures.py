"""Messages that their destination, the levels or ``undeliverable`` refuse; none holds up others.

The consumer and the broker's answers are fakes; the integration tests let real queues refuse,
vanish and fall silent.
"""

from functools import partial
from typing import Any

import amqp
import pytest
from amqp.exceptions import NotFound

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.exceptions import LaterVersion, PublishError, UnprocessableMessage
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels import warning_limit
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION, encode_destination
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.levels.warning_limit import LOGGED
from celery_rabbitdelay.modules import failures
from celery_rabbitdelay.modules.answer_times import AnswerTimes
from celery_rabbitdelay.modules.deliveries import Module, Received
from celery_rabbitdelay.modules.failures import Forwarder, MissingExchanges
from celery_rabbitdelay.modules.forwarding import Outgoing, encoded
from celery_rabbitdelay.publishing.message import Content, Publication, headers_of
from celery_rabbitdelay.publishing.wire import REJECT
from tests.kernel.unit.clock import Clock
from tests.kernel.unit.waiting import waiting

TOPOLOGY = Topology()
#: How many messages a destination may have in flight that has not answered yet.
ROOM = 30
UNDELIVERABLE = TOPOLOGY.module_queues.undeliverable.exchange.name
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
        frame_max: The bytes of a frame.

    Attributes:
        exchanges: The exchanges that exist.
        asked: The exchanges that the broker was asked for.
        silent_for: For how many seconds the broker has answered nothing at all.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, frame_max: int = FRAME_MAX) -> None:
        self.clock = clock = Clock()
        monkeypatch.setattr(failures, "time", clock)
        monkeypatch.setattr(warning_limit, "time", clock)
        timed = partial(MissingExchanges, clock=clock.monotonic)
        monkeypatch.setattr(failures, "MissingExchanges", timed)
        self.exchanges = {"office", "rabbitdelay.seconds.x1"}
        self.asked: list[str] = []
        self.silent_for = 0.0
        queue = TOPOLOGY.module_queues.distribution
        module = Module(
            "distribution", TOPOLOGY, queue, lambda message: iter(()), 1, 1, TIMEOUT, 86_400.0
        )
        self.statistics = module.statistics
        self.forwarder = Forwarder(module, self._exists, frame_max, AnswerTimes(clock))

    def _exists(self, exchange: str) -> bool:
        self.asked.append(exchange)
        return exchange in self.exchanges

    def has_to_wait(self, outgoing: Outgoing) -> bool:
        """Whether a message is not published before its destination has answered others."""
        received = Received(outgoing.message.amqp(), iter(()))
        publication = self.forwarder.first(received, outgoing, self.silent_for)
        assert received.pending == 1 + (publication is not None)
        return publication is None

    def publish(self, outgoing: Outgoing) -> Publication:
        received = Received(outgoing.message.amqp(), iter(()))
        publication = self.forwarder.first(received, outgoing, self.silent_for)
        assert publication is not None
        return publication

    def answer(self, publication: Publication, error: exceptions.PublishError) -> Publication:
        """Let a publication fail; return what is published in its place."""
        publication.error = error
        in_its_place = self.forwarder.settled(publication)
        assert in_its_place is not None
        return in_its_place

    def confirm(self, publication: Publication) -> None:
        assert self.forwarder.settled(publication) is None

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
    received: Received = publication.context[0]
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


@pytest.fixture
def consumer(monkeypatch: pytest.MonkeyPatch) -> Consumer:
    return Consumer(monkeypatch)


def test_a_message_goes_to_its_destination_and_is_tried_there_once(consumer: Consumer) -> None:
    consumer.clock.now = 5.0
    outgoing = for_exchange(mine=1)
    publication = consumer.publish(outgoing)
    assert publication.address() == ("office", "paper")
    assert publication.content == Content.of(outgoing.message.amqp())
    assert publication.deadline == 5.0 + TIMEOUT
    assert publication.single_attempt
    assert pending(publication) == 1
    consumer.confirm(publication)
    assert (pending(publication), consumer.counts) == (0, (1, 0, 0))


def test_a_refused_message_goes_back_and_its_attempts_are_counted(consumer: Consumer) -> None:
    publication = consumer.publish(for_exchange(mine=1))
    consumer.clock.now = 5.0
    later = consumer.answer(publication, NACKED)
    assert is_tried_again(later)
    assert (headers(later)[header_names.ATTEMPTS], headers(later)["mine"]) == (1, 1)
    assert (headers(later)[header_names.EXCHANGE], later.content.body) == ("office", b"body")
    # The levels have as long as the destination had, and are tried until they take it.
    assert later.deadline == 5.0 + TIMEOUT
    assert not later.single_attempt
    # The received message is acknowledged once the levels have it.
    assert pending(later) == 1
    consumer.confirm(later)
    assert (pending(later), consumer.counts) == (0, (1, 1, 0))

    again = consumer.publish(for_exchange(**headers(later)))
    assert headers(consumer.answer(again, NACKED))[header_names.ATTEMPTS] == 2


@pytest.mark.parametrize(
    ("outgoing", "error", "why"),
    [
        (for_exchange(), REFUSED, "the broker refuses it: too large"),
        (for_levels(), RETURNED, "the exchange 'rabbitdelay.seconds.x1' has no queue for the key"),
    ],
)
def test_what_is_never_taken_is_undeliverable_at_once(
    consumer: Consumer, outgoing: Outgoing, error: PublishError, why: str
) -> None:
    given_up = consumer.answer(consumer.publish(outgoing), error)
    assert is_undeliverable(given_up)
    assert reason(given_up).startswith(why)
    # It is acknowledged once undeliverable has it, which is tried until then.
    again = consumer.answer(consumer.answer(given_up, NACKED), TIMED_OUT)
    assert is_undeliverable(again)
    assert again.content is given_up.content
    assert (pending(again), consumer.counts) == (1, (0, 0, 0))
    consumer.confirm(again)
    assert (pending(again), consumer.counts) == (0, (1, 0, 1))


def test_what_amqp_cannot_carry_is_undeliverable_and_the_broker_is_not_asked(
    consumer: Consumer,
) -> None:
    given_up = consumer.publish(for_exchange("x" * 256))
    assert is_undeliverable(given_up)
    assert reason(given_up).startswith("the exchange")
    assert consumer.asked == []


@pytest.mark.parametrize("error", [NACKED, TIMED_OUT])
def test_the_levels_are_tried_until_they_take_it(consumer: Consumer, error: PublishError) -> None:
    publication = consumer.publish(for_levels())
    consumer.clock.now = TIMEOUT
    again = consumer.answer(publication, error)
    assert [each.address()[1].split(".")[6] for each in (publication, again)] == ["8", "7"]
    assert again.content is publication.content
    assert (again.deadline, pending(again), again.single_attempt) == (2 * TIMEOUT, 1, False)


def test_without_room_for_our_headers_it_is_undeliverable(monkeypatch: pytest.MonkeyPatch) -> None:
    outgoing = for_exchange(long="x" * 500)
    size = len(encoded(outgoing, FRAME_MAX).properties)
    consumer = Consumer(monkeypatch, frame_max=size + 2048)
    given_up = consumer.answer(consumer.publish(outgoing), NACKED)
    assert is_undeliverable(given_up)
    assert headers(given_up).keys() == {header_names.REASON}
    assert reason(given_up).startswith("nacked; ")
    assert "its headers and properties take" in reason(given_up)
    consumer.confirm(given_up)
    assert consumer.counts == (1, 0, 1)


@pytest.mark.parametrize("error", [UnprocessableMessage("no envelope"), KeyError("x")])
def test_what_cannot_be_read_is_undeliverable_as_it_came(
    consumer: Consumer, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    message: Any = amqp.Message(b"body", application_headers={"mine": 1})
    message.delivery_info = {"exchange": "rabbitdelay.delivery", "routing_key": "key"}
    received = Received(message, iter([for_queue()]))
    given_up = consumer.forwarder.refuse(received, error)
    assert next(received.outgoing, None) is None
    assert (given_up.content.body, headers(given_up)["mine"]) == (b"body", 1)
    assert is_undeliverable(given_up)
    assert reason(given_up) in ("no envelope", "KeyError('x')")
    assert [each.levelname for each in caplog.records] == [
        "ERROR" if isinstance(error, KeyError) else "WARNING"
    ]


def test_what_a_later_version_can_read_waits_for_it(
    consumer: Consumer, caplog: pytest.LogCaptureFixture
) -> None:
    received = Received(amqp.Message(b"body"), iter([for_queue()]))
    received.message.delivery_info = {"exchange": "", "routing_key": "key"}
    later = consumer.forwarder.refuse(received, LaterVersion("it is of version 9"))
    assert is_tried_again(later)
    assert headers(later)[header_names.ATTEMPTS] == 1
    assert "it is of version 9" in caplog.text
    consumer.confirm(later)
    assert consumer.counts == (1, 1, 0)


def test_what_undeliverable_never_takes_loses_its_headers_and_is_rejected(
    consumer: Consumer,
) -> None:
    told = {header_names.REASON: "why", "CC": "no list"}
    message = waiting(amqp.Message(b"x", application_headers=told))
    bare = consumer.answer(consumer.publish(Outgoing(UNDELIVERABLE, "k", message)), REFUSED)
    assert bare.address() == (UNDELIVERABLE, "")
    assert headers(bare) == {
        header_names.REASON: "why; its headers are left out: the broker refuses it: too large"
    }
    received = bare.context[0]
    bare.error = REFUSED
    assert consumer.forwarder.settled(bare) is None
    assert (received.settlement, pending(bare)) == (REJECT, 0)
    assert consumer.forwarder.bytes_in_flight == 0


def fill(consumer: Consumer, queue: str = "letters") -> list[Publication]:
    """Publish as many messages as a queue may have, and return them."""
    publications = [consumer.publish(for_queue(queue)) for _ in range(ROOM)]
    assert not any(map(is_tried_again, publications))
    assert consumer.has_to_wait(for_queue(queue))
    return publications


def test_a_missing_exchange_means_another_attempt_and_no_channel_error(consumer: Consumer) -> None:
    later = consumer.publish(for_exchange("gone"))
    assert is_tried_again(later)
    assert reason(later) == "there is no exchange 'gone'"
    assert headers(later)[header_names.EXCHANGE] == "gone"
    assert (pending(later), consumer.counts) == (1, (0, 1, 0))
    publication = consumer.publish(for_exchange())
    assert not is_tried_again(publication)
    assert not is_tried_again(consumer.publish(for_queue()))
    # Of those for one that vanishes, one closes the channel.
    consumer.exchanges.clear()
    consumer.answer(publication, NO_EXCHANGE)
    assert is_tried_again(consumer.publish(for_exchange()))
    assert consumer.asked == ["gone", "office"]


def test_a_message_is_held_while_its_destination_owes_many_answers(consumer: Consumer) -> None:
    first, *_ = fill(consumer, "office")
    for other in (for_queue("other"), for_exchange("office"), for_queue()):
        assert not consumer.has_to_wait(other)
    received, outgoing = Received(amqp.Message(b"envelope"), iter(())), for_queue("office")
    assert consumer.forwarder.first(received, outgoing, 0.0) is None
    assert (received.held, received.waits_for) == (outgoing, "the queue 'office'")
    assert received.pending == 1
    consumer.confirm(first)
    assert consumer.forwarder.first(received, outgoing, 0.0) is not None
    assert (received.held, received.waits_for, received.pending) == (None, None, 2)


@pytest.mark.parametrize("make", [for_levels, for_undeliverable])
def test_none_waits_for_levels_or_undeliverable(consumer: Consumer, make: Any) -> None:
    for _ in range(2 * ROOM):
        assert not consumer.has_to_wait(make())


def test_nothing_waits_for_a_full_destination_once_that_is_silent(consumer: Consumer) -> None:
    first, *_ = fill(consumer)
    consumer.clock.now = consumer.silent_for = 1.0
    later = consumer.publish(for_queue())
    assert is_tried_again(later)
    assert reason(later) == "the queue 'letters' answers too slowly, or not at all"
    assert not is_tried_again(consumer.publish(for_queue("other")))
    consumer.silent_for = 0.0
    consumer.confirm(first)
    assert not is_tried_again(consumer.publish(for_queue()))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (NACKED, "rabbitdelay distribution: the queue 'letters' does not accept a message; it"),
        (REFUSED, "rabbitdelay distribution: a message is undeliverable: the broker refuses it"),
    ],
)
def test_trouble_is_logged_once_a_minute(
    consumer: Consumer, caplog: pytest.LogCaptureFixture, error: PublishError, told: str
) -> None:
    for now in (0.0, 59.9, 60.0):
        consumer.clock.now = now
        consumer.answer(consumer.publish(for_queue()), error)
    first, between, again = caplog.messages
    assert (first.startswith(told), again) == (True, first)
    assert "1 more within 60 s" in between


def test_the_log_about_messages_of_strangers_is_finite(
    consumer: Consumer, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(300):
        assert is_tried_again(consumer.publish(for_exchange(f"forged.{number}")))
    received = consumer.publish(for_exchange()).context[0]
    for number in range(300):
        consumer.forwarder.give_up(received, for_exchange(), f"reason {number}")
    assert len(caplog.messages) == 2 * LOGGED
