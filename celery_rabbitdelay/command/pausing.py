"""``celery rabbitdelay pause`` and ``resume``."""

from __future__ import annotations

from typing import Final

import click

from celery_rabbitdelay.command import shared
from celery_rabbitdelay.command.shared import rabbitdelay
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import duration_text
from celery_rabbitdelay.registry.pauses import Paused

_names: Final = shared.options(
    click.option("--task", help="The tasks of this name."),
    click.option("--queue", help="The tasks that arrive at this queue."),
)


@rabbitdelay.command()
@_names
def pause(task: str | None, queue: str | None) -> None:
    """Hold back the due tasks of a name, or for a queue."""
    _check(task, queue)
    with shared.with_registry() as delays:
        paused = Paused(task, queue, delays.pause(task=task, queue=queue))
    shared.answer(paused._asdict(), [paused_line(paused)])


@rabbitdelay.command()
@_names
def resume(task: str | None, queue: str | None) -> None:
    """Let the tasks of a name, or for a queue, run again."""
    _check(task, queue)
    with shared.with_registry() as delays:
        was_paused = delays.resume(task=task, queue=queue)
    told = "resumed" if was_paused else "was not paused"
    answer = {"task": task, "queue": queue, "was_paused": was_paused}
    shared.answer(answer, [f"{_name(task, queue)}: {told}"])
    if not was_paused:
        raise SystemExit(shared.FAILED)


def _check(task: str | None, queue: str | None) -> None:
    if bool(task) == bool(queue):
        raise click.UsageError("give --task, or --queue")


def paused_line(paused: Paused) -> str:
    """Return the line that shows what is paused, and since when."""
    held_ms = max(round((wall_clock.now() - paused.since).total_seconds()), 0) * 1000
    since = f"since {shared.local(paused.since)}, for {duration_text(held_ms)}"
    return f"paused: {_name(paused.task, paused.queue)}, {since}"


def _name(task: str | None, queue: str | None) -> str:
    return f"queue {queue}" if task is None else f"task {task}"
