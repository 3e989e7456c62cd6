"""The headers of a message: their names, and which values are valid. Pure.

The headers of an arriving message are not trusted: another client, another version or an attacker
may have written them. This file alone decides which values are valid. :func:`parse` reads headers
once, and all other code works with :class:`DelayHeaders`. An invalid header counts as missing:
distribution refuses the message, and a worker ignores the header. :mod:`.limits` decides which
destinations, nesting and delays are allowed, and :mod:`.checkin` decides which tasks a client may
send. Three parties set or see headers:

- A client of check-in sets :data:`X_DELAY` and :data:`EXCHANGE`; see :func:`of_client`.
- A producer with permission to publish to the levels may set every header. With a signing key,
  unless ``rabbitdelay_signing_required`` is false, its messages must be signed. The signature
  covers a message's destination, due time, priority and expiration, and the headers that the
  registry uses (:data:`REGISTRY`), but not the headers that modules add. See
  :attr:`DelayHeaders.signed` and :mod:`.signature`.
- The consumer of the message sees the headers that :meth:`DelayHeaders.for_consumer` keeps.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self, TypeGuard

from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.levels.delay import MAX_DUE_MS

#: The instant at which the task may start: int, milliseconds since 1970-01-01 UTC.
DUE: Final = "rabbitdelay-due"

#: The exchange that the message would have been published to without a delay: str.
EXCHANGE: Final = "rabbitdelay-exchange"

#: The routing key that the message would have had without a delay: str.
ROUTING_KEY: Final = "rabbitdelay-routing-key"

#: The name of the destination queue: str.
QUEUE: Final = "rabbitdelay-queue"

#: The priority that distribution restores: int, above 4.
PRIORITY: Final = "rabbitdelay-priority"

#: The ``expiration`` property that distribution restores: str, milliseconds.
EXPIRATION: Final = "rabbitdelay-expiration"

#: Marks a message that left the levels before it was due and was put back: a table, see
#: :class:`EarlyHeader`.
EARLY: Final = "rabbitdelay-early"

#: The number of failed attempts to publish a message to its destination: int; the time of the first
#: failure: int, milliseconds since 1970-01-01 UTC; and the reason for the first failure: str.
ATTEMPTS: Final = "rabbitdelay-attempts"
FAILED_SINCE: Final = "rabbitdelay-failed-since"
FIRST_REASON: Final = "rabbitdelay-first-reason"

#: Why a module put the message into ``undeliverable``: str. The broker gives no reason.
REASON: Final = "rabbitdelay-reason"

#: How often a message was taken out of ``undeliverable`` and published again: int. The header stays
#: until the message reaches its destination.
REDRIVEN: Final = "rabbitdelay-redriven"

#: Marks a task that check-in has passed on without a delay, so that the worker knows that a client
#: has written the task: True. The worker removes the header.
CHECKED_IN: Final = "rabbitdelay-checked-in"

#: The version of the message format that a reader needs: int. Absent: 1.
VERSION: Final = "rabbitdelay-version"

#: The signature, if the sender has a signing key: str.
SIGNATURE: Final = "rabbitdelay-signature"

#: Why the properties of a received message cannot be read: str; and the raw bytes of these
#: properties. The message has no other headers and goes to ``undeliverable``. If only its exchange
#: or routing key cannot be read, :data:`UNREADABLE` is added to the message's own headers.
UNREADABLE: Final = "rabbitdelay-unreadable"
UNREADABLE_PROPERTIES: Final = "rabbitdelay-properties"

#: The message's name, different for every message of a task that has a key or is tracked: str.
COPY: Final = "rabbitdelay-copy"

#: The task's life, which a retry keeps: how often a task was sent again under the same id after it
#: had run: str, digits. Absent: 0. :data:`UNKNOWN_LIFE` if Redis could not be reached.
LIFE: Final = "rabbitdelay-life"

#: The key that the task was sent with: str.
KEY: Final = "rabbitdelay-key"

#: When the task was sent, in microseconds since 1970-01-01 UTC by the clock of Redis: str, digits.
#: The task with the largest value is the newest under its key.
ORDER: Final = "rabbitdelay-key-order"

#: The name of the job that the task was sent with: str; and the job's id: str, because several jobs
#: may have the same name, one after another.
JOB: Final = "rabbitdelay-job"
JOB_ID: Final = "rabbitdelay-job-id"

#: The schedule of a task that is an occurrence: its name, the occurrence's instant, and the rules
#: for the next occurrence: str, JSON; see :class:`.Occurrence`.
SCHEDULE: Final = "rabbitdelay-schedule"

#: A message with this header is not a task: it records that the job in :data:`JOB` and
#: :data:`JOB_ID` was committed: True.
COMMITTED: Final = "rabbitdelay-committed"

#: Set if every attempt of the task may run only once, because the task was sent with ``once`` or is
#: an occurrence: the message's :class:`Mark`, str; or True if the mark has no name.
ONCE: Final = "rabbitdelay-once"

#: Set if the task was sent with ``track``: True. The task's retries are tracked too.
TRACKED: Final = "rabbitdelay-tracked"

#: Set by a worker that puts a message back, if the message may have been allowed to run at an
#: arrival that :data:`ONCE` does not list, for example because RabbitMQ had redelivered it: True.
REDELIVERED: Final = "rabbitdelay-redelivered"

#: The delay that a client of check-in requests, in milliseconds: int, float, or the digits of an
#: integer, str. The delayed-message-exchange plugin uses the same header.
X_DELAY: Final = "x-delay"

#: The latest version of the message format that this version of the package reads. The header
#: :data:`VERSION` of a message names the version that it needs; version 1 writes no header. Raise
#: the number when an older worker would mishandle a message; see docs/how-to/upgrade.md.
MESSAGE_VERSION: Final = 1

#: The prefix of all content types of this package, past and future.
OWN_CONTENT_TYPES: Final = "application/vnd.rabbitdelay."
#: The prefix of the content types of envelopes, which are messages with many tasks.
ENVELOPES: Final = f"{OWN_CONTENT_TYPES}envelope."
#: The content type of an envelope; it ends with the version of the envelope's format.
ENVELOPE: Final = f"{ENVELOPES}1"

#: The prefix of all headers of this package.
OWN_PREFIX: Final = "rabbitdelay-"

#: The headers by which the registry decides whether a task runs.
REGISTRY: Final = frozenset(
    (COPY, LIFE, KEY, ORDER, JOB, JOB_ID, ONCE, TRACKED, REDELIVERED, COMMITTED, SCHEDULE)
)

#: If a message has this header, which tracers and users set, Celery exposes only its value as
#: ``task.request.headers`` (https://github.com/celery/celery/issues/4875).
NESTED_HEADERS: Final = "headers"

#: Headers with additional routing keys, by which RabbitMQ routes although no module checks them
#: (https://www.rabbitmq.com/docs/sender-selected). In the levels, where a routing key consists of
#: digits, such a header can only do harm.
SENDER_SELECTED: Final = ("CC", "BCC")

#: The headers that RabbitMQ adds to a dead-lettered or redelivered message
#: (https://www.rabbitmq.com/docs/dlx#effects). Up to 3.13, RabbitMQ trusts an ``x-death`` that a
#: client publishes, and drops the message as a cycle if the header already names the queue.
BROKER_HEADERS: Final = frozenset(
    {"x-death", "x-delivery-count", "x-acquired-count"}
    | {f"x-first-death-{what}" for what in ("exchange", "queue", "reason")}
    | {f"x-last-death-{what}" for what in ("exchange", "queue", "reason")}
)

#: The highest normal priority of quorum queues (0-4); see :data:`.TWO_PRIORITIES`.
MAX_PRIORITY: Final = 4

#: AMQP's highest priority, and the longest ``expiration`` that RabbitMQ accepts, in milliseconds.
HIGHEST_PRIORITY: Final = 255
MAX_EXPIRATION_MS: Final = 2**32 - 1

#: The largest valid count of attempts, or of returns into the levels; no real message reaches it.
MAX_COUNT: Final = 2**31

#: The largest integer that Lua, the language of Redis's scripts, can distinguish from the next one.
MAX_EXACT: Final = 2**53 - 1

#: The life of a message whose sender could not reach Redis; no other message has the same life.
UNKNOWN_LIFE: Final = -1

#: Maximum characters of a value in an error text.
MAX_SHOWN_LENGTH: Final = 200

NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})

_INTEGER: Final = re.compile("-?[0-9]+")

_PREFIXES: Final[frozenset[str | bytes]] = frozenset((OWN_PREFIX, OWN_PREFIX.encode()))
_PREFIX_LENGTH: Final = len(OWN_PREFIX)


class EarlyHeader(NamedTuple):
    """Records how a message that left the levels too early was put back into them.

    Attributes:
        times: How often the message was put back.
        until_ms: When the message leaves the levels again, in milliseconds since 1970-01-01 UTC; 0
            if it leaves at its due time. The two times differ if the remaining delay is above the
            capacity, or if the registry has put back a due message.
        exchange: The exchange that the task's consumer sees; None for the message's own exchange.
        routing_key: The routing key that the task's consumer sees; None for the message's own key.
    """

    times: int = 0
    until_ms: int = 0
    exchange: str | None = None
    routing_key: str | None = None

    @classmethod
    def of(cls, table: Mapping[str, object]) -> Self:
        """Read the table of the header :data:`EARLY`; invalid values count as missing."""
        times, until_ms = table.get("times"), table.get("until")
        exchange, routing_key = table.get("exchange"), table.get("routing-key")
        early = cls(
            times if is_int(times, 0, MAX_COUNT) else 0,
            until_ms if is_int(until_ms, 0, MAX_DUE_MS) else 0,
        )
        if isinstance(exchange, str) and isinstance(routing_key, str):
            return early._replace(exchange=exchange, routing_key=routing_key)
        return early

    def expects(self, now_ms: int, tolerated_ms: int) -> bool:
        """Return whether the message was to leave the levels by now, before its due time."""
        return 0 < self.until_ms <= now_ms + tolerated_ms

    def header(self) -> dict[str, dict[str, object]]:
        """Return a mapping with the one header :data:`EARLY`."""
        table = {
            "times": self.times,
            "until": self.until_ms or None,
            "exchange": self.exchange,
            "routing-key": self.routing_key,
        }
        return {EARLY: {name: value for name, value in table.items() if value is not None}}


NEVER_EARLY: Final = EarlyHeader()


#: The maximum number of former arrivals that a message lists.
MAX_FORMER: Final = 16


class Mark(NamedTuple):
    """Distinguishes the arrivals of a task's messages, if only one message of the task may run.

    Attributes:
        name: The message's name, which it keeps when it is put back or when RabbitMQ copies it.
        generation: How often the message was put back.
        former: The names of the arrivals that have put the message back. One of these arrivals may
            have been allowed to run.
    """

    name: str = ""
    generation: int = 0
    former: tuple[str, ...] = ()

    @classmethod
    def of(cls, value: object) -> Self:
        """Read the value of the header :data:`ONCE`."""
        name, *more = value.split(".") if isinstance(value, str) else ("",)
        if not more or not is_digits(more[0], MAX_COUNT):
            return cls(name)
        return cls(name, int(more[0]), tuple(more[1:])[-MAX_FORMER:])

    def after(self, arrival: str) -> Self:
        """Return the mark with one more name in ``former``."""
        return self._replace(former=(*self.former, arrival)[-MAX_FORMER:])

    @property
    def text(self) -> str:
        """The mark as the value of the header :data:`ONCE`."""
        return ".".join((self.name, str(self.generation), *self.former))


class Failures(NamedTuple):
    """The failed attempts to publish a message to its destination.

    Attributes:
        attempts: The number of failed attempts.
        since_ms: When the first attempt failed, in milliseconds since 1970-01-01 UTC.
        first_reason: Why the first attempt failed.
    """

    attempts: int
    since_ms: int
    first_reason: str


class DelayHeaders(NamedTuple):
    """The parsed headers of a delayed message.

    Attributes:
        due_ms: The instant at which the task may start, in milliseconds since 1970-01-01 UTC.
        exchange: The exchange that the message would have been published to without a delay.
        routing_key: The routing key that the message would have had without a delay.
        queue: The destination queue; None if the exchange routes the message.
        priority: The priority, above 4, that distribution restores.
        expiration: The ``expiration`` that distribution restores.
        early: How the message was put back after it had left the levels too early.
        failures: The failed attempts to publish the message to its destination.
        reason: Why the message is undeliverable, or why the last attempt failed.
        redriven: How often the message was taken out of ``undeliverable`` and published again.
        registry: The headers that the registry uses, by name.
        signature: The signature.
        others: The user's headers, and Celery's.
    """

    due_ms: int | None = None
    exchange: str | None = None
    routing_key: str | None = None
    queue: str | None = None
    priority: int | None = None
    expiration: str | None = None
    early: EarlyHeader = NEVER_EARLY
    failures: Failures | None = None
    reason: str | None = None
    redriven: int = 0
    registry: Mapping[str, str | bool] = NOTHING
    signature: str | None = None
    others: Mapping[str, Any] = NOTHING

    def to_headers(self) -> dict[str, Any]:
        """Return the headers: the inverse of :func:`parse`."""
        headers = {**self.others, **self.registry}
        for name, field in _FIELDS.items():
            if (value := getattr(self, field)) != self._field_defaults[field]:
                headers[name] = value
        if self.early != NEVER_EARLY:
            headers |= self.early.header()
        if self.failures is not None:
            headers[ATTEMPTS], headers[FAILED_SINCE], headers[FIRST_REASON] = self.failures
        return headers

    @property
    def signed(self) -> tuple[object, ...]:
        """The values that a signature covers apart from :attr:`registry`.

        These values do not change while the message waits. Adding a value here, or changing the
        order, invalidates the signatures of all waiting messages.
        """
        return (
            *(self.exchange, self.routing_key, self.queue, self.due_ms, self.priority),
            *(self.expiration, self.early.exchange, self.early.routing_key),
        )

    def for_consumer(self) -> DelayHeaders:
        """Return the headers that the message's consumer sees.

        Only a message for one queue keeps its destination, which the worker restores.
        """
        is_named = self.queue is not None
        return DelayHeaders(
            self.due_ms,
            self.exchange if is_named else None,
            self.routing_key if is_named else None,
            self.queue,
            early=self.early,
            registry=self.registry,
            others=self.others,
        )


#: The fields of :class:`DelayHeaders` that stand for a single header, keyed by its name.
_FIELDS: Final = {
    DUE: "due_ms",
    EXCHANGE: "exchange",
    ROUTING_KEY: "routing_key",
    QUEUE: "queue",
    PRIORITY: "priority",
    EXPIRATION: "expiration",
    REASON: "reason",
    REDRIVEN: "redriven",
    SIGNATURE: "signature",
}


def is_int(value: object, least: int, most: int) -> TypeGuard[int]:
    """Return whether a value is an integer in a range; a bool does not count."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_digits(value: object, most: int) -> TypeGuard[str]:
    """Return whether a value is a string of decimal digits for a number up to ``most``."""
    if not isinstance(value, str) or len(value) > len(str(most)):
        return False
    return value.isascii() and value.isdigit() and int(value) <= most


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def is_life(value: object) -> TypeGuard[str]:
    """Return whether a value is valid for the header :data:`LIFE`."""
    return value == str(UNKNOWN_LIFE) or is_digits(value, MAX_EXACT)


