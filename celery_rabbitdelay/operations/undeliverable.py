"""Reads, filters, counts, redrives and deletes the messages in ``undeliverable``."""

from __future__ import annotations

import base64
import codecs
import json
import re
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import amqp
from amqp.exceptions import NotFound, ResourceLocked
from kombu import Connection

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app.destinations import configured_queues
from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.headers import ENVELOPE, later_version, shortened
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.envelope import OpenedEnvelope
from celery_rabbitdelay.modules.forwarding import Outgoing
from celery_rabbitdelay.operations.mover import Destinations, Moved, Mover, Place, Stay, counted_as
from celery_rabbitdelay.operations.reasons import Undeliverable, examine
from celery_rabbitdelay.operations.redriving import Redriving, redriving_for
from celery_rabbitdelay.operations.source import ANSWER_TIMEOUT, READERS_PRIORITY, Source, ready_in
from celery_rabbitdelay.publishing.message import Content, body_of, headers_of

#: The default maximum of messages to read. The broker needs some 200 bytes per message until it is
#: requeued (measured on RabbitMQ 3.10.8, 4.0.5 and 4.3.6).
LIMIT: Final = 1_000_000


class UndeliverableMessage(NamedTuple):
    """A copy of a message that could not be delivered.

    Attributes:
        found: The message's task, queue and due time, and why it could not be delivered.
        headers: The message's headers.
        body: The message's body.
        exchange: The exchange of the last publication.
        routing_key: The routing key of the last publication.
        properties: The message's other properties.
    """

    found: Undeliverable
    headers: Mapping[str, object]
    body: bytes
    exchange: str
    routing_key: str
    properties: Mapping[str, object] = MappingProxyType({})


def undeliverable_messages(
    connection: Connection, topology: Topology, limit: int = LIMIT
) -> Generator[UndeliverableMessage, None, None]:
    """Yield a copy of every message in ``undeliverable``; the messages stay there.

    Messages that another consumer holds are left out.

    Args:
        connection: A connection to the broker; the function opens a clone of it.
        topology: The topology of the messages.
        limit: The maximum number of messages to read.

    Raises:
        ReadTooLong: Reading took so long that the broker may have requeued messages.
        amqp.exceptions.NotFound: The queue does not exist.
        OSError: The broker cannot be reached, or the connection was lost.
    """
    name = topology.module_queues.undeliverable.name
    with closing(Source(connection, ANSWER_TIMEOUT, READERS_PRIORITY)) as source:
        for message in source.messages(name, limit):
            yield copy_of(message, topology)


def copy_of(message: amqp.Message, topology: Topology) -> UndeliverableMessage:
    """Return a copy of a message that was read."""
    headers, information = headers_of(message), message.delivery_info
    exchange, key = information["exchange"], information["routing_key"]
    found = examine(headers, topology, key)
    others = {k: value for k, value in message.properties.items() if k != "application_headers"}
    return UndeliverableMessage(found, headers, body_of(message), exchange, key, others)


def headers_as_json(headers: Mapping[str, object]) -> str:
    """Return any headers as the text of a JSON object.

    Instants are written in ISO 8601, bytes as text with escapes, and other values that JSON lacks
    as Python's ``str`` does.
    """
    return json.dumps(as_json(headers))


def as_json(headers: Mapping[str, object]) -> dict[str, object]:
    """Return headers, or properties, in values of JSON; see :func:`headers_as_json`."""
    try:
        text = json.dumps(headers, default=_written)
        plain: dict[str, object] = json.loads(text, parse_constant=str)
    except RecursionError:
        return {str(name): shortened(type(value)) for name, value in headers.items()}
    return plain


def _written(value: object) -> str:
    match value:
        case bytes():
            return value.decode("utf-8", "backslashreplace")
        case datetime():
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).isoformat()
    return str(value)


