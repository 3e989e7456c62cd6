"""Code that all commands share: groups, options, error handling, and the application's delays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import date, datetime, tzinfo
from functools import wraps
from inspect import signature
from typing import Any, Final, NoReturn, TypeAlias

import amqp
import celery
import click
from celery.bin.base import CLIContext
from celery.exceptions import CeleryCommandException
from celery.platforms import EX_UNAVAILABLE
from kombu import Connection
from kombu.exceptions import OperationalError
from kombu.transport import pyamqp

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.levels import delay, shown_url, wall_clock
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.refusals import reason_of

_Function: TypeAlias = Callable[..., None]
_Decorator: TypeAlias = Callable[[_Function], _Function]

#: The keys in click's context for whether ``--json`` and ``--traceback`` are given.
_JSON: Final = "celery_rabbitdelay.json"
_TRACEBACK: Final = "celery_rabbitdelay.traceback"


def _flag(*names: str, key: str, text: str) -> _Decorator:
    """Return a flag whose value goes into click's context instead of an argument of the command."""
    return click.option(
        *names,
        is_flag=True,
        expose_value=False,
        callback=lambda context, option, is_given: context.meta.update({key: is_given}),
        help=text,
    )


#: The flag is spelled as in Celery's own commands; see :func:`as_json`.
_json_option: Final = _flag("-j", "--json", key=_JSON, text="Print one JSON object.")

traceback_option: Final = _flag(
    "--traceback", key=_TRACEBACK, text="Print an error with its traceback."
)


def as_json() -> bool:
    """Return whether the running command prints one JSON object (``--json``)."""
    return bool(click.get_current_context().meta[_JSON])


def app() -> celery.Celery:
    """Return the application that ``celery -A`` names for the running command."""
    context: CLIContext = click.get_current_context().obj
    return context.app


class Commands(click.Group):
    """A group of commands that take ``--json``.

    The group hides passwords in errors, because click's errors quote arguments that it cannot
    parse. If a setting or a server causes an error, the command prints one line and the page in the
    error's notes.
    """

    group_class = type

    def command(  # type: ignore[override]
        self, *args: object, **attributes: object
    ) -> Callable[[_Function], click.Command]:
        """Add a command that takes ``--json``."""
        add: Callable[[_Function], click.Command] = super().command(*args, **attributes)
        return lambda function: add(_json_option(function))

    def invoke(self, ctx: click.Context) -> object:
        """Run the named command."""
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            # Write to the dictionary, because for type checkers the attribute is final.
            vars(error)["message"] = shown_url.without_passwords(error.message)
            raise
        except click.exceptions.Exit:
            raise
        except Exception as error:
            if ctx.find_root().meta.get(_TRACEBACK) or isinstance(error, click.Abort):
                raise
            if isinstance(error, exceptions.RabbitDelayError):
                text = str(error).replace("force=True", "--force")
            else:
                text = f"{type(error).__name__}: {error}; --traceback shows where it comes from"
            is_conflict = isinstance(error, exceptions.LayoutConflict)
            is_away = isinstance(error, BROKER_ERRORS) and not is_conflict
            fail(error, text, EX_UNAVAILABLE if is_away else FAILED)


def command(**attributes: Any) -> Callable[[_Function], click.Command]:
    """Return a decorator that makes a function a command, which takes ``--json``."""
    return lambda function: click.command(**attributes)(_json_option(function))


def group(function: _Function) -> Commands:
    """Return a group of commands that take ``--json``."""
    return click.group(cls=Commands)(function)


def options(*each: _Decorator) -> _Decorator:
    """Return several options as one decorator, in their order."""

    def add(command: _Function) -> _Function:
        for option in reversed(each):
            command = option(command)
        return command

    return add


def as_one(argument: str, made: Callable[..., object], *each: _Decorator) -> _Decorator:
    """Return several options that a command takes as one argument.

    Args:
        argument: The name of the argument.
        made: Returns the argument's value; the options are its parameters.
        *each: The options.
    """

    def add(command: _Function) -> _Function:
        @wraps(command)
        def with_one(**given: object) -> None:
            values = {name: given.pop(name) for name in signature(made).parameters}
            command(**given, **{argument: made(**values)})

        return options(*each)(with_one)

    return add


