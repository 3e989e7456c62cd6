"""``app.rabbitdelay``: pause and resume the due tasks of a name, or for a queue."""

from __future__ import annotations

from datetime import datetime

from celery_rabbitdelay.app.delays import Delays
from celery_rabbitdelay.registry.application import registry_of
from celery_rabbitdelay.registry.pauses import Paused, Pauses


class Pausing:
    """Pause and resume due tasks: a part of ``app.rabbitdelay``.

    All methods raise :class:`.RegistryRequired` where ``rabbitdelay_registry_url`` is not set, and
    :class:`.RegistryUnavailable` if Redis does not answer.

    Args:
        delays: The application's delay levels.
    """

    def __init__(self, delays: Delays) -> None:
        self._delays = delays

    @property
    def _pauses(self) -> Pauses:
        return registry_of(self._delays).pauses

    def pause(self, *, task: str | None = None, queue: str | None = None) -> datetime:
        """Hold back the delayed tasks of a name, or for a queue, until they are resumed.

        From a second later at most, a delayed task that arrives at a worker goes into the queue of
        paused tasks if its name, or the queue that it arrives at, is paused and it would run
        otherwise. It keeps its due time. Tasks that have arrived already run, and so do tasks
        without a delay.

        Args:
            task: The name of the tasks.
            queue: Instead of a name: the name of the queue.

        Returns:
            Since when they are paused: earlier than now if they were already.

        Raises:
            TypeError: Not exactly one of a task's name and a queue's name, or it is no text.
        """
        return self._pauses.pause(*_one(task, queue))

    def resume(self, *, task: str | None = None, queue: str | None = None) -> bool:
        """Let paused tasks run: workers return them to their queues at once.

        Args:
            task: As for :meth:`pause`.
            queue: As for :meth:`pause`.

        Returns:
            Whether they were paused.

        Raises:
            TypeError: As for :meth:`pause`.
        """
        return self._pauses.resume(*_one(task, queue))

    def paused(self) -> list[Paused]:
        """Return what is paused: each with ``task`` or ``queue``, and ``since``; oldest first."""
        return self._pauses.all()


def _one(task: object, queue: object) -> tuple[str | None, str | None]:
    """Return the name of a task or of a queue, and None for the other."""
    match task, queue:
        case (str(), None) if task:
            return task, None
        case (None, str()) if queue:
            return None, queue
    takes = "takes the name of a task or of a queue, such as task='shop.remind' or queue='mails'"
    raise TypeError(f"{takes}, not task={task!r} and queue={queue!r}")