@dataclass(frozen=True)
class Contents:
    """The tasks in a message; an envelope holds many.

    Attributes:
        tasks: The names of the tasks.
        ids: The ids of the tasks.
        queues: The queues of the tasks, as far as the headers have them.
        messages: How many messages an envelope holds; None if the message is not an envelope, or
            cannot be opened.
    """

    tasks: frozenset[str]
    ids: frozenset[str]
    queues: frozenset[str]
    messages: int | None = None

    @classmethod
    def of(cls, message: UndeliverableMessage) -> Contents:
        """Read the tasks in a message; an invalid message raises no error."""
        found, headers = message.found, message.headers
        exchange, key = map(headers.get, (header_names.EXCHANGE, header_names.ROUTING_KEY))
        queues = _texts(found.queue, key if exchange == "" else None)
        content_type = message.properties.get("content_type")
        if content_type == ENVELOPE and later_version(headers, content_type) is None:
            with suppress(Exception):  # any client may have written it
                envelope = OpenedEnvelope(message.body)
                inner = [{**envelope.headers, **item.headers} for item in envelope]
                tasks, ids = (
                    _texts(*(each.get(name) for each in inner)) for name in ("task", "id")
                )
                return cls(tasks, ids, queues, len(inner))
        return cls(_texts(found.task), _texts(found.task_id), queues)


@dataclass(frozen=True)
class UndeliverableFilter:
    """Chooses the messages that meet all conditions; one matching value per condition suffices.

    Attributes:
        tasks: Names of tasks; ``*`` and ``?`` are wildcards. An envelope matches if one of its
            tasks does.
        queues: Names of queues, with the same wildcards.
        ids: Ids of tasks, or of messages (``message_id``, ``correlation_id``).
        reasons: Parts of reasons; with ``*`` or ``?``, a pattern for the whole reason.
        older_than: The shortest time that a message has been undeliverable. A message whose headers
            do not show the time is not chosen.
        newer_than: The longest time that a message has been undeliverable.
    """

    tasks: Collection[str] = ()
    queues: Collection[str] = ()
    ids: Collection[str] = ()
    reasons: Collection[str] = ()
    older_than: timedelta | None = None
    newer_than: timedelta | None = None

    def matches(self, message: UndeliverableMessage) -> bool:
        """Return whether a message is chosen."""
        found, contents = message.found, Contents.of(message)
        others = map(message.properties.get, ("correlation_id", "message_id"))
        age = None if found.since is None else wall_clock.now() - found.since
        return (
            (not self.reasons or any(_is_in(found.reason, each) for each in self.reasons))
            and _matches_names(contents.tasks, self.tasks)
            and _matches_names(contents.queues, self.queues)
            and (not self.ids or not (contents.ids | _texts(*others)).isdisjoint(self.ids))
            and (self.older_than is None or (age is not None and age >= self.older_than))
            and (self.newer_than is None or (age is not None and age <= self.newer_than))
        )


def _texts(*values: object) -> frozenset[str]:
    return frozenset(value for value in values if isinstance(value, str) and value)


def _matches_names(names: Collection[str], patterns: Collection[str]) -> bool:
    return not patterns or any(_matches(name, each) for name in names for each in patterns)


def _is_in(text: str, wanted: str) -> bool:
    return _matches(text, wanted) if "*" in wanted or "?" in wanted else wanted in text


def _matches(text: str, pattern: str) -> bool:
    """Match a pattern in which only ``*`` and ``?`` are special: reasons contain brackets."""
    return fnmatchcase(text, pattern.replace("[", "[[]"))


#: The part of a reason that differs between messages, after failed attempts.
_ATTEMPTS: Final = re.compile(r" \(\d+ attempts since [^;)]*(?:; the first time: .*)?\)")


@dataclass
class ReasonCount:
    """The messages with one reason.

    Attributes:
        reason: The reason, without the number of attempts and their time.
        count: How many messages have the reason.
        oldest: When the first of these messages became undeliverable; None if unknown.
        newest: When the last of these messages became undeliverable; None if unknown.
    """

    reason: str
    count: int = 0
    oldest: datetime | None = None
    newest: datetime | None = None


