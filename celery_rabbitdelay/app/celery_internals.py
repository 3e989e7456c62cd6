"""Private and undocumented parts of Celery, each behind a function named for its use.

If Celery changes such a part, tests/kernel/unit/test_upstream.py fails with the part's name. The
parts of a running worker are in :mod:`celery_rabbitdelay.worker.celery_internals`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, tzinfo
from inspect import signature, unwrap
from types import CodeType, FrameType
from typing import Any, Final, TypeVar

import celery
from celery.app import amqp as celery_amqp
from celery.app.defaults import SETTING_KEYS
from celery.app.registry import TaskRegistry
from celery.backends.base import Backend
from celery.canvas import Signature, group
from celery.utils.quorum_queues import detect_quorum_queues
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu import Queue

from celery_rabbitdelay.app.options import Options
from celery_rabbitdelay.exceptions import InvalidDelay
from celery_rabbitdelay.levels.delay import plain

SignatureT = TypeVar("SignatureT", bound="Signature[Any]")


# The application.


def registered_task(app: celery.Celery, name: str) -> Any:
    """Return a task by its name, None if unknown; ``app.tasks`` would finalize the app."""
    return app._tasks.get(name)  # type: ignore[attr-defined]


@contextmanager
def results_kept_in(app: celery.Celery, backend: Backend) -> Iterator[None]:
    """Use another result backend within a block, in all threads.

    Args:
        app: The application.
        backend: The backend. Tasks with their own backend keep it.
    """
    private: Any = app
    former = private._backend_cache
    private._backend_cache = backend
    try:
        yield
    finally:
        private._backend_cache = former


def forget_connections(app: celery.Celery) -> None:
    """Drop an application's connections and its result backend; Celery creates new ones."""
    private: Any = app
    private._pool = private.amqp._producer_pool = None
    private._backend_cache = private._local.backend = None


def has_quorum_queue(app: celery.Celery) -> bool:
    """Return whether Celery would use native delayed delivery; a quorum queue turns it on.

    Args:
        app: The application, whose broker is RabbitMQ.
    """
    found, _ = detect_quorum_queues(app, "amqp")
    return found


# Mixing classes of this package into the classes of an application.


def combined_class(ours: type[object], base: type[object]) -> type[Any]:
    """Return a subclass of both classes; this package's methods come first, and call the base's."""
    if issubclass(base, ours):
        return base
    if issubclass(ours, base):
        return ours
    own = {"__module__": base.__module__, "__doc__": base.__doc__, "_installed_on": base}
    return type(base.__name__, (ours, base), own)


def mixed(ours: type[object], made: object) -> Any:
    """Mix a class of this package into a class, or into the class of an object, in place."""
    if isinstance(made, type):
        return combined_class(ours, made)
    made.__class__ = combined_class(ours, type(made))
    return made


def installed_on(cls: type[object]) -> type[object]:
    """Return the base of a combined class, since only the base can be imported by name."""
    base: type[object] = getattr(cls, "_installed_on", cls)
    return base


class MixingTasks(TaskRegistry):
    """An application's tasks, with this package's class mixed into every task.

    Celery adds every task here, whatever its ``base``: from the decorators, ``shared_task`` and
    ``register_task``.
    """

    ours: type[object]

    @classmethod
    def mix(cls, app: celery.Celery, ours: type[object]) -> None:
        """Mix a class into all tasks of an application, present and future."""
        private: Any = app
        tasks: MixingTasks = mixed(cls, private._tasks)
        tasks.ours = ours
        for name, task in list(tasks.items()):
            tasks[name] = task

    def __setitem__(self, name: str, task: Any) -> None:
        # A proxy, such as a decorator returns, is not a task.
        is_task = issubclass(type(task), celery.Task)
        super().__setitem__(name, mixed(self.ours, task) if is_task else task)


class DelayingQueues(celery_amqp.Queues):
    """Celery's queues; ``add_consumer`` binds its queue to the delivery exchange."""

    #: kombu calls this once the queue is declared: with its name, and its counts of messages and
    #: consumers.
    on_declared: Callable[[str, int, int], None] | None = None

    def select_add(self, queue: Any, **options: Any) -> Queue:  # type: ignore[override]
        """Add a queue for the worker to consume from (``add_consumer``)."""
        selected: Queue = super().select_add(queue, **options)  # type: ignore[assignment]
        if selected.on_declared is None:
            selected.on_declared = self.on_declared
        return selected


