"""The columns of a DataFrame of tasks: their types, the ids, and the rows for ``send_many``.

Opens no connection.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha1
from typing import Any, Final, NamedTuple
from uuid import UUID, uuid5

import pyarrow as pa
import pyarrow.compute as pc
from kombu.utils.json import JSONEncoder
from pyspark.sql import Row as SparkRow
from pyspark.sql import types as T  # noqa: N812 - the name that Spark's users know

from celery_rabbitdelay.app.rows import MAX_GROUP_BYTES, MAX_GROUP_MESSAGES, Row, WrittenRows
from celery_rabbitdelay.exceptions import InvalidColumn, InvalidOption, InvalidRow
from celery_rabbitdelay.levels.delay import Delay
from celery_rabbitdelay.spark.options import WriteOptions

#: The columns of a grouped DataFrame: when a task is due, in milliseconds since 1970-01-01 UTC; its
#: bytes in an envelope; and its row, if Python has to serialize it.
DUE: Final = "rabbitdelay_due_ms"
ITEM: Final = "rabbitdelay_item"
ROW: Final = "rabbitdelay_row"

#: The namespace of all ids (RFC 9562, version 5); it must never change.
NAMESPACE: Final = UUID("f1688d47-a47a-58e1-bbdf-0044bf1c5a41")

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND: Final = timedelta(microseconds=1)


def task_id(job_id: str, values: Mapping[str, object] | Sequence[object]) -> str:
    r"""Return the id of the task that a write sends for a row.

    With the id, you can cancel the task or get its result. The function opens no connection and
    needs no Spark session.

    The formula never changes. The id is a version 5 UUID. Its namespace is the version 5 UUID of
    ``job_id`` in the namespace ``f1688d47-a47a-58e1-bbdf-0044bf1c5a41``. Its name is the JSON array
    of the values in the alphabetical order of their lower-case column names, without spaces and
    with ``\uXXXX`` for non-ASCII characters. Timestamps (since 1970-01-01 UTC) and intervals are
    whole microseconds; Celery's serializer writes other types that JSON lacks.

    Args:
        job_id: The option ``jobId`` of the write. For a stream, ``f"{job_id}:{batch}"`` with the
            number of the micro-batch, and with the id of the query if ``jobId`` is not set.
        values: The row's values in the columns that ``idColumn`` names, or in all columns without
            that option: by the columns' names (a mapping or a :class:`pyspark.sql.Row`), or as a
            list in the alphabetical order of the columns' names. A struct is a mapping or a
            ``Row``, and a timestamp an aware datetime in any time zone.

    Raises:
        InvalidOption: No values are given.
        TypeError: JSON cannot express one of the values.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Mapping | Sequence) or not values:
        takes = "takes the row's values in these columns: a mapping, or a list of one or more"
        raise InvalidOption("idColumn", repr(values), takes)
    given = values if isinstance(values, Mapping | SparkRow) else list(values)
    plain = SparkRow(values=given).asDict(recursive=True)["values"]
    if isinstance(plain, Mapping):
        plain = [plain[name] for name in alphabetical(plain)]
    return TaskIds(job_id).of(plain)


class TaskIds:
    """Derives the ids of tasks from their rows.

    Args:
        job_id: Part of every id: under another job, the same row gets another id.

    Attributes:
        namespace: The namespace of the ids.
    """

    def __init__(self, job_id: str) -> None:
        self.namespace = uuid5(NAMESPACE, job_id)
        self._begin = self.namespace.bytes
        # Reuse one encoder, because kombu's dumps makes an encoder for each call.
        self._encode = _IdEncoder(sort_keys=True, separators=(",", ":")).encode

    def of(self, values: Sequence[object]) -> str:
        """Return the task id for a row's values, which are in the order of the columns' names.

        Raises:
            TypeError: JSON cannot express one of the values.
        """
        # Do not call uuid5, which takes three times as long: rows come by the million.
        name = self._begin + self._encode(values).encode()
        d = sha1(name, usedforsecurity=False).hexdigest()
        variant = "89ab"[int(d[16], 16) % 4]
        return f"{d[:8]}-{d[8:12]}-5{d[13:16]}-{variant}{d[17:20]}-{d[20:32]}"


