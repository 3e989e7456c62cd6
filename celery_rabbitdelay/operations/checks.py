"""Find faults on a broker that break a promise of the levels."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Final, TypeAlias

from kombu import Exchange, Queue

from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.levels.topology import CONSUMER_TAG, DISTRIBUTE, PROBE, Binding, Topology
from celery_rabbitdelay.operations.inventory import Inventory, described, effective_policies
from celery_rabbitdelay.operations.management import Json
from celery_rabbitdelay.operations.quirks import OLDEST, STUCK_DEAD_LETTERING, version_of
from celery_rabbitdelay.publishing.declaration import module_queues, unserved_modules
from celery_rabbitdelay.publishing.kombu_internals import Counts

#: One fault of one subject: the fault's code in ``findings.toml``, the subject, such as ``queue
#: rabbitdelay.hours.7``, and the values of the placeholders in the fault's texts.
FoundRow: TypeAlias = tuple[str, str, Mapping[str, object]]

#: The keys of policies and arguments that bound a queue.
BOUNDS: Final = ("max-length", "max-length-bytes")

#: The priority of the policy that the documentation recommends for the levels. The policy takes
#: precedence over other policies.
GUARD_PRIORITY: Final = 1000

#: The feature flag that the levels need; see :data:`.DEAD_LETTERING_FLAG`.
NEEDED_FLAG: Final = "stream_queue"

#: The minimum number of replicas with which a queue survives the death of a node:
#: https://www.rabbitmq.com/docs/quorum-queues#replication-factor
ENOUGH_REPLICAS: Final = 3

#: The earliest and the latest timely arrival of a probe, in seconds after its due time.
PROBE_IN_TIME: Final = (-1.0, 30.0)

#: The name of a digit queue, without the prefix: days.70, or days.x10.0.s2 with shards.
_QUEUE: Final = re.compile(r"[A-Za-z0-9_-]+\.(\d+|x\d+\.0)(\.s\d+)?")

#: The name of a level's exchange or of a layout's marker, without the prefix.
_EXCHANGE: Final = re.compile(r"[A-Za-z0-9_-]+\.x\d+|layout\.[^.]+")


def check_broker(
    settings: Settings, inventory: Inventory, is_blocked: bool = False
) -> Iterator[FoundRow]:
    """Find versions, feature flags, queue types, or alarms that break a promise of the levels.

    Args:
        settings: The application's settings.
        inventory: The inventory of the broker.
        is_blocked: Whether the broker blocks publishers, because a node is low on memory or disk
            space. The management API shows the start and the end of an alarm some seconds late.
    """
    subject = f"RabbitMQ {inventory.version}"
    version = version_of(inventory.version)
    if version < OLDEST:
        yield "version-too-old", subject, {}
    if STUCK_DEAD_LETTERING.is_in(version):
        yield "version-fault", subject, {}
    if NEEDED_FLAG in inventory.disabled_flags:
        yield "feature-flag-disabled", f"feature flag {NEEDED_FLAG}", {"flag": NEEDED_FLAG}
    if settings.queue_type == "classic":
        yield "classic-levels", settings.prefix, {}
    if is_blocked:
        for each in inventory.alarmed or [subject]:
            yield "publishers-blocked", each, {}


def check_entities(settings: Settings, inventory: Inventory) -> Iterator[FoundRow]:
    """Find exchanges and queues of the topology that are missing or declared differently."""
    topology, (_, guard, marker) = settings.topology, settings.topology.identity
    everything: list[Exchange | Queue] = [*topology.all_exchanges, *topology.queues]
    needed = [each for each in everything if each not in (guard, marker)]
    if not any(map(inventory.of, needed)):
        code = "not-declared" if settings.declare == "auto" else "missing"
        yield code, topology.prefix, {}
        needed = []
    elif settings.declare == "auto":
        needed = everything
    for each in needed:
        if inventory.of(each) is None:
            yield "missing", _subject(each), {}
    for each in everything:
        if difference := _difference(each, inventory):
            code, subject = "differs", _subject(each)
            if each is guard:
                code, subject = "layout-conflict", topology.prefix
            yield code, subject, {"difference": difference}


def check_strangers(topology: Topology, inventory: Inventory) -> Iterator[FoundRow]:
    """Find missing bindings, bindings that let messages out or in, and foreign consumers."""
    ours = {exchange.name for exchange in topology.exchanges}
    queues = {queue.name for queue in topology.queues}
    for binding in topology.bindings:
        targets = inventory.exchanges if binding.target_is_exchange else inventory.queues
        if (
            binding not in inventory.bindings
            # A missing exchange or queue is a separate finding.
            and binding.source in inventory.exchanges
            and binding.target in targets
        ):
            yield "missing", _subject(binding), {}
    for binding in sorted(inventory.bindings - {*topology.bindings, topology.probe_binding}):
        leads_out = binding.source in ours and not _is_harmless(topology, binding)
        leads_in = binding.target in (ours if binding.target_is_exchange else queues)
        # Orphans, the levels of another layout, are bound to the same delivery exchange.
        if leads_out or (leads_in and not _is_level(topology, binding.source)):
            yield "binding-additional", _subject(binding), {"source": binding.source}
    for name, tag in inventory.consumers:
        if name in queues and not tag.startswith(CONSUMER_TAG):
            yield "level-consumed", f"queue {name}", {}


def destinations_of(
    topology: Topology, queues: Iterable[Queue], inventory: Inventory
) -> tuple[str, ...]:
    """Return the names of the application's queues and of all queues bound to delivery."""
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
    """Find task queues that are missing, declared differently, or not bound to delivery."""
    topology, delivery = settings.topology, settings.topology.delivery.name
    for queue in queues:
        name, subject, found = queue.name, f"queue {queue.name}", inventory.of(queue)
        if found is None:
            # With "auto", the first producer or worker declares the queue.
            if settings.declare == "never":
                yield "missing", subject, {}
            continue
        if not getattr(queue, "no_declare", False) and (each := _difference(queue, inventory)):
            yield "destination-differs", subject, {"difference": each}
        binding = Binding(delivery, topology.keys.destination_pattern(name), name)
        if (
            delivery in inventory.exchanges
            and binding not in inventory.bindings
            # see UNLISTED_BINDINGS
            and not _is_away(found, inventory)
        ):
            if DISTRIBUTE in settings.modules:
                yield "destination-unbound", subject, {}
            else:
                yield "missing", _subject(binding), {}


