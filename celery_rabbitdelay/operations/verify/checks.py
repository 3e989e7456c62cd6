"""Find what on a broker breaks a promise of the levels."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from amqp.exceptions import ChannelError
from kombu import Connection, Queue

from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.quirks import OLDEST, STUCK_DEAD_LETTERING, version_of
from celery_rabbitdelay.levels.topology import CONSUMER_TAG, DISTRIBUTE, PROBE, Binding, Topology
from celery_rabbitdelay.operations.permissions import check_permissions
from celery_rabbitdelay.operations.verify.findings import FoundRow, Verification, findings_of
from celery_rabbitdelay.operations.verify.management import (
    Inventory,
    Json,
    ManagementAPI,
    read_inventory,
)
from celery_rabbitdelay.operations.verify.policies import check_bounds, check_policies
from celery_rabbitdelay.publishing.declaration import connect, queue_counts
from celery_rabbitdelay.publishing.destination import may_refuse
from celery_rabbitdelay.publishing.kombu_internals import declared_arguments
from celery_rabbitdelay.publishing.wire import Wire
from celery_rabbitdelay.schedules.record import HEAL_AFTER_MS, HEALING_MS, Records

#: Seconds that an answer of the broker may take.
ANSWER_TIMEOUT: Final = 30.0

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


def verify(
    connection: Connection,
    settings: Settings,
    queues: Iterable[Queue],
    management: ManagementAPI,
    workers: Mapping[str, Mapping[str, Any]] | None = None,
    schedules: Records | None = None,
    is_blocked: bool = False,
) -> Verification:
    """Look at a broker, and change nothing.

    Args:
        connection: Any kombu connection to RabbitMQ, as the application's own user.
        settings: The application's settings.
        queues: The queues that its tasks are sent to, with their arguments.
        management: The management API of that broker.
        workers: What the workers answer, by their names; see :func:`.status_of_workers`. None: they
            were not asked.
        schedules: The schedules of the application; None: it has no registry.
        is_blocked: Whether the broker blocks publishers.

    Raises:
        ManagementUnavailable: The management API does not answer, or the user may not read all.
        OSError: The broker cannot be reached, or does not answer.
    """
    connect(connection)
    virtual_host = connection.virtual_host or "/"
    inventory, topology = read_inventory(management, virtual_host), settings.topology
    # The others go with a connection or consumer.
    lasting = [queue for queue in queues if not (queue.exclusive or queue.auto_delete)]
    names = destinations_of(topology, lasting, inventory)
    known = {queue.name: queue for queue in lasting}

    def refuses(name: str) -> bool:
        queue = known.get(name, Queue(name))
        return may_refuse(queue, settings.may_refuse, connection)

    def count(name: str) -> int | None:
        try:
            counts = queue_counts(connection, [Queue(name)])[name]
        except ChannelError:
            return None
        return None if counts is None else counts.messages

    with Wire(connection).answers_within(ANSWER_TIMEOUT):
        rows = [
            *check_broker(settings, inventory),
            *check_alarms(inventory, is_blocked),
            *check_limit(topology, lasting, inventory, virtual_host),
            *check_entities(settings, inventory),
            *check_bindings(topology, inventory),
            *check_consumers(topology, inventory),
            *check_held(topology, inventory),
            *check_policies(topology, inventory, names, virtual_host),
            *check_destinations(settings, lasting, inventory),
            *check_bounds(inventory, names, refuses),
            *check_replicas(inventory, [*(queue.name for queue in topology.queues), *names]),
            *check_orphans(topology, inventory, count),
            *check_permissions(connection, settings, lasting, inventory, schedules is not None),
            *check_probes(settings, workers),
            *check_schedules(schedules, wall_clock.ms()),
        ]
    common = {
        "prefix": settings.prefix,
        "vhost": virtual_host,
        "user": connection.userid or "guest",
    }
    quoted = {name: shlex.quote(value) for name, value in common.items()}
    return Verification(inventory.version, findings_of(rows, **quoted))


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
    topology, exchanges, queues = settings.topology, inventory.exchanges, inventory.queues
    guard, marker = topology.identity.guard, topology.identity.marker
    may_declare = settings.declare == "auto"
    ours = [
        *(f"exchange {each.name}" for each in topology.exchanges if each.name not in exchanges),
        *(f"queue {each.name}" for each in topology.queues if each.name not in queues),
    ]
    if len(ours) == len(topology.exchanges) + len(topology.queues):
        yield "not-declared" if may_declare else "nobody-declares", topology.prefix, {}
    else:
        for subject in ours:
            yield "missing", subject, {}
        for exchange in (guard, marker):
            if may_declare and exchange.name not in exchanges:
                yield "marker-missing", f"exchange {exchange.name}", {}
    for exchange in (guard, *topology.exchanges, marker):
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
            yield "binding-missing", _subject(binding), {}
    for binding in sorted(inventory.bindings - {*topology.bindings, topology.probe_binding}):
        leads_out = binding.source in ours and not _is_harmless(topology, binding)
        leads_in = binding.target in (ours if binding.target_is_exchange else queues)
        # The levels of another layout, which are orphans, lead to the same delivery exchange.
        if leads_out or (leads_in and not _is_level(topology, binding.source)):
            kind = ["--to-exchange"] if binding.target_is_exchange else []
            own = shlex.join([*kind, binding.source, binding.target, binding.pattern])
            command = f"celery -A proj rabbitdelay unbind {own}"
            yield "binding-additional", _subject(binding), {"command": command}


def check_consumers(topology: Topology, inventory: Inventory) -> Iterator[FoundRow]:
    """Find consumers of our queues that are not of this package."""
    ours = {queue.name for queue in topology.queues}
    for name, tag in inventory.consumers:
        if name in ours and not tag.startswith(CONSUMER_TAG):
            yield "level-consumed", f"queue {name}", {}


def check_held(topology: Topology, inventory: Inventory) -> Iterator[FoundRow]:
    """Find due messages that the queue of their task has not taken."""
    for queue in topology.queues:
        if queue.name in inventory.held:
            yield "held", f"queue {queue.name}", {"messages": inventory.held[queue.name]}


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
    may_declare, distributes = settings.declare == "auto", DISTRIBUTE in settings.modules
    for queue in queues:
        name, subject = queue.name, f"queue {queue.name}"
        if name not in inventory.queues:
            yield "destination-not-declared" if may_declare else "destination-missing", subject, {}
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


def check_probes(
    settings: Settings, workers: Mapping[str, Mapping[str, Any]] | None
) -> Iterator[FoundRow]:
    """Find levels through which the last probe did not come in time; others' workers answer too."""
    earliest, latest = PROBE_IN_TIME
    told = [answer.get(PROBE, {}) for answer in (workers or {}).values()]
    ours = [each for each in told if each.get("prefix") == settings.prefix]
    if workers is not None and PROBE in settings.modules and not ours:
        yield "probe-unknown", settings.prefix, {}
    for each in ours:
        for level, late in each["late"].items():
            if not earliest <= late <= latest:
                yield "probe-failed", f"level {level}", {"late": late}


