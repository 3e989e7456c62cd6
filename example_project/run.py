"""One run of the example: where its servers are, and what everything of it is called there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from redis import Redis

__all__ = ["BROKER_URL", "REDIS_URL", "RUN_NAME", "Run"]

#: The environment variables that say where the servers are, and which run a process belongs to.
BROKER_URL: Final = "RABBITDELAY_BROKER_URL"
REDIS_URL: Final = "RABBITDELAY_REDIS_URL"
RUN_NAME: Final = "RECORD_SHOP_RUN"


@dataclass(frozen=True)
class Run:
    """One run; Spark's executors, the worker and the terminal find each other by it.

    Attributes:
        name: Two runs of different names never meet, not even on the same servers.
        broker_url: RabbitMQ.
        redis_url: Redis: the mail gateway, the journal, and Celery's results.
    """

    name: str = "by-hand"
    broker_url: str = "amqp://guest:guest@127.0.0.1:5672//"
    redis_url: str = "redis://127.0.0.1:6379/0"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Run:
        """The run that this process belongs to."""
        return cls(
            environment.get(RUN_NAME, cls.name),
            environment.get(BROKER_URL, cls.broker_url),
            environment.get(REDIS_URL, cls.redis_url),
        )

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of the processes that belong to the run."""
        return {RUN_NAME: self.name, BROKER_URL: self.broker_url, REDIS_URL: self.redis_url}

    def connect_redis(self) -> Redis:
        """A client of the run's Redis that answers in text; it connects when it is first used."""
        return Redis.from_url(self.redis_url, decode_responses=True)

    @property
    def prefix(self) -> str:
        """The beginning of every name on the broker and of every key in Redis."""
        return f"record-shop-{self.name}"

    @property
    def queue(self) -> str:
        """The queue that the reminders reach when they are due."""
        return f"{self.prefix}-reminders"