def check_probes(settings: Settings, workers: Mapping[str, Json]) -> Iterator[FoundRow]:
    """Find levels whose last probe was not in time; ignore workers of other levels."""
    earliest, latest = PROBE_IN_TIME
    probes = [answer.get(PROBE, {}) for answer in workers.values()]
    ours = [each for each in probes if each.get("prefix") == settings.prefix]
    if PROBE in settings.modules and not ours:
        yield "probe-unknown", settings.prefix, {}
    for each in ours:
        for level, late in each["late"].items():
            if not earliest <= late <= latest:
                yield "probe-failed", f"level {level}", {"late": late}


def check_modules(topology: Topology, counts: Mapping[str, Counts | None]) -> Iterator[FoundRow]:
    """Find modules with waiting messages that no worker serves.

    Args:
        topology: The topology.
        counts: The counts of the module queues, keyed by the queues' names.
    """
    queues = {module: queue.name for module, queue in module_queues(topology).items()}
    others = {module: counts.get(name) for module, name in queues.items()}
    for module, messages in unserved_modules(others).items():
        values = {"module": module, "messages": messages}
        yield "module-unserved", f"queue {queues[module]}", values


def check_replicas(inventory: Inventory, names: Iterable[str]) -> Iterator[FoundRow]:
    """Find queues with lost or too few replicas, and classic queues whose node is down."""
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
            # Running nodes come first.
            runs, others = inventory.nodes, {*inventory.nodes} - {*members}
            added = sorted(others, key=lambda node: (not runs[node], node))[:lacking]
            commands = _each("rabbitmq-queues grow {} all", added)
            values = {"members": len(members), "nodes": len(inventory.nodes), "commands": commands}
            yield "replicas-few", subject, values


