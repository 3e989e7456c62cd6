"""Find what on a broker breaks a promise of the levels."""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, Final

from kombu import Queue

from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.levels.topology import CONSUMER_TAG, DISTRIBUTE, PROBE, Binding, Topology
from celery_rabbitdelay.operations.findings import (
    BOUNDS,
    DESTINATION_CONSEQUENCES,
    POLICY_CONSEQUENCES,
    FoundRow,
)
from celery_rabbitdelay.operations.inventory import Inventory, effective_policies
from celery_rabbitdelay.operations.management import Json
from celery_rabbitdelay.operations.quirks import OLDEST, STUCK_DEAD_LETTERING, version_of
from celery_rabbitdelay.publishing.kombu_internals import declared_arguments

#: The definition of the policy that the documentation recommends for the levels: it keeps other
#: policies away.
GUARD: Final = json.dumps({"overflow": "reject-publish"})

#: Its priority.
GUARD_PRIORITY: Final = 1000

#: See :data:`.DEAD_LETTERING_FLAG`.
NEEDED_FLAG: Final = "stream_queue"

#: Replicas that survive the death of a node:
#: https://www.rabbitmq.com/docs/quorum-queues#replication-factor
ENOUGH_REPLICAS: Final = 3

#: Queues that workers and commands declare for themselves, for remote control and events.
ROOM_FOR_WORKERS: Final = 100

#: Seconds that a probe may be early, and late.
PROBE_IN_TIME: Final = (-1.0, 30.0)

#: Behind the prefix: the name of a digit's queue, perhaps of a shard: days.70, days.x10.0.s2
_QUEUE: Final = re.compile(r"[A-Za-z0-9_-]+\.(\d+|x\d+\.0)(\.s\d+)?")

#: Behind the prefix: the name of a level's exchange, or of a layout's marker.
_EXCHANGE: Final = re.compile(r"[A-Za-z0-9_-]+\.x\d+|layout\.[^.]+")


def check_broker(settings: Settings, inventory: Inventory) -> Iterator[FoundRow]:
    """Find a version, a feature flag, a clock and a type of queue that break a promise."""
    subject = f"RabbitMQ {inventory.version}"
    version = version_of(inventory.version)
    if version < OLDEST:
        yield "version-too-old", subject, {}
    if STUCK_DEAD_LETTERING.is_in(version):
        yield "version-fault", subject, {}
    if NEEDED_FLAG in inventory.disabled_flags:
        yield "feature-flag-disabled", f"feature flag {NEEDED_FLAG}", {"flag": NEEDED_FLAG}
    difference = abs(inventory.clock_ahead)
    if difference > settings.early_tolerance:
        ahead = "ahead of" if inventory.clock_ahead > 0 else "behind"
        yield "clock-difference", "this machine", {"difference": difference, "ahead": ahead}
    if settings.queue_type == "classic":
        yield "classic-levels", settings.prefix, {}


def check_alarms(inventory: Inventory, is_blocked: bool) -> Iterator[FoundRow]:
    """Find that a node is low on memory or disk space, and blocks publishers at all nodes."""
    # The management API knows of an alarm, and of its end, some seconds late.
    nodes = [f"node {name}" for name in inventory.alarmed]
    for subject in nodes or [f"RabbitMQ {inventory.version}"]:
        if is_blocked:
            yield "publishers-blocked", subject, {}


def check_limit(
    topology: Topology, queues: Sequence[Queue], inventory: Inventory, virtual_host: str
) -> Iterator[FoundRow]:
    """Find that the virtual host may not have as many queues as are still to be declared."""
    most, there = inventory.limits.get("max-queues", -1), inventory.queues
    if most < 0:
        return
    ours = {each.name for each in (*topology.queues, topology.probe, *queues)}
    missing, room = len(ours - {*there}), max(most - len(there), 0)
    if missing > room or not room:
        # For some workers too, each of which has queues of its own.
        enough = {**inventory.limits, "max-queues": len(there) + missing + ROOM_FOR_WORKERS}
        told = {"most": most, "there": len(there), "missing": missing}
        arguments = shlex.join(["-p", virtual_host, json.dumps(enough)])
        command = f"rabbitmqctl set_vhost_limits {arguments}"
        yield "queue-limit", f"virtual host {virtual_host}", {**told, "command": command}


