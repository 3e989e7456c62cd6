"""Publishing to a broker that goes away, falls silent or takes nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import amqp
import pytest
from kombu import Connection, Exchange, Queue

from celery_rabbitdelay.exceptions import (
    ConfirmTimeout,
    ConnectionBlocked,
    ConnectionLost,
    PublishError,
)
from celery_rabbitdelay.publishing.publication import Publication, PublishPolicy
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.integration.arrivals import count
from tests.integration.publishing import (
    TIMEOUT,
    bodies,
    in_time,
    posting,
    postings,
    publish,
    work,
)
from tests.integration.trouble import alarm, resumed, suspended
from tests.node_control import close_all_connections


@pytest.fixture
def broker(private_rabbitmq: RabbitMQServer) -> RabbitMQServer:
    """A broker that the test may maltreat."""
    return private_rabbitmq


@pytest.fixture
def queue(broker: RabbitMQServer, prefix: str) -> Iterator[Queue]:
    """A queue that is on the broker, and stays while the broker is killed."""
    queue = Queue(f"{prefix}-batch", queue_arguments={"x-queue-type": "quorum"})
    with Connection(broker.url) as connection:
        queue(connection.default_channel).declare()
        yield queue
    with Connection(broker.url) as connection:
        queue(connection.default_channel).delete()


@pytest.fixture
def publisher(broker: RabbitMQServer) -> Iterator[Publisher]:
    publisher = Publisher(Connection(broker.url))
    # Which takes long on a busy machine.
    publisher.connection.ensure_connection()
    yield publisher
    publisher.discard()


def then(sent: list[Publication], number: int, event: Callable[[], Any]) -> Iterator[Publication]:
    """All of these, and before the one of this number, something happens."""
    yield from sent[:number]
    event()
    yield from sent[number:]


def all_published(publisher: Publisher, key: str) -> bool:
    sent = postings(key, 20)
    try:
        publisher.publish_all(sent, PublishPolicy(TIMEOUT))
    except PublishError:
        return False
    return not any(each.error for each in sent)


def held_in(broker: RabbitMQServer, queue: Queue) -> Counter[str]:
    with Connection(broker.url) as connection:
        return bodies(connection, queue, count(connection, queue.name))


def test_what_was_in_flight_when_the_broker_closed_the_connection_is_sent_again(
    broker: RabbitMQServer, publisher: Publisher, queue: Queue
) -> None:
    sent = postings(queue.name, 3000)
    finished: list[Publication] = []
    prepared: list[Connection] = []

    def source() -> Iterator[Publication]:
        for number, each in enumerate(sent):
            if number in (700, 1900):
                close_all_connections(broker, "testing")
            yield each

    publisher.publish_all(
        source(), PublishPolicy(window=300), declare=prepared.append, done=finished.append
    )
    assert len(prepared) == 3
    assert Counter(map(id, finished)) == Counter(map(id, sent))
    assert {each.error for each in sent} == {None}
    arrived = held_in(broker, queue)
    assert set(arrived) == {str(number) for number in range(3000)}
    # At least once; more often only what was in flight.
    assert {body for body, times in arrived.items() if times > 1} <= {
        each.context for each in sent if each.resent
    }


def test_a_message_that_is_sent_again_asks_for_its_address_again(
    broker: RabbitMQServer, publisher: Publisher, queue: Queue
) -> None:
    """It depends on the time that is left."""
    publish(publisher, queue.name)
    close_all_connections(broker, "testing")
    asked: list[int] = []

    def address() -> tuple[str, str]:
        asked.append(len(asked))
        return "", queue.name

    publisher.publish(amqp.Message("x"), address)
    assert len(asked) == 2


def test_a_broker_that_is_killed_is_an_error_of_all_that_were_taken_and_of_no_other(
    broker: RabbitMQServer, publisher: Publisher, queue: Queue
) -> None:
    # Up to 4.0, RabbitMQ writes down that a quorum queue exists half a second after it was made.
    enough = time.monotonic() + 2
    first = 0
    while time.monotonic() < enough:
        publisher.publish_all([posting(queue.name, "before")])
        first += 1
    sent = postings(queue.name, 1000)
    finished: list[Publication] = []
    source = then(sent, 500, broker.kill)
    began = time.monotonic()
    with pytest.raises(ConnectionLost, match=f"{broker.port}//, attempt 3") as caught:
        publisher.publish_all(source, PublishPolicy(resends=2, window=100), done=finished.append)
    assert time.monotonic() - began < 30
    rest = list(source)
    taken = sent[: len(sent) - len(rest)]
    assert Counter(map(id, finished)) == Counter(map(id, taken))
    assert 500 <= len(taken) <= 500 + 2 * 100
    lost = [each for each in taken if each.error is not None]
    assert lost
    assert {type(each.error) for each in lost} == {ConnectionLost}
    assert caught.value in {each.error for each in lost}
    sure = {each.context for each in lost if each.error and not each.error.may_have_arrived}
    assert not [each for each in rest if each.error is not None]
    with pytest.raises(ConnectionLost, match="attempt 1"):
        publish(publisher, queue.name, resends=0)
    broker.start()
    wait_for(lambda: all_published(publisher, queue.name), "the queue's leader")
    arrived = held_in(broker, queue)
    assert arrived["before"] >= first
    assert {each.context for each in taken if each.error is None} <= set(arrived)
    assert not sure & set(arrived)


def test_a_broker_that_falls_silent_is_a_timeout_in_time(
    broker: RabbitMQServer, publisher: Publisher, queue: Queue
) -> None:
    sent = postings(queue.name, 1000)
    source = then(sent, 500, broker.suspend)
    with resumed(broker), in_time(), pytest.raises(ConfirmTimeout):
        publisher.publish_all(source, PublishPolicy(TIMEOUT, window=100))
    rest = list(source)
    without = [each for each in sent[: len(sent) - len(rest)] if each.error is not None]
    # Those that were given up while the last confirms of others had just come were replaced once.
    assert 0 < len(without) <= 2 * 100
    assert {type(each.error) for each in without} == {ConfirmTimeout}
    wait_for(lambda: all_published(publisher, queue.name), "the broker")


def test_a_broker_that_is_silent_from_the_start_is_an_error_in_time(
    broker: RabbitMQServer, queue: Queue
) -> None:
    with suspended(broker), in_time(), pytest.raises(PublishError):
        publish(Publisher(Connection(broker.url)), queue.name, timeout=TIMEOUT)


def test_a_declaration_that_is_not_answered_is_an_error_in_time(
    broker: RabbitMQServer, publisher: Publisher, queue: Queue
) -> None:
    def prepare(connection: Connection) -> None:
        broker.suspend()
        Exchange("amq.topic", type="topic")(connection.default_channel).declare(passive=True)

    with resumed(broker), in_time(), pytest.raises(PublishError):
        publish(publisher, queue.name, timeout=TIMEOUT, declare=prepare)


def test_what_is_not_declared_in_time_is_not_called_a_lost_connection(
    broker: RabbitMQServer, publisher: Publisher, queue: Queue
) -> None:
    def declare(connection: Connection) -> None:
        broker.suspend()
        queue(connection.default_channel).declare()

    reason = "has not declared everything in time.*celery rabbitdelay declare"
    with resumed(broker), pytest.raises(ConnectionLost, match=reason):
        publish(publisher, queue.name, timeout=TIMEOUT, declare=declare)


def test_a_broker_that_never_confirms_says_so_and_its_connection_is_not_used_again(
    broker: RabbitMQServer, publisher: Publisher, queue: Queue
) -> None:
    """Also where connecting took a part of the time: no other message was confirmed meanwhile."""
    publisher.discard()
    with resumed(broker), pytest.raises(ConfirmTimeout, match=r"did not confirm in time$"):
        publish(publisher, queue.name, timeout=10, declare=lambda _: broker.suspend())
    assert not publisher.connection.connected
    publish(publisher, queue.name, timeout=30)


def test_a_broker_that_is_silent_takes_no_more_than_fits_into_its_socket(
    broker: RabbitMQServer, publisher: Publisher, queue: Queue
) -> None:
    """Writing itself does not end: an error in time as well."""
    sent = [posting(queue.name, b"x" * 1_000_000) for _ in range(100)]
    source = then(sent, 3, broker.suspend)
    with resumed(broker), in_time(2 * TIMEOUT), pytest.raises(PublishError):
        publisher.publish_all(source, PublishPolicy(TIMEOUT, window=100))
    assert len(list(source)) < 100
    wait_for(lambda: all_published(publisher, queue.name), "the broker")


def test_a_memory_alarm_is_waited_out(
    broker: RabbitMQServer, publisher: Publisher, queue: Queue
) -> None:
    sent = postings(queue.name, 1000)
    with ExitStack() as alarmed, ThreadPoolExecutor(1) as pool:

        def raise_alarm() -> None:
            alarmed.enter_context(alarm(broker))
            pool.submit(alarmed.close)

        publisher.publish_all(then(sent, 500, raise_alarm), PublishPolicy(60.0, window=100))
    assert {each.error for each in sent} == {None}
    assert set(held_in(broker, queue)) == {str(number) for number in range(1000)}


def test_a_memory_alarm_that_stays_is_an_error_of_its_own(
    broker: RabbitMQServer, publisher: Publisher, queue: Queue
) -> None:
    sent = postings(queue.name, 1000)
    alarmed = ExitStack()
    source = then(sent, 500, lambda: alarmed.enter_context(alarm(broker)))
    with alarmed, pytest.raises(ConnectionBlocked) as caught:
        publisher.publish_all(source, PublishPolicy(TIMEOUT, window=100))
    taken = sent[: len(sent) - len(list(source))]
    failed = [each for each in taken if each.error]
    assert {type(each.error) for each in failed} == {ConnectionBlocked}
    assert caught.value.may_have_arrived
    wait_for(lambda: all_published(publisher, queue.name), "the broker")
    arrived = held_in(broker, queue)
    for each in failed:
        assert each.error
        assert each.error.may_have_arrived or each.context not in arrived


def test_why_the_broker_closed_the_connection_is_told(
    broker: RabbitMQServer, publisher: Publisher, queue: Queue
) -> None:
    def prepare(connection: Connection) -> None:
        close_all_connections(broker, "an operator was here")
        queue(connection.default_channel).queue_declare()

    with pytest.raises(ConnectionLost, match="an operator was here"):
        publisher.publish_all([posting(queue.name)], PublishPolicy(resends=0), declare=prepare)
    publisher.publish_all([posting(queue.name)])


def test_a_connection_that_is_lost_while_nothing_is_in_flight_is_opened_again_for_the_next(
    broker: RabbitMQServer, publisher: Publisher, queue: Queue
) -> None:
    sent = [posting(queue.name, "first"), posting("k" * 300), posting(queue.name, "last")]

    def source() -> Iterator[Publication]:
        # A slow iterator's messages are written at once.
        work(0.01)
        yield sent[0]
        with Connection(broker.url) as connection:
            wait_for(lambda: count(connection, queue.name) == 1, "the first message")
        close_all_connections(broker, "testing")
        # It cannot be written; but now the confirm is read, and the end of the connection.
        yield sent[1]
        yield sent[2]

    publisher.publish_all(source())
    assert [type(each.error) for each in sent] == [type(None), PublishError, type(None)]


def test_a_connection_that_the_broker_closes_as_not_allowed_is_an_error_of_all_in_flight(
    broker: RabbitMQServer, publisher: Publisher, queue: Queue
) -> None:
    sent = postings(queue.name, 20)

    def misuse() -> None:
        channel: Any = publisher.connection.channel()
        for _ in range(2):
            channel.basic_consume(queue.name, consumer_tag="twice", nowait=True)

    with pytest.raises(ConnectionLost, match="NOT_ALLOWED"):
        publisher.publish_all(then(sent, 19, misuse))
    assert all(isinstance(each.error, ConnectionLost | None) for each in sent)
    assert sent[-1].error is not None


def test_a_repair_during_which_the_connection_is_lost_is_made_again_on_the_next(
    broker: RabbitMQServer, publisher: Publisher, prefix: str
) -> None:
    late = Queue(f"{prefix}-late", auto_delete=True)
    repairs: list[Connection] = []

    def redeclare(connection: Connection) -> None:
        repairs.append(connection)
        if len(repairs) == 1:
            close_all_connections(broker, "testing")
        late(connection.default_channel).queue_declare()

    sent = posting(late.name)
    publisher.publish_all([sent], redeclare=redeclare)
    assert sent.error is None
    assert len(repairs) == 2
