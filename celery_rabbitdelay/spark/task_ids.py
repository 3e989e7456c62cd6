"""The ids of tasks that are sent for rows: the same row gets the same id, however often it is sent.

Spark runs a task of its own again if it failed, or beside one that is slow, and users run a job
again. With ids that depend on the row alone, the registry drops what was sent a second time
(``once``), and results are found under the same id.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final
from uuid import UUID, uuid5

from kombu.utils.json import JSONEncoder

__all__ = ["TaskIds"]

#: The namespace of all ids (RFC 9562, version 5); it must never change.
NAMESPACE: Final = UUID("f1688d47-a47a-58e1-bbdf-0044bf1c5a41")


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