class UndeliverableSummary:
    """Counts messages by their reasons.

    Attributes:
        count: The number of all messages.
    """

    def __init__(self) -> None:
        self.count = 0
        self._reasons: dict[str, ReasonCount] = {}

    def add(self, message: UndeliverableMessage) -> None:
        """Count a message."""
        self.count += 1
        since = message.found.since
        reason = counted_as(_ATTEMPTS.sub("", message.found.reason), self._reasons)
        group = self._reasons.setdefault(reason, ReasonCount(reason))
        group.count += 1
        if since is not None:
            group.oldest = min(group.oldest or since, since)
            group.newest = max(group.newest or since, since)

    def by_count(self) -> list[ReasonCount]:
        """Return the counts, the most frequent reason first."""
        return sorted(self._reasons.values(), key=lambda each: -each.count)


def summary_of(number: int, message: UndeliverableMessage) -> dict[str, Any]:
    """Return a message's entry in a list of messages.

    Args:
        number: The message's position in the queue, from 1.
        message: The message.
    """
    found, redriven = message.found, message.headers.get(header_names.REDRIVEN)
    return {
        "number": number,
        **asdict(found),
        "redriven": redriven if isinstance(redriven, int) else None,
        "envelope": Contents.of(message).messages,
        "size": len(message.body),
    }


def as_record(number: int, message: UndeliverableMessage) -> dict[str, Any]:
    """Return a whole message in values of JSON.

    ``headers`` and ``properties`` are in readable form: bytes and instants are strings there. A
    program can restore the message from its body and ``amqp_properties``: all properties, including
    headers, as AMQP 0-9-1 encodes them (2.3.5.2 and 4.2.6.1), in base64.

    Args:
        number: The message's position in the queue, from 1.
        message: The message.
    """
    return {
        **as_json(summary_of(number, message)),
        "exchange": message.exchange,
        "routing_key": message.routing_key,
        "headers": as_json(message.headers),
        "properties": as_json(message.properties),
        "amqp_properties": base64.b64encode(_encoded_properties(message)).decode(),
        "body": _text_or_base64(message.body, False),
    }


def _encoded_properties(message: UndeliverableMessage) -> bytes:
    unreadable = message.headers.get(header_names.UNREADABLE_PROPERTIES)
    if isinstance(unreadable, bytes):
        return unreadable
    headers: Any = dict(message.headers)
    properties = dict(message.properties)
    return Content.of(amqp.Message(b"", application_headers=headers, **properties)).properties


def shown_body(body: bytes, most: int) -> dict[str, object]:
    """Return the beginning of a body: ``size``, ``is_cut_off``, and ``text`` or ``base64``.

    Args:
        body: The body.
        most: The maximum number of bytes to return.
    """
    is_cut_off = len(body) > most
    return {"size": len(body), "is_cut_off": is_cut_off, **_text_or_base64(body[:most], is_cut_off)}


def _text_or_base64(body: bytes, is_cut_off: bool) -> dict[str, str | None]:
    """Return bytes as text if they are UTF-8; a cut-off text may end within a character."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        return {"text": decoder.decode(body, final=not is_cut_off), "base64": None}
    except UnicodeDecodeError:
        return {"text": None, "base64": base64.b64encode(body).decode()}


@dataclass
class RemovalReport(Moved):
    """The result of a removal; in a dry run, ``moved`` counts what would have left the queue.

    Attributes:
        present: The number of messages at the start.
        examined: The number of messages that were read.
        matched: How many of the read messages were chosen; ``left`` counts the messages that stay.
        stopped: The reason for ending before the last message; None at a regular end. If another
            thread sets a reason, the removal ends before the next message.
    """

    present: int = 0
    examined: int = 0
    matched: int = 0
    stopped: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all chosen messages have left the queue (in a dry run: would have left it)."""
        return self.stopped is None and not self.left


