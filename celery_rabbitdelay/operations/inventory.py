"""Reads all entities of a virtual host over the management API, and computes effective policies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final, NamedTuple, TypeAlias

from kombu import Exchange, Queue

from celery_rabbitdelay.levels.topology import Binding
from celery_rabbitdelay.operations.management import NOTHING, Json, ManagementAPI
from celery_rabbitdelay.operations.quirks import DEAD_LETTERING_FLAG, version_of
from celery_rabbitdelay.publishing.kombu_internals import declared_arguments

#: Keys for which RabbitMQ takes the smaller value of a policy and an operator policy. For all other
#: keys, it takes the value of the operator policy:
#: https://www.rabbitmq.com/docs/policies#operator-policies
SMALLER_COUNTS: Final = frozenset(
    {"delivery-limit", "expires", "max-length", "max-length-bytes", "message-ttl"}
)

#: The values that policies set for a queue: by key, the value and the policy that it comes from.
Effective: TypeAlias = Mapping[str, tuple[Any, Json]]


class Inventory(NamedTuple):
    """The entities of one virtual host, and the state of its cluster.

    Attributes:
        version: The version of RabbitMQ.
        queues: Every queue by its name, always with ``arguments`` and ``type``.
        exchanges: Every exchange by its name, always with ``arguments``.
        bindings: Every binding, except the bindings of the default exchange.
        consumers: The queues and the tags of all consumers, up to five seconds old.
        policies: Every policy and every operator policy, with its ``kind``.
        nodes: Whether a node of the cluster runs, keyed by the node's name.
        alarmed: The nodes that are low on memory or disk space, as ``node rabbit@host``.
        disabled_flags: The feature flags that are disabled; read on RabbitMQ 3.10 only.
    """

    version: str = "0"
    queues: Mapping[str, Json] = NOTHING
    exchanges: Mapping[str, Json] = NOTHING
    bindings: frozenset[Binding] = frozenset()
    consumers: Sequence[tuple[str, str]] = ()
    policies: Sequence[Json] = ()
    nodes: Mapping[str, bool] = NOTHING
    alarmed: Sequence[str] = ()
    disabled_flags: Sequence[str] = ()

    def of(self, entity: Exchange | Queue) -> Json | None:
        """Return the broker's description of an exchange or queue; None if it does not exist."""
        there = self.queues if isinstance(entity, Queue) else self.exchanges
        return there.get(entity.name)


def read_inventory(api: ManagementAPI, virtual_host: str) -> Inventory:
    """Read a virtual host.

    Args:
        api: The management API.
        virtual_host: The name of the virtual host.

    Raises:
        ManagementUnavailable: The API does not answer, or the user's permissions do not suffice.
    """
    version = api.get("overview")["rabbitmq_version"]
    needs_flag = DEAD_LETTERING_FLAG.is_in(version_of(version))
    flags = api.get("feature-flags") if needs_flag else ()
    # Do not ask for statistics, which are up to five seconds old, and slow with many queues; nor
    # for totals, because RabbitMQ 3.10 then leaves out queues whose node is down.
    queues = _by_name(api.get("queues", virtual_host, disable_stats="true"))
    nodes = api.get("nodes")
    return Inventory(
        version=version,
        queues={
            name: {"type": each["arguments"].get("x-queue-type", "classic"), **each}
            for name, each in queues.items()
        },
        exchanges=_by_name(api.get("exchanges", virtual_host)),
        bindings=frozenset(
            Binding(
                each["source"],
                each["routing_key"],
                each["destination"],
                each["destination_type"] == "exchange",
            )
            for each in api.get("bindings", virtual_host)
            if each["source"]
        ),
        consumers=[
            (each["queue"]["name"], each["consumer_tag"])
            for each in api.get("consumers", virtual_host)
        ],
        policies=[
            {"kind": kind, **each}
            for kind, path in (("policy", "policies"), ("operator policy", "operator-policies"))
            for each in api.get(path, virtual_host)
        ],
        nodes={each["name"]: bool(each.get("running")) for each in nodes},
        alarmed=[
            f"node {each['name']}"
            for each in nodes
            if each.get("mem_alarm") or each.get("disk_free_alarm")
        ],
        disabled_flags=[each["name"] for each in flags if each["state"] == "disabled"],
    )


def _by_name(entities: Iterable[Json]) -> dict[str, Json]:
    return {each["name"]: {**each, "arguments": each.get("arguments") or {}} for each in entities}


def described(entity: Exchange | Queue) -> dict[str, object]:
    """Return the declaration of an exchange or queue as the management API shows it."""
    flags = {"durable": bool(entity.durable), "auto_delete": bool(entity.auto_delete)}
    if isinstance(entity, Queue):
        return {"name": entity.name, **flags, "arguments": declared_arguments(entity)}
    kind = {"type": entity.type, "internal": False}
    return {"name": entity.name, **kind, **flags, "arguments": dict(entity.arguments or {})}


def effective_policies(inventory: Inventory, name: str) -> Iterator[Effective]:
    """Yield the effective policies that a queue may have; none for an unknown queue.

    If several policies of the highest priority match, RabbitMQ applies any one of them. The values
    are computed here, because RabbitMQ reports the effective policies some seconds late.
    """
    if (queue := inventory.queues.get(name)) is None:
        return
    kinds = ("policy", "operator policy")
    for own, operators in product(*(_highest(inventory, kind, queue) for kind in kinds)):
        effective = {key: (value, own) for key, value in own["definition"].items()}
        for key, value in operators["definition"].items():
            if key not in SMALLER_COUNTS or key not in effective or value < effective[key][0]:
                effective[key] = (value, operators)
        yield effective


def _highest(inventory: Inventory, kind: str, queue: Json) -> list[Json]:
    found = [each for each in inventory.policies if each["kind"] == kind and _matches(each, queue)]
    highest = max((policy["priority"] for policy in found), default=0)
    return [each for each in found if each["priority"] == highest] or [{"definition": {}}]


def _matches(policy: Json, queue: Json) -> bool:
    if policy["apply-to"] not in ("all", "queues", f"{queue['type']}_queues"):
        return False
    try:
        return re.search(policy["pattern"], queue["name"]) is not None
    except re.error:
        # Erlang accepts some patterns that Python refuses. A false alarm is better than a missed
        # fault.
        return True