def check_schedules(schedules: Records | None, now_ms: int) -> Iterator[FoundRow]:
    """Find schedules whose next occurrence does not come, or could not be sent again."""
    if schedules is None:
        return
    try:
        names = schedules.all()
        late = schedules.overdue(now_ms - HEAL_AFTER_MS - HEALING_MS)
        found = schedules.get(names)
    except (RegistryUnavailable, OSError) as error:
        yield "registry-unavailable", "Redis", {"error": error}
        return
    for name, noted in zip(names, found, strict=True):
        subject = f"schedule {name}"
        if noted is None or noted.ahead_ms is None:
            continue  # a put that has not got further, or an end that has
        if name in late:
            yield "schedule-overdue", subject, {}
        elif not noted.is_sent:
            yield "schedule-unsent", subject, {}
        if not noted.message:
            yield "schedule-lost", subject, {}


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


def check_orphans(
    topology: Topology, inventory: Inventory, count: Callable[[str], int | None]
) -> Iterator[FoundRow]:
    """Find queues and exchanges of other levels under the prefix.

    Args:
        topology: The topology.
        inventory: The broker's queues and exchanges.
        count: Returns how many messages a queue has now; None if that is unknown.
    """
    start = f"{topology.prefix}."
    identity = topology.identity
    exchanges = {each.name for each in (identity.guard, *topology.exchanges, identity.marker)}
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
            messages = count(name)
            told = "an unknown number of" if messages is None else messages
            code = "orphan-empty" if messages == 0 else "orphan"
            yield code, f"queue {name}", {"messages": told}
    for name in inventory.exchanges:
        if _is_level(topology, name) and name not in exchanges:
            yield "orphan-empty", f"exchange {name}", {}


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


def _difference(wanted: Mapping[str, Any], found: Json | None, flags: Iterable[str]) -> str:
    """Return as text how an exchange or queue differs; empty if not, or if it does not exist."""
    if found is None:
        return ""
    there = {**{flag: found.get(flag) for flag in flags}, **found["arguments"]}
    return ", ".join(
        f"{name} is {there.get(name)!r} instead of {wanted.get(name)!r}"
        for name in sorted({*wanted, *there})
        if wanted.get(name) != there.get(name)
    )