def is_expiration(value: object) -> TypeGuard[str]:
    """Return whether RabbitMQ accepts a value as the ``expiration`` of a message."""
    return is_digits(value, MAX_EXPIRATION_MS)


_INSTANT: Final = partial(is_int, least=0, most=MAX_DUE_MS), "milliseconds since 1970"
_TEXT: Final = _is_text, "a string"
_TRUE: Final = partial(operator.is_, True), "True"

#: The check for valid values of every header of this package, and a description of these values.
_KINDS: Final[Mapping[str, tuple[Callable[[object], bool], str]]] = {
    DUE: _INSTANT,
    EXCHANGE: (_is_text, "an exchange's name"),
    ROUTING_KEY: (_is_text, "a routing key"),
    QUEUE: (lambda value: _is_text(value) and value != "", "a queue's name"),
    PRIORITY: (partial(is_int, least=MAX_PRIORITY + 1, most=HIGHEST_PRIORITY), "a priority"),
    EXPIRATION: (is_expiration, "a number of milliseconds, as a string"),
    EARLY: (lambda value: isinstance(value, Mapping), "a table"),
    ATTEMPTS: (partial(is_int, least=1, most=MAX_COUNT), "a count"),
    FAILED_SINCE: (partial(is_int, least=1, most=MAX_DUE_MS), _INSTANT[1]),
    FIRST_REASON: _TEXT,
    REASON: _TEXT,
    REDRIVEN: (partial(is_int, least=0, most=MAX_COUNT), "a count"),
    SIGNATURE: _TEXT,
    **dict.fromkeys((COPY, KEY, JOB, JOB_ID, SCHEDULE), _TEXT),
    LIFE: (is_life, "a number as a string"),
    ORDER: (partial(is_digits, most=MAX_EXACT), "a number as a string"),
    ONCE: (lambda value: value is True or (_is_text(value) and value != ""), "True or a mark"),
    TRACKED: _TRUE,
    REDELIVERED: _TRUE,
    COMMITTED: _TRUE,
}


