"""The options of a write and of a read, checked before anything is sent. Opens no connection."""

from __future__ import annotations

import re
import ssl
import sys
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Final, NamedTuple, Self, get_type_hints
from urllib.parse import quote, urlsplit, urlunsplit

import celery
import kombu

from celery_rabbitdelay.exceptions import InvalidOption
from celery_rabbitdelay.levels.delay import TAKES_DURATION, parse_duration, plain
from celery_rabbitdelay.levels.shown_url import without_password

#: The prefix of the options that ``CREATE TABLE ... OPTIONS`` states.
OF_TABLE: Final = "option."


class Option(NamedTuple):
    """The values that an option takes, in the annotation of its attribute.

    To add an option, add an attribute: ``job_id`` is the option ``jobId``.

    Attributes:
        takes: The values in words, for errors.
        read: Parses a string, or raises :class:`ValueError`.
        only_with: The value of ``what``, or the protocol, that the option requires; empty if none.
    """

    takes: str = ""
    read: Callable[[str], object] = str
    only_with: str = ""


def _number(kind: type[float], most: int, only_with: str = "") -> Option:
    def read(text: str) -> float:
        number = kind(text)
        if not 0 < number <= most:
            raise ValueError
        return number

    what = "a whole number" if kind is int else "a number"
    return Option(f"takes {what} above 0, up to {most}", read, only_with)


def _one_of(*words: str) -> Option:
    return Option(f"takes {' or '.join(words)}", lambda text: words[words.index(text)])


def _as_duration(text: str) -> str:
    """Convert a Spark duration, such as "interval '1' minute", to this package's format."""
    text = re.sub(r"^\s*interval\b|'", "", text.lower())
    text = re.sub(r"(?<=[\d\s])(?:millisecond|milli|msec)s?\b", "ms", text)
    long = r"(?<=[\d\s])(week|day|hour|min(?:ute)?|sec(?:ond)?)s?\b"
    return re.sub(long, lambda found: found[1][0], text)


TEXT: Final = Option()
FLAG: Final = Option("takes true or false", lambda text: ["false", "true"].index(text.lower()) == 1)
SECONDS: Final = Option(
    f"{TAKES_DURATION}, or a duration of Spark, such as '1 minute' or 'interval 10 seconds'",
    lambda text: parse_duration(_as_duration(text)).total_seconds(),
)
COLUMNS: Final = Option(
    "takes names of columns", lambda text: tuple(each.strip() for each in text.split(","))
)
OF_PENDING: Final = Option(only_with="pending")
OF_TLS: Final = Option(only_with="amqps://")


class ApplicationOptions(NamedTuple):
    """The Celery application.

    Attributes:
        app: The import path of the application, as for ``celery -A``; None without one.
        broker: The URL of RabbitMQ. Users pass it without the password, which is inserted from
            ``broker_password``.
        broker_password: The password. Spark hides options with this name in plans and logs
            (``spark.redaction.regex``).
        registry: The URL of the registry's Redis, without its password.
        registry_password: The password of Redis.
        prefix: ``rabbitdelay_prefix``.
        layout: ``rabbitdelay_layout``, by name.
        broker_ca_file: For TLS, the file with the certificates of authorities; None for the
            system's.
        broker_cert_file: The file with the client's certificate. All three files have to exist on
            the driver and on each executor.
        broker_key_file: The file with the client's private key; None if the key is in
            ``broker_cert_file``.
    """

    app: Annotated[str | None, TEXT] = None
    broker: Annotated[str | None, TEXT] = None
    broker_password: Annotated[str | None, TEXT] = None
    registry: Annotated[str | None, TEXT] = None
    registry_password: Annotated[str | None, TEXT] = None
    prefix: Annotated[str | None, TEXT] = None
    layout: Annotated[str | None, TEXT] = None
    broker_ca_file: Annotated[str | None, OF_TLS] = None
    broker_cert_file: Annotated[str | None, OF_TLS] = None
    broker_key_file: Annotated[str | None, OF_TLS] = None

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Self:
        """Read the options, whose names are in lower case.

        Raises:
            InvalidOption: Not exactly one of ``app`` and ``broker`` is given, or a URL contains a
                password.
        """
        app, broker = given.get("app"), given.get("broker")
        if (app is None) == (broker is None):
            takes = "takes the import path of a Celery application; set either app or broker"
            takes += "" if given else ". Spark drops a table's options: add with (app '...')"
            raise InvalidOption("app", None if app is None else without_password(app), takes)
        for name in _OPTIONS[cls]:
            if app is not None and name != "app" and name.lower() in given:
                raise InvalidOption(name, None, "is a setting of the application; leave it out")
        for name in ("broker", "registry"):
            url = given.get(name, "")
            if (hidden := without_password(url)) != url:
                takes = f"takes a URL without a password, since Spark shows it; use {name}Password"
                raise InvalidOption(name, hidden, takes)
        found = cls(**_read(cls, given, f"{str(broker).partition('//')[0]}//"))
        return found._replace(
            broker=_with_password(found.broker, found.broker_password),
            registry=_with_password(found.registry, found.registry_password),
        )

    @property
    def broker_use_ssl(self) -> Mapping[str, object] | None:
        """Celery's ``broker_use_ssl``, which verifies the broker's host name; None without TLS."""
        if not str(self.broker).startswith("amqps:"):
            return None
        files = {
            "ca_certs": self.broker_ca_file,
            "certfile": self.broker_cert_file,
            "keyfile": self.broker_key_file,
        }
        # kombu replaces the name None by the host of the URL.
        checks = {"cert_reqs": ssl.CERT_REQUIRED, "server_hostname": None}
        return checks | {name: file for name, file in files.items() if file is not None}

    def __repr__(self) -> str:
        return f"ApplicationOptions(app={self.app!r})"


