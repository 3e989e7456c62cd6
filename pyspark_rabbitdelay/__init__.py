"""Lets Spark find the format ``rabbitdelay`` by its name: it looks into modules ``pyspark_*``."""

from celery_rabbitdelay.spark.data_source import RabbitDelayDataSource as DefaultSource

__all__ = ["DefaultSource"]
