"""Writes values as text in Spark's own engine: as JSON, and as Python's ``repr``.

The texts have to equal Python's in every character: a task's id is derived from the JSON text, and
its message contains the texts. Where Spark cannot guarantee that (a quotation mark in a string, the
tenth digit of a double), :func:`is_exact` is false, and Python writes the row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from functools import reduce
from operator import and_, itemgetter
from typing import Final, NamedTuple

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's users know
from pyspark.sql import types as T  # noqa: N812 - likewise

#: Strings that need no escapes in JSON and Python, and that Celery's ``saferepr`` shows like
#: ``repr``.
PLAIN: Final = r"""\A[ -~&&[^"'\\<\[({]]*\z"""

#: Names that need no escapes in JSON and Python.
PLAIN_NAME: Final = r"[A-Za-z0-9_ .-]+"

#: The maximum number of digits after the point: Python may show longer decimals with an exponent.
MAX_SCALE: Final = 6

#: A double with at most this many digits after the point, and below this bound, has the same text
#: in Python as the equal decimal: the shortest text, without an exponent.
DOUBLE_SCALE: Final = 3
DOUBLE_BOUND: Final = 10**12

#: The largest interval, in microseconds: Spark divides with doubles, which are exact up to here.
MAX_INTERVAL_US: Final = 2**53

#: The types that Spark can always write, in addition to certain decimals, arrays and structs.
SIMPLE: Final = (T.BooleanType, T.IntegralType, T.NullType, T.DoubleType, T.StringType, T.DateType)


class Style(NamedTuple):
    """How values are written.

    Attributes:
        comma: The separator between two values.
        colon: The separator between a name and its value.
        quote: The quotation mark around a string.
        null: The text of a null.
        is_sorted: Whether the names of objects are in alphabetical order.
    """

    comma: str
    colon: str
    quote: str
    null: str
    is_sorted: bool = False


#: The notation of kombu's JSON.
JSON: Final = Style(", ", ": ", '"', "null")

#: The notation of the JSON from which ids are derived.
COMPACT: Final = Style(",", ":", '"', "null", is_sorted=True)

#: The notation of ``repr()``.
SHOWN: Final = Style(", ", ": ", "'", "None")


def can_be_written(name: str, kind: T.DataType, is_argument: bool) -> bool:
    """Return whether Spark can write a column, or a field, as Python does.

    Args:
        name: The name of the column or field.
        kind: The type of the column or field.
        is_argument: Whether the values are also written as ``repr``, and not only for an id.
    """
    if re.fullmatch(PLAIN_NAME, name) is None:
        return False
    match kind:
        case T.DecimalType():
            return kind.scale <= MAX_SCALE
        case T.TimestampType() | T.DayTimeIntervalType():
            # How Python shows a time zone depends on where it comes from.
            return not is_argument
        case T.ArrayType():
            if isinstance(kind.elementType, T.ArrayType | T.StructType):
                return False
            return can_be_written(name, kind.elementType, is_argument)
        case T.StructType():
            fields = [(each.name, each.dataType) for each in kind.fields]
            return all(can_be_written(*each, is_argument) for each in fields)
    return isinstance(kind, SIMPLE)


def text(value: Column, kind: T.DataType, style: Style) -> Column:
    """Return a value as text, never null. :func:`can_be_written` must accept its type."""
    return F.coalesce(_text(value, kind, style), F.lit(style.null))


def _text(value: Column, kind: T.DataType, style: Style) -> Column:
    plain = value.cast("string")
    match kind:
        case T.BooleanType() if style is SHOWN:
            return F.initcap(plain)
        case T.DoubleType():
            # "12.500" is shown as "12.5", and "12.000" as "12.0".
            digits = F.rtrim(_rounded(value).cast("string"), F.lit("0"))
            return joined(digits, F.when(digits.endswith("."), "0").otherwise(""))
        case T.StringType():
            return joined(style.quote, plain, style.quote)
        case T.DecimalType() if style is SHOWN:
            return joined("Decimal('", plain, "')")
        case T.DecimalType():
            return _tagged("decimal", plain, style)
        case T.DateType() if style is SHOWN:
            return F.date_format(value, "'datetime.date('y, M, d')'")
        case T.DateType():
            return _tagged("date", plain, style)
        case T.TimestampType():
            return F.unix_micros(value).cast("string")
        case T.DayTimeIntervalType():
            return interval_micros(value).cast("string")
        case T.ArrayType():
            return joined("[", _elements(value, kind.elementType, style), "]")
        case T.StructType():
            return F.when(value.isNotNull(), object_text(members(value, kind, style), style))
    return plain


def is_exact(value: Column, kind: T.DataType) -> Column:
    """Return whether Python writes the same texts for a value; the result is never null."""
    return F.coalesce(_is_exact(value, kind), value.isNull())


def _is_exact(value: Column, kind: T.DataType) -> Column:
    match kind:
        case T.DoubleType():
            # In Spark, -0.0 equals 0.0, but their texts differ.
            is_no_negative_zero = (value != 0) | (value.cast("string") == "0.0")
            is_same = _rounded(value).cast("double") == value
            return is_same & (F.abs(value) < DOUBLE_BOUND) & is_no_negative_zero
        case T.StringType():
            # Drop the collation, because regular expressions do not accept it.
            return value.cast("string").rlike(PLAIN)
        case T.DateType():
            return F.year(value).between(1, 9999)
        case T.DayTimeIntervalType():
            return interval_micros(value).isNotNull()
        case T.ArrayType(elementType=T.StringType() | T.IntegralType()):
            has_no_nulls = F.size(F.array_compact(value)) == F.size(value)
            return has_no_nulls & F.array_join(value.cast("array<string>"), " ").rlike(PLAIN)
        case T.ArrayType():
            return F.forall(value, lambda each: is_exact(each, kind.elementType))
        case T.StructType():
            return all_of([is_exact(value[each.name], each.dataType) for each in kind.fields])
    return F.lit(True)


def members(value: Column, kind: T.StructType, style: Style) -> list[tuple[str, Column]]:
    """Return the names of a struct's fields, and their values as text."""
    return [(each.name, text(value[each.name], each.dataType, style)) for each in kind.fields]


def object_text(named: Sequence[tuple[str, Column]], style: Style) -> Column:
    """Return names and values, which are text already, as an object; null if a value is null."""
    parts: list[str | Column] = []
    for name, value in sorted(named, key=itemgetter(0)) if style.is_sorted else named:
        comma = style.comma if parts else ""
        parts += [f"{comma}{style.quote}{name}{style.quote}{style.colon}", value]
    return joined("{", *parts, "}")


def all_of(conditions: Sequence[Column]) -> Column:
    """Return whether all conditions are true; null counts as false."""
    return reduce(and_, (F.coalesce(each, F.lit(False)) for each in conditions), F.lit(True))


def joined(*parts: str | Column) -> Column:
    """Concatenate texts; null if a text is null."""
    return F.concat(*(F.lit(part) if isinstance(part, str) else part for part in parts))


def block(text: Column) -> Column:
    """Return an ASCII text with its length before it, as a block of an envelope."""
    length = F.unhex(F.lpad(F.hex(F.octet_length(text).cast("long")), 8, "0"))
    return F.concat(length, text.cast("binary"))


def _tagged(tag: str, value: Column, style: Style) -> Column:
    """Return a value that JSON has no type for, as kombu writes it."""
    quoted = [("__type__", F.lit(f'"{tag}"')), ("__value__", joined('"', value, '"'))]
    return object_text(quoted, style)


def _rounded(value: Column) -> Column:
    """Return a double as a decimal; null if it is infinite or not a number."""
    return value.try_cast(f"decimal(18,{DOUBLE_SCALE})")


def interval_micros(value: Column) -> Column:
    """Return the microseconds of an interval; null beyond :data:`MAX_INTERVAL_US`."""
    most = timedelta(microseconds=MAX_INTERVAL_US)
    is_countable = value.between(F.lit(-most), F.lit(most))
    return F.when(is_countable, F.unix_micros(F.timestamp_micros(F.lit(0)) + value))


def _elements(value: Column, kind: T.DataType, style: Style) -> Column:
    """Return the elements of an array as text; faster for simple elements without nulls."""
    if isinstance(kind, T.StringType | T.IntegralType):
        quote = style.quote if isinstance(kind, T.StringType) else ""
        listed = F.array_join(value.cast("array<string>"), f"{quote}{style.comma}{quote}")
        return F.when(F.size(value) == 0, "").otherwise(joined(quote, listed, quote))
    return F.array_join(F.transform(value, lambda each: text(each, kind, style)), style.comma)
