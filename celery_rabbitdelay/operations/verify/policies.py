"""Policies, operator policies and bounds that lose tasks, or make them early or late. Pure."""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import product
from math import inf
from typing import Any, Final, TypeAlias

from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.verify.findings import FoundRow
from celery_rabbitdelay.operations.verify.management import Inventory, Json

#: The definition of the policy that the documentation recommends for the levels: it keeps other
#: policies away.
GUARD: Final = json.dumps({"overflow": "reject-publish"})

#: Its priority.
GUARD_PRIORITY: Final = 1000

#: Keys of which a policy and an operator policy both hold, so that the smaller value counts:
#: https://www.rabbitmq.com/docs/policies#operator-policies. For all others, the operator's counts.
SMALLER_COUNTS: Final = frozenset(
    {"delivery-limit", "expires", "max-length", "max-length-bytes", "message-ttl"}
)

BOUNDS: Final = ("max-length", "max-length-bytes")

#: What policies set for a queue: by the key, the value and the policy that it comes from.
Effective: TypeAlias = Mapping[str, tuple[Any, Json]]


def check_policies(
    topology: Topology, inventory: Inventory, destinations: Iterable[str], virtual_host: str
) -> Iterator[FoundRow]:
    """Find policies that break a promise; those that bound destinations are :func:`check_bounds`'.

    Args:
        topology: The topology.
        inventory: The broker's queues and policies.
        destinations: The names of the tasks' queues.
        virtual_host: Its name, for the remedy.
    """
    checkin = topology.module_queues.checkin.name
    kinds = [
        (queue.name, _of_checkin if queue.name == checkin else _of_ours)
        for queue in topology.queues
    ]
    found: list[tuple[str, str, str, Any, Json]] = []
    for name, find in [*kinds, *((name, _of_tasks) for name in destinations)]:
        for effective in effective_policies(inventory, name):
            values = {key: value for key, (value, _) in effective.items()}
            found += (
                (code, name, key, *effective[key])
                for code, key in find(inventory.queues[name], values)
            )
    harmful: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for _, _, key, _, policy in found:
        harmful[policy["kind"], policy["name"]].add(key)
    for code, name, key, value, policy in found:
        told = {"policy": _title(policy), "key": key, "value": value}
        # One command for all keys of a policy: one for each would put the others back.
        without = _without(policy, harmful[policy["kind"], policy["name"]], virtual_host)
        guard = without
        if policy["kind"] == "policy":
            guard = _guard(topology.prefix, policy, virtual_host)
        yield code, f"queue {name}", {**told, "guard": guard, "without": without}


def check_bounds(
    inventory: Inventory, destinations: Iterable[str], may_refuse: Callable[[str], bool]
) -> Iterator[FoundRow]:
    """Find tasks' queues that drop tasks when they are full, or refuse them unknown to us.

    Args:
        inventory: The broker's queues and policies.
        destinations: The names of the tasks' queues.
        may_refuse: Returns whether the application knows that a queue may refuse tasks.
    """
    for name in destinations:
        for effective in effective_policies(inventory, name):
            policies = {f"x-{key}": value for key, (value, _) in effective.items()}
            values = {**inventory.queues[name]["arguments"], **policies}
            bounds = [f"{key} = {values[f'x-{key}']}" for key in BOUNDS if f"x-{key}" in values]
            if not bounds:
                continue
            told = {"bound": ", ".join(bounds), "queue": name}
            if not str(values.get("x-overflow")).startswith("reject-publish"):
                yield "destination-drops", f"queue {name}", told
            elif not may_refuse(name):
                yield "destination-refuses", f"queue {name}", told


def effective_policies(inventory: Inventory, name: str) -> Iterator[Effective]:
    """Yield what policies and operator policies come to for a queue, if it exists.

    There are several if several policies of the highest priority match: RabbitMQ takes any of them.
    They are computed from the policies, because RabbitMQ reports what is in effect some seconds
    late.
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
        # Erlang knows expressions that Python does not know; it is better to look in vain.
        return True


def _of_ours(queue: Json, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield code and key of what harms a queue of the levels or of a module."""
    arguments, is_quorum = queue["arguments"], queue["type"] == "quorum"
    if "expires" in values:
        yield "policy-expires", "expires"
    if values.get("message-ttl", inf) < arguments.get("x-message-ttl", inf):
        yield "policy-message-ttl", "message-ttl"
    for key in BOUNDS:
        if key in values:
            yield "policy-max-length", key
    # The policy's overflow counts, not the argument's; of dead-lettering, the argument's counts
    # wherever there is one (rabbit_quorum_queue:args_policy_lookup).
    if "x-dead-letter-exchange" in arguments:
        if is_quorum and values.get("overflow", "reject-publish") != "reject-publish":
            yield "policy-overflow", "overflow"
        if "dead-letter-routing-key" in values:
            yield "policy-dead-letter", "dead-letter-routing-key"
    if is_quorum and 0 <= values.get("delivery-limit", -1) < arguments.get("x-delivery-limit", 0):
        # Only undeliverable messages go nowhere from there.
        stays = "x-dead-letter-exchange" in arguments
        yield "policy-delivery-limit" if stays else "policy-drops-undeliverable", "delivery-limit"


def _of_checkin(queue: Json, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the same for check-in, which may refuse its clients' messages when it is full."""
    overflow = values.get("overflow", queue["arguments"].get("x-overflow"))
    refuses = str(overflow).startswith("reject-publish")
    yield from (row for row in _of_ours(queue, values) if not (refuses and row[1] in BOUNDS))


def _of_tasks(queue: Json, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield code and key of what harms a task's queue."""
    for key in ("expires", "message-ttl"):
        if key in values:
            yield f"destination-{key}", key
    if queue["type"] == "quorum" and values.get("delivery-limit", -1) >= 0:
        yield "destination-delivery-limit", "delivery-limit"


def _title(policy: Json) -> str:
    name, pattern, priority = policy["name"], policy["pattern"], policy["priority"]
    return f"the {policy['kind']} '{name}' for '{pattern}', priority {priority},"


def _without(policy: Json, keys: Collection[str], virtual_host: str) -> str:
    """Return the command that removes keys from a policy, or deletes it if none are left."""
    kind = policy["kind"].replace(" ", "_")
    rest = {name: value for name, value in policy["definition"].items() if name not in keys}
    where = ["-p", virtual_host]
    if not rest:
        return f"rabbitmqctl clear_{kind} {shlex.join([*where, policy['name']])}"
    where += ["--priority", str(policy["priority"]), "--apply-to", policy["apply-to"]]
    own = [policy["name"], policy["pattern"], json.dumps(rest)]
    return f"rabbitmqctl set_{kind} {shlex.join([*where, *own])}"


def _guard(prefix: str, policy: Json, virtual_host: str) -> str:
    """Return the command for a policy that keeps another one away from the levels."""
    priority = max(GUARD_PRIORITY, policy["priority"] + 1)
    where = ("-p", virtual_host, "--priority", str(priority), "--apply-to", "queues")
    pattern = f"^{re.escape(prefix)}\\."
    return f"rabbitmqctl set_policy {shlex.join([*where, prefix, pattern, GUARD])}"
