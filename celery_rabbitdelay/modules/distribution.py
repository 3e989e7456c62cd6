"""Distribution: publishes messages that are due to their final exchange, unchanged. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import amqp

from celery_rabbitdelay.exceptions import (
    InvalidEnvelope,
    RegistryUnavailable,
    UnprocessableMessage,
)
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.delay import NS_PER_MS, Due
from celery_rabbitdelay.levels.routing_key import (
    DISTRIBUTION,
    decode_destination,
    encode_destination,
)
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules import headers as module_headers
from celery_rabbitdelay.modules.allowed import (
    ANYWHERE,
    Reach,
    not_allowed,
    refuse_sender_selected,
    where_in_words,
)
from celery_rabbitdelay.modules.bounds import DEFAULT_BOUNDS, Bounds, check_depth
from celery_rabbitdelay.modules.early import PutBack
from celery_rabbitdelay.modules.envelope import CONTENT_TYPE, Item, Opened
from celery_rabbitdelay.modules.forwarding import (
    Outgoing,
    into_levels,
    to_undeliverable,
    with_headers,
    without_broker_headers,
)
from celery_rabbitdelay.modules.version import refuse_later_version
from celery_rabbitdelay.publishing.message import body_of, headers_of, shortened
from celery_rabbitdelay.publishing.signature import NOT_SIGNED, SigningKeys
from celery_rabbitdelay.registry.decision import (
    COMMITTED,
    JOB,
    JOB_ID,
    Arrival,
    Decision,
    Verdict,
    registry_headers,
)

#: The headers by which a worker restores a task that comes straight from the levels.
RESTORED_BY_WORKERS = (
    header_names.DUE,
    module_headers.EARLY,
    header_names.EXCHANGE,
    header_names.ROUTING_KEY,
    header_names.QUEUE,
)

#: Seconds after which a job is confirmed again, if Redis was away.
CONFIRM_AGAIN: Final = 5.0

#: The last word of the routing keys of messages for distribution.
DISTRIBUTION_WORD: Final = encode_destination(DISTRIBUTION)

#: The headers that decide whether a message of an envelope is published.
DECISIVE: Final = frozenset(
    (
        module_headers.VERSION,
        header_names.EXCHANGE,
        header_names.ROUTING_KEY,
        *header_names.SENDER_SELECTED,
    )
)


class Distribution:
    """Finds out where messages go that are due.

    Args:
        topology: The levels that they come from.
        put_back: Returns what to publish instead if a message is not due yet; see
            :class:`.EarlyMessages`.
        look: Returns what the registry says about the messages of an envelope; None without one.
        confirm: Tells the registry the name and the id of a job that was committed, in case that it
            has lost that; None without one.
        reach: Where they may go.
        signing_keys: What verifies their signatures; None: signatures do not matter.
        is_signing_required: Whether a message without a valid signature is refused, if there are
            keys.
        bounds: What a message may cost.
    """

    def __init__(
        self,
        topology: Topology,
        put_back: Callable[[amqp.Message], Outgoing | None] = lambda message: None,
        look: Callable[[Sequence[Arrival]], Sequence[Decision]] | None = None,
        reach: Reach = ANYWHERE,
        signing_keys: SigningKeys | None = None,
        is_signing_required: bool = True,
        bounds: Bounds = DEFAULT_BOUNDS,
        confirm: Callable[[str, str], None] | None = None,
    ) -> None:
        self._topology = topology
        self._confirm = confirm
        self._keys = topology.keys
        self._put_back = put_back
        self._look = look
        self._reach = reach
        # A sender binds a queue in the generation of the levels that it sends into.
        self._deliveries = {
            exchange.name: each.delivery.name
            for each in (topology, *topology.former)
            for exchange in each.exchanges
        }
        self._signing_keys = signing_keys
        self._is_signing_required = is_signing_required
        self._bounds = bounds

    def receive(self, message: amqp.Message) -> Iterator[Outgoing]:
        """Return what to publish for a message that is due; for an envelope, each message in it.

        A message for one known queue is published to that queue by the default exchange, and its
        consumer restores exchange and routing key, as if it had come straight from the levels. For
        any other message they are restored here, with priority and expiration; of our headers only
        the due time stays.

        Raises:
            LaterVersion: Only a later version of this package can read it.
            UnprocessableMessage: Its destination is missing or not allowed, or it is an envelope
                that cannot be read. Nothing was published for it.
        """
        headers = headers_of(message)
        refuse_sender_selected(headers)
        refuse_later_version(headers, message.properties.get("content_type"))
        check_depth(headers)
        self._bounds.check_due(headers, time.time_ns() // NS_PER_MS)
        key = _routing_key(message)
        unrouted = self._queue_in_key(key)
        if unrouted is not None and self._keys.has_no_digits(key):
            queue = unrouted or str(headers.get(header_names.QUEUE))
            yield self._returned(message, queue)._replace(is_vouched=False)
            return
        is_vouched = self._is_vouched(message)
        is_envelope = message.properties.get("content_type") == CONTENT_TYPE
        if unrouted is not None:
            self._refuse_other_than_key(key, "an envelope" if is_envelope else _named_by(headers))
        if headers.get(COMMITTED) is True:
            yield from self._confirmed(message, headers)
            return
        one = None if is_envelope else self._outgoing(message, headers, unrouted, is_vouched)
        early = self._put_back(message)
        single = early or one
        found = self._unpacked(message, headers) if single is None else iter([single])
        for outgoing in found:
            yield outgoing if is_vouched else outgoing._replace(is_vouched=False)

    def _confirmed(self, message: amqp.Message, headers: Mapping[str, Any]) -> Iterator[Outgoing]:
        """Tell the registry that a job was committed; while Redis is away, the note waits again."""
        job, job_id = headers.get(JOB), headers.get(JOB_ID)
        is_note = isinstance(job_id, str) and message.properties.get("message_id") == job_id
        if self._confirm is None or not isinstance(job, str) or not is_note:
            what = "there is no registry" if self._confirm is None else "it names no job"
            raise UnprocessableMessage(f"it says that a job was committed, and {what}")
        try:
            self._confirm(job, str(job_id))
        except RegistryUnavailable:
            kept = with_headers(message, without_broker_headers(headers))
            yield into_levels(self._topology, kept, Due.after(CONFIRM_AGAIN))

    def _is_vouched(self, message: amqp.Message) -> bool:
        """Return whether the sender of a message has shown that it has a key, if there is one.

        Raises:
            UnprocessableMessage: It has not, and a signature is required.
        """
        is_vouched = self._signing_keys is None or self._signing_keys.verify(message)
        if self._is_signing_required and not is_vouched:
            raise UnprocessableMessage(NOT_SIGNED)
        return is_vouched

    def _outgoing(
        self,
        message: amqp.Message,
        headers: dict[str, Any],
        unrouted: str | None,
        is_vouched: bool,
    ) -> Outgoing:
        """Return what to publish for a message that is no envelope.

        Args:
            message: The message.
            headers: Its headers.
            unrouted: The queue in its routing key, if it has not found this one.
            is_vouched: Whether its signature is valid, if there is a key. Of any other message,
                nothing is signed: in the phase without required signatures, a stranger would get
                valid ones.
        """
        if header_names.EXCHANGE not in headers and unrouted:
            headers = {**headers, header_names.EXCHANGE: "", header_names.ROUTING_KEY: unrouted}
        queue = headers.get(header_names.QUEUE)
        if queue is None:
            outgoing = _restored(message, headers, headers)
        else:
            outgoing = _for_queue(message, headers, queue)
        if self._signing_keys is not None and is_vouched and _names_origin(outgoing.message):
            # Its worker verifies where the task came from.
            self._signing_keys.sign(outgoing.message)
        return self._reached(outgoing, message, is_unrouted=unrouted is not None)

    def _reached(
        self, outgoing: Outgoing, received: amqp.Message, *, is_unrouted: bool = False
    ) -> Outgoing:
        """Return a message with how it reaches its destination.

        A queue that the application does not name is reached by its binding to the delivery
        exchange. If the message comes from there, the queue is not bound at the moment: it waits,
        and leaves the levels straight for its queue again.
        """
        if self._reach.names(outgoing.exchange, outgoing.routing_key):
            return outgoing
        queue, delivery = outgoing.routing_key, self._delivery_of(received)
        if is_unrouted:
            return outgoing._replace(trouble=f"no queue {shortened(queue)} is bound to {delivery}")
        return outgoing._replace(through=(delivery, self._keys.key_without_digits(queue)))

    def _delivery_of(self, message: amqp.Message) -> str:
        """Return the name of the delivery exchange of the levels that a message comes from."""
        info: Any = message.delivery_info
        return self._deliveries.get((info or {}).get("exchange", ""), self._topology.delivery.name)

    def _returned(self, message: amqp.Message, queue: str) -> Outgoing:
        """Return a message for ``undeliverable`` that the delivery exchange has no binding for."""
        delivery = self._delivery_of(message)
        reason = not_allowed(
            f"{where_in_words('', queue)}, which the application does not name and which is not "
            f"bound to {delivery}"
        )
        undeliverable = self._topology.module_queues.undeliverable.exchange.name
        return to_undeliverable(undeliverable, Outgoing("", queue, message), reason)

    def _asked(
        self,
        message: amqp.Message,
        unpacked: Iterator[Outgoing],
        arrivals: Sequence[Arrival],
        look: Callable[[Sequence[Arrival]], Sequence[Decision]],
    ) -> Iterator[Outgoing]:
        """Return what to publish for the messages of an envelope, as the registry says.

        The workers that get the tasks ask again, so only two cases end here: the tasks of an
        aborted job do not go on, and if no task may run before its job is committed, the whole
        envelope waits.

        Args:
            message: The envelope.
            unpacked: The messages in it.
            arrivals: The same, as the registry is asked about them.
            look: Asks it.
        """
        try:
            decisions = look(arrivals)
        except RegistryUnavailable:
            # The workers find out, and do what the settings say.
            yield from unpacked
            return
        waits = [each for each in decisions if each.verdict is Verdict.LATER]
        goes_on = any(each.verdict is Verdict.RUN or each.is_new_due for each in decisions)
        if waits and not goes_on:
            until_ms = min(each.until_ms for each in waits)
            due = Due(until_ms * NS_PER_MS, 0, is_instant=True)
            kept = without_broker_headers(headers_of(message))
            yield into_levels(self._topology, with_headers(message, kept), due)
            return
        for outgoing, decision in zip(unpacked, decisions, strict=True):
            if decision.verdict is not Verdict.EXPIRED:
                yield outgoing

    def _queue_in_key(self, key: str) -> str | None:
        """Return the queue that a message has not found on leaving the levels.

        None if its routing key is that of messages for distribution, and empty if the key holds
        only a hash of the queue's name.
        """
        word = key.rpartition(".")[2]
        if word == DISTRIBUTION_WORD or self._keys.digits(key) is None:
            return None
        return decode_destination(word) or ""

    def _refuse_other_than_key(self, key: str, named: Any) -> None:
        """Refuse a message whose headers lead past the queue in its routing key.

        The broker checks the key of each message against its sender's topic permissions, and
        cannot check the headers (https://www.rabbitmq.com/docs/access-control#topic-authorisation).

        Args:
            key: A key with a queue, which the message has not found.
            named: What :func:`_named_by` returns.

        Raises:
            UnprocessableMessage: The headers name something else.
        """
        word = key.rpartition(".")[2]
        queue = decode_destination(word)
        if named is None or (isinstance(named, str) and named == queue):
            return
        if isinstance(named, str) and queue is None and encode_destination(named) == word:
            return
        raise UnprocessableMessage(
            f"its routing key is for the queue {shortened(word if queue is None else queue)}, and "
            f"it names {shortened(named)}"
        )

    def _unpacked(self, message: amqp.Message, headers: Mapping[str, Any]) -> Iterator[Outgoing]:
        """Return what to publish for an envelope.

        It is read twice, and never held as a whole. The first time, each message in it is checked:
        an invalid envelope goes to ``undeliverable``, and nothing in it was published before.
        """
        due_ms = headers.get(header_names.DUE)
        due_ms = due_ms if isinstance(due_ms, int) else 0
        arrivals = []
        try:
            envelope = Opened(body_of(message), self._bounds.max_message_bytes)
            shared = {**headers, **envelope.headers}
            is_shared_checked = False
            for item in envelope.items:
                is_own = _says_otherwise(item)
                if is_own or not is_shared_checked:
                    self._check(
                        {**shared, **item.headers}, {**envelope.properties, **item.properties}
                    )
                    is_shared_checked |= not is_own
                if self._look is not None:
                    inner_headers = {**envelope.headers, **item.headers}
                    arrivals.append(Arrival.of(inner_headers, due_ms, "", redelivered=True))
        except InvalidEnvelope as invalid:
            raise UnprocessableMessage(f"the envelope cannot be opened: {invalid}") from invalid
        unpacked = self._messages(message, headers, envelope)
        if self._look is None:
            yield from unpacked
        else:
            yield from self._asked(message, unpacked, arrivals, self._look)

    def _check(self, effective_headers: Mapping[str, Any], properties: Mapping[str, Any]) -> None:
        """Refuse a message of an envelope that distribution may not publish, or not read."""
        refuse_later_version(effective_headers, properties.get("content_type"))
        refuse_sender_selected(effective_headers)
        self._reach.names(*_destination(effective_headers))

    def _messages(
        self, message: amqp.Message, headers: Mapping[str, Any], envelope: Opened
    ) -> Iterator[Outgoing]:
        """Return the messages of an envelope that was checked."""
        shared = {**headers, **envelope.headers}
        own = {header_names.DUE: headers.get(header_names.DUE), module_headers.EARLY: None}
        for item in envelope.items:
            inner = amqp.Message(item.body, **item.properties_with(envelope.properties))
            effective_headers = {**shared, **item.headers}
            inner_headers = {**envelope.headers, **item.headers, **own}
            yield self._reached(_restored(inner, effective_headers, inner_headers), message)


def _says_otherwise(item: Item) -> bool:
    """Return whether an item has something of its own that decides whether it is published."""
    return not DECISIVE.isdisjoint(item.headers) or "content_type" in item.properties


def _named_by(headers: Mapping[str, Any]) -> Any:
    """Return what a message's headers say it is for: a queue, or an exchange and a routing key.

    None if they say nothing. With a queue, exchange and key only say where a retry of the task
    goes, which its worker checks.
    """
    queue = headers.get(header_names.QUEUE)
    if queue is not None:
        return queue
    if header_names.EXCHANGE not in headers:
        return None
    exchange, routing_key = headers[header_names.EXCHANGE], headers.get(header_names.ROUTING_KEY)
    return routing_key if exchange == "" else (exchange, routing_key)


def _names_origin(message: amqp.Message) -> bool:
    """Return whether a worker restores where a task came from, by the message's headers."""
    headers = headers_of(message)
    return header_names.QUEUE in headers or PutBack.of(headers).exchange is not None


def _routing_key(message: amqp.Message) -> str:
    info: Any = message.delivery_info
    key: str = (info or {}).get("routing_key", "")
    return key


def _for_queue(message: amqp.Message, headers: Mapping[str, Any], queue: Any) -> Outgoing:
    if not isinstance(queue, str):
        raise UnprocessableMessage(
            f"{header_names.QUEUE} is {shortened(queue)}, not a queue's name"
        )
    kept = {name: headers[name] for name in RESTORED_BY_WORKERS if name in headers}
    restored = {**header_names.strip(headers), **registry_headers(headers), **kept}
    return Outgoing("", queue, with_headers(message, restored, **_restored_properties(headers)))


def _restored(
    message: amqp.Message, effective_headers: Mapping[str, Any], headers: Mapping[str, Any]
) -> Outgoing:
    exchange, routing_key = _destination(effective_headers)
    restored = {**header_names.strip(headers), **registry_headers(headers)}
    for name in (header_names.DUE, module_headers.EARLY):
        if headers.get(name) is not None:
            restored[name] = headers[name]
    properties = _restored_properties(effective_headers)
    return Outgoing(exchange, routing_key, with_headers(message, restored, **properties))


def _restored_properties(effective_headers: Mapping[str, Any]) -> dict[str, Any]:
    properties = {"expiration": effective_headers.get(header_names.EXPIRATION)}
    if header_names.PRIORITY in effective_headers:
        properties["priority"] = effective_headers[header_names.PRIORITY]
    return properties


def _destination(effective_headers: Mapping[str, Any]) -> tuple[str, str]:
    exchange, routing_key = (
        effective_headers.get(header_names.EXCHANGE),
        effective_headers.get(header_names.ROUTING_KEY),
    )
    if not isinstance(exchange, str) or not isinstance(routing_key, str):
        raise UnprocessableMessage(
            f"its destination is missing: {header_names.EXCHANGE} is {shortened(exchange)}, "
            f"{header_names.ROUTING_KEY} is {shortened(routing_key)}"
        )
    return exchange, routing_key
