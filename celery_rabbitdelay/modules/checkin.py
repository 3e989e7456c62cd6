"""Check-in, the ingest queue: puts messages with ``x-delay`` from any AMQP client into the levels.

A message whose delay exceeds the levels' capacity goes to meditation, the overflow loop: it waits
there for one capacity and returns to check-in. This file opens no connection.

Unless clients are trusted, their tasks must not make a worker publish other messages. The message
of a task can carry signatures of other tasks: callbacks, errbacks, a chain, a chord. The worker
that runs the task publishes them with its own rights, to any exchange that they name
(https://docs.celeryq.dev/en/stable/internals/protocol.html). The worker also publishes signatures
in the arguments of Celery's own tasks, such as ``celery.group``. The worker may send the result to
the queue in the property ``reply_to``. By each of these means, a client would bypass check-in's
allow-list.

A retry copies the headers that its task exposes, such as the content of the header ``headers``. So
these headers must not have names that have an effect in Celery or RabbitMQ.

A message with the header ``task`` is a task of Celery's protocol 2. A message without that header
is a task of protocol 1 if its body is an object with a member ``task``. Check-in reads JSON in
UTF-8 only, and refuses any other body that a worker might read.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import amqp

from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import NS_PER_MS, Due
from celery_rabbitdelay.levels.headers import NESTED_HEADERS, DelayHeaders, shortened
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.forwarding import Outgoing, into_levels, with_destination
from celery_rabbitdelay.modules.limits import check_delay, check_depth, where_in_words
from celery_rabbitdelay.publishing.kombu_internals import may_be_decoded
from celery_rabbitdelay.publishing.message import WaitingMessage, headers_of
from celery_rabbitdelay.publishing.signature import SigningKeys, signed

#: The names of the signatures that a task can carry; in protocol 2, the members of the last part of
#: its body.
FOLLOWING: Final = ("callbacks", "errbacks", "chain", "chord")

#: The fields that a client's task may not have, in a header or in a body of protocol 1. A task of a
#: group counts towards the chord of another task.
CANVAS: Final = (*FOLLOWING, "group", "taskset")

#: Names that must not occur among the headers that a retry copies: the headers that Celery writes
#: itself (``Celery.amqp.as_task_v2``), and the headers by which RabbitMQ routes.
NOT_TAKEN_OVER: Final = frozenset(
    (
        *("lang", "task", "id", "shadow", "eta", "expires", "group_index", "retries", "timelimit"),
        *("root_id", "parent_id", "argsrepr", "kwargsrepr", "origin", "ignore_result"),
        *("replaced_task_nesting", "stamped_headers", "stamps", "compression"),
        *CANVAS,
        *header_names.SENDER_SELECTED,
    )
)

#: The prefix of the names of Celery's own tasks. Some of these take signatures as arguments.
CELERYS_OWN: Final = "celery."

#: The largest body that is read, in bytes: decoded JSON takes 20 times as much memory in Python.
MAX_READ_BYTES: Final = 2**20

_JSON: Final = "application/json"

#: The content type that kombu assumes for a message without one.
_DATA: Final = "application/data"

#: The content encodings of JSON that check-in reads. For a worker, py-amqp decodes every encoding
#: of Python, including UTF-16 and UTF-7, in which the bytes of a task look different.
READ_ENCODINGS: Final = ("", "utf-8", "us-ascii", "ascii", "binary")

#: Forbidden content encodings: Python's decoders take time quadratic in the body's length, and
#: would block the worker.
SLOW_ENCODINGS: Final = ("punycode", "idna")

_NULL: Final = rb'"(?:%b)"\s*:\s*null' % "|".join(FOLLOWING).encode()

#: The end of a body of protocol 2 if no signatures follow the task: the third part is an object
#: whose members are all null. In valid JSON, this end cannot be a part of a string, because no
#: closing quote follows. So the body need not be parsed. Only the last bytes are searched: they
#: have room for every member once, and for more blanks than any encoder writes.
_PLAIN_END: Final = re.compile(rb",\s*\{\s*(?:%b(?:\s*,\s*%b)*)?\s*\}\s*\]\s*\Z" % (_NULL, _NULL))
_MAX_END_BYTES: Final = 256

_TASK: Final = "task"


def _spelled(word: str) -> bytes:
    r"""Return a pattern for a word in a JSON string; its letters may be escaped (``\u00..``)."""
    return "".join(rf"(?:{char}|\\u00(?i:{ord(char):02x}))" for char in word).encode()


#: Matches a member ``task`` of a JSON object.
_NAMES_TASK: Final = re.compile(rb'"%b"\s*:' % _spelled(_TASK))


def checked_task(message: WaitingMessage) -> WaitingMessage:
    """Return the message of a client, without ``reply_to`` if the message is a task.

    Args:
        message: The message, without the headers that no client may set.

    Raises:
        UnprocessableMessage: The message is, or may be, a task that makes a worker publish other
            messages; or its body is compressed, and may become too large for a worker's memory.
    """
    headers, properties = message.headers.others, message.properties
    if headers.get("compression"):
        raise _not_trusted("its body is compressed")
    content_type = properties.get("content_type") or _DATA
    encoding = str(properties.get("content_encoding") or "").lower()
    is_json = content_type == _JSON
    if (is_json and encoding not in READ_ENCODINGS) or _codec(encoding) in SLOW_ENCODINGS:
        what = f"its content encoding is {shortened(encoding)}"
        raise _not_trusted(f"{what}, and check-in reads UTF-8 only")
    if _TASK in headers:
        _check_version_2(message.body, headers, content_type)
        _check_taken_over(headers.get(NESTED_HEADERS))
    elif is_json:
        if not _is_task_of_version_1(message.body):
            return message
        _check_taken_over(headers)
    elif may_be_decoded(content_type):
        what = f"its content type is {shortened(content_type)}"
        raise _not_trusted(f"{what}, so check-in cannot check whether it is a task of Celery")
    else:
        return message
    return message.having(reply_to=None) if properties.get("reply_to") else message


def _not_trusted(why: str) -> UnprocessableMessage:
    return UnprocessableMessage(f"{why}: see rabbitdelay_checkin_trusted")


def is_read(message: WaitingMessage) -> bool:
    """Return whether check-in may read a body: it is JSON in UTF-8, and not too large."""
    properties = message.properties
    return (
        properties.get("content_type") == _JSON
        and str(properties.get("content_encoding") or "").lower() in READ_ENCODINGS
        and not message.headers.others.get("compression")
        and len(message.body) <= MAX_READ_BYTES
    )


def may_be_version_1(body: bytes) -> bool:
    """Return whether JSON may be an object with a member ``task``."""
    return _NAMES_TASK.search(body) is not None


def _codec(encoding: str) -> str:
    """Return Python's name of an encoding; empty if Python does not know the encoding."""
    try:
        return codecs.lookup(encoding).name
    except (LookupError, ValueError):
        return ""


