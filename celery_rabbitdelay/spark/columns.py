"""The columns of a DataFrame that becomes tasks: types, ids, and a row of ``send_many`` for each.

Opens no connection.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple
from uuid import UUID, uuid5

import celery
from kombu.utils.json import JSONEncoder
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql import Row as SparkRow
from pyspark.sql import types as T  # noqa: N812 - the name that Spark's users know

from celery_rabbitdelay.app.celery_internals import argument_check
from celery_rabbitdelay.app.sending.rows import Row
from celery_rabbitdelay.exceptions import InvalidColumn, InvalidOption, InvalidRow
from celery_rabbitdelay.spark.options import WriteOptions

#: The namespace of all ids (RFC 9562, version 5); it must never change.
NAMESPACE: Final = UUID("f1688d47-a47a-58e1-bbdf-0044bf1c5a41")

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND: Final = timedelta(microseconds=1)


def task_id(job_id: str, values: Mapping[str, Any] | Sequence[Any]) -> str:
    """Return the id of the task that a write sends for a row.

    Use it to find the task again: to cancel it, or to look for its result. It opens no connection
    and needs no Spark session.

    Args:
        job_id: The option ``jobId`` of the write. For a stream, ``f"{job_id}:{batch}"`` with the
            number of the micro-batch, and with the id of the query if ``jobId`` is not set.
        values: The row's values in the columns that ``idColumn`` names, or in all columns without
            it: by the columns' names (a mapping or a :class:`pyspark.sql.Row`), or as a list in the
            alphabetical order of the columns' names. A struct is a mapping or a ``Row``, and a
            timestamp an aware datetime in any time zone.

    Raises:
        InvalidOption: ``job_id`` is not a string, or there are no values.
        TypeError: JSON cannot express one of the values.
    """
    if not isinstance(job_id, str):
        raise InvalidOption("jobId", repr(job_id), "takes a string: the jobId of the write")
    if isinstance(values, str | bytes) or not isinstance(values, Mapping | Sequence) or not values:
        takes = "takes the row's values in these columns: a mapping, or a list of one or more"
        raise InvalidOption("idColumn", repr(values), takes)
    plain = _plain(values)
    if isinstance(plain, dict):
        plain = [plain[name] for name in alphabetical(plain)]
    return TaskIds(job_id).of(plain)


#: The most positional arguments that a task is asked about.
MAX_ARGUMENTS: Final = 100


def numbers_taken(
    task: celery.Task[Any, Any], types: Mapping[str, T.DataType], kwargs_from_columns: bool
) -> Sequence[int]:
    """Return how many positional arguments a task takes with the keyword arguments of a write.

    Args:
        task: The task.
        types: The types of the columns.
        kwargs_from_columns: As for :class:`.WriteOptions`.

    Raises:
        InvalidOption: The task does not take these columns as arguments, whatever a row holds.
    """
    check = argument_check(task)
    names: Sequence[str] = ()
    if kwargs_from_columns:
        names = [name for name in types if name not in TYPES]
    elif isinstance(kwargs := types.get("kwargs"), T.StructType):
        names = kwargs.names
    elif kwargs is not None:
        check = None
    match types.get("args"):
        case None:
            numbers = range(1)
        case T.StructType(names=fields):
            numbers = range(len(fields), len(fields) + 1)
        case _:
            numbers = range(MAX_ARGUMENTS)
    if check is None:
        return numbers
    taken, refusals = [], []
    for number in numbers:
        try:
            check(*[None] * number, **dict.fromkeys(names))
        except TypeError as refused:
            refusals.append(str(refused))
        else:
            taken.append(number)
    if not taken:
        takes = f"does not take these columns as its arguments: {refusals[0]}"
        raise InvalidOption("task", task.name, takes)
    return taken


class TaskIds:
    """Derives ids.

    Args:
        job_id: Part of every id: the same row has another id under another job.

    Attributes:
        namespace: The namespace of the ids.
    """

    def __init__(self, job_id: str) -> None:
        self.namespace = uuid5(NAMESPACE, job_id)
        # kombu's dumps makes an encoder for each call.
        self._encode = _IdEncoder(sort_keys=True, separators=(",", ":")).encode

    def of(self, values: Sequence[Any]) -> str:
        """Return the id of the row with these values, in the order of the columns' names.

        Raises:
            TypeError: JSON cannot express one of them.
        """
        return str(uuid5(self.namespace, self._encode(values)))


class _IdEncoder(JSONEncoder):
    """Writes instants and intervals in microseconds, so that no id depends on a time zone."""

    def default(self, o: Any) -> Any:
        if isinstance(o, datetime) and o.tzinfo is not None:
            o -= EPOCH
        return o // MICROSECOND if isinstance(o, timedelta) else super().default(o)


def alphabetical(names: Iterable[str]) -> list[str]:
    """Return names of columns in the order in which ids are derived from them."""
    return sorted(names, key=lambda name: (name.lower(), name))


def _plain(value: Any) -> Any:
    """Return a value with mappings for Spark's rows, at any depth."""
    if isinstance(value, SparkRow):
        value = value.asDict()
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


