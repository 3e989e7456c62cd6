"""The gate that a delayed task passes when it arrives: it looks as if there had been no delay."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from kombu import Message

from celery_rabbitdelay import headers as names

__all__ = ["behind_the_gate", "restore"]


def behind_the_gate(strategy: Callable[..., Any]) -> Callable[..., Any]:
    """Return a task's execution strategy that gets its messages restored.

    Args:
        strategy: What Celery's consumer calls with each message of one task.
    """

    @wraps(strategy)
    def restored(message: Message, *args: Any, **kwargs: Any) -> Any:
        restore(message)
        return strategy(message, *args, **kwargs)

    return restored


def restore(message: Message) -> None:
    """Undo in a message what the levels did to it; one that was not delayed is left alone.

    Exchange and routing key become those that it would have had without a delay: Celery sends
    a retry to them. The broker's dead-letter headers go; when it is due, and for which queue it
    was delayed, stay readable in ``task.request.headers``.
    """
    headers = message.headers
    if names.DUE not in headers:
        return
    message.delivery_info["exchange"] = headers[names.EXCHANGE]
    message.delivery_info["routing_key"] = headers[names.ROUTING_KEY]
    kept = {name: headers[name] for name in (names.DUE, names.QUEUE)}
    restored = {**names.strip(headers), **kept}
    headers.clear()
    headers.update(restored)
