"""The messages that schedules send: made by Celery once, and filled in for each occurrence."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import celery
from kombu import Message, serialization
from kombu.exceptions import EncodeError

from celery_rabbitdelay.app.delays import DelayingCelery, Delays
from celery_rabbitdelay.app.sending.task_messages import Call, capture_message
from celery_rabbitdelay.exceptions import InvalidSchedule
from celery_rabbitdelay.levels.delay import Due, instant_of
from celery_rabbitdelay.levels.headers import COPY, SCHEDULE, TRACKED
from celery_rabbitdelay.publishing.producer import Delayed, DelayedProducer
from celery_rabbitdelay.publishing.publish_loop import RESENDS
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.registry.application import register_sent, registry_of
from celery_rabbitdelay.registry.decision import new_copy
from celery_rabbitdelay.registry.options import is_tracked as is_tracked_by_default
from celery_rabbitdelay.registry.registry import Registration
from celery_rabbitdelay.registry.stored_message import restored, stored
from celery_rabbitdelay.schedules.recurrence import Occurrence
from celery_rabbitdelay.worker.republishing import ToPublish, publish_each

#: The headers and properties of a message that are part of a schedule; a change is an edit. All
#: others differ with each send.
_OF_HEADERS: Final = ("shadow", "timelimit", "ignore_result", "compression")
_OF_PROPERTIES: Final = ("priority", "delivery_mode", "content_type", "content_encoding")


ItemT = TypeVar("ItemT")

#: A task, or its name.
AnyTask: TypeAlias = celery.Task[Any, Any] | str


def of(occurrence: Occurrence, message: str) -> Delayed:
    """Return the message of an occurrence of what a schedule sends; see :func:`.stored`."""
    pattern = restored(message, occurrence.task_id)
    says = says_of(occurrence, is_tracked(pattern))
    return filled(pattern, occurrence.task_id, occurrence.due_ms, says)


def filled(pattern: Delayed, task_id: str, due_ms: int, says: Mapping[str, object]) -> Delayed:
    """Return what a schedule sends as the message of one task, which is not signed.

    Args:
        pattern: What the schedule sends.
        task_id: The id of the task.
        due_ms: When it is due, in milliseconds since 1970-01-01 UTC.
        says: Its headers for the registry.
    """
    others = with_id(pattern.message.headers.others, task_id)
    message = pattern.message.having(correlation_id=task_id)
    message = message.saying(due_ms=due_ms, registry=says, others=others)
    return pattern._replace(message=message, task_id=task_id)


def says_of(occurrence: Occurrence, is_tracked: bool) -> dict[str, object]:
    """Return the headers for the registry of a new message of an occurrence.

    For the registry, all messages of an occurrence are the same: which of them runs is decided by
    the record of the schedule.
    """
    says: dict[str, object] = {SCHEDULE: occurrence._replace(message=new_copy()).text}
    return {**says, COPY: str(occurrence.order), TRACKED: True} if is_tracked else says


def is_tracked(delayed: Delayed) -> bool:
    """Return whether a message is listed while it waits."""
    return TRACKED in delayed.message.headers.registry


def task_of(delayed: Delayed) -> str:
    """Return the name of a message's task."""
    return str(delayed.message.headers.others.get("task", ""))


def captured(
    app: DelayingCelery,
    made: Occurrence,
    task: AnyTask,
    args: Iterable[object],
    kwargs: Mapping[str, object],
) -> tuple[Delayed, str]:
    """Return the message that Celery would send, and what stands for all of a schedule.

    Args:
        app: The application.
        made: An occurrence of the schedule.
        task: The task, or its name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        InvalidSchedule: The arguments cannot be written, or the task goes not to one known queue.
    """
    name = task if isinstance(task, str) else str(task.name)
    known = app.tasks.get(name)
    options = {**made.options, "expires": None}
    # An eager task would run.
    sent = name if known is None or app.conf.task_always_eager else known
    is_listed = is_tracked_by_default(app.rabbitdelay, known)
    says = {TRACKED: True} if is_listed else {}
    call = Call(made.task_id, list(args), dict(kwargs), Due.at(instant_of(made.due_ms)))
    publisher = Publisher(app.connection_for_write())
    try:
        delayed = capture_message(app, publisher, sent, call, options, says).delayed
    except EncodeError as error:
        takes = f"takes arguments that can be written: {error}"
        raise InvalidSchedule((*call.args, call.kwargs), takes) from None
    said, properties = delayed.message.headers, delayed.message.properties
    if delayed.queue is None:
        where = said.exchange, said.routing_key
        raise InvalidSchedule(where, "takes a task that goes to one known queue")
    words = [
        *(name, call.args, call.kwargs, made.options, delayed.destination),
        *(said.exchange, said.routing_key, said.queue, said.priority, is_listed),
        *(said.others.get(each) for each in _OF_HEADERS),
        *(properties.get(each) for each in _OF_PROPERTIES),
        *(made.recurrence, made.catch_up_ms, made.jitter_ms, made.overlap),
    ]
    return delayed, hashlib.sha256(canonical(words).encode(errors="surrogatepass")).hexdigest()[:12]


