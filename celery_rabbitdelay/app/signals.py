"""Signals about delayed tasks; connect to them as to Celery's own.

Each signal is sent in the process where the event happens, with the application as ``sender`` and
these arguments: ``task_id`` (str), ``due`` (an aware datetime, or None if it is unknown), and
``lateness``, seconds from due to now (negative if the task is early, None if ``due`` is None)::

    from celery_rabbitdelay import signals


    @signals.released.connect
    def arrived(sender, task_id, due, lateness, **kwargs):
        print(f"{task_id} came {lateness} s late")
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import celery
from celery.utils.dispatch import Signal

from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import instant_of

_ARGUMENTS: Final = ["task_id", "due", "lateness"]


def _signal(name: str) -> Signal:
    return Signal(name=name, providing_args=_ARGUMENTS)


#: The broker has confirmed a task that was sent into the levels. Sent by the process that sends the
#: task, but not for the rows of ``send_many``.
delayed: Final = _signal("delayed")

#: A task was cancelled. Sent by the process that calls ``cancel``, and by the worker that discards
#: the task.
cancelled: Final = _signal("cancelled")

#: A task was postponed. Sent by the process that calls ``postpone``.
postponed: Final = _signal("postponed")

#: A task does not run because a newer task was sent with its key. Sent by the worker that discards
#: the older task.
superseded: Final = _signal("superseded")

#: A delayed task has left the levels and is about to run. Sent by the worker.
released: Final = _signal("released")

#: An occurrence of a schedule does not run: it is too late, its schedule is paused, or an earlier
#: occurrence is still running. Sent by the worker.
skipped: Final = _signal("skipped")

#: A task does not run because its job was aborted or not committed in time. Sent by the worker.
expired: Final = _signal("expired")


def send(signal: Signal, app: celery.Celery, task_id: str, due_ms: object) -> None:
    """Send one of these signals, if a receiver is connected.

    Args:
        signal: The signal.
        app: The application.
        task_id: The task's id.
        due_ms: When the task is due, in milliseconds since 1970-01-01 UTC; None if unknown.
    """
    if not signal.receivers:
        return
    due, lateness = None, None
    if isinstance(due_ms, int):
        with suppress(OverflowError):  # after the year 9999
            due = instant_of(due_ms)
        lateness = wall_clock.ns() / 1e9 - due_ms / 1000
    signal.send(sender=app, task_id=task_id, due=due, lateness=lateness)