def _check_taken_over(headers: object) -> None:
    """Check the headers that a retry copies, and the headers nested in them."""
    while isinstance(headers, Mapping):
        for name in NOT_TAKEN_OVER & headers.keys():
            raise _not_trusted(f"it is a task whose retry would copy the header {name}")
        headers = headers.get(NESTED_HEADERS)


def _check_version_2(body: bytes, headers: Mapping[str, object], content_type: object) -> None:
    _check_fields(headers)
    if content_type != _JSON:
        what = f"it is a task whose content type is {shortened(content_type)}"
        raise _not_trusted(f"{what}, and check-in reads JSON only")
    is_list = body[:_MAX_END_BYTES].lstrip().startswith(b"[")
    if not is_list or not _PLAIN_END.search(body[-_MAX_END_BYTES:]):
        raise _not_trusted(
            "it is a task whose body does not end in an object where callbacks, errbacks, chain "
            "and chord are all null"
        )


def _is_task_of_version_1(body: bytes) -> bool:
    """Return whether JSON is a task of protocol 1; check the task."""
    if not may_be_version_1(body):
        return False
    if len(body) > MAX_READ_BYTES:
        what = f"it may be a task of Celery's protocol 1, and has {len(body)} bytes"
        raise _not_trusted(f"{what}, more than {MAX_READ_BYTES}")
    try:
        read = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise _not_trusted(f"its body is not JSON: {shortened(error)}") from error
    if not isinstance(read, dict) or _TASK not in read:
        return False
    _check_fields(read)
    return True


def _check_fields(fields: Mapping[str, object]) -> None:
    """Check that a task's name is allowed, and that its headers and body contain no signatures."""
    name = fields[_TASK]
    if not isinstance(name, str) or name.startswith(CELERYS_OWN):
        raise _not_trusted(f"it is the task {shortened(name)}, whose name is reserved for Celery")
    for field in CANVAS:
        if fields.get(field) is not None:
            raise _not_trusted(f"it is a task with {field}, which a worker would act on")