def check_entities(settings: Settings, inventory: Inventory) -> Iterator[FoundRow]:
    """Find exchanges and queues of the topology that are missing or differ."""
    topology, exchanges = settings.topology, inventory.exchanges
    guard, *others, marker = (
        topology.identity.guard,
        *topology.exchanges,
        topology.identity.marker,
    )
    may_declare = settings.declare == "auto"
    missing = [
        *(f"exchange {each.name}" for each in others if each.name not in exchanges),
        *(f"queue {each.name}" for each in topology.queues if each.name not in inventory.queues),
    ]
    if len(missing) == len(others) + len(topology.queues):
        yield "not-declared" if may_declare else "nobody-declares", topology.prefix, {}
        missing = []
    elif may_declare:
        named = (f"exchange {each.name}" for each in (guard, marker) if each.name not in exchanges)
        missing += named
    for subject in missing:
        yield "missing", subject, {}
    for exchange in (guard, *others, marker):
        wanted = {"type": exchange.type, "durable": True, "auto_delete": False, "internal": False}
        difference = _difference(
            {**wanted, **(exchange.arguments or {})}, exchanges.get(exchange.name), wanted
        )
        if difference and exchange is guard:
            yield "layout-conflict", topology.prefix, {"difference": difference}
        elif difference:
            yield "differs", f"exchange {exchange.name}", {"difference": difference}
    for queue in topology.queues:
        if difference := _difference_of_queue(queue, inventory):
            yield "differs", f"queue {queue.name}", {"difference": difference}


def check_bindings(topology: Topology, inventory: Inventory) -> Iterator[FoundRow]:
    """Find bindings that are missing, and those that let tasks out or strangers in."""
    ours = {exchange.name for exchange in topology.exchanges}
    queues = {queue.name for queue in topology.queues}
    for binding in topology.bindings:
        targets = inventory.exchanges if binding.target_is_exchange else inventory.queues
        if (
            binding not in inventory.bindings
            # If one of its ends is missing, that is a finding of its own.
            and binding.source in inventory.exchanges
            and binding.target in targets
        ):
            yield "missing", _subject(binding), {}
    for binding in sorted(inventory.bindings - {*topology.bindings, topology.probe_binding}):
        leads_out = binding.source in ours and not _is_harmless(topology, binding)
        leads_in = binding.target in (ours if binding.target_is_exchange else queues)
        # The levels of another layout, which are orphans, lead to the same delivery exchange.
        if leads_out or (leads_in and not _is_level(topology, binding.source)):
            yield "binding-additional", _subject(binding), {"source": binding.source}


def check_consumers(topology: Topology, inventory: Inventory) -> Iterator[FoundRow]:
    """Find consumers of our queues that are not of this package."""
    ours = {queue.name for queue in topology.queues}
    for name, tag in inventory.consumers:
        if name in ours and not tag.startswith(CONSUMER_TAG):
            yield "level-consumed", f"queue {name}", {}


def destinations_of(
    topology: Topology, queues: Iterable[Queue], inventory: Inventory
) -> tuple[str, ...]:
    """Return the names of the application's queues, and of all that delivery is bound to."""
    bound = sorted(
        binding.target
        for binding in inventory.bindings
        if binding.source == topology.delivery.name and not binding.target_is_exchange
    )
    ours = {queue.name for queue in (*topology.queues, topology.probe)}
    names = dict.fromkeys([*(queue.name for queue in queues), *bound])
    return tuple(name for name in names if name not in ours)


def check_destinations(
    settings: Settings, queues: Sequence[Queue], inventory: Inventory
) -> Iterator[FoundRow]:
    """Find queues of tasks that are missing, differ, or get no tasks."""
    topology, delivery = settings.topology, settings.topology.delivery.name
    distributes = DISTRIBUTE in settings.modules
    for queue in queues:
        name, subject = queue.name, f"queue {queue.name}"
        if name not in inventory.queues:
            # Otherwise, the first producer or worker that uses it declares it.
            if settings.declare == "never":
                yield "destination-missing", subject, {}
            continue
        difference = _difference_of_queue(queue, inventory)
        if difference and not getattr(queue, "no_declare", False):
            yield "destination-differs", subject, {"difference": difference}
        binding = Binding(delivery, topology.keys.destination_pattern(name), name)
        if (
            delivery in inventory.exchanges
            and binding not in inventory.bindings
            # UNLISTED_BINDINGS
            and not _is_away(inventory.queues[name], inventory)
        ):
            code = "destination-unbound" if distributes else "destination-cut-off"
            yield code, subject, {"exchange": delivery}
    for name in destinations_of(topology, queues, inventory):
        found = inventory.queues.get(name, {"type": ""})
        if found["type"] == "classic" and found["durable"] and not found.get("exclusive"):
            yield "destination-classic", f"queue {name}", {}


