"""The mail gateway: when it refuses, and what its idempotency key is good for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis import Redis

from celery_rabbitdelay.testing import RedisServer
from example_project.gateway import REFUSED_PERCENT, MailGateway, MailRefused, refuses

ORDERS = [f"{number:05}-19970101-1" for number in range(10_000)]
WILLING = next(order for order in ORDERS if not refuses(order, 0))
UNWILLING = next(order for order in ORDERS if refuses(order, 0) and not refuses(order, 1))


@pytest.fixture(scope="module")
def redis() -> Iterator[Redis]:
    """A private Redis."""
    with RedisServer() as server, Redis.from_url(server.url, decode_responses=True) as client:
        yield client


@pytest.fixture
def gateway(redis: Redis) -> MailGateway:
    """A gateway that has not sent anything."""
    redis.flushdb()
    return MailGateway(redis, "test")


def test_it_refuses_about_as_many_attempts_as_it_says() -> None:
    refused = sum(refuses(order, 0) for order in ORDERS)
    assert refused == pytest.approx(len(ORDERS) * REFUSED_PERCENT / 100, rel=0.1)


def test_it_refuses_the_next_attempt_independently() -> None:
    twice = sum(refuses(order, 0) and refuses(order, 1) for order in ORDERS)
    assert twice == pytest.approx(len(ORDERS) * (REFUSED_PERCENT / 100) ** 2, rel=0.3)


def test_a_refused_mail_goes_out_at_the_next_attempt(gateway: MailGateway) -> None:
    with pytest.raises(MailRefused):
        gateway.send(UNWILLING, idempotency_key=UNWILLING, attempt=0)
    assert gateway.mails() == {}
    assert gateway.send(UNWILLING, idempotency_key=UNWILLING, attempt=1)
    assert gateway.mails() == {UNWILLING: 1}


def test_under_the_same_key_one_mail_goes_out(gateway: MailGateway) -> None:
    assert gateway.send(WILLING, idempotency_key=WILLING, attempt=0)
    assert not gateway.send(WILLING, idempotency_key=WILLING, attempt=0)
    assert gateway.mails() == {WILLING: 1}


def test_without_the_same_key_a_second_mail_goes_out_and_is_counted(gateway: MailGateway) -> None:
    for key in ("first", "second"):
        assert gateway.send(WILLING, idempotency_key=key, attempt=0)
    assert gateway.mails() == {WILLING: 2}
    assert gateway.orders_mailed() == 1
