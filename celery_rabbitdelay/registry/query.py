"""The search language: parse, format and match queries such as ``task:store.* due:<2h 4711``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time, timedelta, tzinfo
from functools import partial
from operator import attrgetter
from typing import Final, NamedTuple, Self

from celery_rabbitdelay.exceptions import InvalidDelay, InvalidSearch
from celery_rabbitdelay.levels.delay import milliseconds_of, parse_delay
from celery_rabbitdelay.registry.index import Filter, Kind, Pending
from celery_rabbitdelay.registry.states import STATES, Holds

_INSTANTS: Final = "<2h, >1d, today, 2030-01-31, 2030-01-31T09:00, or 2030-01-31..2030-02-02"

#: The names of terms, with the values that they take. A term without a name is a word.
NAMES: Final = {
    "task": "takes the name of a task; * matches any text: task:store.*",
    "queue": 'takes the name of a queue, or "" for tasks that an exchange routes',
    "key": "takes a key; * matches any text: key:order:4711*",
    "job": "takes the name of a job; * matches any text: job:import-*",
    "id": "takes the id of a task",
    "state": f"takes one of {', '.join(STATES)}; waiting means on time",
    "due": f"takes {_INSTANTS}",
    "sent": f"takes {_INSTANTS}; <2h means less than two hours ago",
}

#: The maximum number of terms in a search.
MOST_TERMS: Final = 50

#: The maximum number of proposed completions.
MOST_COMPLETIONS: Final = 30

#: The names of terms that search for a string.
_OF_TEXT: Final = ("task", "queue", "key", "job", "id")

#: One term: characters, escaped characters and quoted strings.
_TERM: Final = re.compile(r'(?:\\.?|"(?:\\.|[^"\\])*(?:"|\\?\Z)|[^\s"\\])+', re.DOTALL)
_NAMED: Final = re.compile(r"([A-Za-z]+):(.*)", re.DOTALL)
_CHARACTER: Final = re.compile(r"\\u\{(10[0-9a-f]{4}|[0-9a-f]{1,5})\}|\\(.)|([^\\])", re.DOTALL)

#: Any position except one between two digits.
_EDGE: Final = r"(?:(?<!\d)|(?!\d))"

#: The days that have names, with their distance from today in days.
_DAYS: Final = {"yesterday": -1, "today": 0, "tomorrow": 1}

_MINUTE, _DAY = timedelta(minutes=1), timedelta(days=1)


class Term(NamedTuple):
    r"""A term of a search.

    A ``*`` matches any text. A backslash escapes ``*``, quotation marks and backslashes;
    unprintable characters are written as ``\u{202e}``.

    Attributes:
        name: The term's name; empty for a word. :func:`filter_of` refuses a name that is not one of
            :data:`NAMES`, because a single term with any name may be an id or a key with a colon.
        parts: The strings between the wildcards; without wildcards, the whole text.
    """

    name: str
    parts: tuple[str, ...]

    @classmethod
    def of(cls, name: str, text: str) -> Self:
        """Return the term that matches exactly this text."""
        return cls(name, (text,))

    @classmethod
    def read(cls, written: str) -> Self:
        """Parse a term.

        Raises:
            InvalidSearch: The term has a name but no value.
        """
        name, parts = _name_of(written), [""]
        if name in NAMES and len(written) == len(name) + 1:
            raise InvalidSearch(written, f"{name} {NAMES[name]}")
        value = written[len(name) + 1 :] if name else written
        for code, escaped, plain in _CHARACTER.findall(value):
            if plain == "*":
                parts.append("")
            elif plain != '"':
                parts[-1] += chr(int(code, 16)) if code else escaped or plain
        return cls(name, tuple(parts))

    def __str__(self) -> str:
        value = "*".join("".join(map(_escaped, each)) for each in self.parts)
        if " " in value or not value:
            value = f'"{value}"'
        if self.name:
            return f"{self.name}:{value}"
        return value.replace(":", "\\:", 1) if _name_of(value) else value


class Query(NamedTuple):
    """A search.

    Attributes:
        terms: Its terms. Terms with the same name are alternatives, except that all words and all
            terms ``due`` and ``sent`` must match.
    """

    terms: tuple[Term, ...] = ()

    @classmethod
    def of(cls, text: str) -> Self:
        """Parse a search.

        Raises:
            InvalidSearch: A term is invalid, or there are too many terms.
        """
        found = [Term.read(each.group()) for each in _TERM.finditer(text)]
        if len(found) > MOST_TERMS:
            raise InvalidSearch(text, f"a search takes at most {MOST_TERMS} terms")
        return cls(tuple(each for each in found if each.name or any(each.parts)))

    def __str__(self) -> str:
        return " ".join(map(str, self.terms))

    def named(self, name: str) -> list[Term]:
        """Return the terms of a name; words have an empty name."""
        return [each for each in self.terms if each.name == name]

    def replaced(self, name: str, *terms: Term) -> Query:
        """Return the search with the terms of a name replaced, or removed."""
        return Query((*(each for each in self.terms if each.name != name), *terms))

    def without(self, term: Term) -> Query:
        """Return the search without a term."""
        return Query(tuple(each for each in self.terms if each != term))

    def texts(self, name: str) -> list[str]:
        """Return the strings of a name's terms; empty if a term has wildcards."""
        parts = [each.parts for each in self.named(name)]
        return [each[0] for each in parts] if all(len(each) == 1 for each in parts) else []

    @property
    def pasted(self) -> str:
        """The text, if the search is one string without a term's name or a wildcard; else empty."""
        name, parts = self.terms[0] if len(self.terms) == 1 else ("", ("",))
        text = f"{name}:{parts[0]}" if name else parts[0]
        return "" if name in NAMES or len(parts) > 1 else text

    def states(self) -> set[str]:
        """Return the wanted states; empty for any state.

        Raises:
            InvalidSearch: A state is unknown.
        """
        states = {"*".join(each.parts): each for each in self.named("state")}
        for wrong in states.keys() - {*STATES}:
            raise InvalidSearch(str(states[wrong]), f"state {NAMES['state']}")
        # A search for held tasks includes the tasks of open jobs.
        return {*states, *(("job-open",) if "held" in states else ())}

    def span(self, name: str, now: datetime, zone: tzinfo) -> Span:
        """Return the span of time that all terms ``due`` or ``sent`` have in common.

        Raises:
            InvalidSearch: The value of a term is invalid.
        """
        whole = Span(None, None)
        for each in self.named(name):
            whole = whole.cut(*_span_of(each, now, zone))
        return whole


