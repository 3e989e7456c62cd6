"""What this package writes into a message's headers, and what it believes of them. Pure.

Anybody may have written the headers of a message that arrives: another client, another version, an
attacker. What they may say, and what counts as invalid, is decided in this file and nowhere else.
:func:`parse` reads headers once; everything behind it works with :class:`DelayHeaders`. An
invalid header counts as missing: distribution refuses the message, and a worker ignores the header.
Where a message may go and what it may cost is decided in :mod:`.limits`, and which tasks a client
may send in :mod:`.checkin`. These are the parties, and what each may set:

- A client of check-in says :data:`X_DELAY` and :data:`EXCHANGE`; see :func:`of_client`.
- Whoever may publish to the levels may set every header. If there is a signing key, a message has
  to be signed, unless ``rabbitdelay_signing_required`` is false. The signature covers where the
  message goes, when it is due, its priority and expiration, and the headers that the registry uses
  (:data:`REGISTRY`), but not what modules add on the way. See :attr:`DelayHeaders.signed` and
  :mod:`.signature`.
- The consumer of the message gets what :meth:`DelayHeaders.for_consumer` keeps.
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

#: The routing key that it would have been published with: str.
ROUTING_KEY: Final = "rabbitdelay-routing-key"

#: The name of the queue that the message was delayed for: str.
QUEUE: Final = "rabbitdelay-queue"

#: The priority that distribution gives back to the message: int, above 4.
PRIORITY: Final = "rabbitdelay-priority"

#: The ``expiration`` property that distribution gives back to the message: str, milliseconds.
EXPIRATION: Final = "rabbitdelay-expiration"

#: Marks a message that left the levels before it was due and was put back: a table, see
#: :class:`EarlyHeader`.
EARLY: Final = "rabbitdelay-early"

#: How often a message could not be published to its destination: int; when that was tried first:
#: int, milliseconds since 1970-01-01 UTC; and why it failed then: str.
ATTEMPTS: Final = "rabbitdelay-attempts"
FAILED_SINCE: Final = "rabbitdelay-failed-since"
FIRST_REASON: Final = "rabbitdelay-first-reason"

#: Why a module put the message into ``undeliverable``: str. The broker gives no reason.
REASON: Final = "rabbitdelay-reason"

#: How often a message was taken out of ``undeliverable`` and published again: int. It stays until
#: the message reaches its destination.
REDRIVEN: Final = "rabbitdelay-redriven"

#: Marks a task that check-in has passed on without a delay, so that its worker knows that a client
#: has written it: True. The worker removes it.
CHECKED_IN: Final = "rabbitdelay-checked-in"

#: The version of the messages' format that a message needs: int; 1 if it is absent.
VERSION: Final = "rabbitdelay-version"

#: The signature of what these headers say, if the sender has a key: str.
SIGNATURE: Final = "rabbitdelay-signature"

#: Why the properties of a received message cannot be read: str; and their bytes. Such a message has
#: no other headers and goes to ``undeliverable``. If only its exchange or routing key cannot be
#: read, it has the first of the two, beside its own.
UNREADABLE: Final = "rabbitdelay-unreadable"
UNREADABLE_PROPERTIES: Final = "rabbitdelay-properties"

#: The name of the message, different for each message of a task that has a key or is tracked: str.
COPY: Final = "rabbitdelay-copy"

#: How often the task had been sent anew under its id, after it had run, when this message was sent:
#: str, digits. Absent: never; :data:`UNKNOWN_LIFE` if Redis could not be asked.
LIFE: Final = "rabbitdelay-life"

#: The key that the task was sent with: str.
KEY: Final = "rabbitdelay-key"

#: When it was sent, in microseconds since 1970-01-01 UTC by the clock of Redis: str, digits. The
#: task with the largest one is the newest under its key.
ORDER: Final = "rabbitdelay-key-order"

#: The job that the task was sent with: str. Several jobs may have had the name, one after another;
#: :data:`JOB_ID` distinguishes them: str.
JOB: Final = "rabbitdelay-job"
JOB_ID: Final = "rabbitdelay-job-id"

#: The name of the schedule that a task is an occurrence of, its instant, and the rules by which the
#: next one is computed: str, JSON; see :class:`.Occurrence`.
SCHEDULE: Final = "rabbitdelay-schedule"

#: A message with this header is no task. It says that the job in :data:`JOB` and :data:`JOB_ID` was
#: committed: True.
COMMITTED: Final = "rabbitdelay-committed"

#: Set if only one message of each attempt runs, and that one once: its :class:`Mark`, str. True: it
#: has no name.
ONCE: Final = "rabbitdelay-once"

#: Set if the task was sent with ``track``: True. Its retries are tracked as well.
TRACKED: Final = "rabbitdelay-tracked"

#: Set by a worker that puts a message back of which an arrival that :data:`ONCE` does not name may
#: have been let run: RabbitMQ had redelivered it, for example. True.
REDELIVERED: Final = "rabbitdelay-redelivered"

#: The delay that a client of check-in asks for, in milliseconds: int, float, or the digits of an
#: integer, str. It is the header of the delayed-message-exchange plugin.
X_DELAY: Final = "x-delay"

#: The latest version of the messages' format that this version of the package reads. A message says
#: by its header :data:`VERSION` which one it needs; only a version that needs another number writes
#: the header. Raise it when an older worker would do the wrong thing with a message; see
#: docs/how-to/upgrade.md.
MESSAGE_VERSION: Final = 1

#: The content types of all that this package has ever made, or will make, begin with this; those of
#: envelopes, messages with many tasks, go on with the second, and a number, which is the version of
#: their format.
OWN_CONTENT_TYPES: Final = "application/vnd.rabbitdelay."
ENVELOPES: Final = f"{OWN_CONTENT_TYPES}envelope."
ENVELOPE: Final = f"{ENVELOPES}1"

#: The prefix of all our own headers.
OWN_PREFIX: Final = "rabbitdelay-"

#: The headers by which the registry decides whether a task runs.
REGISTRY: Final = frozenset(
    (COPY, LIFE, KEY, ORDER, JOB, JOB_ID, ONCE, TRACKED, REDELIVERED, COMMITTED, SCHEDULE)
)

#: If a message has this header, which tracers and users set, Celery exposes only its value as
#: ``task.request.headers`` (https://github.com/celery/celery/issues/4875).
NESTED_HEADERS: Final = "headers"

#: Headers with further routing keys, by which RabbitMQ routes a message past any check of a module
#: (https://www.rabbitmq.com/docs/sender-selected). In the levels, whose keys are digits, they can
#: only do harm.
SENDER_SELECTED: Final = ("CC", "BCC")

#: What RabbitMQ adds to a dead-lettered or redelivered message
#: (https://www.rabbitmq.com/docs/dlx#effects). Up to 3.13 it trusts an ``x-death`` that a client
#: publishes, and drops the message as a cycle when the queue is in it already.
BROKER_HEADERS: Final = frozenset(
    {"x-death", "x-delivery-count", "x-acquired-count"}
    | {f"x-first-death-{what}" for what in ("exchange", "queue", "reason")}
    | {f"x-last-death-{what}" for what in ("exchange", "queue", "reason")}
)

#: The highest normal priority of quorum queues (0-4); see :data:`.TWO_PRIORITIES`.
MAX_PRIORITY: Final = 4

#: AMQP's highest priority, and the longest ``expiration`` that RabbitMQ takes, in milliseconds.
HIGHEST_PRIORITY: Final = 255
MAX_EXPIRATION_MS: Final = 2**32 - 1

#: More attempts, and more returns into the levels, than any message can have.
MAX_COUNT: Final = 2**31

#: The largest integer that Lua, in which Redis's scripts are written, tells from the next one.
MAX_EXACT: Final = 2**53 - 1

#: The life of a message whose sender could not ask Redis: no other message is of the same one.
UNKNOWN_LIFE: Final = -1

#: Maximum characters of a value in an error text.
MAX_SHOWN_LENGTH: Final = 200

NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})

_INTEGER: Final = re.compile("-?[0-9]+")

_PREFIXES: Final[frozenset[str | bytes]] = frozenset((OWN_PREFIX, OWN_PREFIX.encode()))
_PREFIX_LENGTH: Final = len(OWN_PREFIX)


class EarlyHeader(NamedTuple):
    """How a message was put back into the levels that it had left too early.

    Attributes:
        times: How often it was put back.
        until_ms: Until when it was put back last, in milliseconds since 1970-01-01 UTC; 0 if that
            is its due time. It may have to wait for longer than the levels take at once, or it was
            due and the registry has put it back.
        exchange: The exchange that the task's consumer is to see; None for that of the message.
        routing_key: The routing key that it is to see, likewise.
    """

    times: int = 0
    until_ms: int = 0
    exchange: str | None = None
    routing_key: str | None = None

    @classmethod
    def of(cls, table: Mapping[str, object]) -> Self:
        """Read it from the header's table; what is invalid counts as missing."""
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
        """Return whether the message is early because it could not wait for longer at once."""
        return 0 < self.until_ms <= now_ms + tolerated_ms

    def header(self) -> dict[str, dict[str, object]]:
        """Return the header."""
        table = {
            "times": self.times,
            "until": self.until_ms or None,
            "exchange": self.exchange,
            "routing-key": self.routing_key,
        }
        return {EARLY: {name: value for name, value in table.items() if value is not None}}


