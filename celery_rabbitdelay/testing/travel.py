"""Time travel: a test of what happens in three days takes a second.

Tasks wait on a real broker, and a real worker runs them; only the waiting is left out::

    def test_a_reminder_comes_after_three_days(rabbitdelay_app, rabbitdelay_worker, travel):
        remind.apply_async((order,), delay=timedelta(days=3))
        travel(days=3)
        assert order.reminded

The package's own clock stands at each instant at which something falls due, in the test and in its
worker, until all that is due has run: so what a task sends on the way falls due on the way. All
other code sees the real time; see :attr:`Travel.code_sees_it`.

A test cannot turn the clock of a broker. So for the time of a travel it takes all that waits, and
all that is sent meanwhile, out of the levels' queues, and publishes it again: what is due, without
a delay, and the rest at the end, with what is left of its delay.
"""

from __future__ import annotations

import heapq
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timedelta
from itertools import repeat
from pathlib import Path
from typing import Any, Final, NamedTuple, cast
from uuid import uuid4

import amqp
from kombu import Connection, Producer

from celery_rabbitdelay.app.application import Celery
from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import (
    NS_PER_MS,
    Delay,
    duration_text,
    instant_of,
    milliseconds,
    milliseconds_of,
)
from celery_rabbitdelay.levels.headers import ATTEMPTS, COPY, DUE, EARLY, parse
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION, encode_destination
from celery_rabbitdelay.levels.topology import CHECK_IN, DISTRIBUTE, PROBE_TYPE, Topology
from celery_rabbitdelay.modules.forwarding import encoded
from celery_rabbitdelay.operations.conversion import Migration
from celery_rabbitdelay.operations.mover import Stay
from celery_rabbitdelay.operations.source import Source
from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.publishing.message import Publication, body_of, headers_of
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.publishing.signature import SigningKeys
from celery_rabbitdelay.testing.worker import ANSWERS, LOOK, NUMBER, WORKER, SharedClock, shown

#: Seconds that what runs on the way may take together, at one instant.
TIMEOUT: Final = 60.0

#: Seconds in which the broker has to answer.
ANSWER_TIMEOUT: Final = 30.0

#: The ``type`` of the messages by which a test knows that it has received all that came before.
MARK: Final = "rabbitdelay-mark"

#: The tag of the consumer of the queue of copies.
TAP: Final = "rabbitdelay-copies"

#: Seconds without an answer before checking that the worker is still running.
LOOK_AFTER_WORKER: Final = 1.0

#: Shortens the lives of all keys whose names match a pattern by some milliseconds: Redis goes by
#: its own clock.
AGE: Final = """
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
  local left_ms = redis.call('PTTL', key)
  if left_ms >= 0 then
    redis.call('PEXPIRE', key, string.format('%.0f', left_ms - ARGV[2]))
  end
end
"""

#: Deletes them.
FORGET: Final = "for _, key in ipairs(redis.call('KEYS', ARGV[1])) do redis.call('DEL', key) end"


class DidNotSettle(AssertionError):
    """Tasks that fell due at one instant of a travel have not ended in time."""