def check_probes(settings: Settings, workers: Mapping[str, Json]) -> Iterator[FoundRow]:
    """Find levels through which the last probe did not come in time; others' workers answer too."""
    earliest, latest = PROBE_IN_TIME
    told = [answer.get(PROBE, {}) for answer in workers.values()]
    ours = [each for each in told if each.get("prefix") == settings.prefix]
    if PROBE in settings.modules and not ours:
        yield "probe-unknown", settings.prefix, {}
    for each in ours:
        for level, late in each["late"].items():
            if not earliest <= late <= latest:
                yield "probe-failed", f"level {level}", {"late": late}


def check_replicas(inventory: Inventory, names: Iterable[str]) -> Iterator[FoundRow]:
    """Find queues that have lost replicas, or never had enough for this cluster."""
    for name in names:
        queue, subject = inventory.queues.get(name, {"type": ""}), f"queue {name}"
        if _is_away(queue, inventory):
            yield "unreachable", subject, {"node": _node_of(queue)}
        if queue["type"] != "quorum":
            continue
        members, online = queue.get("members") or (), queue.get("online") or ()
        away = sorted({*members} - {*online})
        values = {
            "members": len(members),
            "online": len(online),
            "away": ", ".join(away),
            "commands": _each("rabbitmqctl forget_cluster_node {}", away),
        }
        if 2 * len(online) <= len(members):
            yield "quorum-lost", subject, values
        elif len(online) < len(members):
            yield "replica-offline", subject, values
        lacking = min(len(inventory.nodes), ENOUGH_REPLICAS) - len(members)
        if lacking > 0:
            # Those that run come first.
            runs, others = inventory.nodes, {*inventory.nodes} - {*members}
            added = sorted(others, key=lambda node: (not runs[node], node))[:lacking]
            commands = _each("rabbitmq-queues grow {} all", added)
            told = {"members": len(members), "nodes": len(inventory.nodes), "commands": commands}
            yield "replicas-few", subject, told


def check_orphans(topology: Topology, inventory: Inventory) -> Iterator[FoundRow]:
    """Find queues and exchanges of other levels under the prefix."""
    start = f"{topology.prefix}."
    exchanges = {each.name for each in topology.all_exchanges}
    queues = {queue.name for queue in topology.queues}
    for name, queue in inventory.queues.items():
        arguments = queue["arguments"]
        # A queue of the application may begin alike.
        is_level = (
            name.startswith(start)
            and str(arguments.get("x-dead-letter-exchange", "")).startswith(start)
            and "x-message-ttl" in arguments
            and _QUEUE.fullmatch(name.removeprefix(start))
        )
        if is_level and name not in queues:
            yield "orphan", f"queue {name}", {}
    for name in inventory.exchanges:
        if _is_level(topology, name) and name not in exchanges:
            yield "orphan", f"exchange {name}", {}


def _is_level(topology: Topology, name: str) -> bool:
    """Return whether an exchange has the name of a level, or of a layout's marker."""
    start = f"{topology.prefix}."
    return name.startswith(start) and bool(_EXCHANGE.fullmatch(name.removeprefix(start)))


def _each(command: str, nodes: Iterable[str]) -> str:
    """Return a command for each node, as ways out print commands."""
    return ", ".join(f"`{command.format(node)}`" for node in nodes)


def _subject(binding: Binding) -> str:
    kind = "exchange" if binding.target_is_exchange else "queue"
    return f"binding {binding.source} -> {kind} {binding.target} ({binding.pattern!r})"


def _is_harmless(topology: Topology, binding: Binding) -> bool:
    """Return whether a binding of the delivery exchange is a destination's, or matches nothing."""
    own = topology.keys.destination_pattern(binding.target)
    if binding.source != topology.delivery.name:
        return False
    if binding.pattern == own and not binding.target_is_exchange:
        return True
    # That of a layout with another number of levels.
    return "#" not in binding.pattern and binding.pattern.count(".") != own.count(".")


