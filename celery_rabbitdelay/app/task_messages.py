"""Writing the messages of one task's many calls, as Celery would publish each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import amqp
import celery
from celery import signals
from celery.app.defaults import SETTING_KEYS
from kombu.serialization import registry  # type: ignore[attr-defined]
from kombu.utils import json

from celery_rabbitdelay.app.message_template import PLACE, PROPERTIES, Template
from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.app.task_producer import DelayedTaskProducer
from celery_rabbitdelay.exceptions import InvalidEnvelope
from celery_rabbitdelay.levels import headers as names
from celery_rabbitdelay.levels.due import Due
from celery_rabbitdelay.modules.envelope import Item
from celery_rabbitdelay.publishing.message import PERSISTENT, body_of
from celery_rabbitdelay.publishing.policy import PublishPolicy
from celery_rabbitdelay.publishing.producer import Delayed
from celery_rabbitdelay.publishing.publisher import Declaration, Publisher
from celery_rabbitdelay.publishing.wire import Content

__all__ = ["Call", "Capture", "Writer", "captured", "sending", "writer_for"]

#: What messages share that Celery has made one by one. Receivers of signals may have given the
#: first call what others do not have: nothing but where they go and, of the envelope, when they are
#: due.
SHARED: Final = frozenset((*PLACE, names.DUE))


class Call(NamedTuple):
    """One call of the task.

    Attributes:
        task_id: Its id.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        due: When it may start.
    """

    task_id: str
    args: Any
    kwargs: Any
    due: Due


class Writer(Protocol):
    """Writes the messages of calls.

    Attributes:
        writes_twice: Whether a call can be written as an item, and then as a message as well.
    """

    writes_twice: bool

    def content(self, call: Call) -> Content:
        """Return the message of a call."""

    def item(self, call: Call) -> bytes:
        """Return a call as it stands in an envelope.

        Raises:
            InvalidEnvelope: It has no place there. As a message it can be written all the same.
        """

    def envelope(self, items: bytes, due_ms: int) -> Content:
        """Return a message that holds calls, which :meth:`item` has returned.

        Raises:
            InvalidEnvelope: What all calls share has no place there.
        """


class Capture(DelayedTaskProducer):
    """Takes the message of a task that Celery has made and routed, instead of publishing it.

    Attributes:
        body: The task's body: arguments, keyword arguments, and what is embedded.
        options: What kombu was to serialize it with.
        delayed: The message.
        patience: How long and how often Celery's options say that it is tried.
        declares: What the publisher declares.
    """

    body: Any
    options: dict[str, Any]
    delayed: Delayed
    patience: PublishPolicy
    declares: dict[str, Declaration | None]

    def publish_delayed(  # type: ignore[override]
        self,
        body: Any,
        destination: Any,
        due: Any,
        *,
        declare: Iterable[Any] = (),
        resends: int | None,
        backoff: tuple[float, float, float],
        **options: Any,
    ) -> None:
        """Keep all that there is to know."""
        self.body = body
        self.options = options
        self.delayed = self.delayed_message(body, destination, due, **options)
        self.delayed.message.properties["delivery_mode"] = PERSISTENT
        self.patience = PublishPolicy(self.timeout, resends, backoff)
        self.declares = self.declarations(self.delayed.queue, declare)


def captured(
    app: celery.Celery,
    settings: Settings,
    publisher: Publisher,
    task: celery.Task[Any, Any] | str,
    call: Call,
    options: Mapping[str, Any],
) -> Capture:
    """Have Celery send a task, with all that belongs to it, and take the message.

    Args:
        app: The application.
        settings: Its settings.
        publisher: What would publish.
        task: The task, or its name.
        call: The call.
        options: What ``apply_async`` takes besides.
    """
    capture = Capture(publisher, settings, app.amqp, call.due)
    given = {**options, "task_id": call.task_id, "producer": capture}
    sending(app, task)(call.args, call.kwargs, **given)
    return capture


def _repr_levels(app: celery.Celery) -> int | None:
    """How deep Celery goes into nested arguments for the headers that represent them."""
    name = "task_repr_maxlevels"
    # A setting since 5.7; before, Celery does not look at what an application has set there.
    levels: int | None = app.conf[name] if name in SETTING_KEYS else 3
    return levels


def sending(app: celery.Celery, task: celery.Task[Any, Any] | str) -> Callable[..., Any]:
    """Return what sends a task: its ``apply_async``, or ``send_task`` with its name."""
    return partial(app.send_task, task) if isinstance(task, str) else task.apply_async


def writer_for(
    first: Capture, call: Call, options: Mapping[str, Any], capture: Callable[[Call], Capture]
) -> Writer:
    """Return what writes further calls.

    Where somebody listens to the signals of publishing, or to the event that a task was sent, each
    call goes through all of Celery.

    Args:
        first: The message of one call.
        call: That call.
        options: What ``apply_async`` takes besides.
        capture: Has Celery send a task, and takes its message.
    """
    listened = (signals.before_task_publish, signals.after_task_publish, signals.task_sent)
    alike = _Alike(first, call, options)
    sends_event = first.amqp.app.conf.task_send_sent_event
    if sends_event or any(signal.receivers for signal in listened):
        return _Exact(alike, first, call, capture)
    return alike


class _Alike:
    """Writes messages like that of one call."""

    writes_twice = True

    def __init__(self, first: Capture, call: Call, options: Mapping[str, Any]) -> None:
        self._first = first
        celerys = first.amqp

        def template(encode: Callable[[Any], bytes] | None) -> Template:
            return Template(
                first.delayed.message,
                call.task_id,
                first.body[2],
                encode,
                (celerys.argsrepr_maxsize, celerys.kwargsrepr_maxsize),
                _repr_levels(celerys.app),
                [name for name in ("argsrepr", "kwargsrepr") if options.get(name)],
            )

        self.template = template(self._encode)
        if self._is_kombus_json:
            faster = template(None)
            # It may be compressed as well.
            if faster.body(call.args, call.kwargs) == body_of(first.delayed.message):
                self.template = faster

    @property
    def _is_kombus_json(self) -> bool:
        """Whether it is kombu's own JSON, and not another that only looks like it at times."""
        codec = registry._encoders.get(self._first.options.get("serializer"))
        return codec is not None and codec.encoder is json.dumps

    def _encode(self, body: Any) -> bytes:
        given = self._first.options
        serializer, compression = given.get("serializer"), given.get("compression")
        encoded, *_ = self._first._prepare(body, serializer, None, None, compression, {})
        return encoded.encode() if isinstance(encoded, str) else encoded

    def content(self, call: Call) -> Content:
        return self.template.content(call.task_id, call.args, call.kwargs, call.due.at_ms)

    def item(self, call: Call) -> bytes:
        return self.template.item(call.task_id, call.args, call.kwargs)

    def envelope(self, items: bytes, due_ms: int) -> Content:
        return self.template.envelope(items, due_ms)