LENGTHS: Final = "a number of seconds, or an interval of days to seconds"
JSON: Final = "JSON text"

#: The types of the columns that have a meaning of their own, and what they take, in words.
TYPES: Final[Mapping[str, tuple[tuple[type[T.DataType], ...], str]]] = {
    "delay": ((T.NumericType, T.DayTimeIntervalType), LENGTHS),
    "eta": ((T.TimestampType,), "a timestamp; cast others to timestamp"),
    "args": ((T.ArrayType, T.StructType, T.StringType), f"an array, a struct, or {JSON}"),
    "kwargs": ((T.StructType, T.MapType, T.StringType), f"a struct, a map, or {JSON}"),
    "task": ((T.StringType,), "a string, the task's name"),
    "queue": ((T.StringType,), "a string"),
    "task_id": ((T.StringType,), "a string"),
    "key": ((T.StringType,), "a string"),
    "tolerance": ((T.NumericType, T.DayTimeIntervalType), LENGTHS),
    "priority": ((T.IntegralType,), "a whole number"),
    "headers": ((T.StructType, T.MapType, T.StringType), f"a struct, a map, or {JSON}"),
}

#: The types that JSON cannot express, at any depth, and those that it takes as the keys of a map.
INEXPRESSIBLE: Final = (T.AnsiIntervalType, T.CalendarIntervalType, T.VariantType)
KEYS: Final = (T.StringType, T.IntegralType, T.FloatType, T.DoubleType, T.BooleanType)

#: The columns in which rows may differ that ``send_many`` takes once for all rows.
SHARED: Final = ("task", "queue", "tolerance", "priority", "headers")


class Shared(NamedTuple):
    """What ``send_many`` takes once for many rows.

    Attributes:
        task: The task's name.
        queue: The queue; None for what the application's routes say.
        tolerance: Seconds that a task may start later.
        priority: The priority; None for Celery's default.
        headers: The headers as JSON text; empty for none.
    """

    task: str
    queue: str | None = None
    tolerance: float = 0.0
    priority: int | None = None
    headers: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """The options of ``apply_async``."""
        headers = json.loads(self.headers) if self.headers else None
        given = {"queue": self.queue, "priority": self.priority, "headers": headers}
        return {name: value for name, value in given.items() if value is not None}


class Taken(NamedTuple):
    """A row of the DataFrame.

    Attributes:
        shared: The options that it shares with other rows.
        row: The row of ``send_many``; None if the row is invalid.
        error: Why it is invalid; None if it is valid.
        identity: The values that the task's id is derived from.
        given: All its values, by the names of the columns in :attr:`Columns.types`.
    """

    shared: Shared
    row: Row | None
    error: Exception | None
    identity: Sequence[Any]
    given: Mapping[str, Any]


