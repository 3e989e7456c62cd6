"""The messages of one task's many calls, the same ones that Celery would publish."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import celery
from kombu import Exchange, Queue

from celery_rabbitdelay.app.delays import DelayingCelery
from celery_rabbitdelay.app.sending.task_producer import DelayedTaskProducer
from celery_rabbitdelay.levels.delay import Due
from celery_rabbitdelay.levels.headers import COPY, KEY, LIFE, ORDER
from celery_rabbitdelay.publishing.message import Declaration
from celery_rabbitdelay.publishing.producer import Delayed
from celery_rabbitdelay.publishing.publish_loop import PublishPolicy
from celery_rabbitdelay.publishing.publisher import Publisher

#: A message without headers of its own for the registry.
NO_HEADERS: Final[Mapping[str, str]] = {}

#: The headers for the registry in which calls differ; all others are the same for all.
OWN_HEADERS: Final = (COPY, LIFE, KEY, ORDER)


class Call(NamedTuple):
    """One call of the task.

    Attributes:
        task_id: Its id.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        due: When it may start.
        headers: Those of :data:`OWN_HEADERS` that its message has, for the registry; or the
            ``group_index`` of a group's member.
        has_id: Whether the caller has given the id; otherwise no task had it before.
    """

    task_id: str
    args: Any
    kwargs: Any
    due: Due
    headers: Mapping[str, Any] = NO_HEADERS
    has_id: bool = True


class CapturingProducer(DelayedTaskProducer):
    """Keeps the message of a task that Celery has made and routed, instead of publishing it.

    Attributes:
        policy: How long and how often to try, by Celery's options.
        declares: The functions by which the publisher declares the destination.
    """

    policy: PublishPolicy
    declares: dict[str, Declaration | None]

    def publish_message(
        self,
        delayed: Delayed,
        due: Due,
        policy: PublishPolicy,
        declare: Iterable[Exchange | Queue] = (),
    ) -> None:
        """Keep everything that publishing the message takes."""
        self.policy = policy
        self.declares = self.declarations(delayed.queue, declare)


def capture_message(
    app: DelayingCelery,
    publisher: Publisher,
    task: celery.Task[Any, Any] | str,
    call: Call,
    options: Mapping[str, Any],
    headers: Mapping[str, Any] = NO_HEADERS,
    send: Callable[..., Any] | None = None,
) -> CapturingProducer:
    """Send a task by Celery to a producer that keeps the message; return the producer.

    Args:
        app: The application.
        publisher: The publisher that the message is for.
        task: The task, or its name.
        call: The call.
        options: Further options of ``apply_async``.
        headers: The headers for the registry that all calls have.
        send: Sends the task; None for :func:`function_to_send`.
    """
    producer = CapturingProducer(publisher, app, call.due, options)
    producer.says = {"registry": {**headers, **call.headers}}
    given = {**options, "task_id": call.task_id, "producer": producer}
    send = send or function_to_send(app, task)
    send(call.args, call.kwargs, **given)
    return producer


def function_to_send(app: celery.Celery, task: celery.Task[Any, Any] | str) -> Callable[..., Any]:
    """Return what sends a task: its ``apply_async``, or ``send_task`` with its name."""
    return partial(app.send_task, task) if isinstance(task, str) else task.apply_async
