"""Tests of the record shop; those of the pipelines start Spark, RabbitMQ, Redis and a worker."""