def orphans_of(topology: Topology, inventory: Inventory) -> Iterator[str]:
    """Yield the queues of other layouts under the prefix."""
    start, queues = f"{topology.prefix}.", {queue.name for queue in topology.queues}
    for name, queue in inventory.queues.items():
        arguments = queue["arguments"]
        # The name of a task queue may begin with the prefix, too.
        if (
            name not in queues
            and name.startswith(start)
            and str(arguments.get("x-dead-letter-exchange", "")).startswith(start)
            and "x-message-ttl" in arguments
            and _QUEUE.fullmatch(name.removeprefix(start))
        ):
            yield name


def check_orphans(
    topology: Topology, inventory: Inventory, counts: Mapping[str, Counts | None]
) -> Iterator[FoundRow]:
    """Find queues and exchanges of other layouts under the prefix.

    Args:
        topology: The topology.
        inventory: The inventory of the broker.
        counts: The counts of the queues of :func:`orphans_of`, where known.
    """
    exchanges = {each.name for each in topology.all_exchanges}
    for name in orphans_of(topology, inventory):
        found = counts.get(name)
        messages = "an unknown number of" if found is None else found.messages
        yield "orphan" if messages else "orphan-empty", f"queue {name}", {"messages": messages}
    for name in inventory.exchanges:
        if _is_level(topology, name) and name not in exchanges:
            yield "orphan-empty", f"exchange {name}", {}


def _is_level(topology: Topology, name: str) -> bool:
    """Return whether an exchange has the name of a level, or of a layout's marker."""
    start = f"{topology.prefix}."
    return name.startswith(start) and bool(_EXCHANGE.fullmatch(name.removeprefix(start)))


def _each(command: str, nodes: Iterable[str]) -> str:
    """Return one command per node, in backticks."""
    return ", ".join(f"`{command.format(node)}`" for node in nodes)


def _subject(each: Exchange | Queue | Binding) -> str:
    if isinstance(each, Binding):
        kind = "exchange" if each.target_is_exchange else "queue"
        return f"binding {each.source} -> {kind} {each.target} ({each.pattern!r})"
    return f"{'queue' if isinstance(each, Queue) else 'exchange'} {each.name}"


def _is_harmless(topology: Topology, binding: Binding) -> bool:
    """Return whether a binding of delivery is normal for its queue, or never matches a key."""
    own = topology.keys.destination_pattern(binding.target)
    if binding.source != topology.delivery.name:
        return False
    if binding.pattern == own and not binding.target_is_exchange:
        return True
    # The binding belongs to a layout with another number of levels.
    return "#" not in binding.pattern and binding.pattern.count(".") != own.count(".")


def _is_away(queue: Json, inventory: Inventory) -> bool:
    """Return whether a queue is a classic queue on a stopped node."""
    return queue["type"] == "classic" and not inventory.nodes.get(_node_of(queue), True)


def _node_of(queue: Json) -> str:
    return str(queue.get("leader") or queue.get("node") or "")


def _difference(entity: Exchange | Queue, inventory: Inventory) -> str:
    """Describe the broker's differences from an expected entity; empty if equal or missing."""
    if (found := inventory.of(entity)) is None:
        return ""
    wanted, there = _flat(described(entity)), _flat(found)
    # Without the argument x-queue-type, the virtual host's default applies.
    wanted["type"] = wanted.pop("x-queue-type", wanted.get("type", found["type"]))
    return ", ".join(
        f"{name} is {there.get(name)!r} instead of {wanted.get(name)!r}"
        for name in sorted({*wanted, *found["arguments"]} - {"x-queue-type", "arguments"})
        if wanted.get(name) != there.get(name)
    )


def _flat(entity: Json) -> dict[str, object]:
    return {**entity, **entity["arguments"]}


