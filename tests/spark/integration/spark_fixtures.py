"""What the tests of Spark share: rows for the task ``note``, and writes.

A test module imports the fixture ``shop``, and names it in its ``__all__``.
"""

from typing import Any, Final

import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.kernel.integration.notes import Notes
from tests.spark.integration.spark_apps import APP

#: Seconds; long enough for Spark to commit before the tasks are due.
DELAY: Final = 4.0


@pytest.fixture
def shop(spark_shop: Any) -> Any:
    """The application ``APP``, which a worker serves."""
    return spark_shop


def notes(
    spark: SparkSession,
    noted: Notes,
    number: int,
    delay: str = f"{DELAY}D",
    partitions: int | None = None,
) -> DataFrame:
    """Return rows for the task ``note``, which is given their numbers.

    Args:
        spark: The session.
        noted: The notes of the test.
        number: How many rows.
        delay: Their delay, as an expression of SQL, in which ``id`` is the row's number.
        partitions: How many partitions; None for Spark's default.
    """
    divided = "" if partitions is None else f", 1, {partitions}"
    return spark.sql(
        f"select array(id) args, named_struct('key', '{noted.key}') kwargs, {delay} delay "
        f"from range(0, {number}{divided})"
    )


def write(frame: DataFrame, **options: Any) -> None:
    """Send a DataFrame's rows by the format, by default to the task ``note`` of ``APP``."""
    given = {"task": "note", **({} if "broker" in options else {"app": APP}), **options}
    frame.write.format("rabbitdelay").mode("append").options(**given).save()