class DelayingAMQP(celery_amqp.AMQP):
    """Celery's AMQP features, with :class:`DelayingQueues`."""

    @classmethod
    def mixed_into(cls, made: celery_amqp.AMQP) -> celery_amqp.AMQP:
        """Mix this class into an application's ``amqp``, which may be in use already."""
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


def check_arguments(task: Any, args: Iterable[object], kwargs: Mapping[str, object]) -> None:
    """Check the arguments of a task as Celery does.

    Args:
        task: The task. If only its name is given, nothing is checked.
        args: The task's positional arguments.
        kwargs: The task's keyword arguments.

    Raises:
        TypeError: The task does not accept these arguments.
    """
    if not isinstance(task, str) and task.typing and hasattr(task, "__header__"):
        task.__header__(*args, **kwargs)


def copied_as(cls: type[SignatureT], made: Signature[Any]) -> SignatureT:
    """Copy a Celery signature to another class."""
    private: Any = made
    copied = cls(made, app=private._app)  # type: ignore[arg-type]
    copied._type = private._type  # type: ignore[attr-defined]
    return copied


# The headers argsrepr and kwargsrepr, and naive times.


def repr_limits(app: celery.Celery) -> tuple[tuple[int, int], int | None]:
    """Return the maximum lengths of both headers, and how deeply they show nested arguments."""
    name = "task_repr_maxlevels"
    # A setting since Celery 5.7; earlier versions ignore it.
    depth: int | None = app.conf[name] if name in SETTING_KEYS else 3
    return (app.amqp.argsrepr_maxsize, app.amqp.kwargsrepr_maxsize), depth


def sends_a_callback() -> bool:
    """Return whether a worker is sending a task's callback or the next task of its chain.

    Celery 5.7 retries these sends itself; earlier versions publish them like any other.
    """
    is_on: ContextVar[bool] | None = getattr(celery_amqp, "_callback_publish_retry", None)
    return is_on is not None and is_on.get()


#: The modules of Celery whose functions wrap a task's own function.
_AROUND_TASKS: Final = ("celery.app.autoretry", "celery.app.task")


def is_sent_by_celery() -> bool:
    """Return whether Celery, and not the running task's own code, is sending a task.

    Celery itself sends callbacks, the next task of a chain, and the body of a chord: in the
    function that called the task's own function, or in one of Celery's own tasks.
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
    """Return whether Celery's ``autoretry_for`` called ``retry``, directly or through overrides.

    Only this package's ``retry`` may call this function, which inspects the call stack.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name == "retry":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "celery.app.autoretry"


def task_that_is_sent() -> str | None:
    """Return the id of the task that Celery's ``send_task`` is sending; None for other callers."""
    frame = sys._getframe(2)
    is_sending = frame.f_code is unwrap(celery.Celery.send_task).__code__
    return frame.f_locals["task_id"] if is_sending else None


def sends_a_group() -> bool:
    """Return whether the call stack shows Celery sending the members of a group."""
    code: CodeType = group._apply_tasks.__code__  # type: ignore[attr-defined]
    return sys._getframe(2).f_code is code


def headers_of_former(app: celery.Celery, options: Options) -> Mapping[str, object]:
    """Return the headers of the task that a send retries or replaces.

    The headers are read from the running task, because ``retry(headers=...)`` replaces them in the
    options. If no task is running, because its worker process was lost, Celery passes the headers
    as options.

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


def arguments_by_name(
    method: Callable[..., Any], first: int, values: tuple[object, ...]
) -> dict[str, Any]:
    """Map the positional arguments of one of Celery's methods to their names.

    Args:
        method: The method.
        first: The position of the first argument, counted from 0.
        values: The arguments.

    Raises:
        TypeError: Too many arguments were given.
    """
    bound = signature(method).bind_partial(*[None] * first, *values)
    return dict(zip(list(bound.arguments)[first:], values, strict=True))


def eta_of(value: object, timezone: tzinfo) -> datetime | None:
    """Return an ``eta`` as Celery's requests read it, None if missing or invalid.

    Args:
        value: The ``eta`` of a message, or the option ``eta`` of a caller, which Celery copies to
            the message.
        timezone: The time zone of the result. A naive instant is in UTC, whatever the settings
            ``timezone`` and ``enable_utc`` are.

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