def _is_away(queue: Json, inventory: Inventory) -> bool:
    """Return whether a queue is a classic one on a node that does not run."""
    return queue["type"] == "classic" and not inventory.nodes.get(_node_of(queue), True)


def _node_of(queue: Json) -> str:
    return str(queue.get("leader") or queue.get("node") or "")


def _difference_of_queue(queue: Queue, inventory: Inventory) -> str:
    wanted = {"durable": bool(queue.durable), "auto_delete": bool(queue.auto_delete)}
    arguments = declared_arguments(queue)
    found = inventory.queues.get(queue.name)
    if found is not None:
        there = {**found["arguments"], "x-queue-type": found["type"]}
        if "x-queue-type" not in arguments:
            del there["x-queue-type"]  # the virtual host's default counts
        found = {**found, "arguments": there}
    return _difference({**wanted, **arguments}, found, wanted)


def _difference(wanted: Mapping[str, object], found: Json | None, flags: Iterable[str]) -> str:
    """Return as text how an exchange or queue differs; empty if not, or if it does not exist."""
    if found is None:
        return ""
    there = {**{flag: found.get(flag) for flag in flags}, **found["arguments"]}
    return ", ".join(
        f"{name} is {there.get(name)!r} instead of {wanted.get(name)!r}"
        for name in sorted({*wanted, *there})
        if wanted.get(name) != there.get(name)
    )


def check_policies(
    topology: Topology, inventory: Inventory, destinations: Collection[str], virtual_host: str
) -> Iterator[FoundRow]:
    """Find policies that break a promise; those that bound destinations are :func:`check_bounds`'.

    Args:
        topology: The topology.
        inventory: The broker's queues and policies.
        destinations: The names of the tasks' queues.
        virtual_host: Its name, for the remedy.
    """
    checkin = topology.module_queues.checkin.name
    found: list[tuple[str, str, str, Any, Json]] = []
    for name in dict.fromkeys([*(queue.name for queue in topology.queues), *destinations]):
        for effective in effective_policies(inventory, name):
            values = {key: value for key, (value, _) in effective.items()}
            queue = inventory.queues[name]
            if name in destinations:
                code, keys = "destination-policy", _harms_tasks(queue, values)
            else:
                code, keys = "policy", _harms_levels(queue, values, is_checkin=name == checkin)
            found += ((code, name, key, *effective[key]) for key in keys)
    harmful: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for _, _, key, _, policy in found:
        harmful[policy["kind"], policy["name"]].add(key)
    for code, name, key, value, policy in found:
        consequences = POLICY_CONSEQUENCES if code == "policy" else DESTINATION_CONSEQUENCES
        told = {
            "policy": _title(policy),
            "key": key,
            "value": value,
            "consequence": consequences[key],
        }
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


def _harms_levels(queue: Json, values: Json, is_checkin: bool) -> Iterator[str]:
    """Yield the keys of policies that harm a queue of the levels or of a module."""
    arguments, is_quorum = queue["arguments"], queue["type"] == "quorum"
    if "expires" in values:
        yield "expires"
    if values.get("message-ttl", inf) < arguments.get("x-message-ttl", inf):
        yield "message-ttl"
    # Check-in may refuse its clients' messages when it is full.
    overflow = str(values.get("overflow", arguments.get("x-overflow")))
    if not (is_checkin and overflow.startswith("reject-publish")):
        yield from (key for key in BOUNDS if key in values)
    # The policy's overflow counts, not the argument's; of dead-lettering, the argument's counts
    # wherever there is one (rabbit_quorum_queue:args_policy_lookup).
    if "x-dead-letter-exchange" in arguments:
        if is_quorum and values.get("overflow", "reject-publish") != "reject-publish":
            yield "overflow"
        if "dead-letter-routing-key" in values:
            yield "dead-letter-routing-key"
    if is_quorum and 0 <= values.get("delivery-limit", -1) < arguments.get("x-delivery-limit", 0):
        yield "delivery-limit"


def _harms_tasks(queue: Json, values: Json) -> Iterator[str]:
    """Yield the keys of policies that harm a task's queue."""
    yield from (key for key in ("expires", "message-ttl") if key in values)
    if queue["type"] == "quorum" and values.get("delivery-limit", -1) >= 0:
        yield "delivery-limit"


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
