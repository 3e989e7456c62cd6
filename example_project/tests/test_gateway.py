"""The mail gateway: when it refuses, and what its idempotency key is good for."""

from __future__ import annotations

import json
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from example_project.demonstration.gateway import REFUSED_PERCENT, MailGateway, refusals

ORDERS = [f"{number:05}-19970101-1" for number in range(10_000)]
WILLING = next(order for order in ORDERS if refusals(order) == 0)
UNWILLING = next(order for order in ORDERS if refusals(order) == 1)


@pytest.fixture
def gateway() -> MailGateway:
    """A gateway that has not sent anything."""
    return MailGateway()


def post(url: str, order: str) -> int:
    """Post a mail as the shop does, and return the status of the answer."""
    headers = {"Content-Type": "application/json", "Idempotency-Key": order}
    body = json.dumps({"customer": "00001", "order": order, "text": "..."}).encode()
    with urlopen(Request(url, body, headers), timeout=10) as answer:
        status: int = answer.status
        return status


def test_it_refuses_about_as_many_attempts_as_it_says() -> None:
    refused = sum(refusals(order) > 0 for order in ORDERS)
    assert refused == pytest.approx(len(ORDERS) * REFUSED_PERCENT / 100, rel=0.1)


def test_it_refuses_the_next_attempt_independently() -> None:
    twice = sum(refusals(order) > 1 for order in ORDERS)
    assert twice == pytest.approx(len(ORDERS) * (REFUSED_PERCENT / 100) ** 2, rel=0.3)


def test_a_refused_mail_goes_out_at_the_next_attempt(gateway: MailGateway) -> None:
    assert not gateway.send(UNWILLING, idempotency_key=UNWILLING)
    assert gateway.mails() == {}
    assert gateway.send(UNWILLING, idempotency_key=UNWILLING)
    assert gateway.mails() == {UNWILLING: 1}
    assert gateway.refused() == 1


def test_under_the_same_key_one_mail_goes_out(gateway: MailGateway) -> None:
    assert gateway.send(WILLING, idempotency_key=WILLING)
    assert gateway.send(WILLING, idempotency_key=WILLING)
    assert gateway.mails() == {WILLING: 1}


def test_without_the_same_key_a_second_mail_goes_out_and_is_counted(gateway: MailGateway) -> None:
    keys = [f"{WILLING}/{number}" for number in range(100)]
    for key in [key for key in keys if refusals(key) == 0][:2]:
        assert gateway.send(WILLING, idempotency_key=key)
    assert gateway.mails() == {WILLING: 2}
    assert gateway.orders_mailed() == 1


def test_a_mail_that_is_posted_goes_out(gateway: MailGateway) -> None:
    with gateway.served() as url:
        assert post(url, WILLING) == 202
    assert gateway.mails() == {WILLING: 1}


def test_a_refusal_is_an_error_for_the_one_who_posts(gateway: MailGateway) -> None:
    with gateway.served() as url, pytest.raises(HTTPError, match="503"):
        post(url, UNWILLING)
    assert gateway.mails() == {}
