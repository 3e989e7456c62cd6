"""The message of a task's sends, of which the next is a copy.

Two delayed sends of a task with the same options differ in their id, their arguments and their due
time. The first goes through all of Celery; its message is the template of the next. A template is
kept while Celery would make the same message: no setting, queue, route, attribute of the task or
receiver of a signal has changed, and no function but Celery's own has a part in it. That is for
plain sends, rows and members of groups, outside of a worker's task; all others go through Celery
each time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from types import MethodType, NoneType
from typing import Any, Final, NamedTuple

import celery
from celery.exceptions import SoftTimeLimitExceeded
from celery.result import AsyncResult
from kombu.utils.uuid import uuid

from celery_rabbitdelay.app import signals
from celery_rabbitdelay.app.celery_internals import (
    argument_check,
    makers_of_messages,
    makes_messages_alone,
    registered_task,
)
from celery_rabbitdelay.app.delays import Delays
from celery_rabbitdelay.app.instruments import queue_label
from celery_rabbitdelay.app.seams import additions_of
from celery_rabbitdelay.app.sending.message_template import Writer
from celery_rabbitdelay.app.sending.pipelines import Sent, current_pipeline
from celery_rabbitdelay.app.sending.task_messages import (
    NO_HEADERS,
    Call,
    CapturingProducer,
    capture_message,
)
from celery_rabbitdelay.app.sending.task_producer import MIN_TIMEOUT
from celery_rabbitdelay.app.task import DelayingTask
from celery_rabbitdelay.exceptions import InvalidDelay, RabbitDelayError
from celery_rabbitdelay.levels.delay import tolerance_milliseconds
from celery_rabbitdelay.publishing.message import Publication
from celery_rabbitdelay.publishing.publisher import Publisher

#: The options that are the same for all sends of a template. Each is a text, a number or None.
SHARED: Final = ("queue", "exchange", "routing_key", "priority", "serializer")

#: The types of their values. None is not the same as no option: it overrides the task's attribute.
PLAIN_TYPES: Final = (str, int, NoneType)

#: The functions that send a task, as they are before anybody wraps them.
_SENDS: Final = (DelayingTask.apply_async, celery.Task.apply_async)

#: All options of a plain send.
PLAIN: Final = frozenset((*SHARED, "delay", "countdown", "eta", "tolerance", "task_id"))

#: The options that Celery gives all members of a group, and those that it gives each of them.
OF_GROUP: Final = ("group_id", "root_id", "parent_id", "reply_to")
OF_MEMBER: Final = PLAIN.union(OF_GROUP, ("group_index", "producer", "add_to_parent"))

#: The first member of a group that is written from a template, counted from 0. To make a template
#: takes as long as to send one member through Celery, so small groups have none.
FIRST_MEMBER: Final = 3

#: How many templates are kept; then they are made anew. Each set of options has its own.
MAX_TEMPLATES: Final = 256


class Template(NamedTuple):
    """The message of a task's sends.

    Attributes:
        writer: Writes the message of a call.
        producer: Celery's message, where it goes, how its destination is declared, and how long
            and how often it is tried.
        ignores_result: Celery's option ``ignore_result``.
        label: The queue, for metrics.
    """

    writer: Writer
    producer: CapturingProducer
    ignores_result: bool | None
    label: str

    @classmethod
    def of(cls, first: CapturingProducer, call: Call, options: Mapping[str, Any]) -> Template:
        """Return the template that the message of one call is.

        Args:
            first: The producer that has the message.
            call: The call.
            options: The options of ``apply_async`` for all calls.
        """
        ignores_result = first.delayed.message.headers.others.get("ignore_result")
        writer = Writer(first, call, options)
        return cls(writer, first, ignores_result, queue_label(first.delayed))

    def publication(self, call: Call, reply_to: str | None = None) -> Publication:
        """Return the message of a call, to be published.

        Args:
            call: The call.
            reply_to: Where the answer goes, if the message says so; None for where all go.
        """
        content = self.writer.content(call, reply_to)
        delayed = self.producer.delayed._replace(task_id=call.task_id)
        self.producer.check_size(len(content.body), delayed.destination, call.due)
        return Publication(content, partial(self.producer.address, delayed, call.due))


class Templates:
    """The templates of an application's tasks.

    Args:
        delays: The application's ``app.rabbitdelay``.
    """

    def __init__(self, delays: Delays) -> None:
        self._delays = delays
        #: With what each was made from. None: such sends go through Celery.
        self._templates: dict[object, tuple[object, Template | None]] = {}

    def send(
        self, task: celery.Task[Any, Any] | str, args: Any, kwargs: Any, options: Mapping[str, Any]
    ) -> AsyncResult[Any] | None:
        """Send a task from a template; return None if it has to go through Celery.

        Args:
            task: The task, or its name.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            options: The options of ``apply_async``.

        Raises:
            TypeError: The task does not take these arguments.
            RabbitDelayError: As :meth:`.Celery.send_task`.
        """
        delay, countdown, eta = options.get("delay"), options.get("countdown"), options.get("eta")
        times = (delay is not None) + (countdown is not None) + (eta is not None)
        delays, app = self._delays, self._delays.app
        of_group = {name: options[name] for name in OF_GROUP if name in options}
        known_options = OF_MEMBER if of_group else PLAIN
        if times != 1 or not options.keys() <= known_options or app.current_worker_task is not None:
            return None
        args, kwargs, task_id = args or (), kwargs or {}, options.get("task_id") or uuid()
        shared = {name: options[name] for name in SHARED if name in options}
        if (
            not (isinstance(args, list | tuple) and type(kwargs) is dict and type(task_id) is str)
            # Such a value is equal to no other one that Celery reads in another way.
            or not all(type(each) in PLAIN_TYPES for each in (*shared.values(), *of_group.values()))
            or (of_group and not _is_further_member(options, task_id))
        ):
            return None
        connection = options["producer"].connection if of_group else None
        pipeline = current_pipeline(delays, connection)
        if of_group and pipeline is None:
            return None
        if not isinstance(task, str) and (check := argument_check(task)) is not None:
            check(*args, **kwargs)
        try:
            tolerance_ms = tolerance_milliseconds(options.get("tolerance", 0))
            due = delays.due(delay, countdown, eta, tolerance_ms)
        except InvalidDelay:  # Celery may take it, where it sends without the levels
            return None
        if due.is_past:
            return None
        began = time.monotonic()
        own = {"group_index": options["group_index"]} if of_group else NO_HEADERS
        call = Call(task_id, args, kwargs, due, own)
        template = self._template(task, call, shared, options if of_group else {}, delay is None)
        if template is None:
            return None
        delays.settings.check_delay(due)
        try:
            # Celery has an address for each thread.
            reply_to = None if "reply_to" in of_group else app.thread_oid
            publication = template.publication(call, reply_to)
        except (RabbitDelayError, SoftTimeLimitExceeded):
            raise
        except Exception:  # noqa: BLE001 - Celery tries once more, and raises its own error
            return None
        producer = template.producer
        if not template.ignores_result:
            app.backend.on_task_call(producer, task_id)
        name = task if isinstance(task, str) else str(task.name)
        sent = Sent(name, task_id, due.at_ms, template.label)
        if pipeline is None:
            self._publish(producer, publication, sent)
        else:
            pipeline.borrow(producer.policy.timeout)
            publication.context = sent
            publication.declare = producer.declares["declare"]
            pipeline.publish(lambda _: publication, sent, producer.policy)
        delays.warn_blocked_loop(time.monotonic() - began)
        result: AsyncResult[Any]
        result = app.AsyncResult(task_id) if isinstance(task, str) else task.AsyncResult(task_id)
        result.ignored = bool(template.ignores_result)
        return result

    def of_rows(
        self, task: celery.Task[Any, Any] | str, first: Call, options: Mapping[str, Any]
    ) -> Template | None:
        """Return the template that rows are written from; None if Celery makes their message.

        Args:
            task: The task, or its name.
            first: The call of the first row.
            options: The options of ``apply_async`` for all rows.
        """
        app = self._delays.app
        if (
            app.current_worker_task is not None
            or not (isinstance(task, str) or _is_sent_as_is(task))
            or not options.keys() <= set(SHARED)
            or not all(type(each) in PLAIN_TYPES for each in options.values())
        ):
            return None
        # Celery has an address for each thread, and an envelope one for all of its tasks.
        return self._template(task, first, options, {"reply_to": app.thread_oid}, False)

    def _template(
        self,
        task: celery.Task[Any, Any] | str,
        call: Call,
        shared: Mapping[str, Any],
        member: Mapping[str, Any],
        is_countdown: bool,
    ) -> Template | None:
        """Return the template that a call is written from; None if it goes through Celery."""
        app = self._delays.app
        known = registered_task(app, task) if isinstance(task, str) else task
        # A group takes the place of the former one with the same task, and so do rows of a thread.
        of_group = {name: member[name] for name in OF_GROUP if name in member}
        made_from = makers_of_messages(app, known), of_group
        key = (task, is_countdown, *member, *shared.items())
        former = self._templates.get(key)
        if former is not None and former[0] == made_from:
            return former[1]
        template = None
        if self._may_have_template(known, is_countdown):
            own = {
                name: member[name] for name in ("group_index", "add_to_parent") if name in member
            }
            options = {**shared, **of_group, **own}
            producer = member.get("producer")
            connection = app.connection_for_write() if producer is None else producer.connection
            plain = call._replace(headers=NO_HEADERS)
            # Overrides of ``apply_async`` have been called, and have called this.
            send = None if isinstance(task, str) else partial(celery.Task.apply_async, task)
            first = capture_message(app, Publisher(connection), task, plain, options, send=send)
            template = Template.of(first, call, options)
            # The template is kept for long; the arguments of this call are not.
            first.body = ((), {}, first.body[2])
            message = first.delayed.message._replace(body=b"")
            first.delayed = first.delayed._replace(message=message)
        if len(self._templates) >= MAX_TEMPLATES:
            self._templates.clear()
        self._templates[key] = made_from, template
        return template

    def _may_have_template(self, known: Any, is_countdown: bool) -> bool:
        delays = self._delays
        if not delays.available:
            return False
        return (
            getattr(known, "rabbitdelay", True)
            and (delays.settings.takeover or not is_countdown)
            and not any(each.shapes(known) for each in additions_of(delays))
            and makes_messages_alone(delays.app, known, DelayingTask)
        )

    def _publish(self, producer: CapturingProducer, publication: Publication, sent: Sent) -> None:
        delays = self._delays
        began, is_confirmed = time.monotonic(), False
        with delays.publisher() as publisher:
            left = max(producer.policy.timeout - (time.monotonic() - began), MIN_TIMEOUT)
            policy = producer.policy._replace(timeout=left)
            try:
                publisher.publish(publication, policy, **producer.declares)
                is_confirmed = True
            finally:
                resent = publication.resent
                delays.recorder.record_send(sent.task, sent.queue, is_confirmed, resent)
        signals.send(signals.delayed, delays.app, sent.task_id, sent.due_ms)


def _is_sent_as_is(task: celery.Task[Any, Any]) -> bool:
    """Return whether nothing overrides or wraps a task's ``apply_async``: it may change options."""
    sends = task.apply_async
    return type(sends) is MethodType and any(sends.__func__ is each for each in _SENDS)


def _is_further_member(options: Mapping[str, Any], task_id: str) -> bool:
    """Return whether the options are those of a member of a group, and not of the first ones."""
    index = options.get("group_index")
    return (
        "group_id" in options
        and options.get("producer") is not None
        and type(index) is int
        and index >= FIRST_MEMBER
        # A message whose root is the task itself would be no template for those of other roots.
        and options.get("root_id") != task_id
    )
