"""A topology as a definitions file, which RabbitMQ imports.

``rabbitmqctl import_definitions``, the management page and ``load_definitions`` of
``rabbitmq.conf`` read it (https://www.rabbitmq.com/docs/definitions).
"""

from __future__ import annotations

import json
from typing import Any

from celery_rabbitdelay.levels.entities import Binding
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.export.entities import all_bindings, all_exchanges, all_queues


def definitions(topology: Topology, vhost: str = "/") -> dict[str, Any]:
    """Return the exchanges, queues and bindings of a topology.

    The virtual host has to exist: an import that names it would reset its description, its tags
    and its default queue type.

    Args:
        topology: The topology.
        vhost: The virtual host that they belong to.
    """
    common = {"vhost": vhost, "durable": True, "auto_delete": False}
    return {
        "exchanges": [
            {**each._asdict(), **common, "internal": False} for each in all_exchanges(topology)
        ],
        "queues": [{**each._asdict(), **common} for each in all_queues(topology)],
        "bindings": [_binding(each, vhost) for each in all_bindings(topology)],
    }


def as_definitions(topology: Topology, vhost: str = "/") -> str:
    """Return the same as JSON."""
    return json.dumps(definitions(topology, vhost), indent=2) + "\n"


def _binding(binding: Binding, vhost: str) -> dict[str, Any]:
    return {
        "source": binding.source,
        "vhost": vhost,
        "destination": binding.target,
        "destination_type": "exchange" if binding.target_is_exchange else "queue",
        "routing_key": binding.pattern,
        "arguments": {},
    }
