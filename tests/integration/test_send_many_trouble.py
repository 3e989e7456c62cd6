"""Many rows, and a broker that goes away: every row that is not named is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.app.sending.rows import Row
from celery_rabbitdelay.exceptions import RowsNotConfirmed
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.integration.arrivals import count, take
from tests.integration.shop import named


def test_a_broker_that_goes_away_has_all_rows_that_are_not_named(
    private_rabbitmq: RabbitMQServer, make_shop: Any
) -> None:
    shop = make_shop(
        broker_url=private_rabbitmq.url,
        rabbitdelay_confirm_timeout=4,
        rabbitdelay_max_unconfirmed=20,
    )
    # Declaring may take longer on a busy machine.
    patient = make_shop(broker_url=private_rabbitmq.url)
    patient.rabbitdelay.send_many("look", [Row((-1,), delay=0.1)], envelopes=False)
    number_of_rows, taken = 10_000, 0

    def rows() -> Iterator[Row]:
        nonlocal taken
        for number in range(number_of_rows):
            if number == 600:
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
    assert set(lost.errors) <= set(range(taken))
    assert {type(error).__name__ for error in lost.errors.values()} == set(lost.report.errors)
    assert lost.report.confirmed == taken - len(lost.errors)
    confirmed = set(range(taken)) - set(lost.errors)
    assert confirmed

    arrived: set[int] = set()
    queue = shop.amqp.queues[named(shop, "default")]
    with Connection(private_rabbitmq.url) as connection:

        def all_came() -> bool:
            for arrival in take(connection, [queue], count(connection, queue.name)):
                arrived.add(arrival.body[0][0])
            return confirmed <= arrived

        # A message that was on its way between two queues is tried again after up to 180 s.
        wait_for(all_came, "all rows", 240, interval=0.2)
    # A row that is named may be there all the same.
    assert arrived - {-1} <= confirmed | set(lost.uncertain)
    assert set(lost.uncertain) <= set(lost.errors)
    assert lost.may_have_arrived == bool(lost.uncertain)


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
