"""The format ``rabbitdelay`` of Spark: ``df.write.format("rabbitdelay")`` and ``spark.read``."""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceReader
from pyspark.sql.types import StructType

from celery_rabbitdelay.exceptions import InvalidOption
from celery_rabbitdelay.spark import read
from celery_rabbitdelay.spark.application import HAS_FILTERS, explained
from celery_rabbitdelay.spark.options import ReadOptions, WriteOptions
from celery_rabbitdelay.spark.write import BatchWriter, StreamWriter


class RabbitDelayDataSource(DataSource):
    """Writes delayed tasks, and reads what waits. Spark finds it by its name.

    Its options are those of :class:`.WriteOptions` and :class:`.ReadOptions`, in camel case.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "rabbitdelay"

    @explained
    def schema(self) -> str:
        """Return the columns of a read."""
        what = ReadOptions.of(self.options).what
        return {"levels": read.LEVELS, "undeliverable": read.UNDELIVERABLE}.get(what, read.PENDING)

    @explained
    def reader(self, schema: StructType) -> DataSourceReader:
        """Return what reads."""
        options = ReadOptions.of(self.options)
        if options.what == "levels":
            return read.LevelsReader(options)
        if options.what == "undeliverable":
            return read.UndeliverableReader(options)
        if not options.filter_pushdown:
            return read.PendingReader(options)
        if not HAS_FILTERS:
            raise InvalidOption("filterPushdown", "true", "takes PySpark 4.1 or newer")
        from celery_rabbitdelay.spark.filters import FilteringReader  # cannot be imported in 4.0

        return FilteringReader(options)

    @explained
    def writer(self, schema: StructType, overwrite: bool) -> Any:
        """Return what writes a DataFrame.

        Raises:
            InvalidOption: An option is wrong, or what waits is to be overwritten.
            InvalidColumn: The schema does not fit.
        """
        if overwrite:
            takes = "takes append: tasks that wait are not overwritten"
            raise InvalidOption("mode", "overwrite", takes)
        return BatchWriter(schema, WriteOptions.of(self.options))

    @explained
    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        """Return what writes a stream.

        Raises:
            InvalidOption: An option is wrong, or the output mode is complete.
            InvalidColumn: The schema does not fit.
        """
        if overwrite:
            takes = "takes append or update: tasks that wait are not overwritten"
            raise InvalidOption("outputMode", "complete", takes)
        return StreamWriter(schema, WriteOptions.of(self.options))
