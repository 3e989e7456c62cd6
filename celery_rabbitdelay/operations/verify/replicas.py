"""Replicas and health of queues, and the nodes of the cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from celery_rabbitdelay.operations.verify.finding import Finding
from celery_rabbitdelay.operations.verify.inventory import FoundQueue, Inventory

#: Replicas that survive the death of a node:
#: https://www.rabbitmq.com/docs/quorum-queues#replication-factor
ENOUGH_REPLICAS: Final = 3


def check_nodes(inventory: Inventory) -> Iterator[Finding]:
    """Find nodes that are away or cut off, and alarms."""
    for node in inventory.nodes or ():
        if not node.running:
            yield Finding(
                "warning",
                "node-down",
                (f"node {node.name}",),
                "the node does not run",
                "the queues have a replica less; classic queues on it are away",
                "start the node, or remove it with rabbitmqctl forget_cluster_node",
            )
        if node.partitions:
            yield Finding(
                "danger",
                "partition",
                (f"node {node.name}",),
                f"it is cut off from {', '.join(node.partitions)}",
                "tasks are late, and classic queues may lose some",
                "see https://www.rabbitmq.com/docs/partitions",
            )
    for alarm in inventory.alarms or ():
        yield Finding(
            "danger",
            "alarm",
            (alarm,),
            "an alarm is in effect",
            "nobody can publish: sending raises ConnectionBlocked, and tasks wait until it ends",
            "make room: free memory or disk, or raise vm_memory_high_watermark or disk_free_limit",
        )


def check_replicas(inventory: Inventory, names: Iterable[str]) -> Iterator[Finding]:
    """Find queues that have lost replicas, or never had enough for this cluster.

    Args:
        inventory: The broker's queues and nodes.
        names: The names of the queues.
    """
    for name in names:
        queue = inventory.queues.get(name)
        if queue is None:
            continue
        if queue.type == "quorum":
            yield from _quorum(queue, len(inventory.nodes or ()))
        elif is_away(queue, inventory):
            yield _away(queue)


def is_away(queue: FoundQueue, inventory: Inventory) -> bool:
    """Return whether a queue is a classic one on a node that does not run."""
    running = {node.name for node in inventory.nodes or () if node.running}
    return queue.type == "classic" and bool(running) and queue.node not in {None, *running}


def _quorum(queue: FoundQueue, nodes: int) -> Iterator[Finding]:
    subject = (f"queue {queue.name}",)
    members, online = len(queue.members), len(queue.online)
    away = ", ".join(sorted({*queue.members} - {*queue.online}))
    if 2 * online <= members:
        yield Finding(
            "danger",
            "quorum-lost",
            subject,
            f"only {online} of {members} replicas are online; those on {away} are away",
            "the queue takes and gives nothing: tasks wait in it, and before it, until it is back",
            "start the nodes that are away; remove dead ones with rabbitmq-queues shrink",
        )
    elif online < members:
        yield Finding(
            "warning",
            "replica-offline",
            subject,
            f"{online} of {members} replicas are online; that on {away} is away",
            "if more nodes fail, the queue stops, and tasks wait until they are back",
            "start the node that is away, or replace it (rabbitmq-queues shrink and grow)",
        )
    if members < min(nodes, ENOUGH_REPLICAS):
        yield Finding(
            "warning",
            "replicas-few",
            subject,
            f"it has {members} replicas in a cluster of {nodes} nodes",
            "tasks wait in it while a node is away, and are lost with its disk",
            "add replicas: rabbitmq-queues grow NODE all",
        )


def _away(queue: FoundQueue) -> Finding:
    return Finding(
        "danger",
        "unreachable",
        (f"queue {queue.name}",),
        f"it is a classic queue, and its node {queue.node} does not run",
        "tasks for it wait, or are tried again until it is back; on RabbitMQ 4.3 they hold up "
        "those of other queues",
        "start the node, or delete the queue and declare it elsewhere",
    )
