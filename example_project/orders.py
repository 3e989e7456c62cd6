"""The shop's orders, the moment at which each is reminded of, and a calendar that runs faster.

Pure: no Spark, no Celery, no server.
"""

from __future__ import annotations

import hashlib
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Final, NamedTuple

__all__ = [
    "FIELDS",
    "LEAST_DOLLARS",
    "ORDERS_FILE",
    "ORDER_LINE",
    "REMIND_AFTER",
    "Calendar",
    "Order",
]

#: The orders of January 1997; data/README.md says where they come from.
ORDERS_FILE: Final = Path(__file__).parent / "data" / "cdnow_orders_1997_01.txt"

#: How long after the order the customer is asked for a review.
REMIND_AFTER: Final = timedelta(days=14)

#: Nobody is asked for a review of a single CD. That leaves 6,027 of the 8,928 orders, which two
#: processor cores can send, execute and catch up with in a minute.
LEAST_DOLLARS: Final = Decimal(15)

#: A line of the file that holds an order; the other one is the header.
ORDER_LINE: Final = r"^ \d{5} \d{8} "

_DAY: Final = timedelta(days=1)


class Field(NamedTuple):
    """A field of the fixed-width file.

    Attributes:
        name: What we call it.
        start: Its first column, counted from 1.
        width: How many columns it has.
    """

    name: str
    start: int
    width: int


FIELDS: Final = (
    Field("customer_id", 2, 5),
    Field("ordered_on", 8, 8),
    Field("number_of_cds", 17, 2),
    Field("dollars", 20, 7),
)


class Order(NamedTuple):
    """An order.

    Attributes:
        order_id: Customer, day, and which of the customer's orders of that day.
        customer_id: Who ordered.
        ordered_on: The day; the data has no time of day.
        number_of_cds: How many CDs.
        dollars: What they cost together.
    """

    order_id: str
    customer_id: str
    ordered_on: date
    number_of_cds: int
    dollars: Decimal

    @property
    def placed_at(self) -> datetime:
        """The moment of the order: a time of day that is made up, but always the same one."""
        digest = hashlib.blake2b(self.order_id.encode(), digest_size=8).digest()
        time_of_day = _DAY * (int.from_bytes(digest) / 2**64)
        return datetime.combine(self.ordered_on, time()) + time_of_day

    @property
    def reminder_at(self) -> datetime:
        """The moment, in the shop's calendar, at which the customer is asked for a review."""
        return self.placed_at + REMIND_AFTER


class Calendar(NamedTuple):
    """The shop's calendar, which runs faster than ours.

    Attributes:
        first_day: A day of the shop's calendar.
        begins: The instant at which that day begins for us, in seconds since 1970-01-01 UTC.
        seconds_per_day: How long a day of the shop lasts for us.
    """

    first_day: date
    begins: float
    seconds_per_day: float

    def instant(self, moment: datetime) -> float:
        """When a moment of the shop's calendar comes, in seconds since 1970-01-01 UTC."""
        days = (moment - datetime.combine(self.first_day, time())) / _DAY
        return self.begins + days * self.seconds_per_day
