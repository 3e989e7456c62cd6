"""Time travel: a test of the next three days takes a second.

Tasks wait on a real broker, and a real worker runs them; only the waiting is skipped::

    def test_a_reminder_comes_after_three_days(rabbitdelay_app, rabbitdelay_worker, travel):
        remind.apply_async((order,), delay=timedelta(days=3))
        travel(days=3)
        assert order.reminded

The package's own clock, in the test and in its worker, stops at every due time until all due tasks
have run. Therefore tasks that a task sends during the travel also come due during the travel. All
other code sees the real time; see :attr:`Travel.code_sees_it`.

A test cannot change the clock of a broker. During a travel, it therefore consumes all messages from
the levels' queues, including messages that are sent during the travel. The travel publishes due
messages without a delay, and all other messages at the end, with their remaining delays.
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
from celery_rabbitdelay.levels import delay, wall_clock
from celery_rabbitdelay.levels.delay import Delay
from celery_rabbitdelay.levels.headers import ATTEMPTS, COPY, DUE, EARLY, parse
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION, encode_destination
from celery_rabbitdelay.levels.topology import CHECK_IN, DISTRIBUTE, PROBE_TYPE, Topology
from celery_rabbitdelay.modules.forwarding import encoded
from celery_rabbitdelay.operations.conversion import Migration
from celery_rabbitdelay.operations.mover import Stay
from celery_rabbitdelay.operations.source import ANSWER_TIMEOUT, LOST, Source
from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.publishing.message import Publication, body_of, headers_of
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.publishing.signature import SigningKeys
from celery_rabbitdelay.testing.worker import ANSWERS, LOOK, NUMBER, WORKER, SharedClock, shown

#: Seconds for all tasks that run at one instant of a travel.
TIMEOUT: Final = 60.0

#: The ``type`` of marker messages: a test that receives one has received all earlier messages.
MARK: Final = "rabbitdelay-mark"

#: The tag of the consumer of the queue of copies.
TAP: Final = "rabbitdelay-copies"

#: Seconds without an answer before checking that the worker is still running.
LOOK_AFTER_WORKER: Final = 1.0

#: Shortens the TTLs of all keys that match a pattern by some milliseconds, because Redis has its
#: own clock.
AGE: Final = """
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
  local left_ms = redis.call('PTTL', key)
  if left_ms >= 0 then
    redis.call('PEXPIRE', key, string.format('%.0f', left_ms - ARGV[2]))
  end