def canonical(value: object) -> str:
    """Return a text that is the same for equal values in all processes, as far as can be."""
    if isinstance(value, Mapping):
        pairs = sorted((canonical(key), canonical(each)) for key, each in value.items())
        return f"{{{pairs}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(canonical, value))}]"
    if isinstance(value, set | frozenset):
        return f"<{','.join(sorted(map(canonical, value)))}>"
    kind = type(value)
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names:
        # The text of a function has its address.
        name = getattr(value, "__qualname__", None)
        return f"{value.__module__}.{name}" if name else repr(value)
    return f"{kind.__qualname__}{canonical(value.__reduce_ex__(2)[1:3])}"


def with_id(headers: Mapping[str, object], task_id: str) -> dict[str, object]:
    """Return Celery's headers of a task under another id; it stays the root, if it was that."""
    former = headers.get("id")
    ids = {each: task_id for each in ("id", "root_id") if headers.get(each) == former}
    return {**headers, **ids}


def send_each(
    delays: Delays,
    items: Sequence[ItemT],
    made: Callable[[DelayedProducer, ItemT], Delayed],
    settled: Callable[[ItemT, Delayed | Exception], None],
    skew_ms: int = 0,
) -> None:
    """Publish a message for each item, and register those that are tracked. Raises nothing.

    Args:
        delays: The ``app.rabbitdelay``.
        items: What messages are made of.
        made: Makes the message of an item.
        settled: Called once with each item, and with its message once that is confirmed, or with
            what is wrong.
        skew_ms: How many milliseconds the clock of Redis is ahead, by which messages are due.
    """
    messages: dict[int, Delayed] = {}
    registrations: list[Registration] = []

    def make(producer: DelayedProducer, item: ItemT) -> ToPublish:
        delayed = messages[id(item)] = made(producer, item)
        queue = delayed.queue and delays.app.amqp.queues.get(delayed.queue.name, delayed.queue)
        due = Due.at(instant_of(_due_ms(delayed) - skew_ms))
        return queue, delayed.message.amqp(), partial(producer.address, delayed, due)

    def settle(item: ItemT, error: Exception | None) -> None:
        if error is None and is_tracked(delayed := messages[id(item)]):
            copy, message = str(delayed.message.headers.registry[COPY]), stored(delayed)
            registration = Registration(delayed.task_id, copy, _due_ms(delayed))
            registrations.append(registration._replace(name=task_of(delayed), message=message))
        settled(item, error or messages[id(item)])

    if items:
        publish_each(delays, items, make, settle, RESENDS)
    if registrations:
        register_sent(registry_of(delays), registrations)


def send_all(delays: Delays, messages: Sequence[Delayed]) -> None:
    """Sign and send messages, and register those that are tracked.

    Raises:
        PublishError: One of them was not confirmed; the others were sent.
    """
    errors: list[Exception] = []

    def signed(producer: DelayedProducer, delayed: Delayed) -> Delayed:
        return delayed._replace(message=producer.sign(delayed.message))

    def settled(_: Delayed, outcome: Delayed | Exception) -> None:
        if isinstance(outcome, Exception):
            errors.append(outcome)

    send_each(delays, messages, signed, settled)
    if errors:
        raise errors[0]


def _due_ms(delayed: Delayed) -> int:
    return delayed.message.headers.due_ms or 0


def read(
    message: str, accept: Iterable[str]
) -> tuple[str, tuple[object, ...] | None, dict[str, object] | None]:
    """Return the task that a schedule sends, and its arguments; None if they cannot be read.

    Args:
        message: What it sends; see :func:`.stored`; empty if Redis has lost it.
        accept: Celery's ``accept_content``.
    """
    if not message:
        return "", None, None
    pattern = restored(message, "")
    waits = pattern.message
    content: Any = {
        "body": waits.body,
        "headers": waits.headers.others,
        "content_type": waits.properties.get("content_type"),
        "content_encoding": waits.properties.get("content_encoding"),
        "accept": serialization.prepare_accept_content(accept),
    }
    try:
        args, kwargs, _ = Message(**content).decode()
        return task_of(pattern), tuple(args), dict(kwargs)
    except Exception:  # noqa: BLE001 - decoders of any type
        return task_of(pattern), None, None