class _IdEncoder(JSONEncoder):
    """Writes instants and intervals in microseconds, so that no id depends on a time zone."""

    def default(self, o: Any) -> Any:
        if isinstance(o, datetime) and o.tzinfo is not None:
            o -= EPOCH
        return o // MICROSECOND if isinstance(o, timedelta) else super().default(o)


def alphabetical(names: Iterable[str]) -> list[str]:
    """Return names of columns in the order in which ids are derived from them."""
    return sorted(names, key=lambda name: (name.lower(), name))


LENGTHS: Final = "a number of seconds, or an interval of days to seconds"

#: The types of the columns with a special meaning, and the accepted values in words.
TYPES: Final[Mapping[str, tuple[tuple[type[T.DataType], ...], str]]] = {
    "delay": ((T.NumericType, T.DayTimeIntervalType), LENGTHS),
    "eta": ((T.TimestampType,), "a timestamp; cast others to timestamp"),
    "args": ((T.ArrayType, T.StructType, T.StringType), "an array, a struct, or JSON text"),
    "kwargs": ((T.StructType, T.MapType, T.StringType), "a struct, a map, or JSON text"),
    "task": ((T.StringType,), "a string, the task's name"),
    "queue": ((T.StringType,), "a string"),
    "task_id": ((T.StringType,), "a string"),
    "key": ((T.StringType,), "a string"),
    "tolerance": ((T.NumericType, T.DayTimeIntervalType), LENGTHS),
    "priority": ((T.IntegralType,), "a whole number"),
    "headers": ((T.StructType, T.MapType, T.StringType), "a struct, a map, or JSON text"),
}

#: Types that JSON cannot express at any depth, and the types that JSON accepts as map keys.
INEXPRESSIBLE: Final = (T.AnsiIntervalType, T.CalendarIntervalType, T.VariantType)
KEYS: Final = (T.StringType, T.IntegralType, T.FloatType, T.DoubleType, T.BooleanType)

#: The columns for arguments that ``send_many`` takes only once, for all rows.
SHARED: Final = frozenset(("task", "queue", "tolerance", "priority", "headers"))


class Shared(NamedTuple):
    """The arguments that ``send_many`` takes once for many rows.

    Attributes:
        task: The task's name.
        tolerance: Seconds by which a task may start late.
        options: The options of ``apply_async`` as JSON text: queue, priority and headers.
    """

    task: str
    tolerance: float
    options: str


class Taken(NamedTuple):
    """A row of the DataFrame, or several rows of one envelope.

    Attributes:
        shared: The arguments that the row shares with other rows; meaningless if the row is
            invalid.
        row: The row for ``send_many``, with its id; the error of an invalid row; or rows that Spark
            has serialized.
        given: All values of the row, keyed by the names of the columns in :attr:`Columns.types`.
    """

    shared: Shared
    row: Row | WrittenRows | TypeError | ValueError
    given: Mapping[str, object]


