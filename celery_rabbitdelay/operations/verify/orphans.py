"""What an older layout has left behind under the prefix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.verify.finding import Finding
from celery_rabbitdelay.operations.verify.inventory import FoundQueue, Inventory

#: Behind the prefix: the name of a digit's queue, perhaps of a shard: days.70, days.x10.0.s2
_QUEUE = re.compile(r"[A-Za-z0-9_-]+\.(\d+|x\d+\.0)(\.s\d+)?")

#: Behind the prefix: the name of a level's exchange, or of a layout's marker.
_EXCHANGE = re.compile(r"[A-Za-z0-9_-]+\.x\d+|layout\.[^.]+")


def check_orphans(
    topology: Topology, inventory: Inventory, count: Callable[[str], int | None]
) -> Iterator[Finding]:
    """Find queues and exchanges of other levels under the prefix.

    Args:
        topology: The topology.
        inventory: The broker's queues and exchanges.
        count: Returns how many messages a queue has now; None if it cannot tell.
    """
    start = f"{topology.name_prefix}."
    ours = {queue.name for queue in topology.queues}
    remedy = (
        "move what waits there with `celery -A proj rabbitdelay migrate` and the --from-layout, "
        "--from-tick, --from-shards and --from-queue-type that these levels had; then delete them"
    )
    for queue in inventory.queues.values():
        if queue.name in ours or not _is_level(queue, start):
            continue
        messages = count(queue.name)
        if messages != 0:
            number = "an unknown number of" if messages is None else messages
            what = f"{number} messages wait in a queue that does not belong to this layout"
            consequence = (
                "no worker and no command of this layout knows of these tasks; when they are due, "
                "their routing keys fit no binding of this layout"
            )
            yield Finding("danger", "orphan", (f"queue {queue.name}",), what, consequence, remedy)
        else:
            what = "an empty queue does not belong to this layout"
            consequence = "it costs the broker memory"
            yield Finding("note", "orphan", (f"queue {queue.name}",), what, consequence, remedy)
    names = {each.name for each in (*topology.exchanges, *topology.identity[1:])}
    for name in inventory.exchanges:
        is_level = name.startswith(start) and _EXCHANGE.fullmatch(name.removeprefix(start))
        if is_level and name not in names:
            what = "an exchange does not belong to this layout"
            consequence = "it costs the broker memory"
            yield Finding("note", "orphan", (f"exchange {name}",), what, consequence, remedy)


def _is_level(queue: FoundQueue, start: str) -> bool:
    """Return whether a queue is a digit's: a queue of the application may begin alike."""
    target = str(queue.arguments.get("x-dead-letter-exchange", ""))
    return (
        queue.name.startswith(start)
        and target.startswith(start)
        and "x-message-ttl" in queue.arguments
        and _QUEUE.fullmatch(queue.name.removeprefix(start)) is not None
    )