class WriteOptions(NamedTuple):
    """The options of a write.

    Attributes:
        application: The application that sends.
        task: The task's name; None if it is in a column.
        queue: The queue of all tasks; None to use the application's routes.
        allow_unknown_tasks: Whether to send tasks that ``app`` does not know.
        tolerance: Seconds by which a task may start late.
        envelopes: Whether tasks that are due together share a message; None for the default of
            ``send_many``.
        job_id: The text from which, with the columns, the tasks' ids are derived. None for a random
            text; for a stream, for the id of its query.
        id_column: The columns that identify a row; None for all columns.
        job: A job that the caller has opened, and will commit or abort; None to make the write a
            job itself.
        job_expires: Seconds after which the tasks of a write are dropped if the write was
            neither committed nor aborted.
        max_rate: The maximum number of tasks a second, over all partitions; None for no limit.
        kwargs_from_columns: Whether columns without a special meaning become keyword arguments.
        past: How to treat rows whose delay is negative, or whose ``eta`` had passed when the write
            began. ``send``: their tasks run at once. ``refuse``: they are refused as invalid rows.
            ``drop``: they are counted, and not sent.
        on_error: ``collect``: refused rows are written to ``errors_path``, and all other rows are
            sent. ``fail``: the first refused row ends the write.
        errors_path: The folder for refused rows; None if they are not collected.
    """

    application: ApplicationOptions
    task: Annotated[str | None, TEXT] = None
    queue: Annotated[str | None, TEXT] = None
    allow_unknown_tasks: Annotated[bool, FLAG] = False
    tolerance: Annotated[float, SECONDS] = 0.0
    envelopes: Annotated[bool | None, FLAG] = None
    job_id: Annotated[str | None, TEXT] = None
    id_column: Annotated[tuple[str, ...] | None, COLUMNS] = None
    job: Annotated[str | None, TEXT] = None
    job_expires: Annotated[float, SECONDS] = 86_400.0
    max_rate: Annotated[float | None, _number(float, 10**9)] = None
    kwargs_from_columns: Annotated[bool, FLAG] = False
    past: Annotated[str, _one_of("send", "refuse", "drop")] = "send"
    on_error: Annotated[str, _one_of("fail", "collect")] = "fail"
    errors_path: Annotated[str | None, TEXT] = None

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """Read the options.

        Raises:
            InvalidOption: An option is unknown, or has an invalid value.
        """
        given = _known(options, cls)
        found = cls(ApplicationOptions.of(given), **_read(cls, given))
        if (found.on_error == "collect") != (found.errors_path is not None):
            takes = "takes the folder for refused rows, together with onError = 'collect'"
            raise InvalidOption("errorsPath", found.errors_path, takes)
        return found

    @classmethod
    def of_call(cls, options: Mapping[str, object]) -> Self:
        """Read options that are Python values; None means that an option is not set.

        A task, a queue and an application may be given as objects. Executors import the
        application; without ``app`` and ``broker``, the task's own application.

        Raises:
            InvalidOption: As for :meth:`of`.
        """
        given = {name: value for name, value in options.items() if value is not None}
        if isinstance(task := given.get("task"), celery.Task) and "broker" not in given:
            given.setdefault("app", task.app)
        return cls.of({name: _as_text(plain(value, name)) for name, value in given.items()})