class Travel:
    """Travels in time: the fixture ``travel``.

    Args:
        app: The application, whose levels are on a broker for tests.
        folder: The folder that the test shares with its worker.
        timeout: Seconds that what runs on the way may take at one instant.
        why_ended: Returns why no worker answers any more, None while it runs.

    Attributes:
        clock: The clock of the test and its worker.
    """

    def __init__(
        self,
        app: Celery,
        folder: Path,
        timeout: float = TIMEOUT,
        why_ended: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.clock = SharedClock(folder)
        self._app = app
        self._folder = folder
        self._timeout = timeout
        self._why_ended = why_ended
        self._hand: Hand | None = None
        self._connection: Connection
        # Not those of a test before, whose answers may come late.
        self._looks = time.monotonic_ns()
        self._shown = ExitStack()
        #: By how much the clock has gone ahead of the machine's since that was started.
        self._ahead_ms = self._ahead_of_machine()
        #: The pauses that the travel found when it looked last.
        self._paused: set[str] = set()
        #: How many messages distribution is to have received.
        self._handed = 0
        #: How many it has received.
        self._served = 0
        self._answers = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._answers.bind(("127.0.0.1", 0))
        port = folder / f"{ANSWERS}.{id(self)}"
        port.write_text(str(self._answers.getsockname()[1]))
        port.replace(folder / ANSWERS)

    def close(self) -> None:
        """Return to the real time."""
        self._answers.close()
        self.code_sees_it = False
        self.clock.reset()

    @property
    def now(self) -> datetime:
        """The time that it is for the levels, in UTC."""
        return wall_clock.now()

    @property
    def code_sees_it(self) -> bool:
        """Whether ``datetime.now()`` in the test and in its tasks gives this time, too.

        Set it to True to have that, which takes the package ``time-machine``; it is False at the
        beginning. With it, an ``eta`` that code computes agrees with the levels.

        Raises:
            ModuleNotFoundError: The package is not installed.
        """
        return self.clock.is_shown

    @code_sees_it.setter
    def code_sees_it(self, is_shown: bool) -> None:
        self.clock.is_shown = is_shown
        self._show()

    def __call__(self, *, to: datetime | None = None, wait: bool = True, **length: float) -> None:
        """Travel ahead; all that falls due on the way has run when this returns.

        In the order of due: what is due later begins when all that was due before has ended,
        together with what it has sent without a delay.

        Args:
            to: The instant to travel to, an aware datetime; None: from now on.
            wait: Whether to wait for what runs. False: all that is due by then is delivered at
                once.
            **length: How far to travel: ``weeks``, ``days``, ``hours``, ``minutes``, ``seconds``,
                as for :class:`~datetime.timedelta`.

        Raises:
            ValueError: The target has passed.
            DidNotSettle: What runs on the way does not end.
        """
        now_ms = wall_clock.ms()
        length_ms = timedelta(**length) // timedelta(milliseconds=1)
        until_ms = (now_ms if to is None else milliseconds_of(to)) + length_ms
        if until_ms < now_ms:
            raise ValueError(
                f"travel goes ahead only, not from {self.now} to {instant_of(until_ms)}"
            )
        with self._in_hand() as hand:
            if wait:
                self._go(hand, until_ms)
            self._arrive(until_ms)
            if wait:
                self._go(hand, until_ms)

    def until(self, condition: Callable[[], object], within: Delay = timedelta(days=3660)) -> None:
        """Travel to the first instant at which a condition is true, from one due time to the next.

        Args:
            condition: Is asked when all that was due has run; such as :meth:`nothing_waits`.
            within: How far to travel at most: seconds, or a timedelta.

        Raises:
            TimeoutError: The condition is not true by then, or nothing waits any more.
            DidNotSettle: What runs on the way does not end.
        """
        within_ms = milliseconds(within)
        latest_ms = wall_clock.ms() + within_ms
        with self._in_hand() as hand:
            is_true, left = self._go(hand, latest_ms, condition), len(hand.held)
        if not is_true:
            what = f"{left} messages wait beyond that" if left else "nothing waits"
            how_far = f"within {duration_text(within_ms)}: {what} at {self.now}"
            raise TimeoutError(f"the condition is not true {how_far}")

    def nothing_waits(self) -> bool:
        """Return whether nothing waits in the levels."""
        if self._hand is not None:
            return not self._hand.held
        with self._in_hand() as hand:
            return not hand.held

    def rest(self) -> None:
        """Wait until the worker has finished what it has begun.

        Raises:
            DidNotSettle: It does not finish.
        """
        with self._app.connection_for_write() as self._connection:
            self._look(time.monotonic() + self._timeout)

    @contextmanager
    def _in_hand(self) -> Iterator[Hand]:
        """Take all that waits into the hand; at the end, put it back."""
        self.clock.stand_at(self.clock.ns())
        settings = self._app.rabbitdelay.settings
        try:
            with self._app.connection_for_write() as like:
                self._app.rabbitdelay.declare(like)
                hand = self._hand = Hand(like, settings.topology, settings.signing_keys)
                self._connection = like
                try:
                    yield hand
                    hand.catch_up()
                    hand.put_back()
                finally:
                    self._hand = None
                    hand.close()
        finally:
            self.clock.go_on()
            self._show()

    def _go(
        self, hand: Hand, until_ms: int, condition: Callable[[], object] = lambda: False
    ) -> bool:
        """Go from one due time to the next; return whether the condition is true there.

        First, what is held asks again: its job may have been committed, or be over.
        """
        self._handed = 0
        self._settle(hand)
        self._handed = self._served
        hand.wake()
        while True:
            if self._is_resumed():
                hand.wake()
            if condition():
                return True
            if not hand.held or hand.held[0].due_ms > until_ms:
                return False
            self._arrive(max(hand.held[0].due_ms, wall_clock.ms()))
            keys = hand.release(wall_clock.ms())
            distribution = encode_destination(DISTRIBUTION)
            self._handed += sum(key.rpartition(".")[2] == distribution for key in keys)
            self._settle(hand)

    def _is_resumed(self) -> bool:
        """Return whether something is not paused any more that was when this was asked last."""
        if not self._app.rabbitdelay.has_registry:
            return False
        before = self._paused
        self._paused = set(self._app.rabbitdelay.registry.pauses.known())
        return not before <= self._paused

    def _arrive(self, at_ms: int) -> None:
        self.clock.stand_at(at_ms * NS_PER_MS)
        self._show()
        if self._app.rabbitdelay.has_registry:
            before_ms, self._ahead_ms = self._ahead_ms, self._ahead_of_machine()
            on_all_keys(self._app, AGE, self._ahead_ms - before_ms)

    def _ahead_of_machine(self) -> int:
        return (self.clock.ns() - time.monotonic_ns()) // NS_PER_MS

    def _show(self) -> None:
        """Let the code in this process see the time, if it is to."""
        self._shown.close()
        if self.clock.is_shown:
            self._shown.enter_context(shown(self.now))

    def _settle(self, hand: Hand) -> None:
        """Wait until all that was due has ended, and what it has sent is in the hand.

        The worker's queues are first in, first out: when it answers a second look, and has taken
        nothing since the first, nothing was on its way to it either.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            first = self._look(deadline)
            hand.catch_up()
            if first is None:
                return
            is_served = self._served >= self._handed and not self._wait_for_modules()
            if is_served and self._look(deadline) == first:
                hand.catch_up()
                return
            if time.monotonic() > deadline:
                raise DidNotSettle(f"the modules have not finished at {self.now}")

    def _wait_for_modules(self) -> bool:
        """Return whether messages wait for the worker's modules."""
        modules = self._app.rabbitdelay.topology.module_queues
        served = self._app.rabbitdelay.settings.modules
        queues = {DISTRIBUTE: modules.distribution, CHECK_IN: modules.checkin}
        counts = queue_counts(self._connection, [queues[name] for name in served if name in queues])
        return any(found is not None and found.messages for found in counts.values())

    def _look(self, deadline: float) -> object:
        """Send a look through each of the worker's queues; return what it has done when at rest.

        None if there is no worker.

        Raises:
            DidNotSettle: It does not come to rest.
        """
        try:
            queues = json.loads((self._folder / WORKER).read_text())
        except FileNotFoundError:
            return None
        looks = set()
        for queue in queues:
            self._looks += 1
            looks.add(self._looks)
            made = self._app.amqp.as_task_v2(uuid4().hex, LOOK, (), {})
            Producer(self._connection.default_channel).publish(
                made.body,
                routing_key=queue,
                serializer=self._app.conf.task_serializer,
                headers={**made.headers, NUMBER: self._looks},
            )
        why, answer = "it takes nothing from its queues", {}
        self._answers.settimeout(LOOK_AFTER_WORKER)
        while looks:
            with suppress(TimeoutError):
                answer = json.loads(self._answers.recv(65_536))
                why = ", ".join(answer["unfinished"]) or why
                looks -= set() if answer["unfinished"] else {answer["look"]}
                if looks and time.monotonic() < deadline:
                    continue
            if looks and (ended := self._why_ended()):
                raise DidNotSettle(f"at {self.now}, {ended}")
            if looks and time.monotonic() > deadline:
                within = f"within {self._timeout:g} s at {self.now}"
                raise DidNotSettle(f"the worker has not finished {within}: {why}")
        self._served = answer["served"].get(DISTRIBUTE, 0)
        return answer["taken"], answer["served"]


def on_all_keys(app: Celery, script: str, *arguments: int) -> None:
    """Run a script about all keys of an application's registry."""
    registry = app.rabbitdelay.registry
    given = f"{registry.names.prefix}:*", *arguments
    registry.store.commands(lambda pipe: pipe.eval(script, 0, *given))


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
        self._source = Source(like, ANSWER_TIMEOUT)
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
                self._source.connection.drain_events(timeout=ANSWER_TIMEOUT)
        except TimeoutError:
            raise TimeoutError(f"{what}: not within {ANSWER_TIMEOUT:g} s") from None
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