#: Returns whether a message is chosen; see :class:`.UndeliverableFilter`.
Matches: TypeAlias = Callable[[UndeliverableMessage], bool]


def redrive(
    place: Place,
    redriving: Redriving | None,
    matches: Matches = lambda message: True,
    *,
    report: RemovalReport | None = None,
    **options: Any,
) -> RemovalReport:
    """Move undeliverable messages into the levels, or delete them.

    Reads only as many messages as are in the queue at the start, so that a message that comes back
    at once is not redriven twice. Messages that another consumer holds are left out.

    Args:
        place: The topology of the messages; separate connections to its broker are opened to read
            and to publish.
        redriving: Converts each message; None to delete the messages.
        matches: Returns whether a message is chosen.
        report: The report to fill; None for a new report.
        **options: Options of :class:`.Mover`: ``timeout``, ``limit``, ``rate`` (an envelope counts
            as one message) and ``dry_run``.

    Returns:
        The report; ``stopped`` has the error if the broker fails after the start.

    Raises:
        amqp.NotFound: The queue does not exist.
        OSError: The broker cannot be reached.
    """
    report = report or RemovalReport()
    queue = place.topology.module_queues.undeliverable.name
    with place.connection.clone(heartbeat=0) as own:
        report.present = ready_in(own, queue)

    def convert(message: amqp.Message, _: str) -> Outgoing | None:
        chosen = matches(copy_of(message, place.topology))
        if report.stopped is not None:
            mover.stopping.set()
            raise Stay
        report.examined += 1
        if not chosen:
            raise Stay
        report.matched += 1
        try:
            return None if redriving is None else redriving.redriven(message)
        except exceptions.UnprocessableMessage as stays:
            raise Stay(stays.reason) from stays

    looked_at = report.present
    mover = Mover(
        place.connection, [queue], place, convert, result=report, looked_at=looked_at, **options
    )
    try:
        mover.move()
    except exceptions.PublishError as error:
        report.stopped = f"nothing more can be published: {error}"
    except (OSError, amqp.AMQPError) as error:
        report.stopped = f"the messages cannot be read further: {error}"
    return report


def redrive_application(
    delays: RabbitDelay,
    connection: Connection,
    matches: Matches,
    redriving: Mapping[str, Any],
    *,
    dry_run: bool = False,
    **options: Any,
) -> RemovalReport:
    """Redrive the undeliverable messages of an application.

    Args:
        delays: The application's delays.
        connection: The broker that tasks are sent to.
        matches: Returns whether a message is chosen.
        redriving: Arguments of :func:`.redriving_for`.
        dry_run: Whether to count the messages without moving them.
        **options: ``limit``, ``rate`` and ``report`` of :func:`redrive`.

    Raises:
        InvalidDestination: The queue for all messages does not exist, or is never allowed.
        InvalidDelay: The delay is invalid.
        DelayTooLong: The delay is above the layout's capacity, and workers do not serve check-in.
    """
    app, topology = delays.app, delays.topology
    app.loader.import_default_modules()
    may_declare = delays.settings.declare == "auto"
    target = Place(app.connection_for_write(), topology, may_declare and not dry_run)
    with closing(Destinations(target, configured_queues(app))) as destinations:
        decides = redriving_for(app, ensure=destinations.ensure, **redriving)
        if decides.to is not None:
            try:
                with suppress(ResourceLocked):  # an exclusive queue of another connection exists
                    ready_in(connection, decides.to)
            except NotFound as missing:
                why = "does not exist: declare it first"
                raise exceptions.InvalidDestination(decides.to, why) from missing
        return redrive(
            Place(connection, topology, may_declare),
            decides,
            matches,
            dry_run=dry_run,
            timeout=delays.settings.confirm_timeout,
            **options,
        )
