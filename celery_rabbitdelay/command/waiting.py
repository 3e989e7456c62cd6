"""``celery rabbitdelay pending``, ``forecast``, ``cancel``, ``postpone`` and ``job``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Final

import click
from celery.bin.base import CLIContext

from celery_rabbitdelay.command.context import (
    instant_type,
    json_option,
    registry_errors,
    with_registry,
)
from celery_rabbitdelay.registry.decision import Outcome
from celery_rabbitdelay.registry.index import Pending

#: The characters of the longest bar.
BAR_LENGTH: Final = 50

#: The most steps that are printed as bars; ``--plot`` and ``--json`` have all of them.
MAX_BARS: Final = 60


def _filters(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say which tasks are meant."""
    for option in (
        click.option("--due-before", type=instant_type, help="Only tasks that are due before."),
        click.option("--job", help="Only tasks that were sent with this job."),
        click.option("--task", help="Only tasks of this name."),
    ):
        command = option(command)
    return command


@click.command()
@_filters
@click.option("--key", help="Only tasks that were sent with this key.")
@click.option("--due-after", type=instant_type, help="Only tasks that are due then or later.")
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="At most this many.",
)
@json_option
@click.pass_obj
def pending(context: CLIContext, /, limit: int, as_json: bool, **filters: Any) -> None:
    """List the tracked tasks that wait, the next one first."""
    delays = with_registry(context)
    with registry_errors(as_json):
        count = delays.count(**filters)
        shown = list(islice(delays.pending(**filters), limit))
        since = delays.pending_since()
    if as_json:
        told = [{**each._asdict(), "due": each.due.isoformat()} for each in shown]
        click.echo(json.dumps({"count": count, "since": since.isoformat(), "tasks": told}))
        return
    click.echo("\n".join(_table(shown)))
    more = f", of which {len(shown):,} are shown" if count > len(shown) else ""
    click.echo(f"{count:,} tracked tasks wait{more}; complete since {_local(since)}")


def _table(tasks: Sequence[Pending]) -> Iterable[str]:
    now = datetime.now(UTC)
    rows = [("due", "in", "task", "id", "key", "job")]
    rows += [
        (
            _local(each.due),
            _brief(each.due - now),
            each.task,
            each.task_id,
            each.key or "",
            each.job or "",
        )
        for each in tasks
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


@click.command()
@_filters
@click.option(
    "--step",
    type=click.FloatRange(min=0.1),
    default=60,
    show_default=True,
    help="The seconds of each step.",
)
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write a picture (PNG)."
)
@json_option
@click.pass_obj
def forecast(
    context: CLIContext, /, step: float, plot: Path | None, as_json: bool, **filters: Any
) -> None:
    """Show how many tracked tasks are due in each minute from now on."""
    delays = with_registry(context)
    with registry_errors(as_json):
        steps = list(delays.forecast(step, **filters))
    if plot is not None:
        _draw(steps, step, plot)
    if as_json:
        told = [{"start": at.isoformat(), "tasks": count} for at, count in steps]
        click.echo(json.dumps({"tasks": sum(count for _, count in steps), "steps": told}))
        return
    most = max((count for _, count in steps), default=0)
    for at, count in steps[:MAX_BARS]:
        click.echo(f"{_local(at)}  {'#' * max(round(count / most * BAR_LENGTH), 1)} {count:,}")
    if len(steps) > MAX_BARS:
        click.echo(f"... and {len(steps) - MAX_BARS:,} further steps; see --plot and --json")
    click.echo(f"{sum(count for _, count in steps):,} tracked tasks wait")


def _draw(steps: Sequence[tuple[datetime, int]], step: float, path: Path) -> None:
    try:
        from matplotlib.figure import Figure  # an extra that only this option needs
    except ImportError as missing:
        raise click.UsageError("--plot needs matplotlib: pip install matplotlib") from missing
    figure = Figure(figsize=(10, 4))
    axes: Any = figure.subplots()
    axes.bar(
        [at.astimezone() for at, _ in steps],
        [count for _, count in steps],
        width=timedelta(seconds=step),
        align="edge",
    )
    axes.set_ylabel(f"tasks due in {step:g} s")
    figure.autofmt_xdate()
    figure.savefig(path, bbox_inches="tight")


