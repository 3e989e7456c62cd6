"""``AsyncResult.state`` of a task that waits."""

from __future__ import annotations

from typing import Any, Final

from celery import states
from celery.result import AsyncResult

#: The state of a tracked task that waits in the levels; one of Celery's custom states.
DELAYED: Final = "DELAYED"


class WaitingResult(AsyncResult):  # type: ignore[type-arg]
    """The result of a task; tells ``PENDING`` from ``DELAYED``, if the task is tracked.

    Celery's state ``PENDING`` means that nothing is known about a task. With a registry, one round
    trip to Redis then says whether it is tracked and waits. If it is not, or if Redis does not
    answer, the state is ``PENDING``.
    """

    @property
    def state(self) -> Any:
        """The state of the task."""
        state = super().state
        if state != states.PENDING:
            return state
        app: Any = self.app
        return DELAYED if app.rabbitdelay.is_waiting(self.id) else state

    status = state
