"""Delayed Celery tasks that wait in RabbitMQ.

A delay is a number, written digit by digit: each digit is a queue with a time to live that
dead-letters to the next one. Nothing waits in a worker::

    from celery_rabbitdelay import Celery

    app = Celery("shop", broker="amqp://")
    remind.apply_async((order,), delay=timedelta(days=3))
"""

from __future__ import annotations

from celery_rabbitdelay.app import Celery, install
from celery_rabbitdelay.bulk import Report, Row

__all__ = ["Celery", "Report", "Row", "__version__", "install"]

__version__ = "0.1.0"
