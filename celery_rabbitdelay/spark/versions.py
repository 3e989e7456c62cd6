"""What PySpark 4.0 lacks: streams in Arrow batches, and filters that a source takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import datasource

#: Whether the writer of a stream gets Arrow batches, and not rows (PySpark 4.1).
STREAMS_BATCHES: Final = hasattr(datasource, "DataSourceStreamArrowWriter")

#: Whether a reader may take filters (PySpark 4.1).
HAS_FILTERS: Final = hasattr(datasource, "EqualTo")

if TYPE_CHECKING or STREAMS_BATCHES:
    StreamWriterBase = datasource.DataSourceStreamArrowWriter
else:
    StreamWriterBase = datasource.DataSourceStreamWriter
