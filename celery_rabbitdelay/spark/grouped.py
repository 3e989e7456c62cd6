"""Grouping in Spark: its own engine writes the rows, and brings together what is due together.

A grouped DataFrame has a row for each task, as it stands in an envelope, sorted by due time within
each partition. Python then cuts the column into envelopes, without touching a row. Rows that Spark
cannot write as Python would stay as they are, and Python writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from uuid import uuid4

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's users know
from pyspark.sql import types as T  # noqa: N812 - likewise

from celery_rabbitdelay.app.celery_internals import repr_limits
from celery_rabbitdelay.exceptions import InvalidColumn, InvalidOption, RabbitDelayError
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import milliseconds
from celery_rabbitdelay.levels.layout import Layout
from celery_rabbitdelay.levels.topology import DISTRIBUTE
from celery_rabbitdelay.publishing.message import MAX_SHORTSTR_BYTES
from celery_rabbitdelay.registry.options import is_tracked
from celery_rabbitdelay.spark import expressions
from celery_rabbitdelay.spark.application import application_of, find_task
from celery_rabbitdelay.spark.columns import (
    MAX_ARGUMENTS,
    SHARED,
    TYPES,
    Columns,
    TaskIds,
    is_case_sensitive,
    numbers_taken,
)
from celery_rabbitdelay.spark.expressions import COMPACT, JSON, SHOWN, Style, all_of, joined
from celery_rabbitdelay.spark.options import WriteOptions

#: The columns of a grouped DataFrame: when a task is due, in milliseconds since 1970-01-01 UTC; its
#: bytes in an envelope; and its row, if Python has to write it.
DUE: Final = "rabbitdelay_due_ms"
ITEM: Final = "rabbitdelay_item"
ROW: Final = "rabbitdelay_row"

#: The third part of a task's body: it has no callbacks, and is in no chain or chord.
EMBEDDED: Final = '{"callbacks": null, "errbacks": null, "chain": null, "chord": null}'

#: The columns on the way to it.
DELAY: Final = "delay_ms"
IDENTITY: Final = "identity"
DIGEST: Final = "digest"
HEADERS: Final = "headers"
BODY: Final = "body"
EXACT: Final = "is_exact"

#: The headers that show the arguments.
REPRS: Final = ("argsrepr", "kwargsrepr")

#: The types of columns with arguments.
CONTAINERS: Final[Mapping[str, Any]] = {
    "args": T.ArrayType | T.StructType,
    "kwargs": T.StructType,
}

#: Rows with a longer delay are written by Python, in seconds; longer than any layout's capacity.
MAX_DELAY: Final = 10**11


def grouped(frame: DataFrame, **options: Any) -> DataFrame:
    """Return a DataFrame that is written much faster, if many tasks share a message.

    Spark writes the messages' parts itself, and shuffles them, so that tasks that are due together
    come together. Write the result with the same options::

        options = {"app": "shop:app", "task": "shop.remind", "tolerance": 60}
        grouped(frame, **options).write.format("rabbitdelay").mode("append").options(**options)

    A delay counts from this call, so that it is the same however often Spark runs a partition.

    Args:
        frame: The rows, with the columns that the format takes, except ``key``, ``task``,
            ``queue``, ``tolerance``, ``priority`` and ``headers``. It must not be a stream.
        **options: The options of the write.

    Raises:
        InvalidColumn: The schema does not fit, or has a column of a type that only Python writes.
        InvalidOption: An option is wrong, or tasks cannot share messages.
    """
    checked = WriteOptions.of_call(options)
    grouping = Grouping(frame.schema, checked, is_case_sensitive(frame))
    if grouping.refusal is not None:
        raise grouping.refusal
    if frame.isStreaming:
        takes = "takes no stream; group each batch in foreachBatch"
        raise InvalidOption("grouped", "stream", takes)
    return grouping.of(frame)


class Grouping:
    """Groups DataFrames of one schema.

    Args:
        schema: The schema.
        options: The options of the write.
        is_case_sensitive: As for :class:`.Columns`.

    Attributes:
        refusal: Why these cannot be grouped; None if they can.

    Raises:
        InvalidColumn: The schema does not fit.
        InvalidOption: The application does not know the task, or it does not take the arguments.
    """

    def __init__(
        self, schema: T.StructType, options: WriteOptions, is_case_sensitive: bool
    ) -> None:
        columns = Columns(schema, options, is_case_sensitive)
        self._given_names = schema.names
        self._types, self._identity = columns.types, columns.identity
        self._options = options
        self._app = application_of(options.application)
        name, allows_unknown = options.task, options.allow_unknown_tasks
        self._task = None if name is None else find_task(self._app, name, allows_unknown)
        self.refusal = self._refusal()

    def of(self, frame: DataFrame) -> DataFrame:
        """Return a DataFrame, grouped."""
        layout: Layout = self._app.rabbitdelay.topology.layout
        now_ms = wall_clock.ms()
        # Spark computes a column once if it has a name and others need it more than once.
        row = F.struct(*map(_given, self._given_names)).alias(ROW)
        frame = frame.select(row, self._delay_ms(now_ms).alias(DELAY), *self._texts(now_ms))
        digest = F.sha1(F.concat(self._namespace, F.col(IDENTITY).cast("binary")))
        frame = frame.select("*", digest.alias(DIGEST))
        frame = frame.select(ROW, DELAY, *self._blocks())
        is_written = all_of([F.col(EXACT), F.col(DELAY).between(0, layout.capacity_ms)])
        item = F.when(
            is_written, F.concat(expressions.block(F.col(HEADERS)), expressions.block(F.col(BODY)))
        )
        shared_ms = _shared_ms(layout, F.col(DELAY), milliseconds(self._options.tolerance))
        frame = frame.select(ROW, (now_ms + shared_ms).alias(DUE), item.alias(ITEM))
        left = F.when(F.col(ITEM).isNull(), F.col(ROW)).alias(ROW)
        # Parts of about the same size, also if very many tasks are due together.
        return frame.select(DUE, ITEM, left).hint("rebalance", DUE).sortWithinPartitions(DUE)

    def _refusal(self) -> RabbitDelayError | None:
        settings, options = self._app.rabbitdelay.settings, self._options
        if options.envelopes is False or DISTRIBUTE not in settings.modules:
            takes = "takes true, and workers that serve distribution, if rows are grouped"
            return InvalidOption("envelopes", str(options.envelopes).lower(), takes)
        if is_tracked(self._app.rabbitdelay, self._task):
            takes = "takes no task that is tracked if rows are grouped: each is noted by itself"
            return InvalidOption("task", options.task, takes)
        for name in ("key", *SHARED):
            if name in self._types:
                kind = self._types[name].simpleString()
                return InvalidColumn(name, kind, "is not written by Spark; leave grouped out")
        for name in {*self._arguments, *self._identity}:
            column = self._types[name]
            is_written = (
                isinstance(column, CONTAINERS.get(name, T.DataType))
                and expressions.has_plain_name(name)
                and expressions.can_be_written(column, is_argument=name in self._arguments)
            )
            if not is_written:
                takes = "has a type that Spark does not write as Celery does; leave grouped out"
                return InvalidColumn(name, column.simpleString(), takes)
        return None

    @property
    def _arguments(self) -> Sequence[str]:
        """The columns that become arguments."""
        if self._options.kwargs_from_columns:
            return [name for name in self._types if name not in TYPES or name == "args"]
        return [name for name in ("args", "kwargs") if name in self._types]

    def _column(self, name: str) -> Column:
        """A column, with strings of no collation."""
        kind = self._types[name]
        plain = _without_collations(kind)
        return _given(name) if plain == kind else _given(name).cast(plain)

    def _delay_ms(self, now_ms: int) -> Column:
        """The milliseconds from now until a row is due; null if it has no valid due time."""
        if "eta" in self._types:
            ahead_us = F.unix_micros(F.col("eta")) - F.lit(now_ms * 1000)
            return _from_now_on(F.ceil(ahead_us / 1000))
        delay, kind = F.col("delay"), self._types["delay"]
        if isinstance(kind, T.DayTimeIntervalType):
            return _from_now_on(F.ceil(expressions.interval_micros(delay) / 1000))
        # Spark raises an error if a number is not a number, or too large for the next step.
        delay = _from_now_on(F.when(delay.between(-MAX_DELAY, MAX_DELAY), delay))
        if isinstance(kind, T.IntegralType):
            return delay.cast("long") * 1000
        if isinstance(kind, T.DecimalType):
            return F.ceil(delay * 1000).cast("long")
        # A float is read as its shortest decimal, so 1.1 is 1,100 ms and not 1,101.
        ms = delay.cast("double") * 1000
        near = F.rint(ms)
        return F.when(F.abs(ms - near) < 1e-6, near).otherwise(F.ceil(ms)).cast("long")

    def _is_for_spark(self, now_ms: int) -> Column:
        """Whether a row is not past, unless these are sent as others are."""
        if self._options.past == "send":
            return F.lit(True)
        if "eta" in self._types:
            return F.unix_micros(F.col("eta")) >= now_ms * 1000
        delay = F.col("delay")
        if isinstance(self._types["delay"], T.DayTimeIntervalType):
            delay = expressions.interval_micros(delay)
        return delay >= 0

    def _texts(self, now_ms: int) -> list[Column]:
        """The parts of a row as text, and whether they are those that Python writes."""
        told = [(self._column(name), self._types[name]) for name in self._identity]
        texts = [expressions.text(value, kind, COMPACT) for value, kind in told]
        identity = joined("[", F.concat_ws(COMPACT.comma, *texts), "]")
        id_is_exact = all_of([expressions.is_exact(value, kind) for value, kind in told])
        given = F.lit(None).cast("string")
        if "task_id" in self._types:
            given = self._column("task_id")
            is_plain = given.rlike(expressions.PLAIN) & (
                F.octet_length(given) <= MAX_SHORTSTR_BYTES
            )
            id_is_exact = F.when(given.isNull(), id_is_exact).otherwise(is_plain)
        exact = id_is_exact, self._is_for_spark(now_ms)
        return [
            self._args(JSON).alias("args"),
            self._args(SHOWN).alias(REPRS[0]),
            self._kwargs(JSON).alias("kwargs"),
            self._kwargs(SHOWN).alias(REPRS[1]),
            identity.alias(IDENTITY),
            given.alias("task_id"),
            all_of([*exact, *self._arguments_are_exact()]).alias(EXACT),
        ]

    def _blocks(self) -> list[Column]:
        """The two blocks of a row, and whether they are those that Python writes."""
        task_id = F.coalesce(F.col("task_id"), _uuid(F.col(DIGEST)))
        headers = joined('{"headers":{"id":"', task_id)
        conditions = [F.col(EXACT)]
        sizes, _ = repr_limits(self._app)
        for name, size in zip(REPRS, sizes, strict=True):
            headers = joined(headers, f'","{name}":"', F.col(name))
            conditions.append(F.octet_length(F.col(name)) <= size)
        body = joined("[", F.col("args"), ", ", F.col("kwargs"), f", {EMBEDDED}]")
        return [
            joined(headers, '"}}').alias(HEADERS),
            body.alias(BODY),
            all_of(conditions).alias(EXACT),
        ]

    @property
    def _namespace(self) -> Column:
        ids = TaskIds(self._options.job_id or str(uuid4()))
        return F.lit(bytearray(ids.namespace.bytes))

    def _args(self, style: Style) -> Column:
        """The positional arguments as text."""
        kind = self._types.get("args")
        if kind is None:
            return F.lit("()" if style is SHOWN else "[]")
        args = self._column("args")
        if isinstance(kind, T.StructType):
            texts = [each for _, each in expressions.members(args, kind, style)]
            listed = F.concat_ws(style.comma, *texts)
            if style is SHOWN:
                return joined("(", listed, ",)" if len(texts) == 1 else ")")
            return joined("[", listed, "]")
        listed = expressions.text(args, kind, style)
        # No arguments are a tuple, whatever they came from.
        return F.when(F.size(args) == 0, "()").otherwise(listed) if style is SHOWN else listed

    def _kwargs(self, style: Style) -> Column:
        """The keyword arguments as text."""
        if "kwargs" in self._types:
            return expressions.text(self._column("kwargs"), self._types["kwargs"], style)
        return expressions.object_text(
            [
                (name, expressions.text(self._column(name), self._types[name], style))
                for name in self._arguments
                if name != "args"
            ],
            style,
        )

    def _arguments_are_exact(self) -> Iterator[Column]:
        """Yield whether Python writes the arguments so, and whether the task takes as many."""
        for name in self._arguments:
            yield expressions.is_exact(self._column(name), self._types[name])
            if name in CONTAINERS:
                # Python writes a null as no arguments.
                yield self._column(name).isNotNull()
        taken: Sequence[int] = range(MAX_ARGUMENTS)
        if self._task is not None:
            taken = numbers_taken(self._task, self._types, self._options.kwargs_from_columns)
        kind = self._types.get("args")
        if isinstance(kind, T.ArrayType):
            yield F.size(F.col("args")).isin(*taken)
        else:
            yield F.lit(bool(taken))


def _from_now_on(length: Column) -> Column:
    """Return a length of time, 0 for a negative one: that means now."""
    return F.when(length < 0, 0).otherwise(length)


def _given(name: str) -> Column:
    return F.col(f"`{name}`")


def _without_collations(kind: T.DataType) -> T.DataType:
    """Return a type whose strings are compared by their bytes, as regular expressions need it."""
    match kind:
        case T.StringType():
            return T.StringType()
        case T.ArrayType():
            return T.ArrayType(_without_collations(kind.elementType), kind.containsNull)
        case T.StructType():
            plain = T.StructType()
            for each in kind.fields:
                plain.add(each.name, _without_collations(each.dataType), each.nullable)
            return plain
    return kind


def _uuid(digest: Column) -> Column:
    """Return the UUID of version 5 of a SHA-1 digest in hexadecimal (RFC 9562, section 5.5)."""
    variant = F.translate(F.substring(digest, 17, 1), "0123456789abcdef", "89ab89ab89ab89ab")
    return F.concat_ws(
        "-",
        F.substring(digest, 1, 8),
        F.substring(digest, 9, 4),
        joined("5", F.substring(digest, 14, 3)),
        joined(variant, F.substring(digest, 18, 3)),
        F.substring(digest, 21, 12),
    )


def _shared_ms(layout: Layout, delay_ms: Column, tolerance_ms: int) -> Column:
    """Return delays as :meth:`.Layout.round_to_fewest_stops` rounds them, and up to ticks."""

    def rounded_up(unit: int) -> Column:
        return F.ceil(delay_ms / unit) * unit

    longest_ms = F.least(delay_ms + tolerance_ms, F.lit(layout.capacity_ms))
    multiples = [
        F.when((rounded_up(place) > 0) & (rounded_up(place) <= longest_ms), rounded_up(place))
        for place in layout.places_ms
        if place > layout.tick_ms
    ]
    return F.coalesce(*multiples, rounded_up(layout.tick_ms))
