"""``celery rabbitdelay cancel``, ``postpone`` and ``job``: what becomes of tasks that wait."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Final

import click
from celery.bin.base import CLIContext

from celery_rabbitdelay.command.context import (
    instant_type,
    json_option,
    registry_errors,
    with_registry,
)
from celery_rabbitdelay.registry.decision import Outcome

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
