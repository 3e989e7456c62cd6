"""The mail gateway: when it refuses mails, and its idempotency key."""

import json
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from example_project.demonstration.gateway import REFUSED_PERCENT, MailGateway, refusals

ORDERS = [f"{number:05}-19970101-1" for number in range(10_000)]
WILLING = next(order for order in ORDERS if refusals(order) == 0)
UNWILLING = next(order for order in ORDERS if refusals(order) == 1)


def test_it_refuses_about_as_many_attempts_as_it_says() -> None:
    for attempts, rel in ((1, 0.1), (2, 0.3)):
        refused = sum(refusals(order) >= attempts for order in ORDERS)
        expected = len(ORDERS) * (REFUSED_PERCENT / 100) ** attempts
        assert refused == pytest.approx(expected, rel=rel)


def test_a_refused_mail_goes_out_at_the_next_attempt_and_under_one_key_once() -> None:
    gateway = MailGateway()
    for key in (UNWILLING, UNWILLING, UNWILLING):
        gateway.send(UNWILLING, idempotency_key=key)
    assert (gateway.mails(), gateway.refused()) == ({UNWILLING: 1}, 1)
    other = next(key for number in range(100) if not refusals(key := f"{WILLING}/{number}"))
    for key in (WILLING, other):
        assert gateway.send(WILLING, idempotency_key=key)
    assert gateway.mails() == {UNWILLING: 1, WILLING: 2}


def test_a_refusal_is_an_error_for_the_client() -> None:
    gateway = MailGateway()
    with gateway.served() as url:

        def post(order: str) -> int:
            headers = {"Content-Type": "application/json", "Idempotency-Key": order}
            body = json.dumps({"customer": "00001", "order": order, "text": "..."}).encode()
            with urlopen(Request(url, body, headers), timeout=60) as answer:
                return int(answer.status)

        assert post(WILLING) == 202
        with pytest.raises(HTTPError, match="503"):
            post(UNWILLING)
    assert gateway.mails() == {WILLING: 1}