end
"""

#: Deletes all keys that match a pattern.
FORGET: Final = "for _, key in ipairs(redis.call('KEYS', ARGV[1])) do redis.call('DEL', key) end"


class DidNotSettle(AssertionError):
    """Tasks that came due at one instant of a travel did not end in time."""


class Travel:
    """Travels in time: the fixture ``travel``.

    Args:
        app: The application, whose levels are on a broker for tests.
        folder: The folder that the test shares with its worker.
        timeout: Seconds for all tasks that run at one instant.
        why_ended: Returns why the worker has ended; None while it runs.

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
        self.clock: SharedClock = SharedClock(folder)
        self._app = app
        self._folder = folder
        self._timeout = timeout
        self._why_ended = why_ended
        self._held: HeldMessages | None = None
        self._connection: Connection
        # Answers to an earlier test may come late; they have smaller numbers.
        self._looks = time.monotonic_ns()
        self._shown = ExitStack()
        #: Milliseconds by which the clock is ahead of the machine's uptime.
        self._ahead_ms = self._ahead_of_machine()
        #: The pauses that were in force at the last look.
        self._paused: set[str] = set()
        #: How many messages distribution should have received.
        self._expected = 0
        #: How many messages distribution has received.
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
        """The time for the levels, in UTC."""
        return wall_clock.now()

    @property
    def code_sees_it(self) -> bool:
        """Whether ``datetime.now()`` in the test and in its tasks returns this time, too.

        False by default. True requires the package ``time-machine``; an ``eta`` that code computes
        then agrees with the levels.

        Raises:
            ModuleNotFoundError: The package is not installed.
        """
        return self.clock.is_shown

    @code_sees_it.setter
    def code_sees_it(self, is_shown: bool) -> None:
        self.clock.is_shown = is_shown
        self._show()

    def __call__(self, *, to: datetime | None = None, wait: bool = True, **length: float) -> None:
        """Travel ahead, and run all tasks that come due on the way.

        Tasks run in the order of their due times. A task begins when all tasks that were due before
        have ended, including the tasks that they sent without a delay.

        Args:
            to: The instant to travel to, an aware datetime; None to travel by ``length`` from now.
            wait: Whether to wait for the tasks. With False, all tasks that are due by the target
                instant are delivered at once.
            **length: How far to travel: ``weeks``, ``days``, ``hours``, ``minutes``, ``seconds``,
                as for :class:`~datetime.timedelta`.

        Raises:
            ValueError: The target is in the past.
            DidNotSettle: Tasks that came due on the way did not end in time.
        """
        now_ms = wall_clock.ms()
        length_ms = timedelta(**length) // timedelta(milliseconds=1)
        until_ms = (now_ms if to is None else delay.milliseconds_of(to)) + length_ms
        if until_ms < now_ms:
            raise ValueError(
                f"cannot travel back in time, from {self.now} to {delay.instant_of(until_ms)}"
            )
        with self._holding() as held:
            if wait:
                self._go(held, until_ms)
            self._arrive(until_ms)
            if wait:
                self._go(held, until_ms)

    def until(self, condition: Callable[[], object], within: Delay = timedelta(days=3660)) -> None:
        """Travel to the first instant at which a condition is true, from one due time to the next.

        Args:
            condition: Called when all due tasks have run; for example :meth:`nothing_waits`.
            within: How far to travel at most: seconds, or a timedelta.

        Raises:
            TimeoutError: The condition did not become true, or nothing waits any more.
            DidNotSettle: Tasks that came due on the way did not end in time.
        """
        within_ms = delay.milliseconds(within)
        latest_ms = wall_clock.ms() + within_ms
        with self._holding() as held:
            is_true, left = self._go(held, latest_ms, condition), len(held.messages)
        if not is_true:
            what = f"{left} messages wait beyond that" if left else "nothing waits"
            how_far = f"within {delay.duration_text(within_ms)}: {what} at {self.now}"
            raise TimeoutError(f"the condition is not true {how_far}")

    def nothing_waits(self) -> bool:
        """Return whether nothing waits in the levels."""
        if self._held is not None:
            return not self._held.messages
        with self._holding() as held:
            return not held.messages

    def rest(self) -> None:
        """Wait until the worker has finished its tasks.

        Raises:
            DidNotSettle: The worker did not finish in time.
        """
        with self._app.connection_for_write() as self._connection:
            self._look(time.monotonic() + self._timeout)

    @contextmanager
    def _holding(self) -> Iterator[HeldMessages]:
        """Hold all waiting messages in a block; put them back at its end."""
        self.clock.stand_at(self.clock.ns())
        settings = self._app.rabbitdelay.settings
        try:
            with self._app.connection_for_write() as like:
                self._app.rabbitdelay.declare(like)
                held = self._held = HeldMessages(like, settings.topology, settings.signing_keys)
                self._connection = like
                try:
                    yield held
                    held.catch_up()
                    held.put_back()
                finally:
                    self._held = None
                    held.close()
        finally:
            self.clock.go_on()
            self._show()

    def _go(
        self, held: HeldMessages, until_ms: int, condition: Callable[[], object] = lambda: False
    ) -> bool:
        """Go from one due time to the next until a condition is true; return whether it is.

        Held tasks arrive again first, because their job may have been committed or may have
        expired.
        """
        self._expected = 0
        self._settle(held)
        self._expected = self._served
        held.wake()
        while True:
            if self._is_resumed():
                held.wake()
            if condition():
                return True
            if not held.messages or held.messages[0].due_ms > until_ms:
                return False
            self._arrive(max(held.messages[0].due_ms, wall_clock.ms()))
            keys = held.release(wall_clock.ms())
            distribution = encode_destination(DISTRIBUTION)
            self._expected += sum(key.rpartition(".")[2] == distribution for key in keys)
            self._settle(held)

    def _is_resumed(self) -> bool:
        """Return whether a pause has ended since the last call."""
        if not self._app.rabbitdelay.has_registry:
            return False
        before = self._paused
        self._paused = set(self._app.rabbitdelay.registry.pauses.known())
        return not before <= self._paused

    def _arrive(self, at_ms: int) -> None:
        self.clock.stand_at(at_ms * delay.NS_PER_MS)
        self._show()
        if self._app.rabbitdelay.has_registry:
            before_ms, self._ahead_ms = self._ahead_ms, self._ahead_of_machine()
            on_all_keys(self._app, AGE, self._ahead_ms - before_ms)

    def _ahead_of_machine(self) -> int:
        return (self.clock.ns() - time.monotonic_ns()) // delay.NS_PER_MS

    def _show(self) -> None:
        """Let the code in this process see the time if ``code_sees_it`` is set."""
        self._shown.close()
        if self.clock.is_shown:
            self._shown.enter_context(shown(self.now))

    def _settle(self, held: HeldMessages) -> None:
        """Wait until all due tasks have ended and the messages that they sent are held.

        The worker's queues are first in, first out: if the worker has received nothing between two
        looks (see :mod:`.testing.worker`), no message was on its way to it.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            first = self._look(deadline)
            held.catch_up()
            if first is None:
                return
            is_served = self._served >= self._expected and not self._wait_for_modules()
            if is_served and self._look(deadline) == first:
                held.catch_up()
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
        """Send a look through every queue of the worker; return its counts once it is idle.

        The result is None if there is no worker.

        Raises:
            DidNotSettle: The worker does not become idle.
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
    """Run a script on all keys of an application's registry."""
    registry = app.rabbitdelay.registry
    given = f"{registry.names.prefix}:*", *arguments
    registry.store.commands(lambda pipe: pipe.eval(script, 0, *given))


