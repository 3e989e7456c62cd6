"""A topology as a graph for Graphviz (https://graphviz.org/doc/info/lang.html)."""

from __future__ import annotations

import json
from typing import Final

from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.export.graph import Edge, Kind, Line, Node, graph

_SHAPES: Final[dict[Kind, str]] = {
    "end": "oval",
    "exchange": "hexagon",
    "module": "box3d",
    "queue": "box",
}

_STYLES: Final[dict[Line, str]] = {"dead-letter": "dashed", "publish": "bold", "route": "solid"}


def as_dot(topology: Topology) -> str:
    """Return a graph from left to right; dashed edges are dead-lettering."""
    drawing = graph(topology)
    return "\n".join(
        [
            "digraph rabbitdelay {",
            f"  graph [rankdir=LR, label={_quoted(drawing.title)}]",
            *(f"  {_node(node)}" for node in drawing.nodes),
            *(f"  {_edge(edge)}" for edge in drawing.edges),
            "}",
            "",
        ]
    )


def _node(node: Node) -> str:
    return f"{node.id} [shape={_SHAPES[node.kind]}, label={_quoted(*node.lines)}]"


def _edge(edge: Edge) -> str:
    label = f", label={_quoted(edge.label)}" if edge.label else ""
    return f"{edge.source} -> {edge.target} [style={_STYLES[edge.line]}{label}]"


def _quoted(*lines: str) -> str:
    return json.dumps("\n".join(lines), ensure_ascii=False)
