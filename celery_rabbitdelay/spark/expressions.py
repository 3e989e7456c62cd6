"""Values as Spark's own engine writes them: as JSON, and as Python shows them.

The texts are those that Python writes, character by character: the task's id is derived from one,
and its message holds the others. Where Spark cannot promise that (a quotation mark in a string, the
tenth digit of a double), :attr:`Written.is_exact` is false, and Python writes the row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from operator import itemgetter
from typing import Final, NamedTuple

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's users know
from pyspark.sql import types as T  # noqa: N812 - likewise

#: Strings that JSON and Python both write as they are, and ``saferepr`` of Celery as ``repr``.
PLAIN: Final = r"""\A[ -~&&[^"'\\<\[({]]*\z"""

#: The same for names.
PLAIN_NAME: Final = r"[A-Za-z0-9_ .-]+"

#: Decimals with more digits after the point may be shown with an exponent.
MAX_SCALE: Final = 6

#: Doubles with this many digits after the point, and below this bound, are the shortest ones that
#: are read as the same number, and have no exponent.
DOUBLE_SCALE: Final = 3
DOUBLE_BOUND: Final = 10**12

#: The years of timestamps whose offset from UTC is of whole minutes, everywhere.
EXACT_YEARS: Final = (1973, 9999)

DAY_US: Final = 86_400_000_000

#: Spark divides as doubles, which count exactly so far.
MAX_INTERVAL_US: Final = 2**53


class Written(NamedTuple):
    """A value as text; all columns are null if the value is.

    Attributes:
        json: As kombu's JSON, with spaces after commas and colons.
        compact: The same without spaces, and with the names of objects in alphabetical order.
        shown: As ``repr()`` shows it, if :func:`can_be_shown` says so.
        is_exact: Whether these are the texts that Python writes.
    """

    json: Column
    compact: Column
    shown: Column
    is_exact: Column


def written(value: Column, kind: T.DataType) -> Written | None:
    """Return a value as text; None if Spark cannot write values of this type as Python does."""
    text = value.cast("string")
    exact = F.lit(True)
    match kind:
        case T.BooleanType():
            shown = F.initcap(text)
            return Written(text, text, shown, exact)
        case T.IntegralType() | T.NullType():
            return Written(text, text, text, exact)
        case T.DoubleType():
            return _double(value)
        case T.StringType():
            quoted = joined('"', value, '"')
            return Written(quoted, quoted, joined("'", value, "'"), value.rlike(PLAIN))
        case T.DecimalType() if kind.scale <= MAX_SCALE:
            return _tagged("decimal", text, joined("Decimal('", text, "')"), exact)
        case T.DateType():
            year, month, day = (
                part(value).cast("string") for part in (F.year, F.month, F.dayofmonth)
            )
            shown = joined("datetime.date(", year, ", ", month, ", ", day, ")")
            return _tagged("date", text, shown, F.year(value).between(1, 9999))
        case T.TimestampType():
            return _timestamp(value)
        case T.DayTimeIntervalType():
            return _interval(value)
        case T.ArrayType():
            return _array(value, kind.elementType)
        case T.StructType():
            return _struct(value, kind)
    return None


def can_be_shown(kind: T.DataType) -> bool:
    """Whether Spark writes values of a type as Python shows them, and not only as JSON."""
    match kind:
        case T.TimestampType() | T.DayTimeIntervalType():
            # How Python shows a time zone depends on where it comes from.
            return False
        case T.ArrayType():
            return can_be_shown(kind.elementType)
        case T.StructType():
            return all(can_be_shown(field.dataType) for field in kind.fields)
    return True


def or_null(value: Column, text: Written) -> Written:
    """Return a value as text that is never null."""
    return Written(
        F.coalesce(text.json, F.lit("null")),
        F.coalesce(text.compact, F.lit("null")),
        F.coalesce(text.shown, F.lit("None")),
        F.coalesce(text.is_exact, value.isNull()),
    )


def written_members(value: Column | None, kind: T.StructType) -> list[tuple[str, Written]] | None:
    """Return the fields of a struct, or of a row, as text; None if one has another type.

    Args:
        value: The struct; None for the row.
        kind: Its type.
    """
    found: list[tuple[str, Written]] = []
    for field in kind.fields:
        if re.fullmatch(PLAIN_NAME, field.name) is None:
            return None
        member = F.col(f"`{field.name}`") if value is None else value.getField(field.name)
        text = written(member, field.dataType)
        # An interval in a struct is nothing that JSON can express.
        if text is None or (value is not None and _is_interval(field.dataType)):
            return None
        found.append((field.name, or_null(member, text)))
    return found


def all_of(conditions: Sequence[Column]) -> Column:
    """Return whether all conditions are true; a null is not."""
    condition = F.lit(True)
    for each in conditions:
        condition = condition & F.coalesce(each, F.lit(False))
    return condition


def joined(*parts: str | Column) -> Column:
    """Return texts one after the other; null if one of them is null."""
    return F.concat(*(F.lit(part) if isinstance(part, str) else part for part in parts))


def block(text: Column) -> Column:
    """Return an ASCII text with its length before it, as a block of an envelope."""
    length = F.unhex(F.lpad(F.hex(F.octet_length(text).cast("long")), 8, "0"))
    return F.concat(length, text.cast("binary"))


def _tagged(tag: str, text: Column, shown: Column, is_exact: Column) -> Written:
    """Return a value that JSON has no type for, as kombu writes it."""
    spaced = joined(f'{{"__type__": "{tag}", "__value__": "', text, '"}')
    compact = joined(f'{{"__type__":"{tag}","__value__":"', text, '"}')
    return Written(spaced, compact, shown, is_exact)


def _double(value: Column) -> Written:
    # Null if it is infinite or not a number.
    rounded = value.try_cast(f"decimal(18,{DOUBLE_SCALE})")
    # "12.500" is shown as "12.5", and "12.000" as "12.0".
    digits = F.rtrim(rounded.cast("string"), F.lit("0"))
    text = joined(digits, F.when(digits.endswith("."), "0").otherwise(""))
    is_exact = (rounded.cast("double") == value) & (F.abs(value) < DOUBLE_BOUND)
    # -0.0 equals 0.0.
    is_exact = is_exact & ((value != 0) | (value.cast("string") == "0.0"))
    return Written(text, text, text, is_exact)


def _timestamp(value: Column) -> Written:
    micros = F.unix_micros(value)
    fraction = F.lpad((F.pmod(micros, F.lit(1_000_000))).cast("string"), 6, "0")
    text = joined(
        F.date_format(value, "yyyy-MM-dd'T'HH:mm:ss"),
        F.when(fraction == "000000", "").otherwise(joined(".", fraction)),
        F.date_format(value, "xxx"),
    )
    never = F.lit(None).cast("string")
    return _tagged("datetime", text, never, F.year(value).between(*EXACT_YEARS))


def _interval(value: Column) -> Written:
    """Return an interval as Python writes a timedelta."""
    micros = interval_micros(value)
    rest = F.pmod(micros, F.lit(DAY_US))
    days = F.floor((micros - rest) / DAY_US)

    def digits(unit: int, base: int, width: int) -> Column:
        return F.lpad(F.pmod(F.floor(rest / unit), F.lit(base)).cast("string"), width, "0")

    fraction = digits(1, 1_000_000, 6)
    text = joined(
        F.when(days == 0, "").otherwise(
            joined(days.cast("string"), F.when(days == 1, " day, ").otherwise(" days, "))
        ),
        F.floor(rest / 3_600_000_000).cast("string"),
        ":",
        digits(60_000_000, 60, 2),
        ":",
        digits(1_000_000, 60, 2),
        F.when(fraction == "000000", "").otherwise(joined(".", fraction)),
    )
    quoted = joined('"', text, '"')
    never = F.lit(None).cast("string")
    return Written(never, quoted, never, micros.isNotNull())


def _is_interval(kind: T.DataType) -> bool:
    return isinstance(kind, T.DayTimeIntervalType)


def interval_micros(value: Column) -> Column:
    """Return the microseconds of an interval of days to seconds; null if it is negative or huge."""
    is_countable = value.between(
        F.lit(timedelta(0)), F.lit(timedelta(microseconds=MAX_INTERVAL_US))
    )
    return F.when(is_countable, F.unix_micros(F.timestamp_micros(F.lit(0)) + value))


def _array(value: Column, kind: T.DataType) -> Written | None:
    nested = isinstance(kind, T.ArrayType | T.StructType)
    if nested or _is_interval(kind) or written(F.lit(None), kind) is None:
        return None
    if isinstance(kind, T.StringType | T.IntegralType):
        return _simple_array(value, kind)

    def of(element: Column) -> Written:
        text = written(element, kind)
        assert text is not None, "the type was looked at"
        return or_null(element, text)

    def texts(part: Callable[[Written], Column], separator: str) -> Column:
        return F.array_join(F.transform(value, lambda each: part(of(each))), separator)

    return Written(
        joined("[", texts(lambda text: text.json, ", "), "]"),
        joined("[", texts(lambda text: text.compact, ","), "]"),
        joined("[", texts(lambda text: text.shown, ", "), "]"),
        F.forall(value, lambda each: of(each).is_exact),
    )


def _simple_array(value: Column, kind: T.DataType) -> Written:
    """Return an array of strings or whole numbers, in a faster way; Python writes nulls in them."""
    texts = value.cast("array<string>")
    is_text = isinstance(kind, T.StringType)

    def listed(quote: str, separator: str) -> Column:
        members = F.array_join(texts, f"{quote}{separator}{quote}")
        return F.when(F.size(value) == 0, "[]").otherwise(joined(f"[{quote}", members, f"{quote}]"))

    double, single = ('"', "'") if is_text else ("", "")
    is_exact = F.size(F.array_compact(value)) == F.size(value)
    if is_text:
        is_exact = is_exact & F.array_join(texts, " ").rlike(PLAIN)
    return Written(listed(double, ", "), listed(double, ","), listed(single, ", "), is_exact)


def _struct(value: Column, kind: T.StructType) -> Written | None:
    members = written_members(value, kind)
    if members is None:
        return None
    return written_object(members, value.isNotNull())


def written_object(members: Sequence[tuple[str, Written]], there: Column) -> Written:
    """Return names and values as an object.

    Args:
        members: The names, and their values.
        there: Whether there is an object; otherwise it is null.
    """

    def text(begin: str, each: Sequence[tuple[str, Column]], separator: str) -> Column:
        parts: list[str | Column] = [begin]
        for number, (name, value) in enumerate(each):
            parts += [f"{separator if number else ''}{name}", value]
        return F.when(there, joined(*parts, "}"))

    spaced = [(f"{json.dumps(name)}: ", each.json) for name, each in members]
    compact = [
        (f"{json.dumps(name)}:", each.compact) for name, each in sorted(members, key=itemgetter(0))
    ]
    shown = [(f"{name!r}: ", each.shown) for name, each in members]
    return Written(
        text("{", spaced, ", "),
        text("{", compact, ","),
        text("{", shown, ", "),
        all_of([each.is_exact for _, each in members]),
    )
