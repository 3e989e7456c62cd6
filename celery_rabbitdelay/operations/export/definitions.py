"""A topology as a definitions file, which RabbitMQ imports, and as a Mermaid diagram.

``rabbitmqctl import_definitions``, the management page and ``load_definitions`` of
``rabbitmq.conf`` read it (https://www.rabbitmq.com/docs/definitions). :func:`as_setting` describes
a layout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from celery_rabbitdelay.exceptions import InvalidLayout
from celery_rabbitdelay.levels.delay import Delay, duration_text, milliseconds
from celery_rabbitdelay.levels.layout import NAMED, Layout, custom
from celery_rabbitdelay.levels.topology import Topology

_LAYOUTS: Final = {**NAMED, "custom": custom}


def as_setting(layout: Layout) -> dict[str, Any] | None:
    """Return the value of ``rabbitdelay_layout`` that makes a layout, as JSON can express it.

    Returns:
        A mapping; None if only Python can make this layout.
    """
    if layout.name not in _LAYOUTS:
        return None
    options = _options(layout)
    try:
        found = _LAYOUTS[layout.name](**options)
    except (InvalidLayout, TypeError):
        return None
    return {"name": layout.name, **options} if found == layout else None


def cut(layout: Layout, max_delay: Delay) -> Layout:
    """Return the fewest of the lowest levels of a layout that hold a delay.

    The result is another layout with other routing keys: applications need it as their setting
    ``rabbitdelay_layout``, see :func:`as_setting`.

    Args:
        layout: The layout.
        max_delay: The longest delay that the levels have to hold: seconds, or a timedelta.

    Raises:
        DelayTooLong: The whole layout does not hold it.
        InvalidDelay: It is invalid.
    """
    max_ms = milliseconds(max_delay)
    layout.check_capacity(max_ms)
    for first in range(len(layout.levels) - 1, 0, -1):
        lowest = custom(_levels(layout, first), layout.zeros)
        if lowest.capacity_ms >= max_ms:
            return lowest
    return layout


def _options(layout: Layout) -> dict[str, Any]:
    tick = _seconds(layout.tick_ms)
    match layout.name:
        case "clock":
            options: dict[str, Any] = {"tick": tick}
        case "binary":
            options = {"tick": tick, "levels": len(layout.levels)}
        case "geometric":
            options = {"tick": tick, "factor": layout.bases[0], "levels": len(layout.levels)}
        case _:
            options = {"levels": [list(level) for level in _levels(layout)]}
    return {**options, "zeros": layout.zeros}


def _levels(layout: Layout, first: int = 0) -> list[tuple[str, int, float]]:
    return [(each.unit, each.base, _seconds(each.place_ms)) for each in layout.levels[first:]]


def _seconds(length_ms: int) -> float:
    return length_ms // 1000 if length_ms % 1000 == 0 else length_ms / 1000


def definitions(topology: Topology, vhost: str = "/") -> dict[str, list[dict[str, Any]]]:
    """Return the exchanges, queues and bindings that ``declare`` makes.

    The guard, which refuses other layouts under the prefix, is the first exchange. The marker,
    which shows that the topology is complete, is the last one.

    The virtual host has to exist: an import that names it would reset its description, its tags
    and its default queue type.

    Args:
        topology: The topology.
        vhost: The virtual host that they belong to.
    """
    common = {"vhost": vhost, "durable": True, "auto_delete": False}
    return {
        "exchanges": [
            {
                "name": each.name,
                "type": each.type,
                "arguments": dict(each.arguments or {}),
                **common,
                "internal": False,
            }
            for each in (topology.identity.guard, *topology.exchanges, topology.identity.marker)
        ],
        "queues": [
            {"name": each.name, "arguments": dict(each.queue_arguments or {}), **common}
            for each in (*topology.queues, topology.probe)
        ],
        "bindings": [
            {
                "source": each.source,
                "vhost": vhost,
                "destination": each.target,
                "destination_type": "exchange" if each.target_is_exchange else "queue",
                "routing_key": each.pattern,
                "arguments": {},
            }
            for each in (*topology.bindings, topology.probe_binding)
        ],
    }


def as_definitions(topology: Topology, vhost: str = "/") -> str:
    """Return the same as JSON."""
    return json.dumps(definitions(topology, vhost), indent=2) + "\n"


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
