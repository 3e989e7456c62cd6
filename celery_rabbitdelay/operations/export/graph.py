"""A topology as a graph for drawings: a node for each exchange, and one for each level's queues.

The nodes stand in a grid. Its columns are the levels, highest first. Its rows are the exchanges,
the queues, and the modules around the levels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from celery_rabbitdelay.levels.delay_text import written
from celery_rabbitdelay.levels.topology import Topology

Kind: TypeAlias = Literal["end", "exchange", "module", "queue"]

#: How messages pass along an edge: expired messages of a queue are dead-lettered, a program
#: publishes them, or an exchange routes them.
Line: TypeAlias = Literal["dead-letter", "publish", "route"]


class Node(NamedTuple):
    """An exchange, the queues of a level, a module with its queue, or a program.

    Attributes:
        id: A word, unique in the graph.
        kind: Its kind.
        lines: The lines of its text.
        column: Its column, from the left.
        row: Its row: 0 for exchanges, 1 for queues, 2 for modules.
    """

    id: str
    kind: Kind
    lines: tuple[str, ...]
    column: int
    row: int


class Edge(NamedTuple):
    """An edge along which messages go from one node to another.

    Attributes:
        source: The id of the first node.
        target: The id of the second node.
        label: The messages that take it: the digits of their routing key from this level on.
        line: How they pass.
    """

    source: str
    target: str
    label: str
    line: Line


class Graph(NamedTuple):
    """A topology as a graph.

    Attributes:
        title: Its title.
        nodes: Its nodes.
        edges: Its edges.
    """

    title: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


def graph(topology: Topology) -> Graph:
    """Return the graph of a topology. All shards of a digit are in one node."""
    layout = topology.layout
    title = (
        f"{topology.name_prefix}: {layout.name}, zeros passed by {layout.zeros}, "
        f"{len(topology.digit_queues)} digit queues, up to {written(layout.capacity_ms)}"
    )
    nodes = (*_level_nodes(topology), *_nodes_around(topology))
    return Graph(title, nodes, (*_level_edges(topology), *_edges_around(topology)))


def _level_nodes(topology: Topology) -> Iterator[Node]:
    for index, level in enumerate(topology.layout.levels):
        queues = topology.level_queues[level.name]
        names = [queue.name.removeprefix(f"{topology.name_prefix}.") for queue in queues]
        ttls = [(queue.queue_arguments or {})["x-message-ttl"] for queue in queues]
        yield Node(f"exchange{index}", "exchange", (level.name,), index + 1, 0)
        shown = names if len(names) == 1 else [f"{names[0]} to", names[-1]]
        waits = written(ttls[0]) if len(ttls) == 1 else f"{written(ttls[0])} to {written(ttls[-1])}"
        yield Node(f"queues{index}", "queue", (*shown, f"TTL {waits}"), index + 1, 1)


def _level_edges(topology: Topology) -> Iterator[Edge]:
    layout = topology.layout
    count = len(layout.levels)
    for index in range(count):
        behind = count if layout.zeros == "skip" else index + 1
        for lower in range(index, behind):
            digits = _digits(layout.bases[lower], 0 if layout.zeros == "queue" else 1)
            label = ".".join([*["0"] * (lower - index), digits])
            yield Edge(f"exchange{index}", f"queues{lower}", label, "route")
        if layout.zeros != "queue":
            label = ".".join(["0"] * (behind - index))
            yield Edge(f"exchange{index}", _exchange(behind, count), label, "route")
        yield Edge(f"queues{index}", _exchange(index + 1, count), "", "dead-letter")


def _exchange(index: int, count: int) -> str:
    return f"exchange{index}" if index < count else "delivery"


def _digits(base: int, first: int) -> str:
    return str(first) if first == base - 1 else f"{first}-{base - 1}"


def _nodes_around(topology: Topology) -> Iterator[Node]:
    last = len(topology.layout.levels) + 1
    yield Node("producer", "end", ("producer",), 0, 1)
    yield Node("delivery", "exchange", ("delivery",), last, 0)
    yield Node("destination", "end", ("the task's queue",), last, 1)
    yield Node("checkin", "module", ("checkin", "(ingest queue)"), 0, 0)
    loop = topology.module_queues.meditation.queue_arguments or {}
    ttl = f"TTL {written(loop['x-message-ttl'])}"
    yield Node("meditation", "module", ("meditation", ttl), 0, 2)
    yield Node("distribution", "module", ("distribution", "(publishes again)"), last, 2)
    yield Node("undeliverable", "module", ("undeliverable",), last - 1, 2)


def _edges_around(topology: Topology) -> Iterator[Edge]:
    yield Edge("producer", "exchange0", "or lower", "publish")
    yield Edge("producer", "meditation", "above", "publish")
    yield Edge("meditation", "checkin", "", "dead-letter")
    yield Edge("checkin", "exchange0", "or lower", "publish")
    yield Edge("delivery", "destination", "its name", "route")
    yield Edge("delivery", "distribution", "no route", "route")
    yield Edge("distribution", "destination", "", "publish")
    yield Edge("distribution", "undeliverable", "in the end", "publish")