def parse(headers: Mapping[str, object]) -> tuple[DelayHeaders, dict[str, str]]:
    """Read the headers of a message; never raises.

    Args:
        headers: The headers, as the broker returns them; they are not trusted.

    Returns:
        The parsed headers, without the invalid ones; and a description of the problem, keyed by
        the name of the invalid header. There is no description for :data:`VERSION`, which
        :func:`later_version` checks, for the values in the table of :data:`EARLY`, for a header
        that is None, and for an unknown ``rabbitdelay-*`` header, which is dropped. Failures count
        only if all three headers are valid.
    """
    known: dict[str, Any] = {}  # by field
    valid: dict[str, Any] = {}  # by name
    problems: dict[str, str] = {}
    others: dict[str, object] = {}
    for name, value in headers.items():
        kind = _KINDS.get(name)
        if kind is None:
            if name not in BROKER_HEADERS and name[:_PREFIX_LENGTH] not in _PREFIXES:
                others[name] = value
        elif kind[0](value):
            (known if name in _FIELDS else valid)[_FIELDS.get(name, name)] = value
        elif value is not None:
            problems[name] = f"its header {name} is {shortened(value)}, not {kind[1]}"
    if isinstance(nested := others.get(NESTED_HEADERS), Mapping):
        others[NESTED_HEADERS] = strip(nested)
    if EARLY in valid:
        known["early"] = EarlyHeader.of(valid[EARLY])
    if ATTEMPTS in valid and FAILED_SINCE in valid and FIRST_REASON in valid:
        known["failures"] = Failures(valid[ATTEMPTS], valid[FAILED_SINCE], valid[FIRST_REASON])
    if not REGISTRY.isdisjoint(valid):
        known["registry"] = {name: valid[name] for name in REGISTRY & valid.keys()}
    return DelayHeaders(**known, others=others), problems and dict(sorted(problems.items()))