@dataclass(frozen=True)
class CheckIn:
    """Puts the messages of clients into the levels.

    Attributes:
        topology: The levels.
        allowed: Returns whether a message may go to an exchange (empty: the default one) with a
            routing key.
        signing_keys: The keys that sign accepted messages; None leaves them unsigned.
        trusts_clients: Whether a task may have callbacks, and everything else that
            :func:`checked_task` refuses.
        check_task: Returns whether a Celery worker may take a message for a task; raises
            :class:`.UnprocessableMessage` if a worker could not read the task. None if there are no
            workers.
    """

    topology: Topology
    allowed: Callable[[str, str], bool]
    signing_keys: SigningKeys | None = None
    trusts_clients: bool = False
    check_task: Callable[[WaitingMessage], bool] | None = None

    def admit(self, message: amqp.Message) -> None:
        """Remove from a received message the headers that no client may set.

        Without the removal, check-in, or a reader of ``undeliverable``, might trust the headers.
        """
        headers = headers_of(message)
        if headers and not self._has_meditated(message):
            kept = header_names.of_client(headers)
            if header_names.EXCHANGE in kept:
                # Marks a refused message as a client's; see ``never_accepted``.
                kept.setdefault(header_names.X_DELAY, 0)
            message.properties["application_headers"] = kept

    def receive(self, message: amqp.Message) -> Iterator[Outgoing]:
        """Return the message to publish for a received message.

        Raises:
            UnprocessableMessage: The delay or destination is invalid, or not allowed.
        """
        headers = headers_of(message)
        check_depth(headers)
        header_names.refuse_sender_selected(headers)
        destination: str = (message.delivery_info or {})["routing_key"]
        if self._has_meditated(message):
            yield self._after_meditation(message, headers, destination)
        else:
            yield self._from_client(message, headers, destination)

    def _has_meditated(self, message: amqp.Message) -> bool:
        exchange = (message.delivery_info or {})["exchange"]
        return bool(exchange == self.topology.module_queues.meditated.name)

    def _after_meditation(
        self, message: amqp.Message, given: dict[str, object], destination: str
    ) -> Outgoing:
        """Return the message to publish for a message from meditation.

        A message of a later version stays unopened and waits for the rest of its delay: every
        version has the same header for the due time and the same routing key in meditation (see
        :meth:`.Topology.route`).
        """
        waiting = WaitingMessage.unopened(message)
        due_ms = waiting.headers.due_ms
        if due_ms is None:
            raise UnprocessableMessage(
                "it returned from meditation without a valid header "
                f"{header_names.DUE}: {shortened(given.get(header_names.DUE))}"
            )
        # Recompute the remaining delay from the due time: the message has also waited for this
        # module, not only in meditation. The delay was checked when the message came in.
        return into_levels(self.topology, waiting, Due.until(due_ms), destination)

    def _from_client(
        self, message: amqp.Message, given: dict[str, object], routing_key: str
    ) -> Outgoing:
        content_type = message.properties.get("content_type")
        if str(content_type).startswith(header_names.OWN_CONTENT_TYPES):
            raise UnprocessableMessage("it is an envelope, which clients may not send")
        why = header_names.later_version(given, content_type)
        if why is not None:
            raise UnprocessableMessage(why)
        delay_ms = header_names.client_delay_ms(given)
        given.pop(header_names.X_DELAY, None)
        headers, problems = header_names.parse(given)
        if header_names.EXCHANGE in problems:
            raise UnprocessableMessage(problems[header_names.EXCHANGE])
        exchange = headers.exchange or ""
        self._check_destination(exchange, routing_key)
        sent = WaitingMessage.of(message, DelayHeaders(others=headers.others))
        if not self.trusts_clients:
            sent = checked_task(sent)
        is_task = self.check_task is not None and self.check_task(sent)
        if not delay_ms:
            if is_task:
                sent = sent.saying(others={**sent.headers.others, header_names.CHECKED_IN: True})
            return Outgoing(exchange, routing_key, sent)
        check_delay(header_names.X_DELAY, delay_ms, delay_ms)
        due = Due(wall_clock.ns() + delay_ms * NS_PER_MS, delay_ms)
        outgoing = Outgoing(exchange, routing_key, sent)
        waiting = with_destination(outgoing, due_ms=due.at_ms).with_low_priority()
        return into_levels(self.topology, signed(waiting, self.signing_keys), due)

    def _check_destination(self, exchange: str, routing_key: str) -> None:
        if not exchange and not routing_key:
            raise UnprocessableMessage(
                f"it has no destination: neither a routing key nor {header_names.EXCHANGE}"
            )
        if not self.allowed(exchange, routing_key):
            raise UnprocessableMessage(
                f"check-in may not reach {where_in_words(exchange, routing_key)}: "
                "see rabbitdelay_checkin_allowed"
            )
