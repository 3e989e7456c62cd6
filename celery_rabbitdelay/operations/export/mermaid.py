"""A topology as a Mermaid flow chart (https://mermaid.js.org/syntax/flowchart.html)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.export.graph import Edge, Kind, Line, Node, graph

_SHAPES: Final[dict[Kind, tuple[str, str]]] = {
    "end": ("([", "])"),
    "exchange": ("{{", "}}"),
    "module": ("[[", "]]"),
    "queue": ("[(", ")]"),
}

_ARROWS: Final[dict[Line, str]] = {"dead-letter": "-.->", "publish": "==>", "route": "-->"}


def as_mermaid(topology: Topology) -> str:
    """Return a flow chart from left to right; dotted arrows are dead-lettering."""
    drawing = graph(topology)
    return "\n".join(
        [
            "---",
            f'title: "{drawing.title}"',
            "---",
            "flowchart LR",
            *(f"  {_node(node)}" for node in drawing.nodes),
            *(f"  {line}" for line in _edges(drawing.edges)),
            "",
        ]
    )


def _node(node: Node) -> str:
    opening, closing = _SHAPES[node.kind]
    return f'{node.id}{opening}"{"<br/>".join(node.lines)}"{closing}'


def _edges(edges: tuple[Edge, ...]) -> Iterator[str]:
    for edge in edges:
        label = f'|"{edge.label}"|' if edge.label else ""
        yield f"{edge.source} {_ARROWS[edge.line]}{label} {edge.target}"
