"""One run of the demonstration: its servers, and the prefix of its names on them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kombu import Connection
from redis import Redis

#: The environment variables that name servers to use instead of private ones.
BROKER_URL: Final = "RABBITDELAY_BROKER_URL"
REDIS_URL: Final = "RABBITDELAY_REDIS_URL"

#: Environment variables of the processes of a run.
_RUN_NAME: Final = "RECORD_SHOP_RUN"
_RUN_REDIS_URL: Final = "SHOP_REDIS_URL"
_RUN_BROKER_USE_SSL: Final = "SHOP_BROKER_USE_SSL"


@dataclass(frozen=True)
class Run:
    """One run, as the Spark job, the worker and the terminal know it.

    Attributes:
        name: The name; runs of different names never meet, even on the same servers.
        broker_url: The URL of RabbitMQ.
        redis_url: The URL of Redis, for the registry, Celery's results and the journal.
        mail_gateway_url: The URL of the mail gateway.
        broker_use_ssl: Celery's setting; False without TLS.
    """

    name: str
    broker_url: str
    redis_url: str
    mail_gateway_url: str
    broker_use_ssl: dict[str, Any] | bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Run:
        """Return the run that this process belongs to."""
        names = (_RUN_NAME, "CELERY_BROKER_URL", _RUN_REDIS_URL, "MAIL_GATEWAY_URL")
        name, broker_url, redis_url, gateway_url = (environment[each] for each in names)
        ssl = json.loads(environment.get(_RUN_BROKER_USE_SSL, "false"))
        return cls(name, broker_url, redis_url, gateway_url, ssl)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of the processes that belong to the run."""
        return {
            # The shop's own.
            "CELERY_BROKER_URL": self.broker_url,
            _RUN_REDIS_URL: self.redis_url,
            "MAIL_GATEWAY_URL": self.mail_gateway_url,
            # Celery prefers this variable, which the terminal may have set, to its configuration.
            "CELERY_RESULT_BACKEND": self.redis_url,
            # The mails stay on this machine, even if the terminal has set a proxy.
            "no_proxy": "127.0.0.1",
            _RUN_NAME: self.name,
            _RUN_BROKER_USE_SSL: json.dumps(self.broker_use_ssl),
        }

    def connect_broker(self) -> Connection:
        """Return a connection to RabbitMQ, which opens at its first use."""
        return Connection(self.broker_url, ssl=self.broker_use_ssl, connect_timeout=5)

    def connect_redis(self) -> Redis:
        """Return a client of the run's Redis, which returns text and connects at its first use."""
        return Redis.from_url(self.redis_url, decode_responses=True)

    @property
    def prefix(self) -> str:
        """The beginning of every name on the broker and of every key in Redis."""
        return f"record-shop-{self.name}"

    @property
    def queue(self) -> str:
        """The queue that the reminders reach when they are due."""
        return f"{self.prefix}-reminders"
