"""Sending from coroutines, as a web request does, without holding up the others; and readiness."""

import asyncio
from typing import Any

import pytest
from celery.signals import before_task_publish
from kombu import Connection

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.kernel.integration.arrivals import count, take
from tests.kernel.integration.notes import listening
from tests.kernel.integration.publishing import TIMEOUT
from tests.kernel.integration.shop import PATIENCE
from tests.kernel.integration.trouble import alarm, suspended, user
from tests.node_control import connections_of


def test_a_send_that_meets_a_frozen_broker_holds_up_no_other_coroutine(
    private_rabbitmq: RabbitMQServer, make_shop: Any
) -> None:
    send = make_shop(broker_url=private_rabbitmq.url).rabbitdelay.send

    async def meet() -> None:
        await send("look", delay=0.3)
        with suspended(private_rabbitmq):
            sending = asyncio.create_task(send("look", delay=0.3, confirm_timeout=2))
            turns = 0
            while not sending.done():
                turns += 1
                await asyncio.sleep(0)
            assert turns > 10
            failed = sending.exception()
            assert isinstance(failed, exceptions.PublishError)
            assert failed.may_have_arrived
        await send("look", delay=0.3)

    asyncio.run(meet())


def test_a_send_that_is_cancelled_before_its_thread_has_begun_sends_nothing(
    private_rabbitmq: RabbitMQServer, make_shop: Any, prefix: str
) -> None:
    shop = make_shop(broker_url=private_rabbitmq.url, broker_pool_limit=1)
    look, delays = shop.tasks["look"], shop.rabbitdelay
    publishing = []

    def note(headers: dict[str, Any], **signal: Any) -> None:
        publishing.append(headers["id"])

    async def cancelled() -> None:
        await delays.send(look, delay=0.1, task_id="first")
        with suspended(private_rabbitmq):
            begun = asyncio.create_task(delays.send(look, delay=0.1, task_id="begun"))
            waits = asyncio.create_task(delays.send(look, delay=0.1, task_id="waits"))
            while "begun" not in publishing:
                await asyncio.sleep(0.01)
            for each in (begun, waits):
                each.cancel()
            done, _ = await asyncio.wait([begun, waits], timeout=20)
            assert [each.cancelled() for each in done] == [True, True]
        # By the name of the task, and with the option of Celery.
        await delays.send("look", countdown=0.1, task_id="last")

    with listening(note, before_task_publish):
        asyncio.run(cancelled())
    with Connection(private_rabbitmq.url) as connection:
        found = take(connection, [shop.amqp.queues[f"{prefix}.default"]], 3)
        ids = [arrival.message.headers["id"] for arrival in found]
        assert sorted(ids) == ["begun", "first", "last"]
        assert not count(connection, f"{prefix}.default")


def test_a_send_that_finds_no_thread_in_time_is_not_sent(
    private_rabbitmq: RabbitMQServer, make_shop: Any
) -> None:
    shop = make_shop(broker_url=private_rabbitmq.url, broker_pool_limit=1)

    async def crowded() -> list[Any]:
        await shop.rabbitdelay.send("look", delay=0.1)
        with suspended(private_rabbitmq):
            sends = [
                shop.rabbitdelay.send("look", delay=0.1, confirm_timeout=seconds)
                for seconds in (TIMEOUT, TIMEOUT / 4, TIMEOUT / 4)
            ]
            return await asyncio.gather(*sends, return_exceptions=True)

    errors = asyncio.run(crowded())
    assert [type(each) for each in errors] == [
        exceptions.ConfirmTimeout,
        exceptions.NoPublisherFree,
        exceptions.NoPublisherFree,
    ]


@pytest.mark.parametrize("is_connected", [True, False], ids=["connected", "not connected"])
def test_check_says_in_time_that_a_send_would_fail(
    private_rabbitmq: RabbitMQServer, make_shop: Any, is_connected: bool
) -> None:
    shop = make_shop(broker_url=private_rabbitmq.url)
    if is_connected:
        shop.rabbitdelay.check(timeout=PATIENCE)
    with suspended(private_rabbitmq), pytest.raises(exceptions.PublishError):
        shop.rabbitdelay.check(timeout=1)
    shop.rabbitdelay.check(timeout=PATIENCE)


def test_check_and_sends_that_fail_keep_the_connection_that_the_broker_blocks(
    private_rabbitmq: RabbitMQServer, make_shop: Any
) -> None:
    # It does not notice that a blocked connection was closed until the alarm is over.
    shop = make_shop(broker_url=private_rabbitmq.url)
    shop.rabbitdelay.check(timeout=PATIENCE)
    wait_for(lambda: connections_of(private_rabbitmq), "the connection")
    before = connections_of(private_rabbitmq)
    with alarm(private_rabbitmq):
        for _ in range(2):
            with pytest.raises(exceptions.ConnectionBlocked):
                shop.rabbitdelay.check(timeout=0.5)
            # Its queue is to be declared first, which the broker would not answer.
            with pytest.raises(exceptions.ConnectionBlocked) as caught:
                shop.tasks["look"].apply_async(delay=0.1, confirm_timeout=0.5)
            assert not caught.value.may_have_arrived
        assert connections_of(private_rabbitmq) == before
    shop.rabbitdelay.check(timeout=PATIENCE)
    shop.tasks["look"].apply_async(delay=0.1)
    assert connections_of(private_rabbitmq) == before


def test_check_needs_neither_levels_that_a_send_would_declare_nor_a_right_to_declare(
    private_rabbitmq: RabbitMQServer, make_shop: Any, prefix: str
) -> None:
    declaring = make_shop(broker_url=private_rabbitmq.url)
    declaring.rabbitdelay.check(timeout=PATIENCE)
    exchanges = rf"^{prefix}\.(.+\.x[0-9]+|delivery)$"
    with user(private_rabbitmq, f"{prefix}-user", "", exchanges, "") as url:
        shop = make_shop(broker_url=private_rabbitmq.url, broker_write_url=url)
        shop.conf.rabbitdelay_declare = "never"
        with pytest.raises(exceptions.TopologyIncomplete):
            shop.rabbitdelay.check(timeout=PATIENCE)
        with declaring.connection_for_write() as connection:
            declaring.rabbitdelay.declare(connection)
            for _ in range(2):
                shop.rabbitdelay.check(timeout=PATIENCE)
            assert not count(connection, f"{prefix}.undeliverable"), "it leaves nothing"
        shop.close()
    nowhere = make_shop(broker_write_url="amqp://guest:guest@127.0.0.1:1//")
    with pytest.raises(exceptions.ConnectionLost):
        nowhere.rabbitdelay.check()