class ReadOptions(NamedTuple):
    """The options of a read.

    Attributes:
        application: The application; the read is about its levels or registry.
        what: ``pending``, ``levels`` or ``undeliverable``.
        partitions: The number of partitions.
        task: Only the tasks with this name.
        key: Only the tasks that were sent with this key.
        job: Only the tasks that were sent with this job.
        limit: The maximum number of undeliverable messages; None for the default.
    """

    application: ApplicationOptions
    what: Annotated[str, _one_of("pending", "levels", "undeliverable")] = "pending"
    partitions: Annotated[int, _number(int, 10_000, "pending")] = 8
    task: Annotated[str | None, OF_PENDING] = None
    key: Annotated[str | None, OF_PENDING] = None
    job: Annotated[str | None, OF_PENDING] = None
    limit: Annotated[int | None, _number(int, 2**31 - 1, "undeliverable")] = None

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """Read the options.

        Raises:
            InvalidOption: An option is unknown, or has an invalid value.
        """
        given = _known(options, cls)
        return cls(ApplicationOptions.of(given), **_read(cls, given, given.get("what", "pending")))


#: The options of each class by name: their attributes, and the values that they take.
_OPTIONS: Final[Mapping[type[NamedTuple], Mapping[str, tuple[str, Option]]]] = {
    cls: {
        re.sub("_(.)", lambda found: found[1].upper(), attribute): (attribute, hint.__metadata__[0])
        for attribute, hint in get_type_hints(cls, include_extras=True).items()
        if hasattr(hint, "__metadata__")
    }
    for cls in (ApplicationOptions, WriteOptions, ReadOptions)
}


def _as_text(value: object) -> str:
    """Return a value as the text of an option."""
    if isinstance(value, celery.Celery):
        return _import_path(value)
    if isinstance(value, list | tuple):
        return ",".join(value)
    return str(value.name if isinstance(value, celery.Task | kombu.Queue) else value)


def _import_path(app: celery.Celery) -> str:
    """Return the import path of an application, for executors.

    Raises:
        InvalidOption: No module that executors can import has the application.
    """
    for path, module in [*sys.modules.items()]:
        # Executors have another main module, and another default application in Celery's modules.
        if path.partition(".")[0] not in ("__main__", "celery"):
            for name, value in [*getattr(module, "__dict__", {}).items()]:
                if value is app:
                    return f"{path}:{name}"
    takes = "takes an application that executors can import: define it in a module, not in a script"
    raise InvalidOption("app", repr(app), takes)


def _known(options: Mapping[str, str], cls: type[NamedTuple]) -> dict[str, str]:
    """Return the options with names in lower case, as Spark passes them.

    Raises:
        InvalidOption: An option is unknown.
    """
    given = {name.lower(): value for name, value in options.items()}
    if "provider" in given:
        # CREATE TABLE passes each option twice, among properties of the table and of Spark.
        stated = {name: value for name, value in given.items() if name.startswith(OF_TABLE)}
        given = {name.removeprefix(OF_TABLE): value for name, value in stated.items()}
    # Spark passes these two options of its own to every streaming sink.
    names = (*_OPTIONS[ApplicationOptions], *_OPTIONS[cls], "checkpointLocation", "path")
    for name in given.keys() - {each.lower() for each in names}:
        # Do not show the value, which may be a password.
        raise InvalidOption(name, None, f"is unknown{suggestion(name, names)}")
    return given


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return a question that suggests the closest known name; empty if no known name is close."""
    close = get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""


def _read(cls: type[NamedTuple], given: Mapping[str, str], kind: str = "") -> dict[str, Any]:
    """Parse options; return their values by the attributes of the class.

    Args:
        cls: The class of the options.
        given: The options' values as text, keyed by the options' names.
        kind: The value of ``what``, or the protocol.
    """
    found = {}
    for name, (attribute, option) in _OPTIONS[cls].items():
        text = given.get(name.lower())
        if text is not None:
            if option.only_with not in ("", kind):
                takes = f"is an option for {option.only_with}, not for {kind}; leave it out"
                raise InvalidOption(name, text, takes)
            try:
                found[attribute] = option.read(text)
            except ValueError as wrong:
                raise InvalidOption(name, text, option.takes) from wrong
    return found


def _with_password(urls: str | None, password: str | None) -> str | None:
    """Return a URL, or a fail-over list of URLs, with a password."""
    if urls is None or password is None:
        return urls
    found = []
    for url in map(urlsplit, urls.split(";")):
        user, _, server = url.netloc.rpartition("@")
        location = f"{user}:{quote(password, safe='')}@{server}"
        found.append(urlunsplit(url._replace(netloc=location)))
    return ";".join(found)
