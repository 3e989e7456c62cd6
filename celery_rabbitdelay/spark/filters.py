"""The filters of a query that the registry takes. Needs PySpark 4.1."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from pyspark.sql.datasource import EqualTo, Filter, GreaterThanOrEqual, LessThan

from celery_rabbitdelay.spark.read import PendingReader, to_ms


class FilteringReader(PendingReader):
    """Reads the tracked tasks that a query's filters let through.

    Args:
        options: The options.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Take the filters that the registry has an index for; return the others to Spark."""
        for each in filters:
            if not self._takes(each):
                yield each

    def _takes(self, given: Filter) -> bool:
        match given:
            case EqualTo(attribute=("task" | "key" | "job" as name,), value=str() as value):
                if getattr(self.wanted, name) is not None:
                    return False
                named: dict[str, Any] = {name: value}
                self.wanted = self.wanted._replace(**named)
            case GreaterThanOrEqual(attribute=("due",), value=datetime() as instant):
                after = max(to_ms(instant), self.wanted.due_after_ms or 0)
                self.wanted = self.wanted._replace(due_after_ms=after)
            case LessThan(attribute=("due",), value=datetime() as instant):
                before = min(to_ms(instant), self.wanted.due_before_ms or to_ms(instant))
                self.wanted = self.wanted._replace(due_before_ms=before)
            case _:
                return False
        return True
