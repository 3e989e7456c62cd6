"""The API for kombu programs: delays in RabbitMQ without Celery.

Importing this module imports neither Celery nor Redis::

    from kombu import Connection, Queue
    from celery_rabbitdelay.kombu import DelayedProducer, Destination, Publisher, Topology

    with Connection("amqp://") as connection:
        producer = DelayedProducer(Publisher(connection), Topology())
        producer.publish_delayed({"month": 7}, Destination(Queue("reports"), "", "reports"), 3600)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from celery_rabbitdelay.levels.delay import Due
from celery_rabbitdelay.levels.headers import strip
from celery_rabbitdelay.levels.layout import Layout, Level, binary, clock, custom, geometric
from celery_rabbitdelay.levels.topology import Route, Topology
from celery_rabbitdelay.publishing.declaration import (
    bind_destination,
    declare,
    delete,
    missing,
    on_declared,
)
from celery_rabbitdelay.publishing.destination import Destination, resolve
from celery_rabbitdelay.publishing.producer import DelayedProducer
from celery_rabbitdelay.publishing.publisher import Publisher, PublisherPool
from celery_rabbitdelay.publishing.signature import SigningKeys

if TYPE_CHECKING:
    from celery_rabbitdelay.operations.reasons import Undeliverable, examine

__all__ = [
    "DelayedProducer",
    "Destination",
    "Due",
    "Layout",
    "Level",
    "Publisher",
    "PublisherPool",
    "Route",
    "SigningKeys",
    "Topology",
    "Undeliverable",
    "binary",
    "bind_destination",
    "clock",
    "custom",
    "declare",
    "delete",
    "examine",
    "geometric",
    "missing",
    "on_declared",
    "resolve",
    "strip",
]


def __getattr__(name: str) -> Any:
    """Import a name from the addition for operators on first use (PEP 562)."""
    if name not in ("Undeliverable", "examine"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("celery_rabbitdelay.operations.reasons"), name)
