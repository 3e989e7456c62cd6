"""Private RabbitMQ and Redis servers for tests; read :mod:`celery_rabbitdelay.testing.servers`."""

from __future__ import annotations

from celery_rabbitdelay.testing.rabbitmq import RabbitMQServer
from celery_rabbitdelay.testing.servers import (
    Certificates,
    RedisServer,
    Server,
    ServerNotStarted,
    wait_for,
)

__all__ = [
    "Certificates",
    "RabbitMQServer",
    "RedisServer",
    "Server",
    "ServerNotStarted",
    "wait_for",
]
