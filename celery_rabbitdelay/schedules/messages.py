"""The messages that schedules send: made by Celery once, and filled in for each occurrence."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from kombu import serialization
from kombu.compression import decompress
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
from celery_rabbitdelay.schedules.occurrence import Occurrence
from celery_rabbitdelay.worker.republishing import ToPublish, publish_each

#: The headers and properties of a message that are part of a schedule; a change is an edit. All
#: others differ with each send.
_OF_HEADERS: Final = ("shadow", "timelimit", "ignore_result", "compression")
_OF_PROPERTIES: Final = ("priority", "delivery_mode", "content_type", "content_encoding")


class Send(NamedTuple):
    """A message to be sent of a schedule.

    Attributes:
        pattern: What the schedule sends.
        task_id: The id of its task.
        due_ms: When it is due, in milliseconds since 1970-01-01 UTC.
        says: Its headers for the registry.
    """

    pattern: Delayed
    task_id: str
    due_ms: int
    says: Mapping[str, Any]

    @classmethod
    def of(cls, occurrence: Occurrence, message: str) -> Send:
        """Return the message of an occurrence of what a schedule sends; see :func:`.stored`."""
        pattern = restored(message, occurrence.task_id)
        return cls(
            pattern,
            occurrence.task_id,
            occurrence.due_ms,
            says_of(occurrence, is_tracked(pattern)),
        )


def says_of(occurrence: Occurrence, is_tracked: bool) -> dict[str, Any]:
    """Return the headers for the registry of a new message of an occurrence.

    For the registry, all messages of an occurrence are the same: which of them runs is decided by
    the record of the schedule.
    """
    says: dict[str, Any] = {SCHEDULE: occurrence._replace(message=new_copy()).text}
    return {**says, COPY: str(occurrence.order), TRACKED: True} if is_tracked else says


def is_tracked(delayed: Delayed) -> bool:
    """Return whether a message is listed while it waits."""
    return TRACKED in delayed.message.headers.registry


def task_of(delayed: Delayed) -> str:
    """Return the name of a message's task."""
    return str(delayed.message.headers.others.get("task", ""))


def captured(
    app: DelayingCelery, made: Occurrence, task: Any, args: Any, kwargs: Any
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
    send: Any = partial(app.send_task, name)
    if known is not None and not app.conf.task_always_eager:  # an eager task would run
        send = known.apply_async
    says = {}
    if is_tracked_by_default(app.rabbitdelay, known):
        says[TRACKED] = True
    call = Call(made.task_id, list(args), dict(kwargs), Due.at(instant_of(made.due_ms)))
    try:
        delayed = capture_message(
            app,
            Publisher(app.connection_for_write()),
            name,
            call,
            {**made.options, "expires": None},
            says,
            send,
        ).delayed
    except EncodeError as error:
        takes = f"takes arguments that can be written: {error}"
        raise InvalidSchedule((*call.args, call.kwargs), takes) from None
    said, properties = delayed.message.headers, delayed.message.properties
    if delayed.queue is None:
        where = said.exchange, said.routing_key
        raise InvalidSchedule(where, "takes a task that goes to one known queue")
    words = [
        *(name, call.args, call.kwargs, made.options, delayed.destination),
        *(said.exchange, said.routing_key, said.queue, said.priority, TRACKED in says),
        *(said.others.get(each) for each in _OF_HEADERS),
        *(properties.get(each) for each in _OF_PROPERTIES),
        *(made.recurrence, made.catch_up_ms, made.jitter_ms, made.overlap),
    ]
    return delayed, hashlib.sha256(canonical(words).encode(errors="surrogatepass")).hexdigest()[:12]


def canonical(value: Any) -> str:
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


def with_id(headers: Mapping[str, Any], task_id: str) -> dict[str, Any]:
    """Return Celery's headers of a task under another id; it stays the root, if it was that."""
    former = headers.get("id")
    ids = {each: task_id for each in ("id", "root_id") if headers.get(each) == former}
    return {**headers, **ids}


def filled(producer: DelayedProducer, send: Send) -> Delayed:
    """Return the message that a schedule sends, as that of one task."""
    message = send.pattern.message
    said = message.headers
    message = message.having(correlation_id=send.task_id).saying(
        due_ms=send.due_ms, registry=send.says, others=with_id(said.others, send.task_id)
    )
    return send.pattern._replace(message=producer.sign(message), task_id=send.task_id)


def send_all(delays: Delays, sends: Sequence[Send]) -> None:
    """Send messages, and register those that are tracked.

    Args:
        delays: The ``app.rabbitdelay``.
        sends: The messages.

    Raises:
        PublishError: One of them was not confirmed; the others were sent.
    """
    errors: list[Exception] = []
    registrations: dict[int, Registration] = {}

    def make(producer: DelayedProducer, send: Send) -> ToPublish:
        delayed = filled(producer, send)
        queue = delayed.queue and delays.app.amqp.queues.get(delayed.queue.name, delayed.queue)
        if is_tracked(delayed):
            registrations[id(send)] = registration_of(delayed, send.due_ms)
        due = Due.at(instant_of(send.due_ms))
        return queue, delayed.message.amqp(), partial(producer.address, delayed, due)

    def settled(send: Send, error: Exception | None) -> None:
        if error is not None:
            errors.append(error)
            registrations.pop(id(send), None)

    if sends:
        publish_each(delays, sends, make, settled, RESENDS)
    if registrations:
        register_sent(registry_of(delays), list(registrations.values()))
    if errors:
        raise errors[0]


def registration_of(delayed: Delayed, due_ms: int) -> Registration:
    """Return what is registered of a tracked message."""
    copy = str(delayed.message.headers.registry[COPY])
    message = stored(delayed)
    return Registration(delayed.task_id, copy, due_ms, name=task_of(delayed), message=message)


def read(
    message: str, accept: Iterable[str]
) -> tuple[str, tuple[Any, ...] | None, dict[str, Any] | None]:
    """Return the task that a schedule sends, and its arguments; None if they cannot be read.

    Args:
        message: What it sends; see :func:`.stored`; empty if Redis has lost it.
        accept: Celery's ``accept_content``.
    """
    if not message:
        return "", None, None
    pattern = restored(message, "")
    waits = pattern.message
    try:
        body, compression = waits.body, waits.headers.others.get("compression")
        if compression:
            body = decompress(body, compression)
        accepted = serialization.prepare_accept_content(accept)
        type_, encoding = (waits.properties.get(f"content_{each}") for each in ("type", "encoding"))
        args, kwargs, _ = serialization.loads(body, str(type_), str(encoding), accepted)
        return task_of(pattern), tuple(args), dict(kwargs)
    except Exception:  # noqa: BLE001 - decoders of any type
        return task_of(pattern), None, None
