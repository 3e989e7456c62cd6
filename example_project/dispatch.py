"""What a Spark executor does with its part of the orders: it sends one delayed task each."""

from __future__ import annotations

import time
from collections.abc import Iterable

from pyspark.sql import Row

from example_project.orders import Calendar, Order
from example_project.shop import app, journal, remind

__all__ = ["dispatch"]


def dispatch(rows: Iterable[Row], calendar: Calendar) -> None:
    """Send the reminders of some orders; each is confirmed by the broker when this returns.

    Spark may call it again with the same rows after a failure: the task's id and the mail's key
    come from the order, so that its customer gets one mail all the same.

    Args:
        rows: The orders, as :func:`example_project.spark_job.read_orders` makes them.
        calendar: Says when a moment of the shop's calendar comes.
    """
    try:
        for row in rows:
            order = Order(**row.asDict())
            remind.apply_async(  # type: ignore[call-arg]
                (order.order_id, order.customer_id, order.number_of_cds),
                delay=calendar.instant(order.reminder_at) - time.time(),
                task_id=f"reminder-{order.order_id}",
            )
            journal.write_sent(order.order_id)
    finally:
        app.rabbitdelay.close()
