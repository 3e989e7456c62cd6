"""Makes the format ``rabbitdelay`` known to Spark, which imports all modules ``pyspark_*``."""

from celery_rabbitdelay.spark.data_source import RabbitDelayDataSource as DefaultSource

__all__ = ["DefaultSource"]
