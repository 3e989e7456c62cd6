"""Exchanges, queues, bindings and their arguments against the topology."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from kombu import Exchange, Queue

from celery_rabbitdelay.levels.entities import Binding
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.verify.application import Application
from celery_rabbitdelay.operations.verify.finding import Finding, Severity
from celery_rabbitdelay.operations.verify.inventory import FoundExchange, FoundQueue, Inventory

#: What to do about an exchange or a queue with other arguments.
CONFLICT: Final = (
    "move what waits to levels with another rabbitdelay_prefix (`celery -A proj rabbitdelay "
    "migrate`), or delete this once it is empty and declare it again"
)


def check_layout(application: Application, inventory: Inventory) -> Iterator[Finding]:
    """Compare everything that the topology declares with what there is."""
    topology = application.topology
    guard, marker = topology.identity.guard, topology.identity.marker
    exchanges = [*topology.exchanges, guard, marker]
    absent = [f"exchange {each.name}" for each in exchanges if each.name not in inventory.exchanges]
    absent += [f"queue {e.name}" for e in topology.queues if e.name not in inventory.queues]
    yield from missing(application, absent)
    for exchange in exchanges:
        found = inventory.exchanges.get(exchange.name)
        difference = found and exchange_difference(exchange, found)
        if difference and exchange is guard:
            yield layout_conflict(topology, difference)
        elif difference:
            yield differing(f"exchange {exchange.name}", difference)
    for queue in topology.queues:
        found_queue = inventory.queues.get(queue.name)
        difference = found_queue and queue_difference(queue, found_queue)
        if difference:
            yield differing(f"queue {queue.name}", difference)
    yield from _missing_bindings(topology, inventory)
    yield from _additional_bindings(topology, inventory)
    yield from _consumers(topology, inventory)


def check_queue_type(topology: Topology) -> Iterator[Finding]:
    """Find levels of classic queues."""
    if topology.queue_type == "classic":
        yield Finding(
            "warning",
            "classic-levels",
            (topology.prefix,),
            "the queues of the levels are classic queues (rabbitdelay_queue_type)",
            "if the broker fails, tasks on their way to the next level are lost; if a queue "
            "refuses a task, it is lost too",
            "set rabbitdelay_queue_type to 'quorum' and another rabbitdelay_prefix, and move what "
            "waits with `celery -A proj rabbitdelay migrate`",
        )


def missing(application: Application, absent: list[str]) -> Iterator[Finding]:
    """Return the finding for exchanges and queues that do not exist, as ``queue NAME``."""
    topology = application.topology
    guard, marker = (f"exchange {each.name}" for each in topology.identity[1:])
    ours = {guard, marker}
    others = tuple(name for name in absent if name not in ours)
    declare = "run `celery -A proj rabbitdelay declare`"
    if len(others) == len(topology.exchanges) + len(topology.queues):
        severity: Severity = "warning" if application.may_declare else "danger"
        consequence = (
            "the first producer or worker declares the levels, which takes some seconds"
            if application.may_declare
            else "no delayed task can be sent: TopologyIncomplete"
        )
        what = "the levels are not declared"
        yield Finding(severity, "not-declared", (topology.prefix,), what, consequence, declare)
        return
    if others:
        consequence = (
            "delayed tasks are not sent, or go to undeliverable when they come to this place; "
            "those that waited in a deleted queue are lost"
        )
        yield Finding("danger", "missing", others, "it does not exist", consequence, declare)
    if application.may_declare and not ours.isdisjoint(absent):
        consequence = (
            "every process declares all levels again; without the guard, another layout can be "
            "declared under this prefix"
        )
        absent_identity = tuple(sorted(ours.intersection(absent)))
        what = "guard or marker of the layout do not exist"
        yield Finding("warning", "marker-missing", absent_identity, what, consequence, declare)


def layout_conflict(topology: Topology, difference: str) -> Finding:
    """Return the finding for levels of another layout under the prefix."""
    return Finding(
        "danger",
        "layout-conflict",
        (topology.prefix,),
        f"another layout is declared under this prefix: {difference}",
        "no delayed task can be sent: LayoutConflict",
        "set the layout, tick, queue type and shards that are declared, or another "
        "rabbitdelay_prefix and move what waits with `celery -A proj rabbitdelay migrate`",
    )


def differing(subject: str, difference: str) -> Finding:
    """Return the finding for an exchange or queue that was declared in another way."""
    return Finding(
        "danger",
        "differs",
        (subject,),
        difference,
        "declaring the levels fails with LayoutConflict, and tasks may be early, late or lost here",
        CONFLICT,
    )


def exchange_difference(expected: Exchange, found: FoundExchange) -> str | None:
    """Return how an exchange differs from the one that is expected, as text."""
    wanted = {
        "type": expected.type,
        "durable": expected.durable,
        "auto_delete": expected.auto_delete,
        "internal": False,
        **(expected.arguments or {}),
    }
    there = {
        "type": found.type,
        "durable": found.durable,
        "auto_delete": found.auto_delete,
        "internal": found.internal,
        **found.arguments,
    }
    return _difference(wanted, there)


def queue_difference(expected: Queue, found: FoundQueue) -> str | None:
    """Return how a queue of the topology differs from the one that is expected, as text."""
    wanted = {"durable": True, "auto_delete": False, **(expected.queue_arguments or {})}
    there = {
        "durable": found.durable,
        "auto_delete": found.auto_delete,
        **found.arguments,
        "x-queue-type": found.type,
    }
    return _difference(wanted, there)


def _difference(wanted: Mapping[str, Any], there: Mapping[str, Any]) -> str | None:
    names = sorted({*wanted, *there})
    differences = [
        f"{name} is {there.get(name)!r} instead of {wanted.get(name)!r}"
        for name in names
        if wanted.get(name) != there.get(name)
    ]
    return ", ".join(differences) or None


def _missing_bindings(topology: Topology, inventory: Inventory) -> Iterator[Finding]:
    for binding in topology.bindings:
        ends = inventory.exchanges if binding.target_is_exchange else inventory.queues
        if binding.source not in inventory.exchanges or binding.target not in ends:
            continue  # which is a finding of its own
        if binding not in inventory.bindings:
            yield Finding(
                "danger",
                "binding-missing",
                (_binding(binding),),
                "the binding does not exist",
                "delayed tasks go to undeliverable when they come to this place",
                "run `celery -A proj rabbitdelay declare`, then redrive what is undeliverable",
            )


def _additional_bindings(topology: Topology, inventory: Inventory) -> Iterator[Finding]:
    expected = frozenset(topology.bindings)
    sources = {exchange.name for exchange in topology.exchanges}
    waiting = {queue.name for queue in topology.digit_queues}
    waiting.add(topology.module_queues.meditation.name)
    for binding in sorted(inventory.bindings - expected):
        if binding.source in sources:
            if binding.source == topology.delivery.name and _is_harmless(topology, binding):
                continue
            what = "somebody has added a binding to an exchange of the levels"
            consequence = "tasks that match the pattern go there as well, or early"
        elif binding.target in waiting and not binding.target_is_exchange:
            what = "somebody has bound another exchange to a queue of the levels"
            consequence = "messages without a due time get into the levels, and to undeliverable"
        else:
            continue
        remedy = "remove the binding, in the management pages or with queue.unbind"
        yield Finding(
            "danger", "binding-additional", (_binding(binding),), what, consequence, remedy
        )


def _is_harmless(topology: Topology, binding: Binding) -> bool:
    """Return whether a binding of the delivery exchange is a destination's, or matches nothing."""
    own = topology.keys.destination_pattern(binding.target)
    if binding.pattern == own and not binding.target_is_exchange:
        return True
    # That of a layout with another number of levels.
    return "#" not in binding.pattern and binding.pattern.count(".") != own.count(".")


def _consumers(topology: Topology, inventory: Inventory) -> Iterator[Finding]:
    waiting = [*topology.digit_queues, topology.module_queues.meditation]
    for queue in waiting:
        consumers = (inventory.consumers or {}).get(queue.name, 0)
        if consumers:
            yield Finding(
                "danger",
                "level-consumed",
                (f"queue {queue.name}",),
                "it has a consumer",
                "whoever consumes takes tasks that wait: they are lost, or early",
                "stop the consumer; a worker must not have this queue in its task_queues or -Q",
            )


def _binding(binding: Binding) -> str:
    kind = "exchange" if binding.target_is_exchange else "queue"
    return f"binding {binding.source} -> {kind} {binding.target} ({binding.pattern!r})"