NEVER_EARLY: Final = EarlyHeader()


#: The former arrivals that a message names, at most.
MAX_FORMER: Final = 16


class Mark(NamedTuple):
    """What distinguishes the arrivals of the messages of a task that was sent with ``once``.

    Attributes:
        name: The name of the message. What is put back keeps it, and so do copies by RabbitMQ.
        generation: How often it was put back.
        former: The names of the arrivals that have put it back, of which one may have been let run:
            its answer was lost.
    """

    name: str = ""
    generation: int = 0
    former: tuple[str, ...] = ()

    @classmethod
    def of(cls, value: object) -> Self:
        """Read it from the header."""
        name, *more = value.split(".") if isinstance(value, str) else ("",)
        if not more or not is_digits(more[0], MAX_COUNT):
            return cls(name)
        return cls(name, int(more[0]), tuple(more[1:])[-MAX_FORMER:])

    def after(self, arrival: str) -> Self:
        """Return it with one more former arrival."""
        return self._replace(former=(*self.former, arrival)[-MAX_FORMER:])

    @property
    def text(self) -> str:
        """The header."""
        return ".".join((self.name, str(self.generation), *self.former))


class Failures(NamedTuple):
    """The failed attempts to publish a message to its destination.

    Attributes:
        attempts: How many have failed.
        since_ms: When the first one failed, in milliseconds since 1970-01-01 UTC.
        first_reason: Why the first one failed.
    """

    attempts: int
    since_ms: int
    first_reason: str