def unopened(headers: Mapping[str, object]) -> DelayHeaders:
    """Read the headers of a message that is passed on unchanged.

    All headers stay except the broker's, even invalid headers and headers of a later version.
    """
    parsed, _ = parse(headers)
    return parsed._replace(others={n: v for n, v in headers.items() if n not in BROKER_HEADERS})


def later_version(headers: Mapping[str, object], content_type: object) -> str | None:
    """Return why this version of the package cannot read a message; None if it can.

    Messages wait for years, and a fleet may have workers of two versions. A message of a later
    version goes back into the levels, unopened, until a worker of that version receives it; see
    :meth:`.Redelivery.until_upgraded`. An invalid value of the header counts as a later version
    too, so that no message is opened by guess.

    Args:
        headers: The message's headers; they are not trusted.
        content_type: The message's property ``content_type``.
    """
    version = headers.get(VERSION, MESSAGE_VERSION)
    is_own = isinstance(content_type, str) and content_type.startswith(OWN_CONTENT_TYPES)
    if not is_int(version, 1, MESSAGE_VERSION):
        why = (
            f"header {VERSION} is {shortened(version)}; this version reads up to {MESSAGE_VERSION}"
        )
    elif is_own and content_type != ENVELOPE:
        why = f"content type is {shortened(content_type)}; this version opens {ENVELOPE!r}"
    else:
        return None
    return f"it needs a later version of celery_rabbitdelay: its {why}"


