"""The queues that due tasks go to."""

from __future__ import annotations

from collections.abc import Iterator

from kombu import Queue

from celery_rabbitdelay.levels.entities import Binding
from celery_rabbitdelay.operations.verify.application import Application
from celery_rabbitdelay.operations.verify.effective_policy import effective_policies
from celery_rabbitdelay.operations.verify.finding import Finding
from celery_rabbitdelay.operations.verify.inventory import FoundQueue, Inventory
from celery_rabbitdelay.operations.verify.replicas import is_away
from celery_rabbitdelay.publishing.destination import may_refuse
from celery_rabbitdelay.publishing.kombu_internals import declared_arguments


def destinations_of(application: Application, inventory: Inventory) -> tuple[str, ...]:
    """Return the names of the application's queues, and of all that delivery is bound to."""
    topology = application.topology
    bound = sorted(
        binding.target
        for binding in inventory.bindings
        if binding.source == topology.delivery.name and not binding.target_is_exchange
    )
    ours = {queue.name for queue in topology.queues}
    names = dict.fromkeys([*(queue.name for queue in _lasting(application)), *bound])
    return tuple(name for name in names if name not in ours)


def check_destinations(application: Application, inventory: Inventory) -> Iterator[Finding]:
    """Find destinations that get no tasks, refuse or lose them."""
    known = {queue.name: queue for queue in application.destinations}
    for queue in _lasting(application):
        found = inventory.queues.get(queue.name)
        if found is None:
            yield destination_missing(application, queue.name)
            continue
        yield from _difference(queue, found)
        yield from _binding(application, inventory, queue.name)
    for name in destinations_of(application, inventory):
        found = inventory.queues.get(name)
        if found is not None:
            yield from _type(found)
            yield from _bound(application, inventory, found, known.get(name))


def destination_missing(application: Application, name: str) -> Finding:
    """Return the finding for a queue of the application that does not exist."""
    if application.may_declare:
        return Finding(
            "note",
            "destination-missing",
            (f"queue {name}",),
            "the queue does not exist",
            "no task is lost: the first producer or worker that uses it declares it",
            "start a worker for it, or remove it from task_queues",
        )
    return Finding(
        "danger",
        "destination-missing",
        (f"queue {name}",),
        "the queue does not exist, and rabbitdelay_declare is 'never'",
        "sending a delayed task to it fails with TopologyIncomplete",
        "run `celery -A proj rabbitdelay declare --queues`, or remove it from task_queues",
    )


def _lasting(application: Application) -> tuple[Queue, ...]:
    """The application's queues that do not go with a connection or consumer."""
    return tuple(
        queue for queue in application.destinations if not (queue.exclusive or queue.auto_delete)
    )


def _difference(queue: Queue, found: FoundQueue) -> Iterator[Finding]:
    wanted, there = dict(declared_arguments(queue)), dict(found.arguments)
    # Where the application names no type, the virtual host's default counts.
    if "x-queue-type" in wanted:
        there["x-queue-type"] = found.type
    else:
        there.pop("x-queue-type", None)
    names = sorted({*wanted, *there})
    differences = [
        f"{name} is {there.get(name)!r} instead of {wanted.get(name)!r}"
        for name in names
        if wanted.get(name) != there.get(name)
    ]
    if bool(queue.durable) != found.durable:
        differences.append(f"durable is {found.durable} instead of {bool(queue.durable)}")
    if differences and not getattr(queue, "no_declare", False):
        yield Finding(
            "danger",
            "destination-differs",
            (f"queue {queue.name}",),
            ", ".join(differences),
            "declaring it fails with PRECONDITION_FAILED: workers do not start, and delayed tasks "
            "are not sent to it",
            "set the arguments in task_queues that the queue has, or delete it once it is empty",
        )


def _binding(application: Application, inventory: Inventory, name: str) -> Iterator[Finding]:
    topology = application.topology
    pattern = topology.keys.destination_pattern(name)
    if topology.delivery.name not in inventory.exchanges:
        return
    if Binding(topology.delivery.name, pattern, name) in inventory.bindings:
        return
    if is_away(inventory.queues[name], inventory):
        return  # RabbitMQ up to 4.2 does not list the bindings of such a queue
    is_served = "distribution" in application.modules
    yield Finding(
        "warning" if is_served else "danger",
        "destination-unbound",
        (f"queue {name}",),
        f"the queue is not bound to {topology.delivery.name}",
        "due tasks reach it through distribution, which is slower and needs a worker that serves it"
        if is_served
        else "due tasks stay in distribution, which no worker serves",
        "run `celery -A proj rabbitdelay declare --queues`",
    )


def _type(found: FoundQueue) -> Iterator[Finding]:
    if found.type == "classic" and found.durable and not found.exclusive:
        yield Finding(
            "note",
            "destination-classic",
            (f"queue {found.name}",),
            "it is a classic queue, which is on one node alone",
            "due tasks wait while that node is away, and are lost with its disk",
            "make it a quorum queue: task_default_queue_type = 'quorum', or x-queue-type in "
            "task_queues",
        )


def _bound(
    application: Application, inventory: Inventory, found: FoundQueue, queue: Queue | None
) -> Iterator[Finding]:
    for effective in effective_policies(inventory, found):
        definition = effective.definition
        bound = next(
            (
                f"{key} = {definition.get(key, found.arguments.get(f'x-{key}'))}"
                for key in ("max-length", "max-length-bytes")
                if key in definition or f"x-{key}" in found.arguments
            ),
            None,
        )
        if bound is None:
            continue
        overflow = definition.get("overflow", found.arguments.get("x-overflow", "drop-head"))
        if not str(overflow).startswith("reject-publish"):
            yield Finding(
                "warning",
                "destination-drops",
                (f"queue {found.name}",),
                f"it drops its oldest tasks when it is full ({bound})",
                "due tasks are lost while workers are slow or away",
                "leave the bound out, or set overflow to reject-publish",
            )
        elif not may_refuse(queue or Queue(found.name), application.may_refuse):
            yield Finding(
                "danger",
                "destination-refuses",
                (f"queue {found.name}",),
                f"it refuses tasks when it is full ({bound}), and the application does not know it",
                "each 32 refused tasks hold up the tasks of all other queues for up to 3 minutes",
                f"add {found.name!r} to rabbitdelay_may_refuse",
            )