def check_policies(
    topology: Topology,
    inventory: Inventory,
    destinations: Sequence[str],
    may_refuse: Callable[[str], bool],
) -> Iterator[FoundRow]:
    """Find policies that break a promise of the levels, and task queues that drop or refuse tasks.

    Args:
        topology: The topology.
        inventory: The broker's queues and policies.
        destinations: The names of the task queues.
        may_refuse: Returns whether ``rabbitdelay_may_refuse`` includes a queue.
    """
    checkin = topology.module_queues.checkin.name
    levels = [queue.name for queue in topology.queues]
    for name in dict.fromkeys([*levels, *destinations]):
        for effective in effective_policies(inventory, name):
            values = {key: value for key, (value, _) in effective.items()}
            queue = inventory.queues[name]
            if name in destinations:
                yield from _check_destination(queue, values, may_refuse)
                harms = _harms_to_tasks(queue, values)
            else:
                harms = _harms_to_levels(queue, values, is_checkin=name == checkin)
            for key in sorted(key for key in values if harms.get(key)):
                value, policy = effective[key]
                code = "policy" if policy["kind"] == "policy" else "operator-policy"
                given = {each: policy[each] for each in ("kind", "name", "pattern", "priority")}
                given |= {
                    "key": key,
                    "value": value,
                    "higher": max(GUARD_PRIORITY, policy["priority"] + 1),
                    "own": shlex.quote(f"^{re.escape(topology.prefix)}\\."),
                }
                yield "destination-policy" if name in destinations else code, f"queue {name}", given


def _check_destination(
    queue: Json, values: Json, may_refuse: Callable[[str], bool]
) -> Iterator[FoundRow]:
    """Find whether a task queue is classic, and whether it drops or refuses tasks when full."""
    name, arguments = queue["name"], queue["arguments"]
    if queue["type"] == "classic" and queue["durable"] and not queue.get("exclusive"):
        yield "destination-classic", f"queue {name}", {}
    bounds = {key: values.get(key, arguments.get(f"x-{key}")) for key in BOUNDS}
    bound = ", ".join(f"{key} = {value}" for key, value in bounds.items() if value is not None)
    overflow = str(values.get("overflow", arguments.get("x-overflow")))
    if bound and not overflow.startswith("reject-publish"):
        yield "destination-drops", f"queue {name}", {"bound": bound}
    elif bound and not may_refuse(name):
        yield "destination-refuses", f"queue {name}", {"bound": bound, "queue": name}


def _harms_to_levels(queue: Json, values: Json, is_checkin: bool) -> dict[str, bool]:
    """Return the keys of policies, and whether they harm a queue of the levels or of a module."""
    arguments, is_quorum = queue["arguments"], queue["type"] == "quorum"
    # Check-in may refuse its clients' messages when it is full.
    overflow = str(values.get("overflow", arguments.get("x-overflow")))
    may_be_full = is_checkin and overflow.startswith("reject-publish")
    # A policy's overflow takes precedence over the argument; for dead-lettering, the argument takes
    # precedence over the policy (rabbit_quorum_queue:args_policy_lookup).
    leads_on, limit = "x-dead-letter-exchange" in arguments, values.get("delivery-limit", -1)
    return {
        "expires": True,
        "message-ttl": values.get("message-ttl", inf) < arguments.get("x-message-ttl", inf),
        **dict.fromkeys(BOUNDS, not may_be_full),
        "overflow": leads_on and is_quorum and overflow != "reject-publish",
        "dead-letter-routing-key": leads_on,
        "delivery-limit": is_quorum and 0 <= limit < arguments.get("x-delivery-limit", 0),
    }


def _harms_to_tasks(queue: Json, values: Json) -> dict[str, bool]:
    """Return the keys of policies, and whether they harm a task queue."""
    is_limited = queue["type"] == "quorum" and values.get("delivery-limit", -1) >= 0
    return {"expires": True, "message-ttl": True, "delivery-limit": is_limited}
