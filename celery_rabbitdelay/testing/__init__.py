"""Private RabbitMQ and Redis servers for tests; read :mod:`celery_rabbitdelay.testing.servers`."""

from __future__ import annotations

from celery_rabbitdelay.testing.servers import (
    RabbitMQServer,
    RedisServer,
    Server,
    ServerNotStarted,
    wait_for,
)

__all__ = ["RabbitMQServer", "RedisServer", "Server", "ServerNotStarted", "wait_for"]
