"""A topology as a definitions file, which RabbitMQ imports.

``rabbitmqctl import_definitions``, the management page and ``load_definitions`` of
``rabbitmq.conf`` read it (https://www.rabbitmq.com/docs/definitions).
"""

from __future__ import annotations

import json
from typing import Any

from celery_rabbitdelay.levels.topology import Topology


def definitions(topology: Topology, vhost: str = "/") -> dict[str, list[dict[str, Any]]]:
    """Return the exchanges, queues and bindings that ``declare`` makes.

    The guard, which refuses other layouts under the prefix, is the first exchange. The marker,
    which tells processes that the topology is complete, is the last one.

    The virtual host has to exist: an import that names it would reset its description, its tags
    and its default queue type.

    Args:
        topology: The topology.
        vhost: The virtual host that they belong to.
    """
    common = {"vhost": vhost, "durable": True, "auto_delete": False}
    return {
        "exchanges": [
            {
                "name": each.name,
                "type": each.type,
                "arguments": dict(each.arguments or {}),
                **common,
                "internal": False,
            }
            for each in (topology.identity.guard, *topology.exchanges, topology.identity.marker)
        ],
        "queues": [
            {"name": each.name, "arguments": dict(each.queue_arguments or {}), **common}
            for each in topology.queues
        ],
        "bindings": [
            {
                "source": each.source,
                "vhost": vhost,
                "destination": each.target,
                "destination_type": "exchange" if each.target_is_exchange else "queue",
                "routing_key": each.pattern,
                "arguments": {},
            }
            for each in topology.bindings
        ],
    }


def as_definitions(topology: Topology, vhost: str = "/") -> str:
    """Return the same as JSON."""
    return json.dumps(definitions(topology, vhost), indent=2) + "\n"
