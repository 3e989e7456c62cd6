"""The ids of tasks that are sent for rows: the same row gets the same id, however often it is sent.

Spark runs a task of its own again if it failed, or beside one that is slow, and users run a job
again. With ids that depend on the row alone, the registry drops what was sent a second time
(``once``), and results are found under the same id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final
from uuid import UUID, uuid5

from kombu.utils.json import JSONEncoder
from pyspark.sql import Row

from celery_rabbitdelay.exceptions import InvalidOption

#: The namespace of all ids (RFC 9562, version 5); it must never change.
NAMESPACE: Final = UUID("f1688d47-a47a-58e1-bbdf-0044bf1c5a41")


def task_id(job_id: str, values: Mapping[str, Any] | Sequence[Any]) -> str:
    """Return the id of the task that a write sends for a row.

    Use it to find the task again: to cancel it, or to look for its result. It opens no connection
    and needs no Spark session.

    Args:
        job_id: The option ``jobId`` of the write. For a stream, ``f"{job_id}:{batch}"`` with the
            number of the micro-batch, and with the id of the query if ``jobId`` is not set.
        values: The row's values in the columns that ``idColumn`` names, or in all columns without
            it: by the columns' names (a mapping or a :class:`pyspark.sql.Row`), or as a list in the
            alphabetical order of the columns' names. A struct is a mapping or a ``Row``.

    Raises:
        InvalidOption: ``job_id`` is not a string, or there are no values.
        TypeError: JSON cannot express one of the values.
    """
    if not isinstance(job_id, str):
        raise InvalidOption("jobId", repr(job_id), "takes a string: the jobId of the write")
    if isinstance(values, str | bytes) or not isinstance(values, Mapping | Sequence) or not values:
        takes = "takes the row's values in these columns: a mapping, or a list of one or more"
        raise InvalidOption("idColumn", repr(values), takes)
    plain = _plain(values)
    if isinstance(plain, dict):
        plain = [plain[name] for name in sorted(plain)]
    return TaskIds(job_id).of(plain)


class TaskIds:
    """Derives ids.

    Args:
        job_id: Part of every id: the same row has another id under another job.

    Attributes:
        namespace: The namespace of the ids.
    """

    def __init__(self, job_id: str) -> None:
        self.namespace = uuid5(NAMESPACE, job_id)
        # kombu's dumps makes an encoder for each call.
        self._encode = JSONEncoder(sort_keys=True, separators=(",", ":")).encode

    def of(self, values: Sequence[Any]) -> str:
        """Return the id of the row with these values, in the order of the columns' names.

        Raises:
            TypeError: JSON cannot express one of them.
        """
        # JSON has no lengths of time.
        told = [str(each) if isinstance(each, timedelta) else each for each in values]
        return str(uuid5(self.namespace, self._encode(told)))


def _plain(value: Any) -> Any:
    """Return a value with mappings for Spark's rows, at any depth."""
    if isinstance(value, Row):
        value = value.asDict()
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
