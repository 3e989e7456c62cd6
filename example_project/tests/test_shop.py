"""A reminder whose mail is refused: 17 minutes of retries after a fortnight, without waiting."""

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from celery_rabbitdelay.testing import Travel
from example_project import shop
from example_project.demonstration.gateway import MailGateway


class Refusing(MailGateway):
    """A gateway that refuses the first ``refuses`` mails, and notes when each was posted."""

    def __init__(self) -> None:
        super().__init__()
        self.begin(0)

    def begin(self, refuses: int, now: Callable[[], datetime] = datetime.now) -> None:
        """Begin a new test.

        Args:
            refuses: The number of mails to refuse from now on.
            now: Returns the time.
        """
        self.posted: list[datetime] = []
        self._refuses, self._now = refuses, now

    def send(self, order_id: str, idempotency_key: str) -> bool:
        self.posted.append(self._now())
        return len(self.posted) > self._refuses and super().send(order_id, idempotency_key)

    @property
    def pauses(self) -> list[float]:
        """The seconds between two mails."""
        return [(later - earlier).total_seconds() for earlier, later in pairwise(self.posted)]


@pytest.fixture(scope="session")
def rabbitdelay_celery_app() -> Any:
    return shop.app


@pytest.fixture(scope="module")
def gateway() -> Iterator[Refusing]:
    """Serve one gateway for all tests: their worker gets its URL when it starts."""
    gateway = Refusing()
    with gateway.served() as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAIL_GATEWAY_URL", url)
        yield gateway


def test_a_reminder_is_posted_again_after_growing_pauses(
    gateway: Refusing, rabbitdelay_worker: Any, travel: Travel
) -> None:
    gateway.begin(4, lambda: travel.now)
    sent = travel.now
    result = shop.remind.apply_async(reminder("00001-19970101-1"), delay=timedelta(days=14))
    travel(days=13)
    assert gateway.posted == []
    travel.until(result.successful)
    assert timedelta(days=14) <= gateway.posted[0] - sent < timedelta(days=14, minutes=1)
    assert gateway.pauses == [1, 2, 4, 8]
    assert gateway.mails() == {"00001-19970101-1": 1}


def test_after_ten_retries_it_is_given_up(
    gateway: Refusing, rabbitdelay_worker: Any, travel: Travel
) -> None:
    gateway.begin(100, lambda: travel.now)
    result = shop.remind.apply_async(reminder("00002-19970101-1"), delay=timedelta(days=14))
    travel.until(travel.nothing_waits)
    assert gateway.pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert result.failed()
    assert "00002-19970101-1" not in gateway.mails()


def reminder(order_id: str) -> tuple[str, str, int]:
    """The arguments of an order's reminder."""
    return order_id, order_id[:5], 2
