"""A publisher, ``send_many``, and a real broker that goes away, falls silent or takes nothing.

Each trouble is played at an exact message in ``tests/kernel/unit/test_publish_loop.py``.
"""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.app.rows import Row
from celery_rabbitdelay.exceptions import ConfirmTimeout, ConnectionLost, RowsNotConfirmed
from celery_rabbitdelay.publishing.message import Publication
from celery_rabbitdelay.publishing.publish_loop import PublishPolicy
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.kernel.integration.arrivals import count, take
from tests.kernel.integration.publishing import GRACE, bodies, posting, publish
from tests.kernel.integration.shop import make_app
from tests.kernel.integration.trouble import alarm, suspended
from tests.node_control import close_all_connections, closes, evaluate

#: Seconds of patience where a broker starts on a slow machine.
LONG = 120.0


def test_a_broker_that_is_killed_and_starts_again_is_not_seen(
    private_rabbitmq: RabbitMQServer, publisher: Publisher, target: Queue
) -> None:
    # Up to 4.0, RabbitMQ writes down that a quorum queue exists half a second after it was made.
    enough = time.monotonic() + 2
    sent = 0
    while time.monotonic() < enough:
        publish(publisher, target.name)
        sent += 1
    with ThreadPoolExecutor(1) as pool:
        private_rabbitmq.kill()
        sending = pool.submit(publish, publisher, target.name, timeout=LONG)
        # In this thread, with which the node would end.
        private_rabbitmq.start()
        sending.result(timeout=LONG)
    with Connection(private_rabbitmq.url) as connection:
        # It may be there twice, if it was written to the new broker before its queue had a leader.
        wait_for(lambda: count(connection, target.name) >= sent + 1, "all messages")


def test_a_broker_that_does_not_answer_may_have_the_message_only_if_it_was_written(
    private_rabbitmq: RabbitMQServer, publisher: Publisher, target: Queue
) -> None:
    publish(publisher, target.name)
    with suspended(private_rabbitmq):
        for error, may_have_arrived in ((ConfirmTimeout, True), (ConnectionLost, False)):
            with pytest.raises(error) as caught:
                publish(publisher, target.name, timeout=0.5)
            assert caught.value.may_have_arrived is may_have_arrived
    publish(publisher, target.name)


def test_what_was_in_flight_when_the_broker_closed_the_connection_is_sent_again(
    private_rabbitmq: RabbitMQServer, publisher: Publisher, target: Queue
) -> None:
    sent = [posting(target.name, str(number)) for number in range(1500)]

    def source() -> Iterator[Publication]:
        for number, each in enumerate(sent):
            if number in (400, 900):
                close_all_connections(private_rabbitmq, "testing")
            yield each

    publisher.publish_all(source(), PublishPolicy(window=300))
    assert {each.error for each in sent} == {None}
    with Connection(private_rabbitmq.url) as own:
        arrived = bodies(own, target, count(own, target.name))
    assert set(arrived) == {each.context for each in sent}
    # At least once; more often only what was in flight.
    again = {body for body, times in arrived.items() if times > 1}
    assert again <= {each.context for each in sent if each.resent}


def test_a_memory_alarm_is_waited_out(
    private_rabbitmq: RabbitMQServer, publisher: Publisher, connection: Connection, target: Queue
) -> None:
    sent = [posting(target.name, str(number)) for number in range(1000)]
    with ExitStack() as alarmed, ThreadPoolExecutor(1) as pool:

        def source() -> Iterator[Publication]:
            yield from sent[:500]
            alarmed.enter_context(alarm(private_rabbitmq))
            pool.submit(alarmed.close)
            yield from sent[500:]

        publisher.publish_all(source(), PublishPolicy(60.0, window=100))
    assert {each.error for each in sent} == {None}
    assert set(bodies(connection, target, 1000)) == {each.context for each in sent}


def test_connecting_takes_no_longer_than_celery_s_setting_says() -> None:
    """All attempts together, to a host that takes the connection and says no word."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"amqp://guest:guest@127.0.0.1:{silent.getsockname()[1]}//"
        given = {"broker_url": url, "prefix": "test", "broker_connection_timeout": 0.5}
        shop: Any = make_app(given)
        began = time.monotonic()
        with pytest.raises(ConnectionLost, match="attempt 1:") as caught:
            shop.tasks["look"].apply_async(delay=5)
        assert time.monotonic() - began < 0.5 + GRACE
        assert not caught.value.may_have_arrived


def test_a_broker_that_goes_away_has_all_rows_that_are_not_named(
    private_rabbitmq: RabbitMQServer, make_shop: Any, prefix: str
) -> None:
    # Declaring may take longer on a busy machine.
    patient = make_shop(broker_url=private_rabbitmq.url)
    patient.rabbitdelay.send_many("look", [Row((-1,), delay=0.1)], envelopes=False)
    settings = {"rabbitdelay_confirm_timeout": 4, "rabbitdelay_max_unconfirmed": 20}
    shop = make_shop(broker_url=private_rabbitmq.url, **settings)
    number_of_rows, taken = 10_000, 0

    def rows() -> Iterator[Row]:
        nonlocal taken
        for number in range(number_of_rows):
            if number == 600:
                # Unlike a node that is killed, it is back in a blink.
                suspends = "rabbit_maintenance:suspend_all_client_listeners()"
                evaluate(private_rabbitmq, suspends, closes("the broker is lost"))
            taken += 1
            yield Row((number,), delay=(0.2, 0.9, 1.7)[number % 3])

    try:
        with pytest.raises(RowsNotConfirmed) as caught:
            shop.rabbitdelay.send_many("look", rows(), envelopes=False)
    finally:
        evaluate(private_rabbitmq, "rabbit_maintenance:resume_all_client_listeners()")
    lost = caught.value
    taken -= 1  # The last one has only shown that there is one more.
    assert lost.rest == taken < number_of_rows
    assert set(lost.errors) <= set(range(taken))
    assert lost.report.confirmed == taken - len(lost.errors)
    confirmed, arrived = set(range(taken)) - set(lost.errors), set[int]()
    with Connection(private_rabbitmq.url) as connection:
        queue = Queue(f"{prefix}.default")
        while not confirmed <= arrived:
            arrivals = take(connection, [queue], max(count(connection, queue.name), 1))
            arrived.update(arrival.body[0][0] for arrival in arrivals)
    # A row that is named may be there all the same.
    assert arrived - {-1} <= confirmed | set(lost.uncertain)
    assert set(lost.uncertain) <= set(lost.errors)
    assert lost.may_have_arrived == bool(lost.uncertain)
