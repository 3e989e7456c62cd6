"""Draws ``levels.png``, the picture of the levels that README and the architecture page show.

``make pictures`` runs it. The routing key and the stops come from the topology itself.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from celery_rabbitdelay.kombu import Topology

DELAY: Final = timedelta(days=3, hours=7, minutes=45, seconds=30)
DESTINATION: Final = "celery"

#: The headings of the clock's levels; the first three stand together, since their digits are zero.
HEADINGS: Final = ("days\nx1000, x100, x10", "days", "hours", "minutes", "seconds", "tenths")

EXCHANGES: Final = ("", "days.x1", "hours.x1", "minutes.x1", "seconds.x1", "ms.x100")

INK, PALE, LINE = "#1f2933", "#9aa5b1", "#52606d"
EXCHANGE_FILL, QUEUE_FILL, END_FILL = "#dbeafe", "#fde8c8", "#d7f0df"
PALE_FILL: Final = "#f2f4f7"

KEY_Y, EXCHANGE_Y, QUEUE_Y = 4.05, 2.55, 0.75
WIDTH, HEIGHT = 1.62, 0.74
STEP: Final = 2.0


def box(axes: Any, x: float, y: float, text: str, fill: str, *, pale: bool = False) -> None:
    """Draw a box with rounded corners and its text in the middle."""
    color = PALE if pale else LINE
    axes.add_patch(
        FancyBboxPatch(
            (x - WIDTH / 2, y - HEIGHT / 2),
            WIDTH,
            HEIGHT,
            boxstyle="round,pad=0.02,rounding_size=0.12",
            facecolor=fill,
            edgecolor=color,
            linewidth=1.2,
            linestyle="--" if pale else "-",
        )
    )
    axes.text(x, y, text, ha="center", va="center", fontsize=9.5, color=PALE if pale else INK)


def arrow(
    axes: Any,
    start: tuple[float, float],
    end: tuple[float, float],
    curve: float = 0.0,
    *,
    pale: bool = False,
) -> None:
    """Draw an arrow; ``curve`` bends it."""
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            connectionstyle=f"arc3,rad={curve}",
            arrowstyle="-|>",
            mutation_scale=13,
            linewidth=1.3,
            linestyle="--" if pale else "-",
            color=PALE if pale else LINE,
            shrinkA=0,
            shrinkB=1,
        )
    )


def key(axes: Any, words: list[str]) -> None:
    """Draw the routing key, a cell for each column."""
    cells = [".".join(words[:3]), *words[3:]]
    for column, (cell, heading) in enumerate(zip(cells, (*HEADINGS, "queue"), strict=True)):
        x, is_zero = column * STEP, set(cell) <= {"0", "."}
        axes.add_patch(
            Rectangle(
                (x - STEP / 2, KEY_Y - 0.3),
                STEP,
                0.6,
                facecolor=PALE_FILL if is_zero else "white",
                edgecolor=LINE,
                linewidth=1.2,
            )
        )
        axes.text(
            x,
            KEY_Y,
            cell,
            ha="center",
            va="center",
            fontsize=15,
            family="monospace",
            color=PALE if is_zero else INK,
            weight="normal" if is_zero else "bold",
        )
        axes.text(x, KEY_Y + 0.42, heading, ha="center", va="bottom", fontsize=9, color=LINE)


def levels(axes: Any, words: list[str], stops: tuple[str, ...]) -> None:
    """Draw the exchange and the queue of each level, and how a message moves between them."""
    waits = iter(stops)
    box(axes, 0, EXCHANGE_Y, "not entered", "white", pale=True)
    for column, name in enumerate(EXCHANGES[1:], start=1):
        x, digit = column * STEP, words[column + 2]
        box(axes, x, EXCHANGE_Y, f"exchange\n{name}", EXCHANGE_FILL)
        following = (x + STEP - WIDTH / 2 - 0.02, EXCHANGE_Y)
        if digit == "0":
            arrow(axes, (x + WIDTH / 2 + 0.02, EXCHANGE_Y), following)
            axes.text(x, EXCHANGE_Y - 0.6, "digit 0:\nno queue,\nno stop", **_note("top"))
            continue
        stop = next(waits)
        box(axes, x, QUEUE_Y, f"queue\n{stop.removeprefix('rabbitdelay.')}", QUEUE_FILL)
        arrow(axes, (x, EXCHANGE_Y - HEIGHT / 2 - 0.02), (x, QUEUE_Y + HEIGHT / 2 + 0.04))
        axes.text(x + 0.08, (EXCHANGE_Y + QUEUE_Y) / 2, f"digit {digit}", **_note("center", "left"))
        start = (x + WIDTH / 2 + 0.02, QUEUE_Y + 0.1)
        arrow(axes, start, (x + STEP - WIDTH / 2 + 0.12, EXCHANGE_Y - HEIGHT / 2 - 0.04), 0.3)
        axes.text(x, QUEUE_Y - 0.5, f"waits {digit} {HEADINGS[column]}", **_note("top"))


def _note(vertical: str, horizontal: str = "center") -> dict[str, Any]:
    return {"ha": horizontal, "va": vertical, "fontsize": 9, "color": LINE}


def ends(axes: Any) -> None:
    """Draw the producer, the delivery exchange and what stands behind it."""
    box(axes, 0, QUEUE_Y, "producer", END_FILL)
    entered = (STEP - WIDTH / 2 + 0.12, EXCHANGE_Y - HEIGHT / 2 - 0.04)
    arrow(axes, (WIDTH / 2 + 0.02, QUEUE_Y + 0.1), entered, 0.25)
    axes.text(0, QUEUE_Y - 0.5, "publishes to the first\ndigit that is not zero", **_note("top"))
    last = len(EXCHANGES) * STEP
    box(axes, last, EXCHANGE_Y, "exchange\ndelivery", EXCHANGE_FILL)
    box(axes, last, QUEUE_Y, f"queue {DESTINATION}\nand its worker", END_FILL)
    arrow(axes, (last, EXCHANGE_Y - HEIGHT / 2 - 0.02), (last, QUEUE_Y + HEIGHT / 2 + 0.04))
    axes.text(last, QUEUE_Y - 0.5, "the task runs", **_note("top"))
    names = "The names of these exchanges and queues begin with rabbitdelay."
    axes.text(3.5 * STEP, -0.28, names, fontsize=9, color=PALE, ha="center", va="top")


def main() -> Path:
    """Draw the picture; return the file."""
    route = Topology().route(DELAY, DESTINATION)
    words = route.routing_key.split(".")
    plt.rcParams["font.family"] = "DejaVu Sans"
    figure, axes = plt.subplots(figsize=(13.2, 5.3))
    axes.text(
        -STEP / 2,
        5.45,
        "countdown = 3 days, 7 hours, 45 minutes, 30 seconds: the delay is the routing key",
        fontsize=13,
        color=INK,
        weight="bold",
    )
    key(axes, words)
    levels(axes, words, route.stops)
    ends(axes)
    axes.set(xlim=(-1.15, len(EXCHANGES) * STEP + 1.15), ylim=(-0.65, 5.75), aspect="equal")
    axes.axis("off")
    path = Path(__file__).with_suffix(".png")
    figure.savefig(path, dpi=110, bbox_inches="tight", facecolor="white")
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