class DelayHeaders(NamedTuple):
    """What the headers of a delayed message say.

    Attributes:
        due_ms: The instant at which the task may start, in milliseconds since 1970-01-01 UTC.
        exchange: The exchange that it would have been published to without a delay.
        routing_key: The routing key that it would have been published with.
        queue: The queue that it was delayed for; None if the exchange routes it.
        priority: The priority, above 4, that distribution gives back to it.
        expiration: The ``expiration`` that distribution gives back to it.
        early: How it was put back into the levels that it had left too early.
        failures: The failed attempts to publish it to its destination.
        reason: Why it is undeliverable, or why the last attempt has failed.
        redriven: How often it was taken out of ``undeliverable`` and published again.
        registry: The headers that the registry knows of, by their names.
        signature: The signature of what the headers say.
        others: The user's own headers, and those of Celery.
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
        for field, name in _FIELDS.items():
            if (value := getattr(self, field)) != self._field_defaults[field]:
                headers[name] = value
        if self.early != NEVER_EARLY:
            headers |= self.early.header()
        if self.failures is not None:
            headers[ATTEMPTS], headers[FAILED_SINCE], headers[FIRST_REASON] = self.failures
        return headers

    @property
    def signed(self) -> tuple[object, ...]:
        """What a signature covers apart from :attr:`registry`: where, when and how a message goes.

        They stay as they are while it waits. To add one, or to change their order, makes the
        signatures of all messages that wait invalid.
        """
        return (
            *(self.exchange, self.routing_key, self.queue, self.due_ms, self.priority),
            *(self.expiration, self.early.exchange, self.early.routing_key),
        )

    def for_consumer(self) -> DelayHeaders:
        """Return what the consumer of the message gets.

        Of a destination, only the worker gets to know that consumes the task's queue.
        """
        kept = {"due_ms", "early", "registry", "others"}
        if self.queue is not None:
            kept |= {"exchange", "routing_key", "queue"}
        return DelayHeaders(**{name: each for name, each in self._asdict().items() if name in kept})


#: The fields of :class:`DelayHeaders` that are one header each.
_FIELDS: Final = {
    "due_ms": DUE,
    "exchange": EXCHANGE,
    "routing_key": ROUTING_KEY,
    "queue": QUEUE,
    "priority": PRIORITY,
    "expiration": EXPIRATION,
    "reason": REASON,
    "redriven": REDRIVEN,
    "signature": SIGNATURE,
}


def is_int(value: object, least: int, most: int) -> TypeGuard[int]:
    """Return whether a value is an integer in a range; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_digits(value: object, most: int) -> TypeGuard[str]:
    """Return whether a value is a text of digits, and their number no more than ``most``."""
    if not isinstance(value, str) or len(value) > len(str(most)):
        return False
    return value.isascii() and value.isdigit() and int(value) <= most


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def is_life(value: object) -> TypeGuard[str]:
    """Return whether a value is one of the header :data:`LIFE`."""
    return value == str(UNKNOWN_LIFE) or is_digits(value, MAX_EXACT)


