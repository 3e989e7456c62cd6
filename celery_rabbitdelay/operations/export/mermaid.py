"""A topology as a Mermaid flow chart (https://mermaid.js.org/syntax/flowchart.html).

It has a node for each exchange, one for the queues of each level with all their shards, and one for
each module. Dotted arrows are dead-lettering, thick ones are messages that a program publishes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from celery_rabbitdelay.levels.delay import duration_text
from celery_rabbitdelay.levels.topology import Topology

#: What stands before, behind and around the levels.
_AROUND: Final = """\
producer(["producer"])
delivery{{"delivery"}}
destination(["the task's queue"])
checkin[["checkin<br/>(ingest queue)"]]
meditation[["meditation<br/>TTL @ttl"]]
distribution[["distribution<br/>(publishes again)"]]
undeliverable[["undeliverable"]]
producer ==>|"or lower"| exchange0
producer ==>|"above"| meditation
meditation -.-> checkin
checkin ==>|"or lower"| exchange0
delivery -->|"its name"| destination
delivery -->|"no route"| distribution
distribution ==> destination
distribution ==>|"in the end"| undeliverable
"""


def as_mermaid(topology: Topology) -> str:
    """Return a flow chart from left to right."""
    layout = topology.layout
    loop = topology.module_queues.meditation.queue_arguments or {}
    around = _AROUND.replace("@ttl", duration_text(loop["x-message-ttl"]))
    title = (
        f"{topology.prefix}: {layout.name}, zeros passed by {layout.zeros}, "
        f"{len(topology.digit_queues)} digit queues, up to {duration_text(layout.capacity_ms)}"
    )
    lines = (*_nodes(topology), *_arrows(topology), *around.splitlines())
    chart = ["---", f'title: "{title}"', "---", "flowchart LR", *(f"  {line}" for line in lines)]
    return "\n".join(chart) + "\n"


def _nodes(topology: Topology) -> Iterator[str]:
    for index, level in enumerate(topology.layout.levels):
        queues = topology.level_queues[level.name]
        ends = queues if len(queues) == 1 else (queues[0], queues[-1])
        names = [queue.name.removeprefix(f"{topology.prefix}.") for queue in ends]
        ttls = [duration_text((queue.queue_arguments or {})["x-message-ttl"]) for queue in ends]
        yield f'exchange{index}{{{{"{level.name}"}}}}'
        yield f'queues{index}[("{" to<br/>".join(names)}<br/>TTL {" to ".join(ttls)}")]'


def _arrows(topology: Topology) -> Iterator[str]:
    """Yield the bindings of each level, by the digits that they match, and its dead-lettering."""
    layout = topology.layout
    count = len(layout.levels)
    exchanges = [*(f"exchange{index}" for index in range(count)), "delivery"]
    first = 0 if layout.zeros == "queue" else 1
    for index in range(count):
        behind = count if layout.zeros == "skip" else index + 1
        for lower in range(index, behind):
            last = layout.bases[lower] - 1
            digits = str(first) if first == last else f"{first}-{last}"
            yield f'exchange{index} -->|"{"0." * (lower - index)}{digits}"| queues{lower}'
        if layout.zeros != "queue":
            zeros = ".".join("0" * (behind - index))
            yield f'exchange{index} -->|"{zeros}"| {exchanges[behind]}'
        yield f"queues{index} -.-> {exchanges[index + 1]}"