class Columns:
    """Reads rows of one schema.

    Args:
        schema: The schema.
        options: The options of the write.
        is_case_sensitive: Whether names of columns are, for Spark's session.

    Attributes:
        schema: The schema.
        types: The type of each column. A column with a meaning of its own has its usual name here,
            if names of columns are case-insensitive.
        identity: The names of the columns that ids are derived from, in their order.
        are_shared: Whether all rows have the same :class:`Shared`.
        shared: The options of all rows, if they are shared; otherwise those of the write alone.

    Raises:
        InvalidColumn: A column is missing, unknown, twice there, or of a wrong type.
    """

    def __init__(
        self, schema: T.StructType, options: WriteOptions, is_case_sensitive: bool = False
    ) -> None:
        self._options = options
        self.schema = schema
        fold = str if is_case_sensitive else str.lower
        self.types: dict[str, T.DataType] = {}
        for field in schema.fields:
            name = fold(field.name) if fold(field.name) in TYPES else field.name
            if name in self.types:
                raise InvalidColumn(field.name, field.dataType.simpleString(), "is there twice")
            self.types[name] = field.dataType
        identity = list(self.types) if options.id_column is None else []
        for name in options.id_column or ():
            same = [each for each in self.types if fold(each) == fold(name)]
            if len(same) != 1:
                takes = f"is named by idColumn; the columns are {', '.join(self.types)}"
                raise InvalidColumn(name, None, takes)
            identity += same
        self.identity = alphabetical(identity)
        _check(self.types, options)
        self._kwargs = [name for name in self.types if name not in TYPES]
        #: The columns with maps, which PyArrow gives as lists of pairs.
        self._with_maps = {
            name
            for name, kind in self.types.items()
            if any(isinstance(part, T.MapType) for part in _parts(kind))
        }
        self.are_shared = not any(name in self.types for name in SHARED)
        self.shared = Shared(options.task or "", options.queue, options.tolerance)

    def taken(self, given: Iterable[Any], in_batches: bool = True) -> Iterator[Taken]:
        """Yield the rows.

        Args:
            given: Batches, each a :class:`pyarrow.RecordBatch`, or Spark's rows.
            in_batches: Which of them.
        """
        kinds = self.types.items()
        if not in_batches:
            for row in given:
                values = zip(kinds, row, strict=True)
                yield self._taken({name: _plain_of(value, kind) for (name, kind), value in values})
            return
        for batch in given:
            columns = {}
            for (name, kind), array in zip(kinds, batch.columns, strict=True):
                column = array.to_pylist()
                if name in self._with_maps:
                    column = [_plain_of(value, kind) for value in column]
                columns[name] = column
            for position in range(batch.num_rows):
                yield self._taken({name: column[position] for name, column in columns.items()})

    def _taken(self, given: Mapping[str, Any]) -> Taken:
        identity = [given[name] for name in self.identity]
        try:
            shared = self.shared if self.are_shared else self._shared_of(given)
            delay, eta = given.get("delay"), given.get("eta")
            if delay is None and eta is None:
                name = "delay" if "delay" in given else "eta"
                raise InvalidRow(_shown(given), f"its {name} is null")
            if self._options.kwargs_from_columns:
                kwargs: Any = {name: given[name] for name in self._kwargs}
            else:
                kwargs = self._parsed(given, "kwargs", dict) or {}
            args = self._parsed(given, "args", list | tuple) or ()
            if isinstance(args, dict):  # a struct
                args = tuple(args.values())
            delay = float(delay) if isinstance(delay, Decimal) else delay
            row = Row(args, kwargs, delay, eta, given.get("task_id"), given.get("key"))
            return Taken(shared, row, None, identity, given)
        except (TypeError, ValueError) as wrong:
            return Taken(self.shared, None, wrong, identity, given)

    def _shared_of(self, given: Mapping[str, Any]) -> Shared:
        options, headers = self._options, given.get("headers")
        if headers is not None:
            headers = self._parsed(given, "headers", dict)
        task = given.get("task") or options.task
        if not task:
            raise InvalidRow(_shown(given), "its task is null")
        tolerance = given.get("tolerance")
        return Shared(
            task,
            given.get("queue") or options.queue,
            options.tolerance if tolerance is None else _seconds(tolerance),
            given.get("priority"),
            json.dumps(headers, sort_keys=True) if headers else "",
        )

    def _parsed(self, given: Mapping[str, Any], name: str, kind: Any) -> Any:
        """Return a column that may be JSON text."""
        value = given.get(name)
        if value is None or not isinstance(self.types[name], T.StringType):
            return value
        try:
            parsed = json.loads(value)
        except ValueError as wrong:
            raise InvalidRow(_shown(given), f"its {name} is no JSON: {wrong}") from wrong
        if not isinstance(parsed, kind):
            what = "an object" if kind is dict else "a list"
            raise InvalidRow(_shown(given), f"the JSON of its {name} is not {what}")
        return parsed


