"""What is known of one task that waits: by its record and its message, in the registry."""

from __future__ import annotations

from typing import Final, NamedTuple

from celery_rabbitdelay.app.sending.task_messages import restored

#: Celery's headers that say how a task is shown.
SHOWN: Final = ("shadow", "argsrepr", "kwargsrepr")


class Said(NamedTuple):
    """What the stored message of a tracked task says; None where it does not.

    Attributes:
        shadow: The name under which Celery shows the task, if that is another one than its own.
        args: Its positional arguments as text: Celery's ``argsrepr``.
        kwargs: Its keyword arguments, likewise.
        queue: The queue that it is for.
        exchange: The exchange that it would have been published to without a delay.
        routing_key: The routing key that it would have been published with.
        priority: Its priority.
    """

    shadow: str | None = None
    args: str | None = None
    kwargs: str | None = None
    queue: str | None = None
    exchange: str | None = None
    routing_key: str | None = None
    priority: int | None = None

    @classmethod
    def by(cls, message: str | None) -> Said:
        """Read a message as the registry has it; empty or None if it is not known."""
        if not message:
            return cls()
        try:
            waiting = restored(message, "").message
        except Exception:  # noqa: BLE001 - of a task whose message cannot be read the rest is shown
            return cls()
        headers, others = waiting.headers, waiting.headers.others
        shadow, args, kwargs = (others.get(each) or None for each in SHOWN)
        priority = headers.priority or waiting.properties.get("priority")
        return cls(
            shadow, args, kwargs, headers.queue, headers.exchange, headers.routing_key, priority
        )
