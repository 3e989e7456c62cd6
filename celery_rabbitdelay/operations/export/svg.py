"""A topology as an SVG picture, drawn here: no other program is needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.export.graph import Edge, Graph, Kind, Line, Node, graph

__all__ = ["as_svg"]

#: Lengths in pixels: of a box, from one box to the next, and around everything.
WIDTH, HEIGHT = 136, 62
STEP_X, STEP_Y = 200, 130
MARGIN: Final = 90

LINE_HEIGHT: Final = 15

INK, LINE_COLOR = "#1f2933", "#52606d"

_FILLS: Final[dict[Kind, str]] = {
    "end": "#d7f0df",
    "exchange": "#dbeafe",
    "module": "#f2f4f7",
    "queue": "#fde8c8",
}

_DASHES: Final[dict[Line, str]] = {
    "dead-letter": ' stroke-dasharray="5 4"',
    "publish": ' stroke-width="2.2"',
    "route": "",
}


def as_svg(topology: Topology) -> str:
    """Return a picture; dashed arrows are dead-lettering."""
    drawing = graph(topology)
    centres = {node.id: _centre(node) for node in drawing.nodes}
    width, height = _size(drawing)
    title = escape(drawing.title)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
            f'  width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
            f"  <title>{title}</title>",
            '  <defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8"',
            '    markerHeight="8" markerUnits="userSpaceOnUse" orient="auto">',
            f'    <path d="M0 0 L8 4 L0 8 z" fill="{LINE_COLOR}"/></marker></defs>',
            f'  <rect width="{width}" height="{height}" fill="white"/>',
            f'  <text x="{MARGIN - WIDTH // 2}" y="24" fill="{INK}" font-size="15">{title}</text>',
            *(line for edge in drawing.edges for line in _edge(edge, centres)),
            *(line for node in drawing.nodes for line in _node(node)),
            "</svg>",
            "",
        ]
    )


def _size(drawing: Graph) -> tuple[int, int]:
    columns = max(node.column for node in drawing.nodes)
    rows = max(node.row for node in drawing.nodes)
    # Edges that skip levels bend above the first row.
    return columns * STEP_X + 2 * MARGIN, rows * STEP_Y + 2 * MARGIN + STEP_Y // 2


def _centre(node: Node) -> tuple[int, int]:
    return MARGIN + node.column * STEP_X, MARGIN + STEP_Y // 2 + node.row * STEP_Y


def _node(node: Node) -> Iterator[str]:
    x, y = _centre(node)
    yield (
        f'  <rect id={quoteattr(node.id)} x="{x - WIDTH // 2}" y="{y - HEIGHT // 2}" '
        f'width="{WIDTH}" height="{HEIGHT}" rx="9" fill="{_FILLS[node.kind]}" '
        f'stroke="{LINE_COLOR}"/>'
    )
    top = y + 4 - (len(node.lines) - 1) * LINE_HEIGHT // 2
    for number, line in enumerate(node.lines):
        size = ' font-size="10"' if len(line) > 20 else ""
        yield (
            f'  <text x="{x}" y="{top + number * LINE_HEIGHT}" text-anchor="middle" '
            f'fill="{INK}"{size}>{escape(line)}</text>'
        )


def _edge(edge: Edge, centres: dict[str, tuple[int, int]]) -> Iterator[str]:
    source, target = centres[edge.source], centres[edge.target]
    (x1, y1), (x2, y2) = _ends(source, target)
    middle_x, middle_y = (x1 + x2) // 2, (y1 + y2) // 2
    if source[1] == target[1] and abs(target[0] - source[0]) > STEP_X:
        # It would cross the boxes in between.
        y1 = y2 = source[1] - HEIGHT // 2
        x1, x2 = source[0] + WIDTH // 4, target[0] - WIDTH // 4
        middle_y = y1 - STEP_Y // 2
        path = f"M{x1} {y1} Q{middle_x} {y1 - STEP_Y} {x2} {y2}"
    else:
        path = f"M{x1} {y1} L{x2} {y2}"
    yield (
        f'  <path d="{path}" fill="none" stroke="{LINE_COLOR}"{_DASHES[edge.line]} '
        'marker-end="url(#arrow)"/>'
    )
    if edge.label:
        yield (
            f'  <text x="{middle_x}" y="{middle_y - 5}" text-anchor="middle" fill="{LINE_COLOR}" '
            f'font-size="10" stroke="white" stroke-width="3" paint-order="stroke">'
            f"{escape(edge.label)}</text>"
        )


def _ends(
    source: tuple[int, int], target: tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The points on the borders of two boxes between which a straight line is drawn."""
    (x1, y1), (x2, y2) = source, target
    if x1 == x2:
        down = 1 if y2 > y1 else -1
        return (x1, y1 + down * HEIGHT // 2), (x2, y2 - down * HEIGHT // 2)
    right = 1 if x2 > x1 else -1
    return (x1 + right * WIDTH // 2, y1), (x2 - right * WIDTH // 2, y2)