def _local(instant: datetime) -> str:
    return instant.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _brief(length: timedelta) -> str:
    """Return a length of time as days and a time of day."""
    seconds = max(int(length.total_seconds()), 0)
    days, rest = divmod(seconds, 86_400)
    of_day = f"{rest // 3600}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days} d {of_day}" if days else of_day


#: What the commands say for each outcome.
WORDS: Final = {
    Outcome.DONE: "done",
    Outcome.UNKNOWN: "done, unless it has arrived at a worker already (it is not tracked)",
    Outcome.RELEASED: "it has arrived at a worker already",
    Outcome.CANCELLED: "it was cancelled or superseded before",
}

#: The exit status where a task has arrived already.
TOO_LATE: Final = 1


def _tell(outcomes: dict[str, Outcome], as_json: bool) -> None:
    if as_json:
        told = {name: each.value for name, each in outcomes.items()}
        click.echo(json.dumps({"outcomes": told}))
    else:
        for name, each in outcomes.items():
            click.echo(f"{name}: {WORDS[each]}")
    if Outcome.RELEASED in outcomes.values():
        raise SystemExit(TOO_LATE)


def _check_targets(tasks: Sequence[str], key: str | None) -> None:
    if bool(tasks) == (key is not None):
        raise click.UsageError("give the ids of tasks, or --key")


@click.command()
@click.argument("tasks", nargs=-1)
@click.option("--key", help="The tasks that were sent with this key, instead of ids.")
@json_option
@click.pass_obj
def cancel(context: CLIContext, /, tasks: tuple[str, ...], key: str | None, as_json: bool) -> None:
    """Cancel tasks that wait, by their ids or by their key."""
    _check_targets(tasks, key)
    delays = with_registry(context)
    with registry_errors(as_json):
        if key is not None:
            outcomes = {key: delays.cancel(key=key)}
        else:
            outcomes = {task: delays.cancel(task) for task in tasks}
    _tell(outcomes, as_json)


@click.command()
@click.argument("tasks", nargs=-1)
@click.option("--key", help="The task that was sent with this key, instead of ids.")
@click.option("--delay", type=float, help="Seconds from now on.")
@click.option("--eta", type=instant_type, help="The instant, instead of a delay (ISO 8601).")
@json_option
@click.pass_obj
def postpone(
    context: CLIContext,
    /,
    tasks: tuple[str, ...],
    key: str | None,
    delay: float | None,
    eta: datetime | None,
    as_json: bool,
) -> None:
    """Let tasks that wait run at another time."""
    _check_targets(tasks, key)
    if (delay is None) == (eta is None):
        raise click.UsageError("give --delay, or --eta")
    delays = with_registry(context)
    with registry_errors(as_json):
        if key is not None:
            outcomes = {key: delays.postpone(key=key, delay=delay, eta=eta)}
        else:
            outcomes = {task: delays.postpone(task, delay=delay, eta=eta) for task in tasks}
    _tell(outcomes, as_json)


@click.command()
@click.argument("action", type=click.Choice(["open", "commit", "abort", "show"]))
@click.argument("name")
@click.option(
    "--expires",
    type=click.FloatRange(min=0, min_open=True),
    default=3600,
    show_default=True,
    help="Seconds after which an open job turns aborted.",
)
@json_option
@click.pass_obj
def job(context: CLIContext, /, action: str, name: str, expires: float, as_json: bool) -> None:
    """Open, commit, abort or show the job NAME."""
    delays = with_registry(context)
    with registry_errors(as_json):
        if action == "open":
            delays.open_job(name, expires=expires)
        elif action == "commit":
            delays.commit_job(name)
        elif action == "abort":
            delays.abort_job(name)
        state = delays.registry.jobs.state(name)
    told = state.value if state is not None else "unknown"
    click.echo(json.dumps({"job": name, "state": told}) if as_json else f"{name}: {told}")
