"""A Celery application whose delays wait in RabbitMQ.

:class:`Celery` is a :class:`celery.Celery`; :func:`install` does the same for an application that
exists already. Everything that Celery sends goes through ``Celery.send_task``, and that is the one
place where a delay is taken over: the task is made and routed by Celery itself, and only the
producer that publishes it is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

import celery
import click
from celery.app import amqp as celery_amqp
from celery.canvas import Signature
from celery.result import AsyncResult
from celery.utils.imports import symbol_by_name
from celery.utils.quorum_queues import detect_quorum_queues
from kombu import Connection, Producer, Queue
from kombu.utils.objects import cached_property
from kombu.utils.uuid import uuid

from celery_rabbitdelay.app.canvas import (
    CHORD_IS_SETTLED,
    NESTED,
    DelayingSignature,
    portable,
    settled,
)
from celery_rabbitdelay.app.extension import RabbitDelay, speaks_amqp
from celery_rabbitdelay.app.task import DelayingTask
from celery_rabbitdelay.app.task_producer import DelayedTaskProducer, HoldingProducer
from celery_rabbitdelay.exceptions import (
    UnknownOption,
)
from celery_rabbitdelay.levels import headers as names
from celery_rabbitdelay.levels.due import refuse_two
from celery_rabbitdelay.levels.place_value import Delay, milliseconds, tolerated

__all__ = ["Celery", "install"]

AppT = TypeVar("AppT", bound=celery.Celery)

#: The bootsteps that make a worker ready for delayed tasks, as Celery imports them.
WORKER_STEPS = (
    "celery_rabbitdelay.worker.bootsteps:DelayLevels",
    "celery_rabbitdelay.worker.bootsteps:Gate",
)

#: The bootstep by which a worker serves the modules around the levels.
MODULES_STEP = "celery_rabbitdelay.worker.bootsteps:Modules"

#: Options of a delayed task that are taken by a later version; Celery would drop them in silence.
NOT_YET = frozenset({"key"})


#: The option of ``celery worker`` that says which modules it serves.
MODULES_OPTION = click.Option(
    ["--rabbitdelay-modules"],
    help="Which modules around the delay levels the worker serves, separated by commas; instead "
    "of the setting rabbitdelay_modules. Empty for none.",
)


class DelayingQueues(celery_amqp.Queues):
    """Celery's queues; those that a running worker is told to consume from are bound as well."""

    #: What kombu calls when such a queue was declared.
    on_declared: Callable[[str, int, int], None] | None = None

    def select_add(self, queue: Any, **options: Any) -> Queue:  # type: ignore[override]
        """Add a queue that the worker shall consume from (``add_consumer``)."""
        selected: Queue = super().select_add(queue, **options)  # type: ignore[assignment]
        if selected.on_declared is None:
            selected.on_declared = self.on_declared
        return selected


class DelayingAMQP(celery_amqp.AMQP):
    """Celery's AMQP features; its queues are bound to the levels when they are declared."""

    def Queues(self, *args: Any, **options: Any) -> celery_amqp.Queues:  # noqa: N802
        """Create Celery's queues by name."""
        return self.make_delaying(super().Queues(*args, **options))

    def make_delaying(self, queues: celery_amqp.Queues) -> celery_amqp.Queues:
        """Turn existing queues into :class:`DelayingQueues`."""
        queues.__class__ = mixed(DelayingQueues, type(queues))
        assert isinstance(queues, DelayingQueues)
        app: Any = self.app
        queues.on_declared = app.rabbitdelay.bind_declared_queue
        return queues