class Span(NamedTuple):
    """A span of time.

    Attributes:
        start: The first instant, in milliseconds since 1970-01-01 UTC; None for no start.
        end: The first instant after the span, in the same unit; None for no end.
    """

    start: int | None
    end: int | None

    def cut(self, start: int | None, end: int | None) -> Span:
        """Return the part of the span between two instants."""
        starts = [each for each in (self.start, start) if each is not None]
        ends = [each for each in (self.end, end) if each is not None]
        return Span(max(starts, default=None), min(ends, default=None))

    def has(self, instant: datetime | None) -> bool:
        """Return whether ``instant`` is in the span; False for None."""
        at_ms = None if instant is None else milliseconds_of(instant)
        return at_ms is not None and self.cut(at_ms, at_ms + 1) == (at_ms, at_ms + 1)


class Context(NamedTuple):
    """The context of a search.

    Attributes:
        holds: The pauses and open jobs that hold due tasks at the time of the search.
        zone: The time zone of dates in the search.
        kinds: The kinds of the waiting tasks.
        arguments: Returns the masked arguments of a task from its name and its stored message; None
            if arguments are hidden.
    """

    holds: Holds
    zone: tzinfo
    kinds: Sequence[Kind] = ()
    arguments: Callable[[str, str], str | None] | None = None


def filter_of(query: Query, context: Context) -> Filter:
    """Translate a search into a filter of the registry's index.

    Raises:
        InvalidSearch: A term is invalid.
    """
    for each in (term for term in query.terms if term.name not in ("", *NAMES)):
        fields = f"the fields are {', '.join(NAMES)}; quote text with a colon"
        raise InvalidSearch(str(each), fields)
    states, holds = query.states(), context.holds
    due = query.span("due", holds.now, context.zone)
    is_due = bool(states) and "waiting" not in states
    if is_due:
        due = due.cut(None, holds.late_ms)
    elif states == {"waiting"}:
        due = due.cut(holds.late_ms, None)
    kinds = kinds_of(query, context)
    # Without open jobs, a task's kind alone decides whether the task is held.
    by_kind = is_due and not holds.of_jobs
    if by_kind:
        kinds = [
            each for each in kinds if ("held" if holds.pause_of(each) else "overdue") in states
        ]
    is_of_kinds = by_kind or query.named("task") or query.named("queue")
    texts = {name: query.texts(name) for name in ("job", "key")}
    only = {name: each[0] for name, each in texts.items() if len(each) == 1 and each[0]}
    names = {*_OF_TEXT} - {"task", "queue", *only}
    conditions: list[Callable[[Pending], bool]]
    conditions = [_condition(query, each) for each in names if query.named(each)]
    if (sent := query.span("sent", holds.now, context.zone)) != (None, None):
        conditions.append(lambda task: sent.has(task.sent))
    if states and states != {"waiting"} and not by_kind:
        conditions.append(lambda task: holds.state(task) in states)
    texts_of_words = [[part.lower() for part in each.parts] for each in query.named("")]
    words = [(_pattern(each), _pattern(["", *each], is_word=True)) for each in texts_of_words]

    def has_words(task: Pending, message: str) -> bool:
        arguments = context.arguments and context.arguments(task.task, message)
        texts = [(each or "").lower() for each in (task.key, arguments)]
        return all(
            # A word matches only the beginning of an id: random ids contain many short strings.
            begins.match(task.task_id.lower()) or any(map(has.match, texts))
            for begins, has in words
        )

    if words and context.arguments is None:
        conditions.append(partial(has_words, message=""))
    return Filter(
        key=only.get("key"),
        job=only.get("job"),
        due_after_ms=due.start,
        due_before_ms=due.end,
        kinds=frozenset(kinds) if is_of_kinds else None,
        where=(lambda task: all(each(task) for each in conditions)) if conditions else None,
        where_message=has_words if words and context.arguments else None,
    )