def refuse_sender_selected(headers: Mapping[str, object]) -> None:
    """Refuse a message whose headers name additional routing keys.

    Raises:
        UnprocessableMessage: The message has such a header.
    """
    for name in SENDER_SELECTED:
        if name in headers:
            raise UnprocessableMessage(
                f"it has the header {name}, by which it could reach any queue"
            )


def of_client(headers: Mapping[str, object]) -> dict[str, object]:
    """Return the headers of a client's message that the client may set.

    Only two headers of this package stay: the exchange, which the client may name, and the version,
    which check-in checks. The broker's headers are removed too, because RabbitMQ up to 3.13 trusts
    their values.
    """
    kept = strip(headers)
    for name in (EXCHANGE, VERSION):
        if name in headers:
            kept[name] = headers[name]
    return kept


def client_delay_ms(headers: Mapping[str, object]) -> int:
    """Return the delay that a client requests, in milliseconds, rounded up; 0 if it is negative.

    Raises:
        UnprocessableMessage: The header is not a number of milliseconds.
    """
    delay = headers.get(X_DELAY, 0)
    with suppress(ValueError, OverflowError):
        # int() also accepts blanks, underscores, and digits of any script.
        if isinstance(delay, str) and _INTEGER.fullmatch(delay):
            return max(int(delay), 0)
        if isinstance(delay, int | float) and not isinstance(delay, bool):
            return max(math.ceil(delay), 0)
    raise UnprocessableMessage(f"{X_DELAY} is {shortened(delay)}, not a number of milliseconds")


