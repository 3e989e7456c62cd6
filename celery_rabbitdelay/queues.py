"""An application's queues: one that a running worker is told to consume from is made ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery.app import amqp as celery_amqp
from kombu import Queue

from celery_rabbitdelay.mixing import mixed

__all__ = ["DelayingAMQP", "DelayingQueues"]


class DelayingQueues(celery_amqp.Queues):
    """Celery's queues; one that a running worker is told to consume from is made ready."""

    #: What kombu calls when such a queue was declared.
    on_declared: Callable[[str, int, int], None] | None = None

    def select_add(self, queue: Any, **options: Any) -> Queue:  # type: ignore[override]
        """Add a queue that the worker shall consume from (``add_consumer``)."""
        selected: Queue = super().select_add(queue, **options)  # type: ignore[assignment]
        if selected.on_declared is None:
            selected.on_declared = self.on_declared
        return selected


class DelayingAMQP(celery_amqp.AMQP):
    """Celery's AMQP features; its queues know how to become ready for delayed tasks."""

    def Queues(self, *args: Any, **options: Any) -> celery_amqp.Queues:  # noqa: N802
        """Create Celery's queues by name."""
        return self.make_delaying(super().Queues(*args, **options))

    def make_delaying(self, queues: celery_amqp.Queues) -> celery_amqp.Queues:
        """Turn existing queues into :class:`DelayingQueues`."""
        queues.__class__ = mixed(DelayingQueues, type(queues))
        assert isinstance(queues, DelayingQueues)
        app: Any = self.app
        queues.on_declared = app.rabbitdelay.make_ready
        return queues
