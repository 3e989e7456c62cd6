"""Many rows, and a broker that goes away: every row that is not named is there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.app.sending.rows import Row
from celery_rabbitdelay.exceptions import RowsNotConfirmed
from celery_rabbitdelay.levels.headers import ENVELOPE
from celery_rabbitdelay.modules.envelope import Envelope
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.integration.arrivals import count, take
from tests.integration.shop import named
from tests.integration.test_send_many import both_ways
from tests.node_control import close_all_connections


def test_a_broker_that_goes_away_has_all_rows_that_are_not_named(
    private_rabbitmq: RabbitMQServer, make_shop: Callable[..., Any]
) -> None:
    shop = make_shop(
        broker_url=private_rabbitmq.url,
        rabbitdelay_confirm_timeout=4,
        rabbitdelay_max_unconfirmed=20,
    )
    # Declaring may take longer on a busy machine.
    patient = make_shop(broker_url=private_rabbitmq.url)
    patient.rabbitdelay.send_many("look", [Row(("before",), delay=0.1)], envelopes=False)
    number_of_rows, stop_at, taken = 10_000, 600, 0

    def rows() -> Iterator[Row]:
        nonlocal taken
        for number in range(number_of_rows):
            if number == stop_at:
                private_rabbitmq.ctl("stop_app")
            taken += 1
            yield Row((number,), delay=(0.2, 0.9, 1.7)[number % 3])

    try:
        with pytest.raises(RowsNotConfirmed) as caught:
            shop.rabbitdelay.send_many("look", rows(), envelopes=False)
    finally:
        private_rabbitmq.ctl("start_app")
        wait_for(lambda: takes_queues(private_rabbitmq), "a broker that is whole", interval=0.2)
    lost = caught.value
    taken -= 1  # The last one has only shown that there is one more.
    assert lost.rest == taken < number_of_rows
    assert 0 < len(lost.errors) <= taken
    assert set(lost.errors) <= set(range(taken))
    assert {type(error).__name__ for error in lost.errors.values()} == set(lost.report.errors)
    assert lost.report.confirmed == taken - len(lost.errors)
    assert f"those from row {taken} on were not taken" in str(lost)
    confirmed = set(range(taken)) - set(lost.errors)
    assert confirmed

    # A message that was on its way between two queues is tried again after up to 180 s.
    arrived = arrived_rows(private_rabbitmq, shop, confirmed, 240)
    # A row that is named may be there all the same.
    assert arrived <= confirmed | set(lost.uncertain)
    assert set(lost.uncertain) <= set(lost.errors)
    assert lost.may_have_arrived == bool(lost.uncertain)


def arrived_rows(broker: RabbitMQServer, shop: Any, expected: set[int], timeout: float) -> set[int]:
    """Take rows that are due, alone or in envelopes, until the expected ones have come."""
    arrived: set[int] = set()
    queues = (
        shop.amqp.queues[named(shop, "default")],
        shop.rabbitdelay.topology.module_queues.distribution,
    )
    with Connection(broker.url) as connection:

        def all_came() -> bool:
            for queue in queues:
                for arrival in take(connection, [queue], count(connection, queue.name)):
                    arrived.update(_rows_of(arrival.message))
            return expected <= arrived

        wait_for(all_came, "all rows", timeout, interval=0.2)
    return arrived


def takes_queues(broker: RabbitMQServer) -> bool:
    """Whether a quorum queue can be declared; for a moment, a node that starts closes instead."""
    queue = Queue("test-whole", queue_arguments={"x-queue-type": "quorum"})
    with Connection(broker.url) as connection:
        try:
            queue(connection.default_channel).declare()
            queue(connection.default_channel).delete()
        except connection.connection_errors + connection.channel_errors:
            return False
    return True


def _rows_of(message: Any) -> list[int]:
    body = message.body
    data: bytes = body.encode() if isinstance(body, str) else bytes(body)
    if message.content_type == ENVELOPE:
        bodies = [item.body for item in Envelope.unpack(data).items]
    else:
        bodies = [data]
    firsts = [json.loads(each)[0][0] for each in bodies]
    return [first for first in firsts if first != "before"]


@both_ways
def test_rows_that_were_in_flight_when_the_connection_was_closed_are_sent_again(
    private_rabbitmq: RabbitMQServer, make_shop: Callable[..., Any], envelopes: bool
) -> None:
    shop = make_shop(broker_url=private_rabbitmq.url, rabbitdelay_max_unconfirmed=20)
    rows_in_all = 6000 if envelopes else 1500

    def rows() -> Iterator[Row]:
        for number in range(rows_in_all):
            if number in (rows_in_all // 3, rows_in_all // 2):
                close_all_connections(private_rabbitmq, "testing")
            yield Row((number,), delay=(0.2, 0.9, 1.7)[number % 3])

    report = shop.rabbitdelay.send_many("look", rows(), envelopes=envelopes)
    assert (report.sent, report.confirmed) == (rows_in_all, rows_in_all)
    assert arrived_rows(private_rabbitmq, shop, {*range(rows_in_all)}, 60) == {*range(rows_in_all)}
