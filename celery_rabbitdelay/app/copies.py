"""Copies: Celery makes a task's first message, and later calls are sent as copies of it.

This file is an optimization; a reader can skip it. The messages of a task's calls with the same
options differ in id, arguments and due time only. Celery makes the first message, which is the
template of the next messages. Each send tries :meth:`Copies.send` first, which returns None if only
Celery can make the message.

A message may be copied while Celery would make the same message: no setting, queue, route,
attribute of the task or receiver of a signal has changed, and only Celery's own functions take part
in making it. Plain sends, rows and members of groups are copied, unless a running task sends them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from json.encoder import encode_basestring_ascii as quoted
from types import FunctionType, NoneType
from typing import Any, Final

import celery
from celery import signals as celery_signals
from celery.app import amqp as celery_amqp
from celery.app.routes import MapRoute, Router
from celery.exceptions import SoftTimeLimitExceeded
from celery.utils.saferepr import saferepr
from kombu import Connection
from kombu.utils.json import JSONEncoder
from kombu.utils.uuid import uuid

from celery_rabbitdelay.app import celery_internals, pipelines, signals
from celery_rabbitdelay.app.delays import Delays
from celery_rabbitdelay.app.instruments import queue_label
from celery_rabbitdelay.app.options import Args, Kwargs, Options, Result, TaskOrName
from celery_rabbitdelay.app.seams import NO_HEADERS, Call, additions_of
from celery_rabbitdelay.app.task_sending import DelayedTaskProducer
from celery_rabbitdelay.exceptions import InvalidDelay, RabbitDelayError
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.delay import tolerance_milliseconds
from celery_rabbitdelay.modules.envelope import Item, compressed, length_prefixed, shared_block
from celery_rabbitdelay.publishing.kombu_internals import is_kombus_json
from celery_rabbitdelay.publishing.message import (
    MESSAGE_PROPERTIES,
    PERSISTENT,
    Content,
    Publication,
    SharedProperties,
    WaitingMessage,
)
from celery_rabbitdelay.publishing.signature import signed

#: The registry's headers that differ between calls; its other headers are the same for all calls.
OWN_HEADERS: Final = (header_names.COPY, header_names.LIFE, header_names.KEY, header_names.ORDER)

#: The options that are the same for all copies. Each value is a string, a number or None.
SHARED: Final = ("queue", "exchange", "routing_key", "priority", "serializer")

#: The types of the values of :data:`SHARED`. None differs from a missing option: None overrides the
#: task's attribute.
PLAIN_TYPES: Final = (str, int, NoneType)

#: All options of a plain send.
PLAIN: Final = frozenset((*SHARED, "delay", "countdown", "eta", "tolerance", "task_id"))

#: The options that Celery adds to every member of a group, and all options of a member.
OF_GROUP: Final = ("group_id", "root_id", "parent_id", "reply_to")
OF_MEMBER: Final = PLAIN.union(OF_GROUP, ("group_index", "producer", "add_to_parent"))

#: The maximum number of templates, one for each set of options. At the maximum, a new template
#: replaces all others.
MAX_TEMPLATES: Final = 256

#: The headers that say where a message goes when it is due.
DESTINATION_HEADERS: Final = (header_names.EXCHANGE, header_names.ROUTING_KEY, header_names.QUEUE)

#: Headers set on the envelope, not on its items.
RESTORED_HEADERS: Final = (*DESTINATION_HEADERS, header_names.PRIORITY)

#: If Celery builds each message, the headers that only the envelope has. All other headers are in
#: the items, because receivers of signals may have changed them.
ENVELOPE_HEADERS: Final = frozenset(
    (*DESTINATION_HEADERS, header_names.DUE, header_names.SIGNATURE)
)

#: If ``repr()`` contains one of these after its first character (quotes, escapes, objects, nested
#: values), Celery's ``saferepr`` may differ from it.
_MAY_DIFFER: Final = re.compile(r'[\\"<\[({]')


class CapturingProducer(DelayedTaskProducer):
    """Keeps the message of a task that Celery has made and routed, instead of publishing it."""

    def deliver(self) -> None:
        """Do not publish the message."""


def capture(
    delays: Delays,
    task: TaskOrName,
    call: Call,
    options: Options,
    headers: Mapping[str, object] = NO_HEADERS,
    connection: Connection | None = None,
) -> CapturingProducer:
    """Let Celery send a task to a producer that keeps the message; return the producer.

    Args:
        delays: The application's delay levels.
        task: The task, or its name.
        call: The call.
        options: Other options of ``apply_async``.
        headers: The registry's headers that all calls share.
        connection: The caller's own connection, which the message will be published over.
    """
    name = task if isinstance(task, str) else task.name
    producer = CapturingProducer(delays, name, call.due, options, connection)
    producer.added_headers = {**headers, **call.headers}
    given = {**options, "task_id": call.task_id, "producer": producer}
    function_to_send(delays.app, task)(call.args, call.kwargs, **given)
    return producer


def function_to_send(app: celery.Celery, task: TaskOrName) -> Callable[..., Result]:
    """Return the function that sends a task: ``apply_async``, or ``send_task`` for a name."""
    return partial(app.send_task, task) if isinstance(task, str) else task.apply_async


class Template:
    """Writes the messages of later calls in the form of the first message (Celery's protocol 2).

    Args:
        first: The producer that has the message of the first call.
        call: The first call.
        options: Other options of ``apply_async``.

    Attributes:
        producer: The producer of the first call, which knows the destination, its declaration, and
            the policy for publishing.
        ignores_result: Celery's option ``ignore_result``.
        label: The queue, for metrics.
        can_write_again: Whether a call that was written as an item can also be written as a
            message.
    """

    can_write_again = True

    def __init__(self, first: CapturingProducer, call: Call, options: Options) -> None:
        self.producer = first
        self.label = queue_label(first.delayed)
        self.ignores_result = bool(first.delayed.message.headers.others.get("ignore_result"))
        message = first.delayed.message.amqp()
        correlation_id = message.properties.get("correlation_id")
        # The caller's own correlation id, which all messages share; None if each message has its
        # task's id.
        self._correlation_id = None if correlation_id == call.task_id else correlation_id
        self._has_root = message.properties["application_headers"]["root_id"] == call.task_id
        sizes, self._repr_depth = celery_internals.repr_limits(first.amqp.app)
        named = zip(("argsrepr", "kwargsrepr"), sizes, strict=True)
        # If the caller gave one of these strings, all messages share it.
        self._reprs = {name: size for name, size in named if not options.get(name)}
        own = {"id", header_names.DUE, header_names.SIGNATURE, *OWN_HEADERS}
        own.update(self._reprs, call.headers, {"root_id"} if self._has_root else ())
        #: The headers and the properties that all messages share. Celery leaves options that AMQP
        #: does not know among a message's properties.
        self._headers = {
            name: value
            for name, value in message.properties["application_headers"].items()
            if name not in own
        }
        self._properties = {
            name: value
            for name, value in message.properties.items()
            if name in MESSAGE_PROPERTIES and name not in ("application_headers", "correlation_id")
        }
        #: A template for each ``reply_to``, because every thread has its own.
        self._encoder = lru_cache(maxsize=16)(self._make_encoder)
        self._json = JSONEncoder().encode
        #: The end of every body, if it is JSON and can be written faster; otherwise empty.
        self._rest = ""
        if is_kombus_json(first.options.get("serializer")):
            self._rest = f", {self._json(first.body[2])}]"
            # The body may be compressed.
            if self._body(call) != first.delayed.message.body:
                self._rest = ""

    def forget_arguments(self) -> None:
        """Forget the arguments of the first call, because a template is kept for a long time."""
        producer = self.producer
        producer.body = ((), {}, producer.body[2])
        message = producer.delayed.message._replace(body=b"")
        producer.delayed = producer.delayed._replace(message=message)

    def publication(self, call: Call, reply_to: str | None = None) -> Publication:
        """Return the message of a call, to be published.

        Args:
            call: The call.
            reply_to: The address for the answer; None for the address in the first message.
        """
        content = self.content(call, reply_to)
        producer = self.producer
        delayed = producer.delayed._replace(task_id=call.task_id)
        producer.check_size(len(content.body), delayed.destination, call.due)
        return Publication(content, partial(producer.address, delayed, call.due))

    def _body(self, call: Call) -> bytes:
        if self._rest:
            return f"{self._json((call.args, call.kwargs))[:-1]}{self._rest}".encode()
        options = self.producer.options
        return self.producer.serialize(
            (call.args, call.kwargs, self.producer.body[2]),
            {},
            serializer=options.get("serializer"),
            compression=options.get("compression"),
        )[0]

    def _own_headers(self, call: Call) -> dict[str, Any]:
        """Return a call's own headers, as an item of an envelope has them."""
        own: dict[str, Any] = {"id": call.task_id}
        for name, max_length in self._reprs.items():
            value = call.args if name == "argsrepr" else call.kwargs
            text = repr(value)  # faster than Celery's, and mostly equal
            if len(text) > max_length or _MAY_DIFFER.search(text, 1):
                text = saferepr(value, max_length, self._repr_depth)  # type: ignore[arg-type]
            own[name] = text
        own.update(call.headers)
        return own

    def content(self, call: Call, reply_to: str | None = None) -> Content:
        """Return the message of a call.

        Args:
            call: The call.
            reply_to: As for :meth:`publication`.
        """
        own = {**self._own_headers(call), header_names.DUE: call.due.at_ms}
        if self._has_root:
            own["root_id"] = call.task_id
        encoder, body = self._encoder(reply_to), self._body(call)
        return self._signed(encoder, own, body, self._correlation_id or call.task_id)

    def _make_encoder(self, reply_to: str | None) -> SharedProperties:
        properties = {**self._properties, "correlation_id": ""}
        if reply_to is not None:
            properties["reply_to"] = reply_to
        return SharedProperties(self._headers, properties)

    def _signed(
        self,
        encoder: SharedProperties,
        own: dict[str, object],
        body: bytes,
        correlation_id: str | None = None,
    ) -> Content:
        """Return a message with its own headers, signed if there is a key."""
        keys = self.producer.signing_keys
        if keys is not None:
            parsed, _ = header_names.parse({**encoder.headers, **own})
            properties = {**encoder.properties, "correlation_id": correlation_id}
            own[header_names.SIGNATURE] = keys.signature(body, properties, parsed)
        return Content(encoder.encode(own, correlation_id), body)

    def item(self, call: Call) -> bytes:
        """Return a call as an item of an envelope, which is two blocks.

        Raises:
            InvalidEnvelope: An envelope cannot express the call, but :meth:`content` can.
        """
        own = self._own_headers(call).items()
        headers = ",".join([f'"{name}":{quoted(value)}' for name, value in own])
        return length_prefixed(f'{{"headers":{{{headers}}}}}'.encode()) + length_prefixed(
            self._body(call)
        )

    def envelope(self, items: bytes, due_ms: int) -> Content:
        """Return the envelope of items that :meth:`item` has returned.

        Raises:
            InvalidEnvelope: An envelope cannot express a header that all calls have.
        """
        own: dict[str, object] = {header_names.DUE: due_ms}
        return self._signed(self._envelope, own, compressed(self._shared + items))

    @cached_property
    def _envelope(self) -> SharedProperties:
        headers = {name: self._headers[name] for name in RESTORED_HEADERS if name in self._headers}
        properties = {
            "content_type": header_names.ENVELOPE,
            "content_encoding": "binary",
            "delivery_mode": PERSISTENT,
            "priority": self._properties.get("priority", 0),
        }
        return SharedProperties(headers, properties)

    @cached_property
    def _shared(self) -> bytes:
        """The block with the headers and properties that all tasks in an envelope share."""
        headers, properties = self._headers, self._properties
        shared = {name: value for name, value in headers.items() if name not in RESTORED_HEADERS}
        copied = {"root_id": "id"} if self._has_root else {}
        if self._correlation_id is None:
            return shared_block(shared, properties, copied, {"correlation_id": "id"})
        return shared_block(shared, {**properties, "correlation_id": self._correlation_id}, copied)


class TemplateByCelery(Template):
    """Lets Celery build each message; all messages go to the destination of the first message.

    Used if receivers are connected to Celery's signals of publishing. The items of an envelope
    share nothing but the destination: each item has all headers and properties.

    Args:
        first: As for :class:`Template`.
        call: As for :class:`Template`.
        options: As for :class:`Template`.
        capture: Lets Celery send a call; returns the producer that keeps the message.
    """

    can_write_again = False
    _shared = shared_block({}, {})

    def __init__(
        self,
        first: CapturingProducer,
        call: Call,
        options: Options,
        capture: Callable[[Call], CapturingProducer],
    ) -> None:
        super().__init__(first, call, options)
        self._capture = capture
        # Making the message again would send the signals again.
        self._last = call.task_id, first.delayed.message

    def _message(self, call: Call) -> WaitingMessage:
        if self._last[0] != call.task_id:
            self._last = call.task_id, self._capture(call).delayed.message
        shared, _ = header_names.parse(self._headers)
        message = self._last[1].saying(
            exchange=shared.exchange, routing_key=shared.routing_key, queue=shared.queue
        )
        return signed(message, self.producer.signing_keys)

    def content(self, call: Call, reply_to: str | None = None) -> Content:
        """Return the message of a call; Celery makes it, but only once."""
        return Content.of(self._message(call).amqp())

    def item(self, call: Call) -> bytes:
        """Return the message as an item of an envelope, which is two blocks."""
        message = self._message(call)
        headers = message.headers.to_headers()
        own = {name: value for name, value in headers.items() if name not in ENVELOPE_HEADERS}
        properties = {
            name: value
            for name, value in message.amqp().properties.items()
            if name in MESSAGE_PROPERTIES and name != "application_headers"
        }
        if header_names.PRIORITY in self._headers:
            own.setdefault(header_names.PRIORITY, properties.get("priority"))
        return Item(message.body, own, properties).length_prefixed()


class _NotACopy(Exception):
    """Raised for a call whose message only Celery can make."""


class Copies:
    """The templates of an application's tasks.

    Args:
        delays: The application's delay levels.
    """

    def __init__(self, delays: Delays) -> None:
        self._delays = delays
        #: By key: the fingerprint that a template was made from, and the template; None if only
        #: Celery can make such messages.
        self._templates: dict[object, tuple[object, Template | None]] = {}

    def send(self, task: TaskOrName, args: Args, kwargs: Kwargs, options: Options) -> Result | None:
        """Send a task as a copy; return None if it has to go through Celery.

        Args:
            task: The task, or its name.
            args: The task's positional arguments.
            kwargs: The task's keyword arguments.
            options: The options of ``apply_async``.

        Raises:
            TypeError: The task does not take these arguments.
            RabbitDelayError: As :meth:`.Celery.send_task`.
        """
        delays, app = self._delays, self._delays.app
        try:
            template, publication, pipeline = self._copy(task, args, kwargs, options)
        except _NotACopy:
            return None
        sent: pipelines.PublishedTask = publication.context
        producer = template.producer
        if not template.ignores_result:
            app.backend.on_task_call(producer, sent.task_id)
        pipelines.publish_task(delays, publication, producer.policy, producer.declares, pipeline)
        if pipeline is None:
            signals.send(signals.delayed, app, sent.task_id, sent.due_ms)
        make = app.AsyncResult if isinstance(task, str) else task.AsyncResult
        result: Result = make(sent.task_id)
        result.ignored = template.ignores_result
        return result

    def _copy(
        self, task: TaskOrName, args: Args, kwargs: Kwargs, options: Options
    ) -> tuple[Template, Publication, pipelines.TaskPipeline | None]:
        """Return a call's template, its message, and the pipeline block that confirms it."""
        delays, is_member = self._delays, "group_index" in options
        delay, countdown, eta = options.get("delay"), options.get("countdown"), options.get("eta")
        args, kwargs, task_id = args or (), kwargs or {}, options.get("task_id") or uuid()
        connection = None
        if (
            (delay is not None) + (countdown is not None) + (eta is not None) != 1
            or not options.keys() <= (OF_MEMBER if is_member else PLAIN)
            or not (isinstance(args, list | tuple) and type(kwargs) is dict)
            or type(task_id) is not str
            or not delays.available
            or (delay is None and not delays.settings.takeover)
        ):
            raise _NotACopy
        shared = {name: options[name] for name in SHARED if name in options}
        of_group: dict[str, object] = {}
        own: Mapping[str, object] = NO_HEADERS
        if is_member:
            # The message of a member that is its own root cannot be a template for other members.
            if options.get("producer") is None or options.get("root_id") == task_id:
                raise _NotACopy
            of_group = {name: options[name] for name in OF_GROUP if name in options}
            own = {"group_index": options["group_index"]}
            connection = options["producer"].connection
        pipeline = pipelines.current_pipeline(delays, connection)
        if is_member and pipeline is None:
            raise _NotACopy
        celery_internals.check_arguments(task, args, kwargs)
        try:
            tolerance_ms = tolerance_milliseconds(options.get("tolerance", 0))
            due = delays.due(delay, countdown, eta, tolerance_ms)
        except InvalidDelay as invalid:  # Celery may accept it without the levels
            raise _NotACopy from invalid
        if due.is_past:
            raise _NotACopy
        call = Call(task_id, args, kwargs, due, own)
        template = self._template(task, call, shared, of_group, connection)
        delays.settings.check_delay(due)
        try:
            # Celery has a reply address for each thread.
            reply_to = None if "reply_to" in of_group else delays.app.thread_oid
            publication = template.publication(call, reply_to)
        except (RabbitDelayError, SoftTimeLimitExceeded):
            raise
        except Exception as error:  # so that Celery raises its own error
            raise _NotACopy from error
        publication.context = pipelines.PublishedTask(
            template.producer.name, task_id, due.at_ms, template.label
        )
        return template, publication, pipeline

    def of_rows(
        self,
        task: TaskOrName,
        first: Call,
        options: Options,
        headers: Mapping[str, object],
        connection: Connection | None,
    ) -> Template:
        """Return the template for the messages of rows, cached or made from the first row.

        Args:
            task: The task, or its name.
            first: The call of the first row.
            options: The options of ``apply_async`` for all rows.
            headers: The registry's headers that all rows share.
            connection: The caller's own connection.
        """
        delays = self._delays
        # Celery has a reply address for each thread; all tasks in an envelope share one address.
        of_thread = {"reply_to": delays.app.thread_oid}
        if connection is None and not headers and options.keys() <= set(SHARED):
            with suppress(_NotACopy):
                return self._template(task, first, options, of_thread, None)
        captured = partial(
            capture, delays, task, options=options, headers=headers, connection=connection
        )
        made = captured(first)
        if _is_publishing_watched(delays.app):
            return TemplateByCelery(made, first, options, captured)
        return Template(made, first, options)

    def _template(
        self,
        task: TaskOrName,
        call: Call,
        shared: Mapping[str, object],
        of_group: Mapping[str, object],
        connection: Connection | None,
    ) -> Template:
        """Return the template from which the message of a call is copied.

        Args:
            task: The task, or its name.
            call: The call.
            shared: The call's options that are the same for all copies.
            of_group: The options that Celery has added to a member of a group. For rows, the
                thread's reply address.
            connection: The caller's own connection.
        """
        app = self._delays.app
        values = (*shared.values(), *of_group.values())
        # Values of other types may be equal, but Celery may read them differently.
        if app.current_worker_task is not None or any(
            type(each) not in PLAIN_TYPES for each in values
        ):
            raise _NotACopy
        known = celery_internals.registered_task(app, task) if isinstance(task, str) else task
        # A template replaces the template of the former group or, for rows, of the former thread.
        fingerprint = _message_fingerprint(app, known), of_group
        key = (task, *of_group, *shared.items())
        former = self._templates.get(key)
        if former is None or former[0] != fingerprint:
            template = None
            if self._may_copy(known):
                options = {**shared, **of_group}
                if "group_index" in call.headers:
                    options["group_index"] = call.headers["group_index"]
                plain = call._replace(headers=NO_HEADERS)
                first = capture(self._delays, task, plain, options, connection=connection)
                template = Template(first, call, options)
                template.forget_arguments()
            if len(self._templates) >= MAX_TEMPLATES:
                self._templates.clear()
            former = self._templates[key] = fingerprint, template
        if former[1] is None:
            raise _NotACopy
        return former[1]

    def _may_copy(self, task: Any) -> bool:
        """Return whether Celery makes a task's messages from data alone.

        False if other code takes part: a router, a receiver of a signal, a subclass, or a library's
        wrapper around Celery's functions. Also false if Celery sends an event with each message,
        and in Celery's message protocol 1.

        Args:
            task: The task; None if the application does not know it.
        """
        delays: Delays = self._delays
        app: Any = delays.app
        conf, amqp, router = app.conf, app.amqp, app.amqp.router
        functions = [getattr(owner, name) for owner, name in _MAKERS]
        functions += (amqp.send_task_message, type(app.backend).on_task_call)
        functions.append(getattr(amqp.create_task_message, "__func__", None))
        return (
            getattr(task, "rabbitdelay", True)
            and not any(each.affects(task) for each in delays.part(additions_of))
            and not _is_publishing_watched(app)
            and not conf.task_always_eager
            and conf.task_protocol == 2
            and type(amqp) is celery_internals.DelayingAMQP
            and type(router) is Router
            and all(type(each) is MapRoute for each in getattr(router, "routes", ()))
            and all(map(_is_celerys, functions))
            # The RPC backend's hook declares its queue over the producer.
            and not type(app.backend).__module__.endswith(".rpc")
            and _definers(app, "send_task")[1:] == [celery.Celery]
            and (task is None or _is_plain(task))
        )


#: Celery's functions that make a task's message, or decide about it.
_MAKERS: Final = (
    (celery.Celery, "send_task"),
    (celery.Task, "apply_async"),
    (celery.Task, "shadow_name"),
    (celery.Task, "_get_exec_options"),
    (celery_amqp.AMQP, "as_task_v2"),
    (celery_amqp.AMQP, "_create_task_sender"),
)

#: The signals whose receivers see a task's message.
_SIGNALS: Final = (
    celery_signals.before_task_publish,
    celery_signals.after_task_publish,
    celery_signals.task_sent,
)

#: The attributes of a task that its message depends on.
_OF_A_TASK: Final = (
    *("ignore_result", "time_limit", "soft_time_limit", "shadow_name", "_backend"),
    *("rabbitdelay", "once", "track"),
)


def _message_fingerprint(app: Any, task: Any) -> tuple[object, ...]:
    """Return a fingerprint of everything that shapes a message, in a few microseconds.

    The fingerprint does not cover changes inside a value of the configuration, which Celery has
    already read, or the effects of routers and receivers, which :meth:`Copies._may_copy` rules out.

    Args:
        app: The application.
        task: The task; None if the application does not know it.
    """
    conf, amqp = app.conf, app.amqp
    router, queues = amqp.router, amqp.queues
    return (
        *(os.getpid(), conf, len(conf.maps), dict(conf.changes)),
        *(amqp, router, *getattr(router, "routes", ()), queues, *queues.values()),
        *(amqp.send_task_message, amqp.create_task_message, type(app.backend)),
        *(amqp.argsrepr_maxsize, amqp.kwargsrepr_maxsize),
        *(type(app).send_task, vars(app).get("send_task")),
        *[getattr(owner, name) for owner, name in _MAKERS],
        *[bool(signal.receivers) for signal in _SIGNALS],
        None if task is None else task._get_exec_options(),
        *[getattr(task, name, None) for name in _OF_A_TASK],
    )


def _is_publishing_watched(app: celery.Celery) -> bool:
    """Return whether publishing a message calls receivers of signals, or sends an event."""
    return any(signal.receivers for signal in _SIGNALS) or bool(app.conf.task_send_sent_event)


def _is_plain(task: Any) -> bool:
    """Return whether a task's own class does not change its messages."""
    return (
        task.expires is None
        and getattr(task, "_dump_pydantic_arguments", None) is None  # since Celery 5.6
        and not task.__v2_compat__
        and _definers(task, "shadow_name") == [celery.Task]
        # The method of this package, which is mixed into every task, and Celery's method.
        and _definers(task, "apply_async")[1:] == [celery.Task]
    )


def _definers(instance: object, name: str) -> list[object]:
    """Return the instance and the classes that define a function, in lookup order."""
    return [each for each in (instance, *type(instance).__mro__) if name in vars(each)]


def _is_celerys(function: object) -> bool:
    """Return whether a function is Celery's own, and not a wrapper with its name."""
    if not isinstance(function, FunctionType) or not function.__module__.startswith("celery."):
        return False
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    return function.__code__.co_filename == file
