"""``celery rabbitdelay schedules``: list, show when, pause, resume, trigger and delete them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click
from celery.bin.base import CLIContext

from celery_rabbitdelay.app.schedules import Schedule, Schedules
from celery_rabbitdelay.command import shared
from celery_rabbitdelay.command.shared import rabbitdelay

#: The exit status where there is no schedule of the name.
UNKNOWN: Final = 1

_name: Final = click.argument("name")


@rabbitdelay.group()
def schedules() -> None:
    """Schedules: tasks that run again and again."""


@schedules.command("list")
def list_all(context: CLIContext, /, as_json: bool) -> None:
    """List all schedules, and when they are due next."""
    delays = shared.with_registry(context)
    with shared.registry_errors(as_json):
        found = delays.schedules.all()
    lines = [_line(each) for each in found] or ["there are no schedules"]
    shared.answer(as_json, {"schedules": [_as_json(each) for each in found]}, lines)


@schedules.command("next")
@_name
@click.option("--number", default=5, show_default=True, help="How many instants.")
def show_next(context: CLIContext, /, name: str, number: int, as_json: bool) -> None:
    """Show when a schedule is due next."""
    delays = shared.with_registry(context)
    with shared.registry_errors(as_json):
        instants = delays.schedules.next(name, number)
    answer = {"name": name, "next": [each.isoformat() for each in instants]}
    _answer(as_json, answer, name, [shared.local(each) for each in instants])


@schedules.command()
@_name
def pause(context: CLIContext, /, name: str, as_json: bool) -> None:
    """Let the occurrences of a schedule come and not run."""
    _change(context, name, as_json, Schedules.pause, "paused")


@schedules.command()
@_name
def resume(context: CLIContext, /, name: str, as_json: bool) -> None:
    """Let the occurrences of a schedule run again."""
    _change(context, name, as_json, Schedules.resume, "resumed")


@schedules.command()
@_name
def trigger(context: CLIContext, /, name: str, as_json: bool) -> None:
    """Send the task of a schedule now."""
    delays = shared.with_registry(context)
    with shared.registry_errors(as_json):
        sent = delays.schedules.trigger(name)
    task_id = None if sent is None else sent.id
    lines = [] if sent is None else [f"{name}: sent as {task_id}"]
    _answer(as_json, {"name": name, "task_id": task_id}, name, lines)


@schedules.command()
@_name
def delete(context: CLIContext, /, name: str, as_json: bool) -> None:
    """End a schedule."""
    _change(context, name, as_json, Schedules.delete, "deleted")


@schedules.command("put-beat")
def put_beat(context: CLIContext, /, as_json: bool) -> None:
    """Put Celery's beat_schedule, also if later code has put another one."""
    delays = shared.with_registry(context)
    with shared.registry_errors(as_json):
        delays.schedules.put_beat(is_forced=True)
        found = [each for each in delays.schedules.all() if each.name.startswith("beat:")]
    shared.answer(as_json, {"schedules": [_as_json(each) for each in found]}, map(_line, found))


def _change(
    context: CLIContext,
    name: str,
    as_json: bool,
    change: Callable[[Schedules, str], bool],
    word: str,
) -> None:
    """Change a schedule, and say in a word what became of it."""
    delays = shared.with_registry(context)
    with shared.registry_errors(as_json):
        is_known = change(delays.schedules, name)
    _answer(as_json, {"name": name, word: is_known}, name, [f"{name}: {word}"] * is_known)


def _answer(as_json: bool, answer: dict[str, Any], name: str, lines: list[str]) -> None:
    """Print an answer, which has no line where there is no such schedule."""
    shared.answer(as_json, answer, lines or [f"{name}: there is no such schedule"])
    if not lines:
        raise SystemExit(UNKNOWN)


def _as_json(schedule: Schedule) -> dict[str, Any]:
    return {**schedule._asdict(), "next_at": schedule.next_at.isoformat()}


def _line(schedule: Schedule) -> str:
    paused = ", paused" if schedule.is_paused else ""
    task = schedule.task or "a task that Redis has lost"
    return f"{schedule.name}: {task}, next {shared.local(schedule.next_at)}{paused}"