class _Exact:
    """Writes each message as Celery makes it; all go to where the first one goes."""

    writes_twice = False

    def __init__(
        self, alike: _Alike, first: Capture, call: Call, capture: Callable[[Call], Capture]
    ) -> None:
        self._template = alike.template
        self._capture = capture
        # Celery has sent it already, and told its signals.
        self._made = {call.task_id: first.delayed.message}

    def _message(self, call: Call) -> amqp.Message:
        message = self._made.pop(call.task_id, None) or self._capture(call).delayed.message
        headers = message.properties["application_headers"]
        headers.update({n: value for n, value in self._template.headers.items() if n in PLACE})
        return message

    def content(self, call: Call) -> Content:
        return Content.of(self._message(call))

    def item(self, call: Call) -> bytes:
        message = self._message(call)
        properties = dict(message.properties)
        headers = properties.pop("application_headers")
        own = {name: value for name, value in headers.items() if name not in SHARED}
        if names.PRIORITY in self._template.headers:
            own.setdefault(names.PRIORITY, properties.get("priority"))
        properties = {name: value for name, value in properties.items() if name in PROPERTIES}
        try:
            return Item(body_of(message), own, properties).framed()
        except InvalidEnvelope:
            self._made[call.task_id] = message
            raise

    def envelope(self, items: bytes, due_ms: int) -> Content:
        return self._template.envelope(items, due_ms, shares=False)
