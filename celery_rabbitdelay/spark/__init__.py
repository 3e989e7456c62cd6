"""The PySpark data source ``rabbitdelay``: writes rows as delayed tasks, and reads waiting tasks.

Only this folder of the package imports PySpark and PyArrow. Spark makes a
``data_source.RabbitDelayDataSource`` from the options of a write or a read, in a separate Python
process, and pickles its writer or reader for the executors. Read ``options`` (what users set),
``columns`` (the schema, rows of Arrow batches, ids), ``partition`` (one partition goes through
``send_many``), ``write`` (a whole write, which is one job of the registry, and ``dispatch``, which
sends from a driver) and ``data_source`` (the class that Spark finds, and the readers). Then read
``grouped`` (Spark's own engine serializes the rows) with ``expressions`` (values as text).
``application`` gives each Python process its Celery application.
"""

from __future__ import annotations

from celery_rabbitdelay.spark.columns import task_id
from celery_rabbitdelay.spark.grouped import grouped
from celery_rabbitdelay.spark.write import Dispatched, dispatch

__all__ = ["Dispatched", "dispatch", "grouped", "task_id"]