def is_expiration(value: object) -> TypeGuard[str]:
    """Return whether RabbitMQ takes a value as the ``expiration`` of a message."""
    return is_digits(value, MAX_EXPIRATION_MS)


_INSTANT: Final = partial(is_int, least=0, most=MAX_DUE_MS), "milliseconds since 1970"
_TEXT: Final = _is_text, "a text"
_TRUE: Final = partial(operator.is_, True), "True"

#: For each of our headers which values count, and what they are in words.
_KINDS: Final[Mapping[str, tuple[Callable[[object], bool], str]]] = {
    DUE: _INSTANT,
    EXCHANGE: (_is_text, "an exchange's name"),
    ROUTING_KEY: (_is_text, "a routing key"),
    QUEUE: (lambda value: _is_text(value) and value != "", "a queue's name"),
    PRIORITY: (partial(is_int, least=MAX_PRIORITY + 1, most=HIGHEST_PRIORITY), "a priority"),
    EXPIRATION: (is_expiration, "a number of milliseconds, as a text"),
    EARLY: (lambda value: isinstance(value, Mapping), "a table"),
    ATTEMPTS: (partial(is_int, least=1, most=MAX_COUNT), "a count"),
    FAILED_SINCE: (partial(is_int, least=1, most=MAX_DUE_MS), _INSTANT[1]),
    FIRST_REASON: _TEXT,
    REASON: _TEXT,
    REDRIVEN: (partial(is_int, least=0, most=MAX_COUNT), "a count"),
    SIGNATURE: _TEXT,
    **dict.fromkeys((COPY, KEY, JOB, JOB_ID, SCHEDULE), _TEXT),
    LIFE: (is_life, "a number as a text"),
    ORDER: (partial(is_digits, most=MAX_EXACT), "a number as a text"),
    ONCE: (lambda value: value is True or (_is_text(value) and value != ""), "True or a mark"),
    TRACKED: _TRUE,
    REDELIVERED: _TRUE,
    COMMITTED: _TRUE,
}