class Celery(celery.Celery):
    """A :class:`celery.Celery` whose delays live in RabbitMQ; takes the same arguments.

    ``countdown``, ``eta`` and our own ``delay`` wait in the levels, wherever Celery takes them.
    Tasks without a delay take Celery's own path, unchanged.
    """

    def on_init(self) -> None:
        """Called by Celery at the end of its initialization."""
        super().on_init()
        _add_steps(self)

    @cached_property
    def rabbitdelay(self) -> RabbitDelay:
        """The application's delay levels: topology, settings, publishers."""
        return RabbitDelay(self)

    @cached_property
    def amqp(self) -> celery_amqp.AMQP:
        """Celery's AMQP features of the application."""
        amqp_class: type[DelayingAMQP] = mixed(DelayingAMQP, symbol_by_name(self.amqp_cls))  # type: ignore[arg-type]
        return amqp_class(app=self)

    def create_task_cls(self) -> type[celery.Task[Any, Any]]:
        """Create the base class of the application's tasks."""
        base = mixed(DelayingTask, symbol_by_name(self.task_cls))  # type: ignore[arg-type]
        return self.subclass_with_self(
            base, name="Task", attribute="_app", keep_reduce=True, abstract=True
        )

    def __reduce__(self) -> tuple[Any, ...]:
        reduced: tuple[Any, Any] = super().__reduce__()  # type: ignore[assignment]
        rebuild, (cls, *rest) = reduced
        return _rebuild, (rebuild, getattr(cls, "_installed_on", cls), *rest)

    def close(self) -> None:
        """Clean up after the application."""
        self.rabbitdelay.close()
        super().close()

    def send_task(
        self,
        name: str,
        args: Any = None,
        kwargs: Any = None,
        countdown: float | None = None,
        eta: datetime | str | None = None,
        task_id: str | None = None,
        producer: Producer | None = None,
        connection: Connection | None = None,
        *more: Any,
        delay: Delay | None = None,
        tolerance: Delay = 0,
        **options: Any,
    ) -> AsyncResult[Any]:
        """Send a task by name, as :meth:`celery.Celery.send_task`, which takes ``delay`` as well.

        Args:
            name: The task's name.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            countdown: Seconds until it may start.
            eta: The instant at which it may start; a naive one needs the ``timezone`` setting.
            task_id: Its id; a random one by default.
            producer: The caller's producer, whose connection is then used.
            connection: The caller's connection.
            *more: Whatever else Celery takes by position.
            delay: Seconds, or a timedelta, until it may start; zero or less sends it at once.
            tolerance: Seconds, or a timedelta, that the task may start later if that saves stops.
            **options: Everything else that Celery takes.

        Raises:
            TypeError: ``delay`` together with ``countdown`` or ``eta``, or one of a wrong type.
            ValueError: A delay that is not finite, or a naive ``eta`` without ``timezone``.
            DelayTooLong: The delay is above the layout's capacity.
            NeedsDistribution: Not exactly one known queue gets the task, or its priority is above 4
                and the levels are quorum queues.
            PublishError: The broker did not confirm.
        """
        came_from, options = _without_former_delay(options)
        chord_is_settled = options.pop(CHORD_IS_SETTLED, False)
        if not chord_is_settled and not options.get("retries"):
            options = settled(options, delay)
        if any(options.get(name) for name in NESTED):
            takeover = self.rabbitdelay.settings.takeover
            options = portable(options, "countdown" if takeover else "delay")
        if delay is not None:
            refuse_two(delay, countdown, eta)
        tolerance_ms = tolerated(tolerance)

        def send(
            countdown: Any, eta: Any, producer: Any = producer, connection: Any = connection
        ) -> AsyncResult[Any]:
            by_celery: Any = super(Celery, self).send_task
            given = (name, args, kwargs, countdown, eta, task_id, producer, connection)
            return by_celery(*given, *more, **options)  # type: ignore[no-any-return]

        if delay is None and not countdown and not eta:
            return send(countdown, eta)
        task_id = task_id or uuid()
        callers = producer or options.get("publisher")
        callers_connection = connection or (callers.connection if callers is not None else None)
        by_amqp = self._speaks_amqp(callers_connection)
        if not by_amqp or not self._takes_over(name, options.get("task_type"), delay):
            if delay is not None:
                countdown = milliseconds(delay) / 1000
                if not by_amqp and countdown > 0:
                    why = "the broker is not RabbitMQ, and a worker holds the task until it is due"
                    self.rabbitdelay.warn_of_countdown(why)
            if not by_amqp or not detect_quorum_queues(self, "amqp")[0]:
                return send(countdown, eta)
            # Not by Celery's native delayed delivery, whose queues no worker of ours declares.
            if connection is not None:
                callers = self.amqp.Producer(connection, auto_declare=False)
            with self.producer_or_acquire(callers) as acquired:
                held = HoldingProducer(acquired, countdown, eta)
                return send(None, None, producer=held, connection=None)
        _refuse_unknown(options)
        due = self.rabbitdelay.due(delay, countdown, eta, tolerance_ms)
        if due.is_over:
            return send(None, None)
        settings = self.rabbitdelay.settings
        if "check-in" not in settings.modules:
            settings.topology.layout.check(due.delay_ms)
        with self.rabbitdelay.publisher(callers_connection) as publisher:
            is_retry = bool(options.get("retries"))
            ours = DelayedTaskProducer(publisher, settings, self.amqp, due, is_retry, came_from)
            return send(None, None, producer=ours, connection=None)

    def signature(self, *args: Any, **options: Any) -> Any:
        """Create a signature bound to this application, as :meth:`celery.Celery.signature`."""
        signature = super().signature(*args, **options)
        return DelayingSignature.of(signature) if type(signature) is Signature else signature

    def _speaks_amqp(self, connection: Connection | None) -> bool:
        if connection is None:
            return self.rabbitdelay.available
        return speaks_amqp(connection)

    def _takes_over(self, name: str, task: Any, delay: Delay | None) -> bool:
        """Whether a delay goes into the levels: see ``rabbitdelay=False`` and ``takeover``."""
        # Not self.tasks, which would finalize the application.
        task = task or self._tasks.get(name)  # type: ignore[attr-defined]
        if not getattr(task, "rabbitdelay", True):
            return False
        return delay is not None or self.rabbitdelay.settings.takeover


