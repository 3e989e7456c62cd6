"""The PySpark data source ``rabbitdelay``: rows become delayed tasks, and what waits becomes rows.

PySpark and PyArrow come in here, and nowhere else in the package. Of the options of a write or a
read, Spark makes a ``data_source.RabbitDelayDataSource`` in a Python process of its own, and
pickles what that returns for the executors. Read ``options`` (what a user may say), ``columns``
(the schema, and rows of Arrow batches), ``task_ids``, ``partition`` (one partition goes through
``send_many``), ``write`` (a whole write, which is one job of the registry), and ``pending``
(reading what waits). Then ``grouped``, by which Spark's own engine writes the rows, with
``expressions`` (values as text) and ``grouped_columns`` (cutting the result into envelopes).
``application`` gives each Python process its Celery application, ``filters``
takes the filters of a query, ``undeliverable`` reads what could not be delivered, ``versions``
knows what PySpark 4.0 lacks, and ``dispatch`` sends from a driver, whose terminal shows the
``progress``.
"""

from __future__ import annotations

from celery_rabbitdelay.spark.dispatch import Dispatched, dispatch
from celery_rabbitdelay.spark.grouped import grouped
from celery_rabbitdelay.spark.task_ids import task_id

__all__ = ["Dispatched", "dispatch", "grouped", "task_id"]
