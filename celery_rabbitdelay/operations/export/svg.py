"""A topology as an SVG picture, drawn here: no other program is needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.export.graph import Edge, Graph, Kind, Line, Node, graph

#: Lengths in pixels: of a box, from one box to the next, and around everything.
WIDTH, HEIGHT = 150, 62
STEP_X, STEP_Y = 214, 130
MARGIN: Final = 130

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
        size = f' font-size="{9 if len(line) > 24 else 10}"' if len(line) > 20 else ""
        yield (
            f'  <text x="{x}" y="{top + number * LINE_HEIGHT}" text-anchor="middle" '
            f'fill="{INK}"{size}>{escape(line)}</text>'
        )


def _edge(edge: Edge, centres: dict[str, tuple[int, int]]) -> Iterator[str]:
    source, target = centres[edge.source], centres[edge.target]
    path, (x, y) = _path(source, target)
    yield (
        f'  <path d="{path}" fill="none" stroke="{LINE_COLOR}"{_DASHES[edge.line]} '
        'marker-end="url(#arrow)"/>'
    )
    if edge.label:
        yield (
            f'  <text x="{x}" y="{y}" text-anchor="middle" fill="{LINE_COLOR}" font-size="10" '
            f'stroke="white" stroke-width="3" paint-order="stroke">{escape(edge.label)}</text>'
        )


def _path(source: tuple[int, int], target: tuple[int, int]) -> tuple[str, tuple[int, int]]:
    """Return the path from one box to another, around those in between, and its label's place."""
    (x1, y1), (x2, y2) = source, target
    if y1 == y2 and abs(x2 - x1) > STEP_X:
        top, middle = y1 - HEIGHT // 2, (x1 + x2) // 2
        begin, end = x1 + WIDTH // 4, x2 - WIDTH // 4
        return f"M{begin} {top} Q{middle} {top - STEP_Y} {end} {top}", (middle, top - STEP_Y // 2)
    if x1 == x2 and abs(y2 - y1) > STEP_Y:
        # The first column has room on its left, the last one on its right.
        outwards = -1 if x1 == MARGIN else 1
        side, middle = x1 + outwards * WIDTH // 2, (y1 + y2) // 2
        path = f"M{side} {y1} Q{side + outwards * STEP_X // 3} {middle} {side} {y2}"
        return path, (side + outwards * STEP_X // 6, middle)
    (x1, y1), (x2, y2) = _ends(source, target)
    # Labels of lines that cross stand apart near the ends of the lines.
    part = 0.75 if x1 != x2 and y1 < y2 else 0.5
    label = round(x1 + part * (x2 - x1)), round(y1 + part * (y2 - y1)) - 5
    return f"M{x1} {y1} L{x2} {y2}", label


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
