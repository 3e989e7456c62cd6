"""The parts of Celery that are private or undocumented, each behind a function that says its use.

When Celery moves one of them, tests/kernel/unit/test_upstream.py says which. The parts of a running
worker are in :mod:`celery_rabbitdelay.worker.celery_internals`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, tzinfo
from inspect import Parameter, signature, unwrap
from threading import RLock
from types import CodeType, FrameType, FunctionType
from typing import Any, Final, TypeVar

import celery
from celery import signals
from celery.app import amqp as celery_amqp
from celery.app.defaults import SETTING_KEYS
from celery.app.registry import TaskRegistry
from celery.app.routes import MapRoute, Router
from celery.backends.base import Backend
from celery.canvas import Signature, group
from celery.utils.quorum_queues import detect_quorum_queues
from celery.utils.saferepr import saferepr
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu import Queue

from celery_rabbitdelay.exceptions import InvalidDelay
from celery_rabbitdelay.levels.delay import plain

SignatureT = TypeVar("SignatureT", bound=Signature[Any])


# The application.


def registered_task(app: celery.Celery, name: str) -> Any:
    """Return a task by its name, None if there is none; ``app.tasks`` would finalize the app."""
    return app._tasks.get(name)  # type: ignore[attr-defined]


@contextmanager
def results_kept_in(app: celery.Celery, backend: Backend) -> Iterator[None]:
    """Keep the application's results in another backend for the time of a block, in all threads.

    Args:
        app: The application.
        backend: The backend. Tasks that have a backend of their own keep it.
    """
    private: Any = app
    former = private._backend_cache
    private._backend_cache = backend
    try:
        yield
    finally:
        private._backend_cache = former


def forget_connections(app: celery.Celery) -> None:
    """Let an application connect anew, to the broker and to the result backend of its settings."""
    private: Any = app
    private._pool = private.amqp._producer_pool = None
    private._backend_cache = private._local.backend = None


def has_quorum_queue(app: celery.Celery) -> bool:
    """Return whether Celery would use its native delayed delivery, which a quorum queue turns on.

    Args:
        app: The application, whose broker is RabbitMQ.
    """
    found, _ = detect_quorum_queues(app, "amqp")
    return found


# How Celery makes the message of a task.

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
_SIGNALS_OF_PUBLISHING: Final = (
    signals.before_task_publish,
    signals.after_task_publish,
    signals.task_sent,
)

#: The attributes of a task that its message depends on.
_OF_A_TASK: Final = (
    *("ignore_result", "time_limit", "soft_time_limit", "shadow_name", "_backend"),
    *("rabbitdelay", "once", "track"),
)


def makers_of_messages(app: Any, task: Any) -> tuple[object, ...]:
    """Return what differs as soon as Celery might make another message of the same call.

    That takes a few microseconds. Not seen is what is changed within a value of the configuration,
    which Celery has read already, and what a router or a receiver does: see
    :func:`makes_messages_alone`.

    Args:
        app: The application.
        task: The task; None for one that the application does not know.
    """
    conf, amqp = app.conf, app.amqp
    return (
        *(os.getpid(), conf, len(conf.maps), dict(conf.changes)),
        *(
            amqp,
            amqp.router,
            *getattr(amqp.router, "routes", ()),
            amqp.queues,
            *amqp.queues.values(),
        ),
        *(amqp.send_task_message, amqp.create_task_message, type(app.backend)),
        *(amqp.argsrepr_maxsize, amqp.kwargsrepr_maxsize),
        *(type(app).send_task, vars(app).get("send_task")),
        *[getattr(owner, name) for owner, name in _MAKERS],
        *[bool(signal.receivers) for signal in _SIGNALS_OF_PUBLISHING],
        None if task is None else task._get_exec_options(),
        *[getattr(task, name, None) for name in _OF_A_TASK],
    )


def is_publishing_watched(app: celery.Celery) -> bool:
    """Return whether receivers of signals, or events, get each message that Celery publishes."""
    receivers = any(signal.receivers for signal in _SIGNALS_OF_PUBLISHING)
    return receivers or bool(app.conf.task_send_sent_event)


def makes_messages_alone(app: Any, task: Any, our_task: type[Any]) -> bool:
    """Return whether Celery makes a task's messages from data alone.

    Not if a function of somebody else's has a part in it: a router, a receiver of a signal, a
    subclass, or what a library has wrapped Celery's functions in. Not with an event for each
    message either, nor in Celery's message protocol 1.

    Args:
        app: The application.
        task: The task; None for one that the application does not know.
        our_task: The class whose ``apply_async`` is called before Celery's.
    """
    conf, amqp, router = app.conf, app.amqp, app.amqp.router
    routes = getattr(router, "routes", ())
    functions = [getattr(owner, name) for owner, name in _MAKERS]
    functions += (amqp.send_task_message, type(app.backend).on_task_call)
    functions.append(getattr(amqp.create_task_message, "__func__", None))
    return (
        not is_publishing_watched(app)
        and not conf.task_always_eager
        and conf.task_protocol == 2
        and type(amqp) is DelayingAMQP
        and type(router) is Router
        and all(type(route) is MapRoute for route in routes)
        and all(map(_is_celerys, functions))
        # That of the results by RPC publishes.
        and not type(app.backend).__module__.endswith(".rpc")
        and "send_task" not in vars(app)
        and _definers(app, "send_task")[1:] == [celery.Celery]
        and (task is None or _is_plain(task, our_task))
    )


def _is_plain(task: Any, our_task: type[Any]) -> bool:
    """Return whether a task's class has no part in its messages."""
    definers = _definers(task, "apply_async")
    return (
        task.expires is None
        and getattr(task, "_dump_pydantic_arguments", None) is None  # since Celery 5.6
        and not task.__v2_compat__
        and "shadow_name" not in vars(task)
        and _definers(task, "shadow_name") == [celery.Task]
        and definers[-2:] == [our_task, celery.Task]
    )