class Columns:
    """Reads rows of one schema, even from a grouped DataFrame.

    Args:
        schema: The schema.
        options: The options of the write.

    Attributes:
        schema: The schema; for a grouped DataFrame, the schema before it was grouped.
        types: The type of each column. A column with a special meaning may be in upper or lower
            case in the schema, and has its usual name here.
        identity: The names of the columns that ids are derived from, in their order.
        are_shared: Whether the arguments in :class:`Shared` are the same for all rows.
        shared: The arguments in :class:`Shared`, from the options alone; used for all rows if
            ``are_shared``.

    Raises:
        InvalidColumn: A column is missing, unknown, duplicated, or of a wrong type.
    """

    def __init__(self, schema: T.StructType, options: WriteOptions) -> None:
        self._options = options
        self._is_grouped = schema.names == [DUE, ITEM, ROW]
        if self._is_grouped and isinstance(row := schema[ROW].dataType, T.StructType):
            schema = row
        self.schema = schema
        self.types: dict[str, T.DataType] = {}
        for field in schema.fields:
            name = field.name.lower() if field.name.lower() in TYPES else field.name
            if name in self.types:
                raise InvalidColumn(field.name, field.dataType.simpleString(), "appears twice")
            self.types[name] = field.dataType
        identity = list(self.types) if options.id_column is None else []
        for name in options.id_column or ():
            same = [each for each in self.types if each.lower() == name.lower()]
            if len(same) != 1:
                takes = f"idColumn needs one such column; the columns are {', '.join(self.types)}"
                raise InvalidColumn(name, None, takes)
            identity += same
        self.identity = alphabetical(identity)
        _check(self.types, options)
        self._texts = [
            name
            for name in ("args", "kwargs", "headers")
            if isinstance(self.types.get(name), T.StringType)
        ]
        self._kwargs = [name for name in self.types if name not in TYPES]
        self._with_maps = [
            (number, kind)
            for number, kind in enumerate(self.types.values())
            if any(isinstance(part, T.MapType) for part in _parts(kind))
        ]
        self.are_shared = not self.types.keys() & SHARED
        self.shared = self._shared_of({})

    def taken(self, batches: Iterable[pa.RecordBatch], ids: TaskIds) -> Iterator[Taken]:
        """Yield the rows; combine rows that Spark has serialized into envelopes.

        Args:
            batches: The rows; of a grouped DataFrame, sorted by due time.
            ids: Derives the tasks' ids.
        """
        due_ms, items, size = 0, list[bytes](), 0
        for batch in batches:
            if not self._is_grouped:
                yield from self._rows(batch, ids)
                continue
            written = batch.column(ITEM)
            if written.null_count:
                left = batch.column(ROW).filter(pc.is_null(written))
                yield from self._rows(pa.RecordBatch.from_struct_array(left), ids)
            due_times = batch.column(DUE).to_pylist()
            for due, item in zip(due_times, written.to_pylist(), strict=True):
                if item is None:
                    continue
                is_full = len(items) == MAX_GROUP_MESSAGES or size + len(item) > MAX_GROUP_BYTES
                if items and (is_full or due != due_ms):
                    yield self._written(items, due_ms)
                    items, size = [], 0
                due_ms = due
                items.append(item)
                size += len(item)
        if items:
            yield self._written(items, due_ms)

    def _written(self, items: list[bytes], due_ms: int) -> Taken:
        return Taken(self.shared, WrittenRows(b"".join(items), len(items), due_ms), {})

    def _rows(self, batch: pa.RecordBatch, ids: TaskIds) -> Iterator[Taken]:
        columns = [each.to_pylist() for each in batch.columns]
        for number, kind in self._with_maps:
            columns[number] = [_with_mappings(each, kind) for each in columns[number]]
        for values in zip(*columns, strict=True):
            given = dict(zip(self.types, values, strict=True))
            try:
                yield Taken(*self._row(given, ids), given)
            except (TypeError, ValueError) as wrong:
                yield Taken(self.shared, wrong, given)

    def _row(self, given: Mapping[str, Any], ids: TaskIds) -> tuple[Shared, Row]:
        parsed = self._parsed(given) if self._texts else given
        shared = self.shared if self.are_shared else self._shared_of(parsed)
        if not shared.task:
            raise InvalidRow(shown(given), "its task is null")
        delay, eta = given.get("delay"), given.get("eta")
        if delay is None and eta is None:
            raise InvalidRow(shown(given), f"its {'delay' if 'delay' in given else 'eta'} is null")
        kwargs = {name: given[name] for name in self._kwargs} or parsed.get("kwargs") or {}
        args = parsed.get("args") or ()
        if isinstance(args, dict):  # a struct
            args = tuple(args.values())
        task_id = given.get("task_id")
        if task_id is None:
            task_id = ids.of([given[name] for name in self.identity])
        return shared, Row(args, kwargs, delay, eta, task_id, given.get("key"))

    def _shared_of(self, given: Mapping[str, Any]) -> Shared:
        task, tolerance = given.get("task") or self._options.task, given.get("tolerance")
        headers = given.get("headers") or None
        queue = given.get("queue") or self._options.queue
        named = {"queue": queue, "priority": given.get("priority"), "headers": headers}
        options = {name: value for name, value in named.items() if value is not None}
        tolerance = self._options.tolerance if tolerance is None else seconds(tolerance)
        return Shared(task or "", tolerance, json.dumps(options, sort_keys=True))

    def _parsed(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a row with its columns of JSON text parsed."""
        parsed = {**given}
        for name in self._texts:
            if given[name] is None:
                continue
            try:
                parsed[name] = json.loads(given[name])
            except ValueError as wrong:
                raise InvalidRow(shown(given), f"its {name} is not JSON: {wrong}") from wrong
            kind, what = (list, "a list") if name == "args" else (dict, "an object")
            if not isinstance(parsed[name], kind):
                raise InvalidRow(shown(given), f"its {name} is JSON, but not {what}")
        return parsed


def _check(types: Mapping[str, T.DataType], options: WriteOptions) -> None:
    for name, kind in types.items():
        kinds, takes = TYPES.get(name, ((T.DataType,), ""))
        wrong = [
            part
            for part in _parts(kind)
            if isinstance(part, INEXPRESSIBLE)
            or (isinstance(part, T.MapType) and not isinstance(part.keyType, KEYS))
        ]
        if not isinstance(kind, kinds):
            problem = f"takes {takes}"
        elif takes and isinstance(kind, T.MapType) and not isinstance(kind.keyType, T.StringType):
            problem = "takes a map with string keys"
        elif not takes and not options.kwargs_from_columns:
            problem = (
                f"is unknown; known are {', '.join(TYPES)}. Drop it, or set kwargsFromColumns to "
                "make all further columns keyword arguments"
            )
        elif wrong and takes != LENGTHS:
            part = wrong[0].simpleString()
            problem = f"JSON cannot express {part}; cast it, to a string for example"
        elif name == "kwargs" and options.kwargs_from_columns:
            problem = "cannot be combined with kwargsFromColumns"
        else:
            continue
        raise InvalidColumn(name, kind.simpleString(), problem)
    if ("delay" in types) == ("eta" in types):
        what = "present" if "eta" in types else "missing"
        raise InvalidColumn("delay", None, f"use exactly one of delay and eta; both are {what}")
    if "task" not in types and not options.task:
        raise InvalidColumn("task", None, "add this column, or set the option task")


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


def _with_mappings(value: Any, kind: T.DataType) -> Any:
    """Convert PyArrow's maps, which are lists of pairs, to mappings within a value."""
    if value is None:
        return None
    match kind:
        case T.MapType():
            return {key: _with_mappings(each, kind.valueType) for key, each in value}
        case T.ArrayType():
            return [_with_mappings(each, kind.elementType) for each in value]
        case T.StructType():
            kinds = {each.name: each.dataType for each in kind.fields}
            return {name: _with_mappings(each, kinds[name]) for name, each in value.items()}
    return value


def seconds(length: Delay) -> float:
    """Return a length of time in seconds."""
    return length.total_seconds() if isinstance(length, timedelta) else float(length)


def shown(given: Mapping[str, object]) -> dict[str, object]:
    """Return a row for an error, with long values shortened."""
    texts = {name: repr(value) for name, value in given.items()}
    return {
        name: given[name] if len(text) <= 100 else f"{text[:100]}..."
        for name, text in texts.items()
    }
