"""The Celery application of a Python process of Spark, its tasks, and how Spark shows errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, wraps
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar

import celery
from amqp.exceptions import AMQPError
from celery.app.utils import find_app
from pyspark import TaskContext
from pyspark.sql import types as T  # noqa: N812 - the name that Spark's users know

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app.application import Celery
from celery_rabbitdelay.app.celery_internals import check_arguments
from celery_rabbitdelay.levels.shown_url import without_password
from celery_rabbitdelay.registry.application import is_tracked
from celery_rabbitdelay.spark.columns import TYPES
from celery_rabbitdelay.spark.options import ApplicationOptions, WriteOptions, suggestion

ReturnT = TypeVar("ReturnT")
ParametersT = ParamSpec("ParametersT")

CeleryTask: TypeAlias = "celery.Task[Any, Any]"

#: The name of an application that is made from a URL.
MADE_FROM_URL: Final = "celery_rabbitdelay.spark"

#: The maximum number of positional arguments that are tried with a task.
MAX_ARGUMENTS: Final = 100


@cache
def application_of(options: ApplicationOptions) -> Celery:
    """Return the application; a process caches it for other partitions.

    Raises:
        InvalidOption: The application does not exist, or does not use this package.
    """
    return _made(options) if options.app is None else _imported(options.app)


def _imported(path: str) -> Celery:
    if re.fullmatch(r"[\w.]+(:[\w.]+)?", path) is None:
        takes = "takes an import path, such as shop:app; for a broker's URL, use the option broker"
        raise exceptions.InvalidOption("app", without_password(path), takes)
    try:
        app: object = find_app(path)
    except (ImportError, AttributeError, ValueError) as missing:
        takes = f"cannot be imported here, on {_where()}: {missing}"
        raise exceptions.InvalidOption("app", path, takes) from missing
    if not isinstance(app, Celery):
        takes = "takes an application of this package: call celery_rabbitdelay.install(app)"
        raise exceptions.InvalidOption("app", path, takes)
    return app


def _made(options: ApplicationOptions) -> Celery:
    app = Celery(MADE_FROM_URL, broker=options.broker, set_as_current=False)
    settings = {
        "rabbitdelay_registry_url": options.registry,
        "rabbitdelay_prefix": options.prefix,
        "rabbitdelay_layout": options.layout,
        "broker_use_ssl": options.broker_use_ssl,
    }
    app.conf.update({name: value for name, value in settings.items() if value is not None})
    return app


def briefly(method: Callable[ParametersT, ReturnT]) -> Callable[ParametersT, ReturnT]:
    """Decorate a method that Spark calls, so that :func:`brief` shortens its errors."""

    @wraps(method)
    def called(*args: ParametersT.args, **kwargs: ParametersT.kwargs) -> ReturnT:
        try:
            return method(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - raised again
            raise brief(error) from None

    return called


def brief(error: Exception) -> Exception:
    """Return an error; drop the traceback of this package's errors and of connection errors.

    Spark shows a driver the traceback first, although it adds nothing to the text.
    """
    if isinstance(error, (exceptions.RabbitDelayError, OSError, AMQPError)):
        error.__traceback__ = None
    return error


def find_task(app: Celery, name: str | None, allows_unknown: bool) -> CeleryTask | None:
    """Return a task of the application; None if its name alone suffices.

    Args:
        app: The application; if it is made from a URL, it knows no tasks.
        name: The task's name; None if it is in a column.
        allows_unknown: Whether to allow a task that the application does not know.

    Raises:
        InvalidOption: The application does not know the task.
    """
    if name is None:
        return None
    if name in app.tasks or allows_unknown or app.main == MADE_FROM_URL:
        return app.tasks.get(name)
    try:
        # Import the configured and the discovered modules, as a worker does.
        app.loader.import_default_modules()
    except Exception as failed:  # noqa: BLE001 - importing runs the user's code
        problem = f"is not found: cannot import the task modules here, on {_where()}: {failed!r}"
    else:
        if name in app.tasks:
            return app.tasks[name]
        problem = f"is unknown to the application{suggestion(name, app.tasks)}"
    takes = f"{problem}; set allowUnknownTasks to send a task by its name alone"
    raise exceptions.InvalidOption("task", name, takes)


def numbers_taken(
    task: CeleryTask | None, types: Mapping[str, T.DataType], options: WriteOptions
) -> Sequence[int]:
    """Return the numbers of positional arguments that fit a task and the columns of a write.

    Args:
        task: The task; None if its signature is unknown.
        types: The types of the columns.
        options: The options of the write.

    Raises:
        InvalidOption: The task does not take these columns as arguments, whatever a row holds.
    """
    args, kwargs = types.get("args"), types.get("kwargs")
    names = kwargs.names if isinstance(kwargs, T.StructType) else []
    if options.kwargs_from_columns:
        names = [name for name in types if name not in TYPES]
    numbers: Sequence[int] = [0] if args is None else range(MAX_ARGUMENTS)
    if isinstance(args, T.StructType):
        numbers = [len(args)]
    if task is None or isinstance(kwargs, T.MapType | T.StringType):
        return numbers
    taken, refused = [], ""
    for number in numbers:
        try:
            check_arguments(task, [None] * number, dict.fromkeys(names))
            taken.append(number)
        except TypeError as error:
            refused = refused or str(error)
    if not taken:
        takes = f"does not take these columns as its arguments: {refused}"
        raise exceptions.InvalidOption("task", str(task.name), takes)
    return taken


def tracks(app: Celery) -> bool:
    """Return whether tasks may be tracked; True if the application is made from a URL."""
    if app.main == MADE_FROM_URL:
        return True
    with suppress(Exception):  # importing runs the user's code
        app.loader.import_default_modules()
    return any(is_tracked(app.rabbitdelay, each) for each in (None, *app.tasks.values()))


def _where() -> str:
    return "the driver" if TaskContext.get() is None else "an executor"