def _definers(instance: object, name: str) -> list[type[Any]]:
    """Return the classes of an instance that define a function, in the order of their calls."""
    return [cls for cls in type(instance).__mro__ if name in vars(cls)]


def _is_celerys(function: object) -> bool:
    """Return whether a function is Celery's own, and not a wrapper that looks like it."""
    if not isinstance(function, FunctionType) or not function.__module__.startswith("celery."):
        return False
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    return function.__code__.co_filename == file


# Combining our classes with those of an application.


def combined_class(ours: type[Any], base: type[Any]) -> type[Any]:
    """Return a class that is ours and another one, whose methods ours call by ``super()``."""
    if issubclass(base, ours):
        return base
    if issubclass(ours, base):
        return ours
    own = {"__module__": base.__module__, "__doc__": base.__doc__, "_installed_on": base}
    return type(base.__name__, (ours, base), own)


def mixed(ours: type[Any], made: Any) -> Any:
    """Return a class as :func:`combined_class` does; an object gets that class."""
    if isinstance(made, type):
        return combined_class(ours, made)
    made.__class__ = combined_class(ours, type(made))
    return made


def installed_on(cls: type[Any]) -> type[Any]:
    """Return the other class of :func:`combined_class`: only it can be imported by name."""
    base: type[Any] = getattr(cls, "_installed_on", cls)
    return base


class Mixed:
    """An attribute of an application that Celery caches, with a class of ours mixed in.

    Celery, or the application's own class, makes the value when it is first needed. What is
    assigned, as in Flask's recipe ``app.Task = ContextTask``, gets our class as well.

    Args:
        mix: Mixes our class into a value, once.
    """

    def __init__(self, mix: Callable[[Any], Any]) -> None:
        self._mix = mix
        self._lock = RLock()

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, app: Any, owner: type[Any] | None = None) -> Any:
        if app is None:
            return self
        # As in Celery, all threads get the same value.
        with self._lock:
            if self._name not in vars(app):
                made = getattr(super(self._owner, app), self._name)
                vars(app)[self._name] = self._mix(made)
            return vars(app)[self._name]

    def __set__(self, app: Any, value: Any) -> None:
        with self._lock:
            vars(app)[self._name] = self._mix(value)

    def __delete__(self, app: Any) -> None:
        with self._lock:
            vars(app).pop(self._name, None)