def kinds_of(query: Query, context: Context) -> list[Kind]:
    """Return the kinds of waiting tasks that a search may match."""
    of_task, of_queue = _condition(query, "task"), _condition(query, "queue")
    return [each for each in context.kinds if of_task(each) and of_queue(each)]


def completions(text: str, values: Mapping[str, Sequence[str]]) -> list[str]:
    """Complete the last term of a search.

    Args:
        text: The text so far.
        values: The possible values of terms, keyed by the term's name.
    """
    begun = text.split(" ")[-1]
    before, found = text[: len(text) - len(begun)], _name_of(begun)
    name, sought = (found, begun[len(found) + 1 :]) if found in NAMES else ("", begun)
    terms = [
        str(Term.of(each, value))
        for each, all_values in values.items()
        if not name or each == name
        for value in all_values
        if sought.strip('"').lower() in value.lower() and (sought or name or each == "state")
    ]
    names = [f"{each}:" for each in NAMES if not name and each.startswith(begun.lower())]
    return [f"{before}{each}" for each in (*names, *terms)[:MOST_COMPLETIONS]]


def _name_of(written: str) -> str:
    """Return the name of a written term, in lower case if it is known; empty for a word."""
    found = _NAMED.fullmatch(written)
    name = found[1] if found else ""
    return name.lower() if name.lower() in NAMES else name


def _escaped(character: str) -> str:
    if character in '\\*"':
        return f"\\{character}"
    return character if character.isprintable() else f"\\u{{{ord(character):x}}}"


def _condition(query: Query, name: str) -> Callable[[Pending | Kind], bool]:
    """Return a predicate: a task or kind matches a term of this name, or no term has the name."""
    matches, text_of = matcher(query, name), attrgetter("task_id" if name == "id" else name)
    return lambda each: matches(text_of(each))


def matcher(query: Query, name: str) -> Callable[[str | None], bool]:
    """Return a predicate: a text matches a term of this name, or no term has the name.

    None stands for a task without a key or a job, which matches only ``key:""`` or ``job:""``.
    """
    terms = query.named(name)
    patterns = [(_pattern(each.parts), each.parts == ("",)) for each in terms]
    return lambda text: (
        not terms
        or any(is_empty if text is None else each.fullmatch(text) for each, is_empty in patterns)
    )


def _pattern(parts: Sequence[str], is_word: bool = False) -> re.Pattern[str]:
    """Return the pattern of these parts in order, with any text in between.

    Args:
        parts: The parts.
        is_word: Whether the parts are a word: the first part is empty, and a number matches only
            whole numbers.
    """
    first, *others = map(re.escape, parts)
    if is_word and "".join(parts).isdecimal():
        others[0] = _EDGE + others[0]
        others[-1] += _EDGE
    # A part in the middle matches only its first occurrence, so that no search is slow.
    between = [f"(?>.*?{each})" for each in others[:-1]]
    return re.compile("".join([first, *between, *(f".*{each}" for each in others[-1:])]), re.DOTALL)


def _span_of(term: Term, now: datetime, zone: tzinfo) -> Span:
    """Return the span of time of a term."""
    is_ago = term.name == "sent"

    def read(text: str) -> tuple[datetime, datetime]:
        """Return the start and the end of a day, a minute or an instant."""
        with suppress(InvalidDelay):
            away = timedelta(seconds=float(parse_delay(text)))
            instant = now - away if is_ago else now + away
            return instant, instant
        with suppress(ValueError):
            day = now.astimezone(zone).date()
            ahead = _DAYS.get(text.lower())
            day = date.fromisoformat(text) if ahead is None else day + ahead * _DAY
            return datetime.combine(day, time(), zone), datetime.combine(day + _DAY, time(), zone)
        instant = datetime.fromisoformat(text)
        instant = instant if instant.tzinfo else instant.replace(tzinfo=zone)
        has_seconds = instant.second or instant.microsecond
        return instant, instant + (timedelta(milliseconds=1) if has_seconds else _MINUTE)

    text = "".join(term.parts)
    sign, (first, dots, last) = text[:1], text.partition("..")
    start: datetime | None
    end: datetime | None
    try:
        if dots:
            start, end = read(first)[0] if first else None, read(last)[1] if last else None
        else:
            start, end = read(text[1:] if sign in "<>" else text)
            if sign in "<>" or start == end:
                is_length = start == end
                is_before = (sign == ">") == (is_ago and is_length)
                start, end = (None, start) if is_before else (end, None)
        bounds = [
            None if each is None else milliseconds_of(each.astimezone()) for each in (start, end)
        ]
    except (ValueError, OverflowError) as wrong:
        raise InvalidSearch(str(term), f"{term.name} {NAMES[term.name]}") from wrong
    return Span(*bounds)
