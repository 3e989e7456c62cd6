"""The Celery application of a Python process of Spark, and what PySpark 4.0 lacks."""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

import kombu
from celery.app.utils import find_app
from pyspark.sql import datasource

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app.application import Celery
from celery_rabbitdelay.levels.shown_url import without_password
from celery_rabbitdelay.registry.options import is_tracked
from celery_rabbitdelay.spark.options import ApplicationOptions

#: Whether the writer of a stream gets Arrow batches, and not rows (PySpark 4.1).
STREAMS_BATCHES: Final = hasattr(datasource, "DataSourceStreamArrowWriter")

#: Whether a reader may take filters (PySpark 4.1).
HAS_FILTERS: Final = hasattr(datasource, "EqualTo")

if TYPE_CHECKING or STREAMS_BATCHES:
    StreamWriterBase = datasource.DataSourceStreamArrowWriter
else:
    StreamWriterBase = datasource.DataSourceStreamWriter


SelfT = TypeVar("SelfT")
ReturnT = TypeVar("ReturnT")
ParametersT = ParamSpec("ParametersT")

#: The name of an application that is made of a URL.
MADE: Final = "celery_rabbitdelay.spark"

#: The applications of this process, which Spark uses for many partitions.
_applications: dict[ApplicationOptions, Any] = {}


def application_of(options: ApplicationOptions) -> Any:
    """Return the application, and keep it for the next partition.

    Raises:
        InvalidOption: There is no such application, or it does not delay by this package.
    """
    found = _applications.get(options)
    if found is None:
        made = _made(options) if options.app is None else _imported(options.app)
        found = _applications[options] = made
    return found


def _imported(path: str) -> Any:
    if re.fullmatch(r"[\w.]+(:[\w.]+)?", path) is None:
        takes = (
            "takes the import path of a Celery application, such as shop:app; a broker's URL is "
            "the option broker"
        )
        raise exceptions.InvalidOption("app", without_password(path), takes)
    try:
        app: Any = find_app(path)
    except (ImportError, AttributeError, ValueError) as missing:
        takes = f"cannot be imported here, on {_where()}: {missing}"
        raise exceptions.InvalidOption("app", path, takes) from missing
    if not isinstance(app, Celery):
        takes = "takes an application of this package: call celery_rabbitdelay.install(app)"
        raise exceptions.InvalidOption("app", path, takes)
    return app


def _made(options: ApplicationOptions) -> Celery:
    app = Celery(MADE, broker=options.broker_url, set_as_current=False)
    settings = {
        "rabbitdelay_registry_url": options.registry_url,
        "rabbitdelay_prefix": options.prefix,
        "rabbitdelay_layout": options.layout,
        "broker_use_ssl": options.broker_use_ssl,
    }
    app.conf.update({name: value for name, value in settings.items() if value is not None})
    know_queue(app, None)
    return app


def know_queue(app: Any, name: str | None) -> None:
    """Let an application that is made of a URL send to a queue as it is on the broker.

    It does not know whether it is a quorum queue, for example, so it cannot declare it.

    Args:
        app: The application.
        name: The queue's name; None for Celery's default.
    """
    name = name or str(app.conf.task_default_queue)
    known = app.amqp.queues.get(name)
    if app.main == MADE and (known is None or not known.no_declare):
        app.amqp.queues.add(kombu.Queue(name, no_declare=True))


def explained(
    method: Callable[Concatenate[SelfT, ParametersT], ReturnT],
) -> Callable[Concatenate[SelfT, ParametersT], ReturnT]:
    """Let a method that Spark calls raise errors as :func:`explain` makes them.

    Its object's attribute ``application`` is the application, if that is known already.
    """

    @wraps(method)
    def called(self: SelfT, /, *args: ParametersT.args, **kwargs: ParametersT.kwargs) -> ReturnT:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            explain(error, getattr(self, "application", None))
            raise error from None

    return called


def explain(error: Exception, options: ApplicationOptions | None, *raw: type[Exception]) -> None:
    """Add to the error of a connection what to check, and drop its traceback.

    Spark shows a driver the traceback first. It says no more than the text, if the error is one of
    this package or of a connection.

    Args:
        error: The error.
        options: The application, if it is known.
        *raw: Further errors of connections to the broker.
    """
    registry = isinstance(error, exceptions.RegistryUnavailable)
    causes = error.errors.values() if isinstance(error, exceptions.RowsNotConfirmed) else (error,)
    if registry or any(isinstance(each, (exceptions.ConnectionLost, *raw)) for each in causes):
        server, setting, option = (
            ("Redis", "rabbitdelay_registry_url", "registry")
            if registry
            else ("RabbitMQ", "broker_url", "broker")
        )
        given = f"the options {option} and {option}Password"
        app = None if options is None else options.app
        place = given if app is None else f"{setting} of the application {app}"
        error.add_note(f"Check that {server} runs and can be reached from {_where()}, and {place}.")
    elif not isinstance(error, exceptions.RabbitDelayError):
        return
    error.__traceback__ = None


def find_task(app: Any, name: str, allows_unknown: bool) -> Any:
    """Return a task of the application; None if it may be sent by its name alone.

    Args:
        app: The application; one that is made of a URL knows no tasks.
        name: The task's name.
        allows_unknown: Whether the application need not know it.

    Raises:
        InvalidOption: The application does not know it.
    """
    if name in app.tasks or allows_unknown or app.main == MADE:
        return app.tasks.get(name)
    try:
        # As a worker does: the modules of the settings, and those that are discovered.
        app.loader.import_default_modules()
    except Exception as failed:  # noqa: BLE001 - importing runs code of the user's
        problem = f"is not found: importing the modules of tasks here, on {_where()}: {failed!r}"
    else:
        if name in app.tasks:
            return app.tasks[name]
        (meant, *_) = (*get_close_matches(name, list(app.tasks), 1), "")
        problem = "is unknown to the application" + (f"; did you mean {meant}?" if meant else "")
    takes = f"{problem}; set allowUnknownTasks to send a task by its name alone"
    raise exceptions.InvalidOption("task", name, takes)


def tracks(app: Any) -> bool:
    """Return whether tasks may be tracked; an application that is made of a URL does not know."""
    if app.main == MADE:
        return True
    try:
        app.loader.import_default_modules()
    except Exception:  # noqa: BLE001 - importing runs code of the user's
        return True
    return any(is_tracked(app.rabbitdelay, each) for each in (None, *app.tasks.values()))


def _where() -> str:
    from pyspark import TaskContext

    return "the driver" if TaskContext.get() is None else "an executor"