class MixingTasks(TaskRegistry):
    """An application's tasks, with a class of ours mixed into each.

    Celery puts each task in here, whatever its ``base`` and whoever has made it: the decorators,
    ``shared_task`` and ``register_task``.
    """

    ours: type[Any]

    @classmethod
    def mix(cls, app: celery.Celery, ours: type[Any]) -> None:
        """Mix a class into the tasks that an application has, and into those to come."""
        private: Any = app
        tasks: MixingTasks = mixed(cls, private._tasks)
        tasks.ours = ours
        for name, task in list(tasks.items()):
            tasks[name] = task

    def __setitem__(self, name: str, task: Any) -> None:
        # A stand-in, such as the one that a decorator returns, is no task itself.
        is_task = issubclass(type(task), celery.Task)
        super().__setitem__(name, mixed(self.ours, task) if is_task else task)


class DelayingQueues(celery_amqp.Queues):
    """Celery's queues; those added by ``add_consumer`` are bound to the delivery exchange."""

    #: kombu calls this with the name, messages and consumers of such a queue once it is declared.
    on_declared: Callable[[str, int, int], None] | None = None

    def select_add(self, queue: Any, **options: Any) -> Queue:  # type: ignore[override]
        """Add a queue that the worker shall consume from (``add_consumer``)."""
        selected: Queue = super().select_add(queue, **options)  # type: ignore[assignment]
        if selected.on_declared is None:
            selected.on_declared = self.on_declared
        return selected


class DelayingAMQP(celery_amqp.AMQP):
    """Celery's AMQP features; its queues know how to become ready for delayed tasks."""

    @classmethod
    def mixed_into(cls, made: celery_amqp.AMQP) -> celery_amqp.AMQP:
        """Give this class to what an application has made, and may have used already."""
        amqp: Any = mixed(cls, made)
        if "queues" in vars(amqp):
            amqp._delaying(amqp.queues)
        return made

    def Queues(self, *args: Any, **options: Any) -> celery_amqp.Queues:  # noqa: N802
        """Create Celery's queues by name."""
        return self._delaying(super().Queues(*args, **options))

    def _delaying(self, queues: celery_amqp.Queues) -> celery_amqp.Queues:
        app: Any = self.app
        delaying: DelayingQueues = mixed(DelayingQueues, queues)
        delaying.on_declared = app.rabbitdelay.bind_declared_queue
        return delaying


# Tasks and signatures.


def argument_check(task: celery.Task[Any, Any]) -> Callable[..., Any] | None:
    """Return what Celery checks arguments with; it raises :class:`TypeError`. None for no check."""
    check: Callable[..., Any] | None = getattr(task, "__header__", None) if task.typing else None
    return check


def copied_as(cls: type[SignatureT], made: Signature[Any]) -> SignatureT:
    """Return a signature of another class with everything that a signature has."""
    private: Any = made
    copy: Any = cls(made, app=private._app)  # type: ignore[arg-type]
    copy._type = private._type
    copied: SignatureT = copy
    return copied


# The headers argsrepr and kwargsrepr, and naive times.


def repr_limits(app: celery.Celery) -> tuple[tuple[int, int], int | None]:
    """Return the maximum characters of both, and how deep they go into nested arguments."""
    name = "task_repr_maxlevels"
    # A setting since 5.7; before, Celery does not look at what an application has set there.
    depth: int | None = app.conf[name] if name in SETTING_KEYS else 3
    return (app.amqp.argsrepr_maxsize, app.amqp.kwargsrepr_maxsize), depth


def sends_a_callback() -> bool:
    """Return whether a worker is sending a task's callback or the next task of its chain.

    Celery 5.7 does that with retries of its own; earlier versions publish as everywhere else.
    """
    is_on: ContextVar[bool] | None = getattr(celery_amqp, "_callback_publish_retry", None)
    return is_on is not None and is_on.get()


