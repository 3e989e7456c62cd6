"""Groups tasks in Spark's own engine, which serializes them and shuffles them by due time.

A grouped DataFrame has a row for each task, as an item of an envelope, sorted by due time within
each partition. Python then packs the items into envelopes without reading them. If Spark cannot
serialize a row exactly as Python does, Python serializes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final
from uuid import uuid4

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's users know
from pyspark.sql import types as T  # noqa: N812 - likewise

from celery_rabbitdelay.app.celery_internals import repr_limits
from celery_rabbitdelay.exceptions import InvalidColumn, InvalidOption
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import milliseconds
from celery_rabbitdelay.levels.layout import Layout
from celery_rabbitdelay.levels.topology import DISTRIBUTE
from celery_rabbitdelay.publishing.message import MAX_SHORTSTR_BYTES
from celery_rabbitdelay.registry.application import is_tracked
from celery_rabbitdelay.spark import columns, expressions
from celery_rabbitdelay.spark.application import application_of, find_task, numbers_taken
from celery_rabbitdelay.spark.columns import DUE, ITEM, ROW
from celery_rabbitdelay.spark.expressions import COMPACT, JSON, SHOWN, Style, all_of, joined
from celery_rabbitdelay.spark.options import WriteOptions

#: The third part of a task's body, for a task without callbacks that is in no chain or chord.
EMBEDDED: Final = '{"callbacks": null, "errbacks": null, "chain": null, "chord": null}'

#: Intermediate columns.
DELAY: Final = "delay_ms"
EXACT: Final = "is_exact"

#: The headers that show the arguments.
REPRS: Final = ("argsrepr", "kwargsrepr")

#: The types of columns with arguments.
CONTAINERS: Final = {"args": T.ArrayType | T.StructType, "kwargs": T.StructType}

#: The type of delays in Spark, in seconds. Python writes rows with longer delays, which are above
#: any capacity.
SECONDS: Final = "decimal(20,9)"


def grouped(frame: DataFrame, **options: Any) -> DataFrame:
    """Return a DataFrame that can be written much faster if many of its tasks share messages.

    Spark serializes the tasks itself, and shuffles them, so that tasks that are due together are in
    one partition. Write the result with the same options::

        options = {"app": "shop:app", "task": "shop.remind", "tolerance": 60}
        grouped(frame, **options).write.format("rabbitdelay").mode("append").options(**options)

    A delay counts from this call, so a task keeps its due time if Spark repeats a partition.

    Args:
        frame: The rows, with the columns that the format takes, except ``key``, ``task``,
            ``queue``, ``tolerance``, ``priority`` and ``headers``. A stream cannot be grouped.
        **options: The options of the write.

    Raises:
        InvalidColumn: The schema is invalid, or has a column that only Python can write.
        InvalidOption: An option is invalid, or tasks cannot share messages.
    """
    checked = WriteOptions.of_call(options)
    return Grouping(frame.schema, checked).of(frame)


class Grouping:
    """Groups DataFrames of one schema.

    Args:
        schema: The schema.
        options: The options of the write.

    Raises:
        InvalidColumn: The schema is invalid, or has a column that only Python can write.
        InvalidOption: The application does not know the task, or tasks cannot share messages.
    """

    def __init__(self, schema: T.StructType, options: WriteOptions) -> None:
        found = columns.Columns(schema, options)
        self._types, self._identity = found.types, found.identity
        #: The columns that become arguments.
        self._arguments = [name for name in CONTAINERS if name in self._types]
        if options.kwargs_from_columns:
            self._arguments += [name for name in self._types if name not in columns.TYPES]
        self._options = options
        self._app = application_of(options.application)
        self._task = find_task(self._app, options.task, options.allow_unknown_tasks)
        self._check()

    def of(self, frame: DataFrame) -> DataFrame:
        """Group a DataFrame."""
        layout, now_ms = self._app.rabbitdelay.topology.layout, wall_clock.ms()
        namespace = columns.TaskIds(self._options.job_id or str(uuid4())).namespace.bytes
        # Spark computes a named column only once, even if several other columns need it.
        frame = frame.toDF(*self._types)
        frame = frame.select(F.struct("*").alias(ROW), *self._texts(now_ms))
        digest = F.sha1(F.concat(F.lit(bytearray(namespace)), F.col("identity").cast("binary")))
        frame = frame.select("*", digest.alias("digest")).select(ROW, DELAY, *self._blocks())
        is_written = all_of([F.col(EXACT), F.col(DELAY).between(0, layout.capacity_ms)])
        item = F.when(
            is_written, F.concat(*(expressions.block(F.col(n)) for n in ("headers", "body")))
        )
        shared_ms = _shared_ms(layout, F.col(DELAY), milliseconds(self._options.tolerance))
        frame = frame.select(ROW, (now_ms + shared_ms).alias(DUE), item.alias(ITEM))
        left = F.when(F.col(ITEM).isNull(), F.col(ROW)).alias(ROW)
        # Rebalance: the partitions have about the same size, even if very many tasks are due
        # together.
        return frame.select(DUE, ITEM, left).hint("rebalance", DUE).sortWithinPartitions(DUE)

    def _check(self) -> None:
        settings, options = self._app.rabbitdelay.settings, self._options
        if options.envelopes is False or DISTRIBUTE not in settings.modules:
            takes = "takes true if rows are grouped, and workers have to serve distribution"
            raise InvalidOption("envelopes", str(options.envelopes).lower(), takes)
        if is_tracked(self._app.rabbitdelay, self._task):
            takes = "takes no tracked task if rows are grouped: the registry needs every row"
            raise InvalidOption("task", options.task, takes)
        for name, kind in self._types.items():
            is_argument = name in self._arguments
            is_text = is_argument or name in self._identity or name == "task_id"
            fits = isinstance(kind, CONTAINERS.get(name, T.DataType))
            fits = fits and expressions.can_be_written(name, kind, is_argument)
            if name in ("key", *columns.SHARED) or (is_text and not fits):
                takes = "cannot be written by Spark as Celery writes it; write without grouped()"
                raise InvalidColumn(name, kind.simpleString(), takes)

    def _ahead_us(self, now_ms: int) -> Column:
        """Return the microseconds from now until a row is due; null if it has no valid due time."""
        if "eta" in self._types:
            return F.unix_micros(F.col("eta")) - F.lit(now_ms * 1000)
        if isinstance(self._types["delay"], T.DayTimeIntervalType):
            return expressions.interval_micros(F.col("delay"))
        # A double is read as its shortest decimal, so 1.1 is 1,100 ms and not 1,101.
        return F.ceil(F.col("delay").try_cast(SECONDS) * 1_000_000).cast("long")

    def _texts(self, now_ms: int) -> list[Column]:
        """Return a row's parts as text, its delay, and whether Python writes the same texts."""
        ahead_us = self._ahead_us(now_ms)
        identity = [(_given(name), self._types[name]) for name in self._identity]
        texts = [expressions.text(value, kind, COMPACT) for value, kind in identity]
        exact = all_of([expressions.is_exact(value, kind) for value, kind in identity])
        task_id = F.lit(None).cast("string")
        if "task_id" in self._types:
            task_id = F.col("task_id").cast("string")
            is_short = F.octet_length(task_id) <= MAX_SHORTSTR_BYTES
            is_plain = task_id.rlike(expressions.PLAIN) & is_short
            exact = F.when(task_id.isNull(), exact).otherwise(is_plain)
        # Python drops or refuses past rows.
        is_for_spark = F.lit(True) if self._options.past == "send" else ahead_us >= 0
        return [
            F.ceil(F.when(ahead_us < 0, 0).otherwise(ahead_us) / 1000).alias(DELAY),
            self._args(JSON).alias("args"),
            self._args(SHOWN).alias(REPRS[0]),
            self._kwargs(JSON).alias("kwargs"),
            self._kwargs(SHOWN).alias(REPRS[1]),
            joined("[", F.concat_ws(COMPACT.comma, *texts), "]").alias("identity"),
            task_id.alias("task_id"),
            all_of([exact, is_for_spark, *self._arguments_are_exact()]).alias(EXACT),
        ]

    def _blocks(self) -> list[Column]:
        """Return the two blocks of a row, and whether Python writes the same blocks."""
        task_id = F.coalesce(F.col("task_id"), _uuid(F.col("digest")))
        headers = joined('{"headers":{"id":"', task_id)
        conditions = [F.col(EXACT)]
        sizes, _ = repr_limits(self._app)
        for name, size in zip(REPRS, sizes, strict=True):
            headers = joined(headers, f'","{name}":"', F.col(name))
            conditions.append(F.octet_length(F.col(name)) <= size)
        body = joined("[", F.col("args"), ", ", F.col("kwargs"), f", {EMBEDDED}]")
        headers = joined(headers, '"}}')
        return [headers.alias("headers"), body.alias("body"), all_of(conditions).alias(EXACT)]

    def _args(self, style: Style) -> Column:
        """Return the positional arguments as text."""
        kind, args = self._types.get("args"), F.col("args")
        if kind is None:
            return F.lit("()" if style is SHOWN else "[]")
        if isinstance(kind, T.StructType):
            texts = [each for _, each in expressions.members(args, kind, style)]
            begin, end = ("(", ",)" if len(texts) == 1 else ")") if style is SHOWN else "[]"
            return joined(begin, F.concat_ws(style.comma, *texts), end)
        listed = expressions.text(args, kind, style)
        # Celery shows empty arguments as a tuple, even if they were a list.
        return F.when(F.size(args) == 0, "()").otherwise(listed) if style is SHOWN else listed

    def _kwargs(self, style: Style) -> Column:
        """Return the keyword arguments as text."""
        kinds = {name: self._types[name] for name in self._arguments if name != "args"}
        named = [(name, expressions.text(_given(name), kinds[name], style)) for name in kinds]
        return named[0][1] if "kwargs" in self._types else expressions.object_text(named, style)

    def _arguments_are_exact(self) -> Iterator[Column]:
        """Yield whether Python writes the same arguments, and whether their number fits."""
        for name in self._arguments:
            yield expressions.is_exact(_given(name), self._types[name])
            if name in CONTAINERS:
                # In Python, a null means no arguments.
                yield _given(name).isNotNull()
        taken = numbers_taken(self._task, self._types, self._options)
        if isinstance(self._types.get("args"), T.ArrayType):
            yield F.size(F.col("args")).isin(*taken)


