"""Tests of the record shop; one file needs redis-server, none needs RabbitMQ or Java."""
