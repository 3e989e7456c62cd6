"""The options of a write and of a read, checked before anything is sent. Opens no connection."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Final, NamedTuple, Self, TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

from celery_rabbitdelay.exceptions import InvalidOption
from celery_rabbitdelay.publishing.shown_url import has_password, without_password

#: The options that name or describe the application.
APPLICATION: Final = (
    "app",
    "broker",
    "brokerPassword",
    "registry",
    "registryPassword",
    "prefix",
    "layout",
    "brokerCaFile",
    "brokerCertFile",
    "brokerKeyFile",
)

#: Further options of a write.
WRITE: Final = (
    "task",
    "queue",
    "tolerance",
    "envelopes",
    "jobId",
    "idColumn",
    "job",
    "jobExpires",
    "maxRate",
    "kwargsFromColumns",
    "onError",
    "errorsPath",
)

#: Further options of a read.
READ: Final = ("what", "partitions", "task", "key", "job", "filterPushdown", "limit")

#: The values of the option ``what``, each with the options that only it takes.
WHAT: Final[Mapping[str, tuple[str, ...]]] = {
    "pending": ("partitions", "task", "key", "job", "filterPushdown"),
    "levels": (),
    "undeliverable": ("limit",),
}

#: Spark's own options, which it passes on to every streaming sink.
SPARKS_OWN: Final = ("checkpointLocation", "path")

#: Seconds after which the tasks of a write that was neither committed nor aborted are dropped.
JOB_EXPIRES: Final = 86_400.0

ValueT = TypeVar("ValueT")


class ApplicationOptions(NamedTuple):
    """The Celery application.

    Attributes:
        app: Its import path, as for ``celery -A``; None if the other options describe it.
        broker: The URL of RabbitMQ, without a password.
        broker_password: Its password. Spark hides options of such a name in plans and logs
            (``spark.redaction.regex``).
        registry: The URL of the registry's Redis, without a password.
        registry_password: Its password.
        prefix: ``rabbitdelay_prefix``.
        layout: ``rabbitdelay_layout``, by name.
        ca_file: For TLS, the file with the certificates of authorities; None for the system's.
        cert_file: The file with the client's certificate. Like the other two, it has to exist on
            the driver and on each executor.
        key_file: The file with its private key; None if that is in ``cert_file``.
    """

    app: str | None = None
    broker: str | None = None
    broker_password: str | None = None
    registry: str | None = None
    registry_password: str | None = None
    prefix: str | None = None
    layout: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Self:
        """Read the options.

        Raises:
            InvalidOption: Neither ``app`` nor ``broker`` is given, or both are, or a URL contains a
                password.
        """
        app, broker = given.get("app"), given.get("broker")
        if (app is None) == (broker is None):
            takes = "takes the import path of a Celery application; set either app or broker"
            raise InvalidOption("app", None if app is None else without_password(app), takes)
        for name in ("broker", "registry"):
            if has_password(given.get(name, "")):
                takes = f"takes a URL without a password, since Spark shows it; use {name}Password"
                raise InvalidOption(name, without_password(given[name]), takes)
        if app is not None:
            for name in APPLICATION[2:]:
                if name.lower() in given:
                    takes = "is a setting of the application; leave it out"
                    value = None if "Password" in name else given[name.lower()]
                    raise InvalidOption(name, value, takes)
        for name in APPLICATION[-3:]:
            if name.lower() in given and not str(broker).startswith("amqps:"):
                takes = "is for TLS; write the broker's URL with amqps://"
                raise InvalidOption(name, given[name.lower()], takes)
        return cls(*(given.get(name.lower()) for name in APPLICATION))

    @property
    def broker_url(self) -> str | None:
        """The broker's URL with its password."""
        return _with_password(self.broker, self.broker_password)

    @property
    def broker_use_ssl(self) -> dict[str, Any] | None:
        """Celery's ``broker_use_ssl``; None without TLS. The broker's name is checked."""
        if not str(self.broker).startswith("amqps:"):
            return None
        files = {"ca_certs": self.ca_file, "certfile": self.cert_file, "keyfile": self.key_file}
        # kombu puts in the host of the URL.
        told: dict[str, Any] = {"cert_reqs": ssl.CERT_REQUIRED, "server_hostname": None}
        return {**told, **{name: file for name, file in files.items() if file is not None}}

    @property
    def registry_url(self) -> str | None:
        """The registry's URL with its password."""
        return _with_password(self.registry, self.registry_password)

    def __repr__(self) -> str:
        return f"ApplicationOptions(app={self.app!r}, broker={self.broker!r})"


