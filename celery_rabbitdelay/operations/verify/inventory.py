"""What the management API says about a broker, as values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from celery_rabbitdelay.exceptions import ManagementUnavailable
from celery_rabbitdelay.levels.entities import Binding
from celery_rabbitdelay.operations.verify.management_api import ManagementAPI

#: HTTP's status for a failed health check.
UNHEALTHY = 503

#: HTTP's status for a path that this version of the broker does not have.
NO_SUCH_PATH = 404

T = TypeVar("T")


class FoundQueue(NamedTuple):
    """A queue on the broker.

    Attributes:
        name: Its name.
        type: "quorum", "classic", "stream", ...
        arguments: The arguments that it was declared with.
        durable: Whether it survives a restart.
        auto_delete: Whether it goes with its last consumer.
        exclusive: Whether it belongs to one connection.
        node: The node of a classic queue, or of the leader; None if there is none.
        members: The nodes with a replica.
        online: Those of them that run.
    """

    name: str
    type: str
    arguments: Mapping[str, Any]
    durable: bool
    auto_delete: bool
    exclusive: bool
    node: str | None
    members: tuple[str, ...]
    online: tuple[str, ...]


class FoundExchange(NamedTuple):
    """An exchange on the broker.

    Attributes:
        name: Its name.
        type: "topic", "fanout", ...
        arguments: The arguments that it was declared with.
        durable: Whether it survives a restart.
        auto_delete: Whether it goes with its last binding.
        internal: Whether clients may not publish to it.
    """

    name: str
    type: str
    arguments: Mapping[str, Any]
    durable: bool
    auto_delete: bool
    internal: bool


class Policy(NamedTuple):
    """A policy or an operator policy.

    Attributes:
        name: Its name.
        pattern: The regular expression for names.
        apply_to: "all", "queues", "quorum_queues", "classic_queues", "exchanges", ...
        priority: Of several policies that match, the highest one is applied.
        definition: What it sets.
        is_operator: Whether it is an operator policy, which is applied in addition.
    """

    name: str
    pattern: str
    apply_to: str
    priority: int
    definition: Mapping[str, Any]
    is_operator: bool


class Node(NamedTuple):
    """A node of the cluster.

    Attributes:
        name: Its name.
        running: Whether it runs.
        partitions: The nodes that it is cut off from.
    """

    name: str
    running: bool
    partitions: tuple[str, ...]


@dataclass(frozen=True)
class Inventory:
    """What there is in one virtual host, and in its cluster. None: the user may not see it.

    Attributes:
        queues: Every queue, by its name.
        exchanges: Every exchange, by its name.
        bindings: Every binding, except those of the default exchange.
        consumers: How many consumers each queue has, up to five seconds ago.
        policies: Policies and operator policies.
        effective: Where policies are None: what they come to for each queue, up to five seconds
            ago, by its name.
        nodes: The nodes.
        disabled_flags: The stable feature flags that are disabled.
        deprecated: The deprecated features that are in use.
        alarms: The alarms in effect, as "memory on rabbit@a".
        not_seen: What is None, and why.
    """

    queues: Mapping[str, FoundQueue]
    exchanges: Mapping[str, FoundExchange]
    bindings: frozenset[Binding]
    consumers: Mapping[str, int] | None = None
    policies: tuple[Policy, ...] | None = ()
    effective: Mapping[str, Mapping[str, Any]] | None = None
    nodes: tuple[Node, ...] | None = None
    disabled_flags: tuple[str, ...] | None = ()
    deprecated: tuple[str, ...] | None = ()
    alarms: tuple[str, ...] | None = ()
    not_seen: tuple[str, ...] = ()


def read_inventory(api: ManagementAPI, virtual_host: str) -> Inventory:
    """Read a virtual host.

    Args:
        api: The management API.
        virtual_host: Its name.

    Raises:
        ManagementUnavailable: Its queues, exchanges and bindings cannot be read.
    """
    # Without statistics, which are up to five seconds old, and slow if there are many queues. With
    # enable_queue_totals, RabbitMQ 3.10 leaves out the queues whose node is away.
    queues = api.get("queues", virtual_host, disable_stats="true")
    exchanges = api.get("exchanges", virtual_host)
    bindings = api.get("bindings", virtual_host)
    not_seen: list[str] = []

    def seen(what: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except ManagementUnavailable as error:
            not_seen.append(f"{what}: {error}")
            return None

    policies = seen("policies and operator policies", lambda: _policies(api, virtual_host))
    return Inventory(
        queues={queue["name"]: _queue(queue) for queue in queues},
        exchanges={exchange["name"]: _exchange(exchange) for exchange in exchanges},
        bindings=frozenset(_bindings(bindings)),
        consumers=seen("consumers", lambda: _consumers(api, virtual_host)),
        policies=policies,
        effective=None if policies is not None else _effective(api, virtual_host),
        nodes=seen("the cluster's nodes", lambda: _nodes(api)),
        disabled_flags=seen("feature flags", lambda: _disabled_flags(api)),
        deprecated=seen("deprecated features", lambda: _deprecated(api)),
        alarms=seen("alarms", lambda: _alarms(api)),
        not_seen=tuple(not_seen),
    )


def _queue(found: Mapping[str, Any]) -> FoundQueue:
    arguments = found.get("arguments") or {}
    return FoundQueue(
        name=found["name"],
        type=found.get("type") or arguments.get("x-queue-type", "classic"),
        arguments=arguments,
        durable=bool(found.get("durable")),
        auto_delete=bool(found.get("auto_delete")),
        exclusive=bool(found.get("exclusive")),
        node=found.get("leader") or found.get("node"),
        members=tuple(found.get("members") or ()),
        online=tuple(found.get("online") or ()),
    )


def _exchange(found: Mapping[str, Any]) -> FoundExchange:
    flags = (bool(found.get(flag)) for flag in ("durable", "auto_delete", "internal"))
    return FoundExchange(found["name"], found["type"], found.get("arguments") or {}, *flags)


def _bindings(found: Iterable[Mapping[str, Any]]) -> Iterable[Binding]:
    for each in found:
        if each["source"]:
            is_exchange = each["destination_type"] == "exchange"
            yield Binding(each["source"], each["routing_key"], each["destination"], is_exchange)


def _consumers(api: ManagementAPI, virtual_host: str) -> Mapping[str, int]:
    return Counter(each["queue"]["name"] for each in api.get("consumers", virtual_host))


def _policies(api: ManagementAPI, virtual_host: str) -> tuple[Policy, ...]:
    return tuple(
        Policy(
            name=each["name"],
            pattern=each["pattern"],
            apply_to=each["apply-to"],
            priority=each["priority"],
            definition=each["definition"],
            is_operator=path == "operator-policies",
        )
        for path in ("policies", "operator-policies")
        for each in api.get(path, virtual_host)
    )


def _effective(api: ManagementAPI, virtual_host: str) -> Mapping[str, Mapping[str, Any]] | None:
    try:
        found = api.get("queues", virtual_host, columns="name,effective_policy_definition")
    except ManagementUnavailable:
        return None
    return {each["name"]: each.get("effective_policy_definition") or {} for each in found}


def _nodes(api: ManagementAPI) -> tuple[Node, ...]:
    return tuple(
        Node(each["name"], bool(each.get("running")), tuple(each.get("partitions") or ()))
        for each in api.get("nodes")
    )


def _disabled_flags(api: ManagementAPI) -> tuple[str, ...]:
    return tuple(
        each["name"]
        for each in api.get("feature-flags")
        if each["state"] == "disabled" and each["stability"] in ("stable", "required")
    )


def _deprecated(api: ManagementAPI) -> tuple[str, ...]:
    try:
        return tuple(each["name"] for each in api.get("deprecated-features", "used"))
    except ManagementUnavailable as error:
        if error.status == NO_SUCH_PATH:  # up to RabbitMQ 3.12, there are none
            return ()
        raise


def _alarms(api: ManagementAPI) -> tuple[str, ...]:
    found = api.get("health", "checks", "alarms", accept=UNHEALTHY)
    return tuple(f"{each['resource']} on {each['node']}" for each in found.get("alarms", ()))
