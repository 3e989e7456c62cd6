"""The picture at the end of a run: how late the reminders were, and when."""

from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from example_project.demonstration.outcome import FirstStart, Outcome, percentile

_BEFORE: Final = "#2b6cb0"
_AFTER: Final = "#dd8a3c"
_AWAY: Final = "#f7e3e3"
_INK: Final = "#2d3748"

_MILLISECONDS: Final = FuncFormatter(lambda value, _: f"{value:,.0f}")


def draw(outcome: Outcome, path: Path) -> None:
    """Draw the lateness of all first attempts into a PNG file.

    Args:
        outcome: The run; at least one lateness was measured.
        path: The file; its folder must exist.
    """
    figure = Figure(figsize=(10, 8.5), layout="constrained")
    figure.suptitle(
        f"{len(outcome.lateness):,} delayed reminders; the worker was killed and started again",
        fontsize=14,
        color=_INK,
    )
    histogram, course = figure.subplots(2, 1)
    _draw_histogram(histogram, outcome)
    _draw_course(course, outcome)
    for axes in (histogram, course):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=120)


def _draw_histogram(axes: Axes, outcome: Outcome) -> None:
    before, after = _before_and_after(outcome)
    highest = max(2, outcome.lateness[-1])
    axes.hist(
        [_on_log_axis(before), _on_log_axis(after)],
        bins=np.geomspace(1, highest, 60).tolist(),
        stacked=True,
        color=[_BEFORE, _AFTER],
        label=["started before the kill", "started after it"],
    )
    for name, percent, style in (("p50", 50, "--"), ("p99", 99, ":")):
        value = percentile(outcome.lateness, percent)
        label = f"{name} of all: {value:,} ms"
        axes.axvline(max(1, value), color=_INK, linestyle=style, linewidth=1.2, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(_MILLISECONDS)
    axes.set_title("How late: start minus due, first attempts", loc="left", color=_INK)
    axes.set_xlabel("lateness [ms], logarithmic; below 1 ms drawn at 1")
    axes.set_ylabel("reminders")
    axes.legend(frameon=False, loc="upper left")


def _draw_course(axes: Axes, outcome: Outcome) -> None:
    first_due = min(start.due_ms for start in outcome.first_starts)
    away = [(instant - first_due) / 1000 for instant in (outcome.kill.killed_ms, outcome.back_ms)]
    axes.axvspan(away[0], away[1], color=_AWAY, label=f"no worker: {away[1] - away[0]:.1f} s")
    for starts, color in zip(_before_and_after(outcome), (_BEFORE, _AFTER), strict=True):
        due = [(start.due_ms - first_due) / 1000 for start in starts]
        axes.scatter(due, _on_log_axis(starts), s=3, color=color, linewidths=0)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(_MILLISECONDS)
    axes.set_title("When: each point is a reminder", loc="left", color=_INK)
    axes.set_xlabel("due [s after the first one]")
    axes.set_ylabel("lateness [ms], logarithmic")
    axes.legend(frameon=False, loc="upper left")


def _before_and_after(outcome: Outcome) -> tuple[list[FirstStart], list[FirstStart]]:
    killed_ms = outcome.kill.killed_ms
    before = [start for start in outcome.first_starts if start.started_ms <= killed_ms]
    after = [start for start in outcome.first_starts if start.started_ms > killed_ms]
    return before, after


def _on_log_axis(starts: list[FirstStart]) -> list[int]:
    return [max(1, start.lateness_ms) for start in starts]