#: The modules of Celery whose functions a worker calls around a task's own one.
_AROUND_TASKS: Final = ("celery.app.autoretry", "celery.app.task")


def is_sent_by_celery() -> bool:
    """Return whether a worker sends what follows a task, and not the task itself does.

    That is a callback, the next task of a chain, or the body of a chord. Celery sends them in the
    function that has called the task's own one, or in a task of its own.
    """
    frame: FrameType | None = sys._getframe(1)
    called = ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == "celery.app.trace" and frame.f_code.co_name == "trace_task":
            return called.startswith("celery.")
        if module not in _AROUND_TASKS:
            called = module
        frame = frame.f_back
    return False


def retries_by_itself() -> bool:
    """Return whether Celery's ``autoretry_for`` calls ``retry``, perhaps over an application's own.

    To be called by our ``retry``.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name == "retry":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "celery.app.autoretry"


def task_that_is_sent() -> str | None:
    """Return the id of the task if Celery's ``send_task`` calls the caller."""
    frame = sys._getframe(2)
    is_sending = frame.f_code is unwrap(celery.Celery.send_task).__code__
    return frame.f_locals["task_id"] if is_sending else None


def sends_a_group() -> bool:
    """Return whether the function that calls the caller is the one that sends a group's members."""
    code: CodeType = group._apply_tasks.__code__  # type: ignore[attr-defined]
    return sys._getframe(2).f_code is code


def headers_of_former(app: celery.Celery, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the headers of the message whose task is retried, or replaced, by one that is sent.

    They are those of the task that runs: what ``retry(headers=...)`` gives comes instead of them.
    Where none runs, because its worker process was lost, Celery sends them with the retry.

    Args:
        app: The application.
        options: The options of the task that is sent.
    """
    is_retry = options.get("retries")
    if not is_retry and not options.get("replaced_task_nesting"):
        return {}
    task: Any = app.current_worker_task
    if task is not None and task.request.id == options.get("task_id"):
        return task.request.headers or {}
    return (is_retry and options.get("headers")) or {}


def as_given(args: Any, kwargs: Any, *more: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call without the task's own ones that the caller has left out.

    An override of the application's may have other defaults for them than None.

    Args:
        args: The task's positional arguments.
        kwargs: Its keyword arguments.
        *more: Further positional arguments of the call.
    """
    if more or (args is not None and kwargs is not None):
        return (args, kwargs, *more), {}
    if kwargs is not None:
        return (), {"kwargs": kwargs}
    return () if args is None else (args,), {}


def positional(function: Callable[..., Any], values: tuple[Any, ...]) -> dict[str, Any]:
    """Return the fourth and later positional arguments of ``send_task`` by their names.

    Args:
        function: The method that takes them.
        values: The arguments.
    """
    for each in (function, celery.Celery.send_task.__get__(object())):
        names = [
            name
            for name, parameter in signature(each).parameters.items()
            if parameter.kind is Parameter.POSITIONAL_OR_KEYWORD
        ][3:]
        if len(names) >= len(values):
            return dict(zip(names, values, strict=False))
    raise TypeError(f"send_task() takes at most {len(names) + 3} arguments by position")


def celerys_repr(value: Any, size: int, depth: int | None) -> str:
    """Return what Celery writes into such a header."""
    return saferepr(value, size, depth)  # type: ignore[arg-type]


def eta_of(value: Any, timezone: tzinfo) -> datetime | None:
    """Return an ``eta`` as Celery's requests read it, None if missing or invalid.

    Args:
        value: The field of a message, or what a sender gives, which Celery writes there as it is.
        timezone: That of the result. A naive instant is UTC, whatever ``timezone`` and
            ``enable_utc`` say.

    Raises:
        InvalidDelay: As :func:`.plain`.
    """
    try:
        instant = maybe_iso8601(plain(value, "eta"))
    except InvalidDelay:
        raise
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return None
    return maybe_make_aware(instant, timezone) if isinstance(instant, datetime) else None