class HeldMessage(NamedTuple):
    """A held message; sorts by the time at which it leaves the levels.

    Attributes:
        due_ms: When it leaves the levels, in milliseconds since 1970-01-01 UTC.
        tag: The message's delivery tag, which grows with every message.
        message: The message.
    """

    due_ms: int
    tag: int
    message: amqp.Message


class HeldMessages:
    """Holds all messages of the levels, unacknowledged, until they are published again.

    If the process dies, the broker requeues them. Messages that were published and not acknowledged
    yet then exist twice.

    Args:
        like: A connection to the broker; the other connections are its clones.
        topology: The levels.
        signing_keys: The keys that sign messages; None to sign no messages.

    Attributes:
        messages: The messages, a heap.
    """

    def __init__(
        self, like: Connection, topology: Topology, signing_keys: SigningKeys | None
    ) -> None:
        self.messages: list[HeldMessage] = []
        self._topology = topology
        self._convert = Migration(topology, topology, lambda name: None, signing_keys).convert
        self._publisher = Publisher(like.clone(heartbeat=0))
        self._source = Source(like, ANSWER_TIMEOUT)
        #: Messages that were published and have not arrived from their queues yet.
        self._on_their_way: Counter[object] = Counter()
        self._marks: set[str] = set()
        self._tap = ""
        try:
            self._take_all()
        except BaseException:
            self.close()
            raise

    def _take_all(self) -> None:
        """Copy publications, consume all queues, and wait until all waiting messages are here."""
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
            # A message arrives before the mark behind it in its queue. A message that does not
            # arrive had left its queue before the queue was consumed, and never arrives.
            self._wait_for_marks(queues)
            self._on_their_way.subtract(sent_meanwhile & self._on_their_way)
        self.catch_up()

    def catch_up(self) -> None:
        """Take all messages that were confirmed until now."""
        self._wait_for_marks([self._tap])
        while +self._on_their_way:
            self._read(f"{self._on_their_way.total()} messages from the levels' queues")

    def release(self, until_ms: int) -> list[str]:
        """Publish messages due by ``until_ms`` to the delivery exchange; return their routing keys.

        Args:
            until_ms: The instant, in milliseconds since 1970-01-01 UTC.
        """
        due = []
        while self.messages and self.messages[0].due_ms <= until_ms:
            due.append(heapq.heappop(self.messages))
        return self._publish(due)

    def wake(self) -> None:
        """Let due messages that were put back leave now: their tasks may no longer be held."""
        now_ms = wall_clock.ms()
        for number, each in enumerate(self.messages):
            headers, _ = parse(headers_of(each.message))
            if headers.early.until_ms and (headers.due_ms or 0) <= now_ms:
                self.messages[number] = each._replace(due_ms=now_ms)
        heapq.heapify(self.messages)

    def put_back(self) -> None:
        """Put all messages into the levels, for their remaining delays."""
        self._stop()
        messages, self.messages = sorted(self.messages), []
        self._publish(messages)

    def close(self) -> None:
        """Close the connections; the broker requeues unpublished messages."""
        self._publisher.close()
        try:
            self._stop()
        except LOST:
            self._source.drop()
        else:
            self._source.close()

    def _stop(self) -> None:
        """Cancel the consumers, and delete the queue of copies.

        If the queue of copies were deleted with its connection, the broker would nack messages that
        are being published, although the levels have them, and the messages would be sent again.
        """
        self._source.cancel()
        if self._tap:
            self._source.channel.basic_cancel(TAP)
            self._source.channel.queue_delete(self._tap)
            self._tap = ""

    def _publish(self, messages: Sequence[HeldMessage]) -> list[str]:
        keys: list[str] = []

        def publications() -> Iterator[Publication]:
            for each in messages:
                info: Any = each.message.delivery_info
                try:
                    outgoing = self._convert(each.message, info["queue"], each.due_ms)
                    content = encoded(outgoing, self._source.frame_max)
                except (Stay, UnprocessableMessage):
                    continue  # the message is requeued at the end
                keys.append(outgoing.routing_key)
                address = outgoing.reroute or repeat(outgoing.address).__next__
                yield Publication(content, address, each.message)

        def done(publication: Publication) -> None:
            if publication.error is not None:
                raise publication.error
            self._source.to_acknowledge.append(publication.context.delivery_tag)

        if messages:
            self._publisher.publish_all(publications(), done=done)
            self._source.acknowledge()
        return keys

    def _wait_for_marks(self, queues: Sequence[str]) -> None:
        """Wait until all messages that are in queues at the moment have arrived."""
        for queue in queues:
            mark = uuid4().hex
            self._marks.add(mark)
            message = amqp.Message(b"", type=MARK, message_id=mark)
            self._source.channel.basic_publish(message, "", queue)
        while self._marks:
            self._read("marks")

    def _read(self, what: str) -> None:
        """Read the messages that the broker sends.

        Raises:
            TimeoutError: The broker sends nothing.
        """
        try:
            if not self._source.received:
                self._source.connection.drain_events(timeout=ANSWER_TIMEOUT)
        except TimeoutError:
            raise TimeoutError(f"the broker did not send {what} in {ANSWER_TIMEOUT:g} s") from None
        while self._source.received:
            self._take(self._source.received.popleft())

    def _seen(self, message: amqp.Message) -> None:
        """Record a message that was published into the levels, from the copy of the message."""
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
            heapq.heappush(self.messages, HeldMessage(self._leaves_at(message), tag, message))

    def _leaves_at(self, message: amqp.Message) -> int:
        """Return when a message leaves the levels, in milliseconds since 1970-01-01 UTC.

        A message leaves at its due time, or at the end of the pause before its next attempt.
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