def is_case_sensitive(frame: DataFrame | None = None) -> bool:
    """Return whether names of columns are case-sensitive for Spark's session.

    Args:
        frame: A DataFrame of the session; None in an executor.
    """
    setting = "spark.sql.caseSensitive"
    if frame is not None:
        return frame.sparkSession.conf.get(setting) == "true"
    context = TaskContext.get()
    return context is not None and context.getLocalProperty(setting) == "true"


def _check(columns: Mapping[str, T.DataType], options: WriteOptions) -> None:
    for name, found in columns.items():
        if name in TYPES:
            kinds, takes = TYPES[name]
            if not isinstance(found, kinds):
                raise InvalidColumn(name, found.simpleString(), f"takes {takes}")
            if isinstance(found, T.MapType) and not isinstance(found.keyType, T.StringType):
                raise InvalidColumn(name, found.simpleString(), "takes a map with string keys")
        elif not options.kwargs_from_columns:
            takes = (
                f"is unknown; known are {', '.join(TYPES)}. Drop it, or set kwargsFromColumns to "
                "make all further columns keyword arguments"
            )
            raise InvalidColumn(name, found.simpleString(), takes)
        for part in () if name in ("delay", "tolerance") else _parts(found):
            has_wrong_keys = isinstance(part, T.MapType) and not isinstance(part.keyType, KEYS)
            if has_wrong_keys or isinstance(part, INEXPRESSIBLE):
                takes = (
                    f"JSON cannot express {part.simpleString()}; cast it, to a string for example"
                )
                raise InvalidColumn(name, found.simpleString(), takes)
    both = "delay" in columns and "eta" in columns
    if both or not ("delay" in columns or "eta" in columns):
        what = "there are both" if both else "there is neither"
        raise InvalidColumn("delay", None, f"takes one of the columns delay and eta; {what}")
    if options.kwargs_from_columns and "kwargs" in columns:
        takes = "cannot be combined with kwargsFromColumns"
        raise InvalidColumn("kwargs", columns["kwargs"].simpleString(), takes)
    if "task" not in columns and not options.task:
        raise InvalidColumn("task", None, "takes a column of tasks' names, or the option task")


def _parts(kind: T.DataType) -> Iterator[T.DataType]:
    """Yield a type, and all types of the values in it, at any depth."""
    yield kind
    match kind:
        case T.ArrayType():
            yield from _parts(kind.elementType)
        case T.StructType():
            for field in kind.fields:
                yield from _parts(field.dataType)
        case T.MapType():
            yield from _parts(kind.valueType)


def _plain_of(value: Any, kind: T.DataType) -> Any:
    """Return a value of PyArrow, or of Spark's rows, as JSON can express it.

    The maps of PyArrow are lists of pairs. The timestamps of rows are naive, in local time.
    """
    if value is None:
        return None
    match kind:
        case T.TimestampType():
            return value.astimezone() if value.tzinfo is None else value
        case T.StructType():
            return {each.name: _plain_of(value[each.name], each.dataType) for each in kind.fields}
        case T.ArrayType():
            return [_plain_of(each, kind.elementType) for each in value]
        case T.MapType():
            return {key: _plain_of(each, kind.valueType) for key, each in dict(value).items()}
    return value


def _seconds(length: Any) -> float:
    return length.total_seconds() if isinstance(length, timedelta) else float(length)


def _shown(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as an error shows it: texts and lists may be long."""
    return {name: _short(value) for name, value in given.items()}


def _short(value: Any) -> Any:
    if isinstance(value, float) and math.isnan(value):
        return value
    text = repr(value)
    return value if len(text) <= 100 else f"{text[:100]}..."