class WriteOptions(NamedTuple):
    """The options of a write.

    Attributes:
        application: The application that sends.
        task: The task's name; None if it is in a column.
        queue: The queue of all tasks; None to use the application's routes.
        tolerance: Seconds by which a task may start late.
        envelopes: Whether tasks that are due together share a message; None for the default of
            ``send_many``.
        job_id: What the tasks' ids are derived from, together with the columns. None for a random
            one; for a stream, for the id of its query.
        id_column: The columns that identify a row; None for all.
        job: A job that the caller has opened, and commits or aborts; None if the write is a job of
            its own.
        job_expires: Seconds after which the tasks of a write are dropped that was neither committed
            nor aborted.
        max_rate: The maximum number of tasks a second, over all partitions; None for no limit.
        kwargs_from_columns: Whether columns without a special meaning become keyword arguments.
        collects: Whether refused rows are written to ``errors_path`` while the others are sent.
        errors_path: The folder for refused rows.
    """

    application: ApplicationOptions
    task: str | None
    queue: str | None
    tolerance: float
    envelopes: bool | None
    job_id: str | None
    id_column: tuple[str, ...] | None
    job: str | None
    job_expires: float
    max_rate: float | None
    kwargs_from_columns: bool
    collects: bool
    errors_path: str | None

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """Read the options.

        Raises:
            InvalidOption: One of them is unknown, or has an invalid value.
        """
        given = _known(options, (*APPLICATION, *WRITE))
        collects = _one_of(given, "onError", ("fail", "collect")) == "collect"
        path = given.get("errorspath")
        if collects != (path is not None):
            takes = "takes the folder for refused rows, together with onError = 'collect'"
            raise InvalidOption("errorsPath", path, takes)
        columns = given.get("idcolumn")
        return cls(
            ApplicationOptions.of(given),
            given.get("task"),
            given.get("queue"),
            _number(given, "tolerance", 0.0),
            _flag(given, "envelopes"),
            given.get("jobid"),
            None if columns is None else tuple(each.strip() for each in columns.split(",")),
            given.get("job"),
            _number(given, "jobExpires", JOB_EXPIRES),
            _rate(given),
            bool(_flag(given, "kwargsFromColumns")),
            collects,
            path,
        )

    @classmethod
    def of_call(cls, options: Mapping[str, object]) -> Self:
        """Read options that are Python values; None means that an option is not set.

        Raises:
            InvalidOption: As for :meth:`of`.
        """
        return cls.of({name: str(value) for name, value in options.items() if value is not None})


class ReadOptions(NamedTuple):
    """The options of a read.

    Attributes:
        application: The application whose levels or registry are read.
        what: ``pending``, ``levels`` or ``undeliverable``.
        partitions: The number of partitions.
        task: Only the tasks of this name.
        key: Only the tasks that were sent with this key.
        job: Only the tasks that were sent with this job.
        takes_filters: Whether the query's filters are pushed down to the registry. Spark rejects a
            source that takes filters unless ``spark.sql.python.filterPushdown.enabled`` is true.
        limit: The maximum number of undeliverable messages; None for the default.
    """

    application: ApplicationOptions
    what: str
    partitions: int
    task: str | None = None
    key: str | None = None
    job: str | None = None
    takes_filters: bool = False
    limit: int | None = None

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """Read the options.

        Raises:
            InvalidOption: One of them is unknown, or has an invalid value.
        """
        given = _known(options, (*APPLICATION, *READ))
        what = _one_of(given, "what", tuple(WHAT))
        for other, names in WHAT.items():
            for name in names:
                if other != what and name.lower() in given:
                    takes = f"is an option of what = {other!r}; leave it out"
                    raise InvalidOption(name, given[name.lower()], takes)
        return cls(
            ApplicationOptions.of(given),
            what,
            _whole(given, "partitions", 10_000) or 8,
            given.get("task"),
            given.get("key"),
            given.get("job"),
            bool(_flag(given, "filterPushdown")),
            _whole(given, "limit", 2**31 - 1),
        )


def _known(options: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """Return the options with names in lower case, as Spark passes them.

    Raises:
        InvalidOption: One of them is unknown.
    """
    given = {name.lower(): value for name, value in options.items()}
    known = {name.lower(): name for name in (*names, *SPARKS_OWN)}
    for name in given.keys() - known.keys():
        (meant, *_) = (*get_close_matches(name, list(known), 1), "")
        suggested = f"; did you mean {known[meant]}?" if meant else ""
        # Without its value, which may be a password.
        raise InvalidOption(name, None, f"is unknown{suggested}")
    return given


def _read(
    given: Mapping[str, str], name: str, read: Callable[[str], ValueT], takes: str
) -> ValueT | None:
    text = given.get(name.lower())
    if text is None:
        return None
    try:
        return read(text)
    except (KeyError, ValueError) as wrong:
        raise InvalidOption(name, text, takes) from wrong


def _number(given: Mapping[str, str], name: str, default: float) -> float:
    def seconds(text: str) -> float:
        number = float(text)
        if not 0 <= number < float("inf"):
            raise ValueError
        return number

    found = _read(given, name, seconds, "takes a number that is not negative")
    return default if found is None else found


def _rate(given: Mapping[str, str]) -> float | None:
    rate = _number(given, "maxRate", 0.0)
    if rate == 0 and "maxrate" in given:
        raise InvalidOption("maxRate", given["maxrate"], "takes a number of tasks a second above 0")
    return rate or None


def _whole(given: Mapping[str, str], name: str, most: int) -> int | None:
    def whole(text: str) -> int:
        number = float(text)
        if not 1 <= number <= most or number != int(number):
            raise ValueError
        return int(number)

    return _read(given, name, whole, f"takes a whole number from 1 to {most}")


def _flag(given: Mapping[str, str], name: str) -> bool | None:
    def flag(text: str) -> bool:
        return {"true": True, "false": False}[text.lower()]

    return _read(given, name, flag, "takes true or false")


def _one_of(given: Mapping[str, str], name: str, words: tuple[str, ...]) -> str:
    def word(text: str) -> str:
        return words[words.index(text)]

    *others, last = map(repr, words)
    takes = f"takes {', '.join(others)} or {last}"
    return _read(given, name, word, takes) or words[0]


def _with_password(url: str | None, password: str | None) -> str | None:
    if url is None or password is None:
        return url
    # A fail-over list has a URL for each server.
    return ";".join(_server_with_password(each, password) for each in url.split(";"))


def _server_with_password(url: str, password: str) -> str:
    parts = urlsplit(url)
    user, _, server = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user}:{quote(password, safe='')}@{server}"))