def _given(name: str) -> Column:
    return F.col(f"`{name}`")


def _uuid(digest: Column) -> Column:
    """Return the UUID of version 5 of a SHA-1 digest in hexadecimal (RFC 9562, section 5.5)."""
    variant = F.translate(F.substring(digest, 17, 1), "0123456789abcdef", "89ab89ab89ab89ab")
    begin, middle, end = (F.substring(digest, *part) for part in ((1, 12), (14, 3), (18, 15)))
    digits = joined(begin, "5", middle, variant, end)
    return F.regexp_replace(digits, "^(.{8})(.{4})(.{4})(.{4})", "$1-$2-$3-$4-")


def _shared_ms(layout: Layout, delay_ms: Column, tolerance_ms: int) -> Column:
    """Round delays as :meth:`.Layout.round_to_fewest_stops` does, and up to ticks."""

    def rounded_up(unit: int) -> Column:
        return F.ceil(delay_ms / unit) * unit

    longest_ms = F.least(delay_ms + tolerance_ms, F.lit(layout.capacity_ms))
    multiples = [
        F.when((rounded_up(place) > 0) & (rounded_up(place) <= longest_ms), rounded_up(place))
        for place in layout.places_ms
        if place > layout.tick_ms
    ]
    return F.coalesce(*multiples, rounded_up(layout.tick_ms))
