"""``celery rabbitdelay schedules``: list, show and change schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import click

from celery_rabbitdelay.command import shared
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.registry.commands import with_registry
from celery_rabbitdelay.schedules.beat import BeatEntries
from celery_rabbitdelay.schedules.schedules import Schedule, Schedules

#: Seconds after which an overdue occurrence is shown as missing.
MISSING: Final = 60.0

_name: Final = click.argument("name")


@shared.group
def schedules() -> None:
    """Schedules: recurring tasks."""


@schedules.command("list")
def list_all() -> None:
    """List all schedules and their next due times."""
    with with_registry() as delays:
        found = delays.schedules.all()
    _list(found, ["there are no schedules"])


@schedules.command("next")
@_name
@click.option("--number", default=5, show_default=True, help="Number of due times.")
def show_next(name: str, number: int) -> None:
    """Show the next due times of a schedule."""
    with with_registry() as delays:
        instants = delays.schedules.next(name, number)
    _answer({"name": name, "next": instants}, name, [shared.local(each) for each in instants])


@schedules.command()
@_name
def show(name: str) -> None:
    """Show a schedule and the fate of its last occurrence."""
    with with_registry() as delays:
        found = delays.schedules.get(name)
    shown = None if found is None else _as_json(found)
    facts = [f"  {fact}: {value}" for fact, value in (shown or {}).items() if fact != "name"]
    lines = [] if found is None else [_line(found), *facts]
    _answer({"name": name, "schedule": shown}, name, lines)


@schedules.command()
@_name
def pause(name: str) -> None:
    """Pause a schedule: its occurrences are skipped."""
    _change(name, Schedules.pause, "paused")


@schedules.command()
@_name
def resume(name: str) -> None:
    """Resume a schedule."""
    _change(name, Schedules.resume, "resumed")


@schedules.command()
@_name
def trigger(name: str) -> None:
    """Send the task of a schedule now."""
    with with_registry() as delays:
        sent = delays.schedules.trigger(name)
    lines = [] if sent is None else [f"{name}: sent as {sent.id}"]
    _answer({"name": name, "task_id": sent and sent.id}, name, lines)


@schedules.command()
@_name
def delete(name: str) -> None:
    """Delete a schedule."""
    _change(name, Schedules.delete, "deleted")


@schedules.command("put-beat")
@click.option("--end", is_flag=True, help="Delete these schedules, because beat runs again.")
def put_beat(end: bool) -> None:
    """Store Celery's beat_schedule as schedules, even if later code has replaced it."""
    with with_registry() as delays:
        entries = BeatEntries(delays.schedules)
        if end:
            entries.end()
        else:
            entries.put(is_forced=True)
        found = [each for each in delays.schedules.all() if each.name.startswith("beat:")]
    _list(found, [])


def _change(name: str, change: Callable[[Schedules, str], bool], word: str) -> None:
    """Change a schedule and print the outcome."""
    with with_registry() as delays:
        is_known = change(delays.schedules, name)
    _answer({"name": name, word: is_known}, name, [f"{name}: {word}"] * is_known)


def _answer(answer: Mapping[str, object], name: str, lines: list[str]) -> None:
    """Print an answer; without lines, report an unknown schedule."""
    shared.answer(answer, lines or [f"{name}: there is no such schedule"])
    if not lines:
        raise SystemExit(shared.FAILED)


def _as_json(schedule: Schedule) -> dict[str, object]:
    last = schedule.last and dict(zip(("due", "came", "fate"), schedule.last, strict=True))
    return {
        **schedule.exported(),
        "next_at": schedule.next_at,
        "next_id": schedule.next_id,
        "last": last,
    }


def _list(found: Sequence[Schedule], otherwise: list[str]) -> None:
    shared.answer({"schedules": [*map(_as_json, found)]}, [*map(_line, found)] or otherwise)


def _line(schedule: Schedule) -> str:
    paused = ", paused" if schedule.is_paused else ""
    task = schedule.task or "a task that Redis has lost"
    late = (wall_clock.now() - schedule.next_at).total_seconds()
    missing = f", overdue by {late:.0f} s" if late > MISSING else ""
    return f"{schedule.name}: {task}, next {shared.local(schedule.next_at)}{paused}{missing}"