def strip(headers: Mapping[str, object]) -> dict[str, object]:
    """Return headers without the headers of the broker and of this package.

    The user's own ``x-*`` headers stay. Nested headers, to which tracers copy all headers, are
    stripped too. py-amqp returns a name that is not UTF-8 as bytes.
    """
    stripped = table = _foreign(headers)
    # A loop, because an attacker may nest headers a thousand deep.
    while isinstance(nested := table.get(NESTED_HEADERS), Mapping):
        table[NESTED_HEADERS] = table = _foreign(nested)
    return stripped


def _foreign(table: Mapping[str, object]) -> dict[str, object]:
    return {
        name: value
        for name, value in table.items()
        if name not in BROKER_HEADERS and name[:_PREFIX_LENGTH] not in _PREFIXES
    }


def own(headers: Mapping[str, object]) -> dict[str, object]:
    """Return the headers of a message that have this package's prefix."""
    return {name: each for name, each in headers.items() if name[:_PREFIX_LENGTH] == OWN_PREFIX}


def drop_own(headers: dict[str, Any]) -> None:
    """Remove this package's headers, at any depth, from a message that was never in the levels."""
    table: object = headers
    while isinstance(table, dict):
        for name in [name for name in table if name[:_PREFIX_LENGTH] in _PREFIXES]:
            del table[name]
        table = table.get(NESTED_HEADERS)


def shortened(value: object) -> str:
    """Return the ``repr`` of a value, cut off after :data:`MAX_SHOWN_LENGTH` characters."""
    try:
        text = repr(value)
    except RecursionError:  # an attacker may nest values a thousand deep
        text = f"a {type(value).__name__} that is nested too deep"
    return text if len(text) <= MAX_SHOWN_LENGTH else f"{text[:MAX_SHOWN_LENGTH]}..."