class ParameterType(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # by click's version
    """Parses a parameter with a function; errors name the parameter.

    Args:
        name: The kind of parameter, for the help.
        read: Parses the parameter's text. The function also gets the parameter's name, and raises
            :class:`ValueError` with the reason.
    """

    def __init__(self, name: str, read: Callable[[str, str], object]) -> None:
        self.name = name
        self._read = read

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        """Return the value; click also passes values that are parsed already."""
        if not isinstance(value, str):
            return value
        try:
            return self._read(value, (param.name if param is not None else None) or self.name)
        except ValueError as wrong:
            self.fail(str(wrong), param, ctx)


#: The exit status if an action is not allowed or not completed, or if something is wrong, missing
#: or unknown.
FAILED: Final = 1

#: Raised if the broker cannot be reached, or refuses a request.
BROKER_ERRORS: Final = (OperationalError, amqp.AMQPError, OSError)

#: A number of messages a second.
POSITIVE: Final = click.FloatRange(min=0, min_open=True)


def answer(found: Mapping[str, object], lines: Iterable[str]) -> None:
    """Print the object as JSON if ``--json`` is given; otherwise, print the lines.

    Args:
        found: The object. Instants become ISO 8601, and other types that JSON lacks become text.
        lines: The text.
    """
    text = json.dumps(found, default=_written) if as_json() else "\n".join(lines)
    if text:
        click.echo(text)


def _written(value: object) -> str:
    return value.isoformat() if isinstance(value, date) else str(value)


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def local(instant: datetime, zone: tzinfo | None = None) -> str:
    """Format ``instant`` in ``zone``, by default this machine's time zone, to the second."""
    with suppress(OverflowError):  # a message may have a time on the last day of the year 9999
        instant = instant.astimezone(zone)
    return instant.strftime("%Y-%m-%d %H:%M:%S")


def task_or_queue(task: str | None, queue: str | None) -> str:
    """Return the subject of a pause as text."""
    return f"queue {queue}" if task is None else f"task {task}"


def paused_line(
    task: str | None, queue: str | None, since: datetime, until: datetime | None = None
) -> str:
    """Return a line about a pause: its subject, its start and its end."""
    held = delay.duration_text(max(round((wall_clock.now() - since).total_seconds()), 0) * 1000)
    ends = "" if until is None else f", until {local(until)}"
    return f"paused: {task_or_queue(task, queue)}, since {local(since)}, for {held}{ends}"


@contextmanager
def usage_errors(*kinds: type[Exception], of: str = "") -> Iterator[None]:
    """Raise errors of some types as usage errors of the command.

    Args:
        *kinds: The types.
        of: The subject of the arguments, shown before the error's own text.
    """
    try:
        yield
    except kinds as error:
        raise click.UsageError(with_notes(f"{of}{error}", error)) from error


def delays() -> RabbitDelay:
    """Return the delays of the application.

    Raises:
        click.UsageError: The application's delays do not wait in RabbitMQ, or a ``rabbitdelay_*``
        setting is invalid.
    """
    found = getattr(app(), "rabbitdelay", None)
    if not isinstance(found, RabbitDelay):
        raise click.UsageError(
            f"the delays of {app()!r} are not in RabbitMQ: make it a "
            "celery_rabbitdelay.Celery, or call celery_rabbitdelay.install(app)"
        )
    checked_connection(app().connection_for_write, f"the broker_url of {app()!r}")
    with usage_errors(exceptions.InvalidSetting):
        found.settings  # noqa: B018 - read, and so checked
    return found


def first_of(names: Sequence[str], most: int = 5) -> str:
    """Return the first few names as text, and the number of the other names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


@contextmanager
def broker() -> Iterator[Connection]:
    """Connect to the producers' broker, which may differ from the consumers' broker.

    The command ends with one line if the broker cannot be reached or refuses a request.

    Raises:
        click.UsageError: The URL of the management API is malformed, or the application's delays
            are not in RabbitMQ.
    """
    connection = delays().app.connection_for_write()
    try:
        with usage_errors(exceptions.InvalidManagementURL), connection:
            yield connection
    except exceptions.RabbitDelayError:
        raise  # its text says what to do
    except BROKER_ERRORS as error:
        message = f"a request to the broker {shown_url.shown_broker(connection)} failed: {error}"
        fail(error, message, EX_UNAVAILABLE)


def checked_connection(connection: Callable[[], Connection], what: str) -> Connection:
    """Return a connection to RabbitMQ whose URL is well-formed."""
    try:
        made = connection()
        is_rabbitmq = isinstance(made.transport, pyamqp.Transport)
        # If a password contains "/", kombu takes the rest of the password as the virtual host.
        is_well_formed = bool(made.userid) or "@" not in (made.virtual_host or "")
    except (KeyError, ImportError):  # kombu has no such transport, or lacks its library
        is_rabbitmq, is_well_formed = False, True
    except ValueError:
        is_rabbitmq, is_well_formed = True, False
    if is_rabbitmq and is_well_formed:
        return made
    if not is_rabbitmq:
        raise click.UsageError(f"{what} is not RabbitMQ: use a URL with amqp:// or amqps://")
    # Drop the cause, because its text quotes a part of the password as the port.
    raise click.UsageError(
        f"{what} is malformed: percent-encode all but letters and digits in user and password"
    )


def _seconds(text: str, what: str) -> float:
    """Parse a duration above 0; return its seconds."""
    seconds = delay.parse_duration(text, what).total_seconds()
    if not seconds:
        raise exceptions.InvalidDelay(text, delay.TAKES_DURATION.replace("from", "above"), what)
    return seconds


#: A negative delay means now.
delay_type: Final = ParameterType("delay", delay.parse_delay)

#: A timedelta.
duration_type: Final = ParameterType("duration", delay.parse_duration)

#: A duration above 0, in seconds.
seconds_type: Final = ParameterType("duration", _seconds)


def with_notes(message: str, error: Exception) -> str:
    """Return a message, and below it the notes of the error, which name a page to read."""
    notes = map(shown_url.without_passwords, getattr(error, "__notes__", ()))
    return "\n".join([message, *notes])


def fail(error: Exception, message: str, exit_status: int = FAILED) -> NoReturn:
    """End the command with one line on the standard error, and below it the notes of the error.

    With ``--json``, also print an object with the key ``error``.

    Args:
        error: The cause.
        message: The line; it may end with the text of the error.
        exit_status: The command's exit status.
    """
    reason = reason_of(error)
    if reason != str(error):
        message = f"{message.removesuffix(str(error))}{reason}"
    line = shown_url.without_passwords(" ".join(message.split()))
    if click.get_current_context().meta.get(_JSON):
        click.echo(json.dumps({"error": line}))
    raise CeleryCommandException(with_notes(line, error), exit_status) from error


def _layout(text: str, what: str) -> object:
    """Parse the name of a layout, or a value of ``rabbitdelay_layout`` as JSON."""
    if not text.lstrip().startswith(("[", "{", '"')):
        return text
    try:
        return json.loads(text)
    except ValueError as wrong:
        raise ValueError(f"{text!r} is not JSON: {wrong}") from wrong


layout_type: Final = ParameterType("layout", _layout)


def topology_options(start: str = "") -> _Decorator:
    """Return the options that describe another topology, for :func:`topology`.

    Args:
        start: The beginning of the options' names, such as "from-".
    """
    whose = "source's" if start else "levels'"
    return options(
        click.option(f"--{start}prefix", help=f"The first part of the {whose} names."),
        click.option(
            f"--{start}layout",
            type=layout_type,
            help="clock, binary, geometric, or a value of rabbitdelay_layout as JSON.",
        ),
        click.option(f"--{start}tick", type=seconds_type, help="The resolution."),
        click.option(f"--{start}queue-type", help="quorum or classic."),
        click.option(f"--{start}shards", type=int, help="The number of queues for each digit."),
    )


def topology(options: Mapping[str, object], of: str = "") -> Topology:
    """Return the application's topology, changed by options.

    Args:
        options: Settings by their names, which may begin with "from_"; None for the application's
            own value.
        of: The subject of the options, for errors.

    Raises:
        click.UsageError: The application's delays do not wait in RabbitMQ, or a value is invalid.
    """
    settings = delays().settings
    given: dict[str, Any] = {
        name.removeprefix("from_"): value for name, value in options.items() if value is not None
    }
    with usage_errors(exceptions.InvalidSetting, of=of):
        return replace(settings, **given).topology
