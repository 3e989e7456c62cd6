"""The ids that the format ``rabbitdelay`` derives for the reminders.

The guide, ``docs/how-to/spark.md``, says how they are derived from ``jobId`` and ``idColumn``.
"""

from __future__ import annotations

import json
from typing import Final
from uuid import UUID, uuid5

from example_project.spark_job import JOB_ID

__all__ = ["task_id"]

#: The namespace of all ids that the format derives.
NAMESPACE: Final = UUID("f1688d47-a47a-58e1-bbdf-0044bf1c5a41")


def task_id(order_id: str) -> str:
    """Return the id of an order's reminder."""
    return str(uuid5(uuid5(NAMESPACE, JOB_ID), json.dumps([order_id])))
