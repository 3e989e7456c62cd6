"""Check a client's task at check-in, and guard a worker when the task arrives.

A worker builds a request from a task's message in its main process, and evaluates parts of it
later: when it holds the task, takes a slot of its pool, and starts the task. Celery does not expect
invalid values there: such a value ends the worker, or blocks the slot permanently. Which values are
invalid depends on Celery's version, so this module does not list them, but builds the request.

Check-in builds the request as a task's strategy does (``celery.worker.strategy.default``), and
passes it to a pool that runs nothing. On arrival, if Celery raises an error about a message from
check-in or the levels, only this message is refused.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias

from billiard.einfo import ExceptionInfo
from celery.app.task import Context
from celery.exceptions import InvalidTaskError, TaskRevokedError
from celery.utils.imports import symbol_by_name
from celery.worker import request as requests
from celery.worker import state, strategy
from kombu import Connection, Message
from kombu.exceptions import ContentDisallowed, DecodeError
from kombu.utils import json

from celery_rabbitdelay.app.delays import DelayingCelery
from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.levels.headers import shortened
from celery_rabbitdelay.modules.checkin import is_read, may_be_version_1
from celery_rabbitdelay.publishing.kombu_internals import may_be_decoded
from celery_rabbitdelay.publishing.message import WaitingMessage
from celery_rabbitdelay.publishing.wire import read_unreadable_properties
from celery_rabbitdelay.worker.celery_internals import Consumer, Delivery, Request, Worker

#: Called with a message about which Celery has raised an error.
Refuse: TypeAlias = Callable[[Message, Exception], None]

_TASK: Final = "task"

#: Untyped modules of Celery.
_requests: Any = requests
_strategy: Any = strategy


class _IdlePool:
    """A pool that serializes the arguments of a task, and runs nothing."""

    @staticmethod
    def apply_async(_: object, args: object, **options: object) -> None:
        # The prefork pool serializes in this way for its child processes.
        pickle.dumps(args)


class _Unread(Message):
    """The message of a task; check-in does not read its body, which counts as empty."""

    payload: object = ((), {}, {})


class CeleryRequests:
    """Builds Celery's request from the message of a client, without side effects.

    Args:
        app: The application, for its request class; the application need not know the tasks.
    """

    def __init__(self, app: DelayingCelery) -> None:
        task, self._pool = app.Task(), _IdlePool()
        task.name, task.ignore_result = "any", True
        base = symbol_by_name(task.Request)
        celerys = _requests.create_request_cls(base, task, self._pool, "check-in", None, app=app)
        no_effects = {"maybe_expire": lambda _: False, "_announce_revoked": lambda *_: None}
        checked: Any = type("Checked", (celerys,), no_effects)
        self._request = partial(checked, app=app, hostname="check-in", task=task)

    def check(self, sent: WaitingMessage) -> bool:
        """Refuse a message that Celery cannot convert to a request, or cannot pass to a pool.

        The headers are always checked; the body is checked only if check-in reads it.

        Returns:
            Whether a worker may take the message for a task.

        Raises:
            UnprocessableMessage: Celery raises an error.
        """
        headers, content_type = dict(sent.headers.others), sent.properties.get("content_type")
        reads = is_read(sent)
        if _TASK not in headers and not (reads and may_be_version_1(sent.body)):
            return not reads and may_be_decoded(content_type)
        headers.pop("compression", None)
        body: Any = sent.body if reads else b""
        message = (Message if reads else _Unread)(
            body,
            content_type=content_type,
            content_encoding=sent.properties.get("content_encoding"),
            properties=dict(sent.properties),
            headers=headers,
        )
        try:
            self._build(message)
        except Exception as error:
            raise UnprocessableMessage(
                f"Celery cannot read it as a task: {shortened(error)}"
            ) from error
        return True

    def _build(self, message: Message) -> None:
        # ``Consumer.create_task_handler`` does the same.
        is_version_1 = _TASK not in message.headers
        fields: object = message.decode() if is_version_1 else message.headers
        if not isinstance(fields, Mapping) or _TASK not in fields:
            return  # not a task: Celery reports that on arrival
        hash(fields[_TASK])  # Celery looks the task up by its name
        # ``celery.worker.strategy.default`` does the same.
        payload: Any = message.payload
        if "args" in payload:
            body, headers, decoded, utc = _strategy.hybrid_to_proto2(message, payload)
        elif is_version_1:
            body, headers, decoded, utc = _strategy.proto1_to_proto2(message, fields)
        else:
            body, headers, decoded, utc = message.body, message.headers, False, True
        request = self._request(message, body=body, headers=headers, decoded=decoded, utc=utc)
        check_request(request)
        with suppress(TaskRevokedError):
            request.execute_using_pool(self._pool)
        _ = request.stamps  # read only while a stamp is revoked


def check_request(request: Request) -> None:
    """Evaluate the parts of a request that Celery reads in the event loop at a task's start.

    Raises:
        Exception: The error that Celery would raise.
    """
    for seconds in request.time_limits:
        # Celery sets a timer for each time limit.
        if seconds and not math.isfinite(time.monotonic() + seconds):
            raise InvalidTaskError(f"the time limit {seconds} is not finite")
    _, _, embed = request._payload  # which a pool's child reads
    dict(**embed or {})
    for name in request.request_dict:
        # The names become attributes of ``task.request``. A name that is not UTF-8 is bytes.
        if isinstance(name, str) and callable(getattr(Context, name, None)):
            raise InvalidTaskError(f"header {shortened(name)} hides a method of task.request")
    # The worker counts tasks by name, and ``celery inspect`` shows them as JSON.
    json.dumps({request.name: request.info(safe=True)})


def is_ours(message: Message) -> bool:
    """Return whether a message has passed check-in or the levels; see :func:`.bound_bodies`."""
    return getattr(message, "rabbitdelay_is_ours", False)


def guard_consumer(consumer: Consumer, refuse: Refuse) -> None:
    """Refuse a delayed message if Celery raises an error about it.

    Args:
        consumer: The worker's consumer.
        refuse: Called with the message and the error.
    """
    connect, create = consumer.ensure_connected, consumer.create_task_handler

    def ensure_connected(connection: Connection) -> Connection:
        connected: Connection = connect(connection)
        read_unreadable_properties(connected)
        return connected

    def create_task_handler(*args: object, **options: object) -> Callable[[Message], object]:
        handle = create(*args, **options)

        def on_task_received(message: Message) -> Any:
            try:
                return handle(message)
            except _connection_errors(consumer):
                raise
            except Exception as error:
                if not is_ours(message):
                    raise
                refuse(message, error)

        return on_task_received

    consumer.ensure_connected = ensure_connected
    consumer.create_task_handler = create_task_handler


def run_strategy(consumer: Consumer, delivery: Delivery, refuse: Refuse) -> None:
    """Run a task's strategy outside of Celery's consumer, with the consumer's error handling.

    Args:
        consumer: The worker's consumer.
        delivery: The task's message, as Celery has passed it.
        refuse: Called with the message and any other error.
    """
    try:
        delivery.go_on()
    except (InvalidTaskError, ContentDisallowed) as invalid:
        consumer.on_invalid_task(delivery.body, delivery.message, invalid)
    except DecodeError as unreadable:
        consumer.on_decode_error(delivery.message, unreadable)
    except _connection_errors(consumer):
        raise
    except Exception as error:  # noqa: BLE001 - Celery raises any about a message
        refuse(delivery.message, error)


def guard_pool(worker: Worker, refuse: Refuse) -> None:
    """Refuse a delayed task that the pool cannot accept, and free its slot.

    Celery passes a task to the pool when its message arrives, when its rate limit or its ``eta``
    allows the task, or when another task frees a slot. Each time, Celery calls ``_process_task``.

    Args:
        worker: The worker, which has a pool but no consumer yet.
        refuse: Called with the task's message and the error.
    """
    celerys = worker._process_task  # Celery reads it for every task that waits for a slot

    def process_task(request: Request) -> None:
        if not is_ours(request.message):
            celerys(request)
            return
        try:
            check_request(request)
            request.execute_using_pool(worker.pool)
        except TaskRevokedError:
            pass
        except _connection_errors(worker.consumer):
            raise
        except Exception as error:  # noqa: BLE001 - Celery raises any about a message
            state.task_ready(request)
            _forget_job(worker.pool, request)
            refuse(request.message, error)
        else:
            return
        if worker.semaphore is not None:
            # Free the slot later: freeing it now would start the next waiting task in this call.
            worker.hub.call_soon(worker.semaphore.release)

    apply = worker.pool.on_apply

    def on_apply(target: Any, *args: Any, **options: Any) -> Any:
        request = getattr(options.get("error_callback"), "__self__", None)
        if request is None or not is_ours(request.message):
            return apply(target, *args, **options)

        def run(*given: object) -> object:
            try:
                return target(*given)
            except Exception:  # noqa: BLE001 - as in a process of the prefork pool
                return ExceptionInfo()

        def settle(result: object) -> None:
            has_failed = isinstance(result, ExceptionInfo)
            options["error_callback" if has_failed else "callback"](result)

        return apply(run, *args, **{**options, "callback": settle})

    # The prefork pool replaces ``on_apply`` when it starts. In other pools, an error outside of the
    # task's own code would end the thread's work or the greenlet, without settling the message.
    worker.pool.on_apply = on_apply
    worker._process_task = process_task
    if worker.process_task == celerys:
        worker.process_task = process_task


def _forget_job(pool: object, request: Request) -> None:
    """Remove a job that the prefork pool has not sent yet; a stopping pool would wait for it."""
    jobs = getattr(getattr(pool, "_pool", None), "_cache", {})
    for job in list(jobs.values()):
        if getattr(job._callback, "__self__", None) is request:
            job.discard()


def _connection_errors(consumer: Consumer) -> tuple[type[Exception], ...]:
    """Return the errors that a consumer raises after losing its connection or channel."""
    return (*consumer.connection_errors, *consumer.channel_errors)