def install(app: AppT) -> AppT:
    """Have the delays of an existing application live in RabbitMQ; returns the application.

    Call it right behind the application's creation: tasks that are defined before do not have
    ``retry(delay=...)``, with ``task_always_eager`` they do not check a delay, and their signatures
    may lose a delay as the body of a chord; everything else works for them too.

    Args:
        app: Any Celery application, Django's or a third party's. It stays the same object; only
            its class becomes a subclass of :class:`Celery` as well.
    """
    if isinstance(app, Celery):
        return app
    app.__class__ = mixed(Celery, type(app))
    app.__dict__.pop("Task", None)
    _add_steps(app)
    amqp = app.__dict__.get("amqp")
    if amqp is not None:
        amqp.__class__ = mixed(DelayingAMQP, type(amqp))
        if "queues" in amqp.__dict__:
            amqp.make_delaying(amqp.queues)
    return app


def _add_steps(app: celery.Celery) -> None:
    app.steps["consumer"].update(WORKER_STEPS)
    app.steps["worker"].add(MODULES_STEP)
    app.user_options["worker"].add(MODULES_OPTION)


def _rebuild(rebuild: Callable[..., celery.Celery], *arguments: Any) -> celery.Celery:
    """Unpickle an application: the class that :func:`install` made cannot be imported by name."""
    return install(rebuild(*arguments))


def _refuse_unknown(options: dict[str, Any]) -> None:
    for name in NOT_YET & options.keys():
        raise UnknownOption(name, options[name])


def _without_former_delay(options: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Take what an earlier delay left out of the headers; return the queue of a retry."""
    headers = options.get("headers")
    if not headers or not any(name.startswith(names.OWN_PREFIX) for name in headers):
        return None, options
    came_from = headers.get(names.QUEUE) if options.get("retries") else None
    return came_from, {**options, "headers": names.strip(headers)}


def mixed(ours: type[Any], base: type[Any]) -> type[Any]:
    """Return a class that is ``ours`` and ``base``."""
    if issubclass(base, ours):
        return base
    if issubclass(ours, base):
        return ours
    attributes = {"__module__": base.__module__, "_installed_on": base}
    return type(base.__name__, (ours, base), attributes)
