"""A digest of everything that is declared: all arguments, kinds and bindings count. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from kombu import Exchange, Queue

from celery_rabbitdelay.levels.entities import Binding


def digest_of(
    exchanges: Iterable[Exchange], queues: Iterable[Queue], bindings: Iterable[Binding]
) -> str:
    """Return a digest that changes with any exchange, queue, binding, or argument of one.

    The order does not count.
    """
    declared = {
        "exchanges": sorted(
            [e.name, e.type, e.durable, e.auto_delete, _written(e.arguments)] for e in exchanges
        ),
        "queues": sorted(
            [q.name, q.durable, q.exclusive, q.auto_delete, _written(q.queue_arguments)]
            for q in queues
        ),
        "bindings": sorted(map(list, bindings)),
    }
    return hashlib.sha256(json.dumps(declared).encode()).hexdigest()[:10]


def _written(arguments: dict[str, object] | None) -> str:
    return json.dumps(arguments or {}, sort_keys=True)