def parse(headers: Mapping[str, object]) -> tuple[DelayHeaders, dict[str, str]]:
    """Read the headers of a message; never raises.

    Args:
        headers: The headers, as the broker returns them. Anybody may have written them.

    Returns:
        What they say; an invalid header counts as missing. And for each of these a text that says
        what is wrong with it. There is no text for :data:`VERSION`, about which
        :func:`later_version` says more, for what stands in the table of :data:`EARLY`, for a header
        that is None, and for an own header of an unknown name, which is dropped. Of failures, all
        three headers count or none.
    """
    valid: dict[str, Any] = {}
    problems: dict[str, str] = {}
    others: dict[str, object] = {}
    for name, value in headers.items():
        kind = _KINDS.get(name)
        if kind is None:
            if name not in BROKER_HEADERS and name[:_PREFIX_LENGTH] not in _PREFIXES:
                others[name] = value
        elif kind[0](value):
            valid[name] = value
        elif value is not None:
            problems[name] = f"its header {name} is {shortened(value)}, not {kind[1]}"
    if isinstance(nested := others.get(NESTED_HEADERS), Mapping):
        others[NESTED_HEADERS] = strip(nested)
    said: dict[str, Any] = {field: valid[name] for field, name in _FIELDS.items() if name in valid}
    if EARLY in valid:
        said["early"] = EarlyHeader.of(valid[EARLY])
    if ATTEMPTS in valid and FAILED_SINCE in valid and FIRST_REASON in valid:
        said["failures"] = Failures(valid[ATTEMPTS], valid[FAILED_SINCE], valid[FIRST_REASON])
    if registry := REGISTRY & valid.keys():
        said["registry"] = {name: valid[name] for name in registry}
    return DelayHeaders(**said, others=others), dict(sorted(problems.items()))


def unopened(headers: Mapping[str, object]) -> DelayHeaders:
    """Read the headers of a message that is passed on as it came.

    All of them stay but those of the broker, also invalid ones and those of a later version.
    """
    parsed, _ = parse(headers)
    return parsed._replace(others={n: v for n, v in headers.items() if n not in BROKER_HEADERS})


def later_version(headers: Mapping[str, object], content_type: object) -> str | None:
    """Return why this version of the package cannot read a message; None if it can.

    Messages wait for years, and the workers of a fleet may be of two versions. A message of a later
    one goes back into the levels, unopened, until a worker of that version receives it; see
    :meth:`.Redelivery.until_upgraded`. A value of the header that no version writes counts as later
    too: nothing is opened by guess.

    Args:
        headers: The message's headers; anybody may have written them.
        content_type: Its property ``content_type``.
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
    """Refuse a message whose headers name further routing keys.

    Raises:
        UnprocessableMessage: It has such a header.
    """
    for name in SENDER_SELECTED:
        if name in headers:
            raise UnprocessableMessage(
                f"it has the header {name}, by which it could reach any queue"
            )


def of_client(headers: Mapping[str, object]) -> dict[str, object]:
    """Return the headers of a message that a client has checked in, as far as it may set them.

    Of our own, the exchange stays, which the client may name, and the version, for which check-in
    refuses the message. What the broker adds goes as well: up to 3.13, it believes what a client
    writes there.
    """
    kept = strip(headers)
    for name in (EXCHANGE, VERSION):
        if name in headers:
            kept[name] = headers[name]
    return kept


def client_delay_ms(headers: Mapping[str, object]) -> int:
    """Return the delay that a client asks for in milliseconds, rounded up; 0 if that is over.

    Raises:
        UnprocessableMessage: It is not a number of milliseconds.
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
    """Return headers without those that the broker and this package added.

    The user's own ``x-*`` stay. Nested headers, to which tracers copy the others, are stripped too.
    A name that is not UTF-8 is given in bytes, by py-amqp.
    """
    stripped = table = _foreign(headers)
    # Not by recursion: anybody may have nested them a thousand deep.
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
    """Return our own headers among those of a message."""
    return {name: each for name, each in headers.items() if name[:_PREFIX_LENGTH] == OWN_PREFIX}


def drop_own(headers: dict[str, Any]) -> None:
    """Remove our own headers, also nested ones, from a message that has not been in the levels."""
    table: object = headers
    while isinstance(table, dict):
        for name in [name for name in table if name[:_PREFIX_LENGTH] in _PREFIXES]:
            del table[name]
        table = table.get(NESTED_HEADERS)


def shortened(value: object) -> str:
    """Return what a value looks like, in few characters."""
    try:
        text = repr(value)
    except RecursionError:  # anybody may have nested it a thousand deep
        text = f"a {type(value).__name__} that is nested too deep"
    return text if len(text) <= MAX_SHOWN_LENGTH else f"{text[:MAX_SHOWN_LENGTH]}..."
