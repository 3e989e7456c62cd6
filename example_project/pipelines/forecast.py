"""Count the waiting tasks in the registry by due time: a table and a picture."""

import csv
from argparse import ArgumentParser
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's users know

from example_project.pipelines.replay import APP, session


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the pipeline; the arguments are those of the command line."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--step", default="1 minute", help="time per row (default: %(default)s)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("due_load.png"),
        help="the picture; a .csv file is written beside it (default: %(default)s)",
    )
    given = parser.parse_args(arguments)
    read = session("forecast").read.format("rabbitdelay").option("app", APP)
    pending = read.load().cache()
    now = F.lit(datetime.now(UTC))
    steps = due_load(pending.where(F.col("due") > now), given.step).collect()

    with given.output.with_suffix(".csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["due", "tasks"])
        lines.writerows((_instant(step).isoformat(), step.tasks) for step in steps)
    _draw(steps, given.output, given.step)
    print(f"{sum(step.tasks for step in steps):,} tasks wait; the busiest steps:")
    for step in sorted(steps, key=lambda step: step.tasks, reverse=True)[:3]:
        print(f"{step.tasks:8,} in the {given.step} from {_instant(step):%Y-%m-%d %H:%M:%S} UTC")
    overdue = pending.where(F.col("due") <= now).count()
    print(f"{overdue:,} are overdue; if the number stays, check the tasks' queue and workers")


def due_load(pending: DataFrame, step: str) -> DataFrame:
    """Return how many tasks are due in each step of time; steps without tasks are left out."""
    due = F.unix_seconds(F.window("due", step).start).alias("due")
    return pending.groupBy(due).agg(F.count("*").alias("tasks")).orderBy("due")


def _instant(step: Row) -> datetime:
    return datetime.fromtimestamp(step.due, UTC)


def _draw(steps: Sequence[Row], output: Path, step: str) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    due = np.array([_instant(each) for each in steps], dtype=object)
    axes.step(due, [each.tasks for each in steps], where="post")
    axes.set_ylabel(f"tasks due in {step}")
    figure.savefig(output, dpi=120)


if __name__ == "__main__":
    main()
