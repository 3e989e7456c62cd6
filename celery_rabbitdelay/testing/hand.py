"""Takes all messages out of the levels, for a test that travels in time.

A test cannot turn the clock of a broker. So for the time of a travel it takes all that waits, and
all that is sent meanwhile, out of the levels' queues, and publishes it again: what is due, without
a delay, and the rest at the end, with what is left of its delay.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, Final, NamedTuple, cast
from uuid import uuid4

import amqp
from kombu import Connection

from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.headers import ATTEMPTS, COPY, DUE, EARLY, parse
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.forwarding import encoded
from celery_rabbitdelay.modules.probe import PROBE_TYPE
from celery_rabbitdelay.operations.conversion import Migration
from celery_rabbitdelay.operations.mover import Stay
from celery_rabbitdelay.operations.source import Source
from celery_rabbitdelay.publishing.message import Publication, body_of, headers_of
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.publishing.signature import SigningKeys

#: Seconds in which the broker has to answer.
TIMEOUT: Final = 30.0

#: The ``type`` of the messages by which a test knows that it has received all that came before.
MARK: Final = "rabbitdelay-mark"

#: The tag of the consumer of the queue of copies.
TAP: Final = "rabbitdelay-copies"


class Held(NamedTuple):
    """A message in the hand; they are in the order in which they fall due.

    Attributes:
        due_ms: When it leaves the levels, in milliseconds since 1970-01-01 UTC.
        tag: Its delivery tag, which grows from one that was taken to the next.
        message: The message.
    """

    due_ms: int
    tag: int
    message: amqp.Message


class Hand:
    """Holds all that waits in the levels, unacknowledged, until it is published again.

    If the process dies, the broker requeues them. Those that are published and not acknowledged yet
    then exist twice.

    Args:
        like: A connection to the broker; other ones like it are opened.
        topology: The levels.
        signing_keys: The keys that sign messages; None if they are not signed.

    Attributes:
        held: The messages, a heap.
    """

    def __init__(
        self, like: Connection, topology: Topology, signing_keys: SigningKeys | None
    ) -> None:
        self.held: list[Held] = []
        self._topology = topology
        self._convert = Migration(topology, topology, lambda name: None, signing_keys).convert
        self._publisher = Publisher(like.clone(heartbeat=0))
        self._source = Source(like, TIMEOUT)
        #: How often messages were published and have not come from their queues.
        self._on_their_way: Counter[object] = Counter()
        self._marks: set[str] = set()
        self._tap = ""
        try:
            self._take_all()
        except BaseException:
            self.close()
            raise

    def _take_all(self) -> None:
        """Look at what is published, consume all queues, and wait until all that waited is here."""
        topology, modules = self._topology, self._topology.module_queues
        others = (modules.meditation, modules.paused)
        queues = [queue.name for queue in (*topology.digit_queues, *others)]
        channel = self._source.channel
        self._tap = channel.queue_declare("", exclusive=True).queue
        for exchange in topology.level_exchanges:
            channel.queue_bind(self._tap, exchange.name, "#", nowait=True)
        for queue in others:
            channel.queue_bind(self._tap, queue.exchange.name, "")
        channel.basic_consume(self._tap, TAP, no_ack=True, callback=self._seen)
        waiting = self._source.ready(queues)
        self._source.consume(queues, 0)
        self._wait_for_marks([self._tap, *waiting])
        if sent_meanwhile := +self._on_their_way:
            # Each comes before a mark that is behind it in its queue. If it does not, its delay was
            # over before its queue was consumed, and it never comes.
            self._wait_for_marks(queues)
            self._on_their_way.subtract(sent_meanwhile & self._on_their_way)
        self.catch_up()

    def catch_up(self) -> None:
        """Take all that was sent, and confirmed, until now."""
        self._wait_for_marks([self._tap])
        while +self._on_their_way:
            self._read(f"{self._on_their_way.total()} messages from the levels' queues")

    def release(self, until_ms: int) -> list[str]:
        """Publish what is due until an instant, as if it left the levels; return the routing keys.

        Args:
            until_ms: The instant, in milliseconds since 1970-01-01 UTC.
        """
        due = []
        while self.held and self.held[0].due_ms <= until_ms:
            due.append(heapq.heappop(self.held))
        return self._publish(due)

    def wake(self) -> None:
        """Let all due messages that were put back leave now: they may not be held any more."""
        now_ms = wall_clock.ms()
        for number, each in enumerate(self.held):
            headers, _ = parse(headers_of(each.message))
            if headers.early.until_ms and (headers.due_ms or 0) <= now_ms:
                self.held[number] = each._replace(due_ms=now_ms)
        heapq.heapify(self.held)

    def put_back(self) -> None:
        """Put all into the levels, for what is left of its delay."""
        self._stop()
        held, self.held = sorted(self.held), []
        self._publish(held)

    def close(self) -> None:
        """Close the connections; what was not published is in its queue again."""
        lost: Any = (OSError, *self._source.errors)
        self._publisher.close()
        try:
            self._stop()
        except lost:
            self._source.drop()
        else:
            self._source.close()

    def _stop(self) -> None:
        """Take nothing more, and look at nothing more.

        If the queue of copies went with its connection, the broker would refuse what is published
        meanwhile, although the levels have it (nack), and its sender would send it again.
        """
        self._source.cancel()
        if self._tap:
            self._source.channel.basic_cancel(TAP)
            self._source.channel.queue_delete(self._tap)
            self._tap = ""

    def _publish(self, held: Sequence[Held]) -> list[str]:
        keys: list[str] = []

        def publications() -> Iterator[Publication]:
            for each in held:
                info: Any = each.message.delivery_info
                try:
                    outgoing = self._convert(each.message, info["queue"], each.due_ms)
                    content = encoded(outgoing, self._source.frame_max)
                except (Stay, UnprocessableMessage):
                    continue  # it goes back into its queue at the end
                keys.append(outgoing.routing_key)
                address = outgoing.reroute or repeat(outgoing.address).__next__
                yield Publication(content, address, each.message)

        def done(publication: Publication) -> None:
            if publication.error is not None:
                raise publication.error
            self._source.to_acknowledge.append(publication.context.delivery_tag)

        if held:
            self._publisher.publish_all(publications(), done=done)
            self._source.acknowledge()
        return keys

    def _wait_for_marks(self, queues: Sequence[str]) -> None:
        """Wait until all that stands in queues at the moment has come from them."""
        for queue in queues:
            mark = uuid4().hex
            self._marks.add(mark)
            message = amqp.Message(b"", type=MARK, message_id=mark)
            self._source.channel.basic_publish(message, "", queue)
        while self._marks:
            self._read("marks")

    def _read(self, what: str) -> None:
        """Read what the broker sends, and take it into the hand.

        Raises:
            TimeoutError: It sends nothing.
        """
        try:
            if not self._source.received:
                self._source.connection.drain_events(timeout=TIMEOUT)
        except TimeoutError:
            raise TimeoutError(f"{what}: not within {TIMEOUT:g} s") from None
        while self._source.received:
            self._take(self._source.received.popleft())

    def _seen(self, message: amqp.Message) -> None:
        """Note what is published into the levels, by a copy of it."""
        if message.properties.get("type") == MARK:
            self._marks.discard(message.properties["message_id"])
        elif "x-death" not in headers_of(message):  # it does not come from a level
            self._on_their_way[_identity(message)] += 1

    def _take(self, message: amqp.Message) -> None:
        kind, tag = message.properties.get("type"), cast(int, message.delivery_tag)
        if kind == MARK:
            self._marks.discard(message.properties["message_id"])
        else:
            self._on_their_way[_identity(message)] -= 1
        if kind in (MARK, PROBE_TYPE):  # a probe measures the real time
            self._source.to_acknowledge.append(tag)
        else:
            heapq.heappush(self.held, Held(self._leaves_at(message), tag, message))

    def _leaves_at(self, message: amqp.Message) -> int:
        """Return when a message leaves the levels, in milliseconds since 1970-01-01 UTC.

        That is when it is due, or the end of a pause after that, before it is tried again.
        """
        headers, _ = parse(headers_of(message))
        now_ms, due_ms = wall_clock.ms(), headers.early.until_ms or headers.due_ms or 0
        info: Any = message.delivery_info
        digits = self._topology.keys.digits(info["routing_key"])
        if due_ms > now_ms or digits is None:
            return due_ms
        places = self._topology.layout.places_ms
        return now_ms + sum(int(digit) * place for digit, place in zip(digits, places, strict=True))


def _identity(message: amqp.Message) -> object:
    properties, headers = message.properties, headers_of(message)
    ids = properties.get("message_id"), properties.get("correlation_id"), headers.get(COPY)
    times = headers.get(DUE), str(headers.get(EARLY)), headers.get(ATTEMPTS)
    return ids, times, (message.delivery_info or {}).get("routing_key"), body_of(message)
