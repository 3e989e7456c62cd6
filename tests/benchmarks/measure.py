# ruff: noqa: T201  # a program at the terminal prints
"""What all benchmarks share: contestants in turn, medians and ratios, results and pictures.

A figure of one machine says little; so every one stands beside a peer's, measured in the same run
on the same broker, the contestants in turn, round by round.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from celery_rabbitdelay.testing import RabbitMQServer

REPOSITORY: Final = Path(__file__).resolve().parents[2]

#: Where results and pictures are written to.
RESULTS: Final = REPOSITORY / "build" / "benchmarks"

#: The colors of the contestants' lines.
COLORS: Final = ("#1f6fb4", "#7fb3dc", "#d1495b", "#8d99ae")

LIBRARIES: Final = ("celery", "kombu", "amqp", "celery-rabbitdelay")


class Target(NamedTuple):
    """A figure, and what it is meant to be at least."""

    claim: str
    figure: float
    bound: float

    @property
    def met(self) -> bool:
        """Whether the figure is what it is meant to be."""
        return self.figure >= self.bound


def judge(targets: Sequence[Target]) -> list[dict[str, Any]]:
    """Print which targets are met; return them for :func:`save`."""
    print("\ntargets")
    for target in targets:
        verdict = "met" if target.met else "NOT MET"
        print(f"  {target.claim}: {target.figure:,.2f} >= {target.bound:,g}: {verdict}")
    return [{**target._asdict(), "met": target.met} for target in targets]


def version_of(broker: RabbitMQServer) -> str:
    """The version of RabbitMQ."""
    return broker.ctl("version").strip()


def environment(broker: RabbitMQServer) -> dict[str, Any]:
    """The machine and the versions that figures belong to."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "rabbitmq": version_of(broker),
        **{name: version(name) for name in LIBRARIES},
    }


def in_turn(contestants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure each contestant once a round; return their figures, a list for each."""
    figures: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name, measure in contestants.items():
            figures[name].append(measure())
            print(f"  round {number + 1}, {name}: {figures[name][-1]:,.1f}", flush=True)
    return figures


def medians(figures: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each contestant's figures."""
    return {name: median(rounds) for name, rounds in figures.items()}


def ratios(figures: Mapping[str, Sequence[float]], peer: str) -> dict[str, float]:
    """The median of each contestant's figure as a multiple of the peer's of the same round."""
    return {
        name: median(own / other for own, other in zip(rounds, figures[peer], strict=True))
        for name, rounds in figures.items()
    }


def show(
    title: str, unit: str, figures: Mapping[str, Sequence[float]], peer: str | None = None
) -> None:
    """Print medians and spread; and ratios, if there is a peer."""
    print(f"\n{title} ({unit})")
    compared = ratios(figures, peer) if peer else {}
    for name, rounds in figures.items():
        ratio = f"  {compared[name]:8.2f} x {peer}" if peer else ""
        print(
            f"  {name:44} median {median(rounds):12,.1f}  from {min(rounds):12,.1f} "
            f"to {max(rounds):12,.1f}{ratio}"
        )


def save(name: str, broker: RabbitMQServer, results: Mapping[str, Any]) -> Path:
    """Write results as JSON, with the machine and the versions; return the file."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(broker), **results}, indent=2) + "\n")
    print(f"written: {path.relative_to(REPOSITORY)}")
    return path


def bars(
    name: str, title: str, unit: str, figures: Mapping[str, Sequence[float]], footnote: str
) -> Path:
    """Draw the medians as bars, with their spread; return the picture."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.5 * len(figures)))
    middles, spread = _middles(figures.values())
    drawn = axes.barh(list(figures), middles, xerr=spread, color="#4c72b0")
    axes.bar_label(drawn, labels=[f"{middle:,.0f}" for middle in middles], padding=6)
    axes.invert_yaxis()
    axes.set(title=title, xlabel=unit)
    axes.margins(x=0.15)
    figure.tight_layout()
    return _drawn(figure, name, footnote)


def _middles(figures: Iterable[Sequence[float]]) -> tuple[list[float], list[list[float]]]:
    """Return medians, and how far the lowest and the highest are from each."""
    triples = [(min(rounds), median(rounds), max(rounds)) for rounds in figures]
    spread = [[m - low for low, m, _ in triples], [high - m for _, m, high in triples]]
    return [middle for _, middle, _ in triples], spread


def _drawn(figure: Any, name: str, footnote: str) -> Path:
    import matplotlib.pyplot as plt

    figure.text(0.01, 0.01, footnote, fontsize=7, color="#555555")
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def lines_over_rate(
    name: str,
    title: str,
    rate: str,
    unit: str,
    figures: Mapping[str, Mapping[int, Sequence[float]]],
    footnote: str,
) -> Path:
    """Draw a line for each contestant over the rate, both axes logarithmic; return the picture.

    Args:
        name: The picture's file name without suffix.
        title: What the picture shows.
        rate: What the lower axis counts.
        unit: What the left axis counts.
        figures: For each contestant, what was measured at each rate, a figure for each round.
        footnote: Versions and conditions.
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure, axes = plt.subplots(figsize=(8, 5.4))
    for color, (contestant, by_rate) in zip(COLORS, figures.items(), strict=False):
        rates = sorted(by_rate)
        middles, spread = _middles(by_rate[each] for each in rates)
        axes.errorbar(
            rates, middles, yerr=spread, color=color, marker="o", capsize=3, label=contestant
        )
        style: Any = {"textcoords": "offset points", "va": "center", "color": color}
        axes.annotate(f"{middles[-1]:,.0f}", (rates[-1], middles[-1]), xytext=(8, 0), **style)
    axes.set(title=title, xlabel=rate, ylabel=unit, xscale="log", yscale="log")
    every_rate = sorted({each for by_rate in figures.values() for each in by_rate})
    axes.set_xticks(every_rate, [f"{each:,}" for each in every_rate])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.margins(x=0.1)
    axes.grid(visible=True, which="major", color="#dddddd")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    return _drawn(figure, name, footnote)
