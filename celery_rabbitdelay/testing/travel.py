"""Time travel: a test of what happens in three days takes a second.

Tasks wait on a real broker, and a real worker runs them; only the waiting is left out::

    def test_a_reminder_comes_after_three_days(rabbitdelay_app, rabbitdelay_worker, travel):
        remind.apply_async((order,), delay=timedelta(days=3))
        travel(days=3)
        assert order.reminded

The package's own clock stands at each instant at which something falls due, in the test and in its
worker, until all that is due has run: so what a task sends on the way falls due on the way. All
other code sees the real time; see :attr:`Travel.code_sees_it`.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from kombu import Connection, Producer

from celery_rabbitdelay.app.application import Celery
from celery_rabbitdelay.app.delays import Delays
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import (
    NS_PER_MS,
    Delay,
    duration_text,
    instant_of,
    milliseconds,
    milliseconds_of,
)
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION, encode_destination
from celery_rabbitdelay.levels.topology import CHECK_IN, DISTRIBUTE
from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.registry.application import how_kept
from celery_rabbitdelay.registry.settings import RegistrySettings
from celery_rabbitdelay.testing.hand import Hand
from celery_rabbitdelay.testing.shared_clock import SharedClock, shown
from celery_rabbitdelay.testing.worker import ANSWERS, LOOK, NUMBER, WORKER

#: Seconds that what runs on the way may take together, at one instant.
TIMEOUT: Final = 60.0

#: Seconds without an answer before checking that the worker is still running.
LOOK_AFTER_WORKER: Final = 1.0

#: Shortens the lives of all keys whose names match a pattern: Redis goes by its own clock. Its
#: arguments are the pattern, the traveller's time, and by how much that was ahead of Redis's last
#: time, in milliseconds. It returns by how much it is ahead now.
AGE: Final = """
local now = redis.call('TIME')
local ahead_ms = ARGV[2] - now[1] * 1000 - math.floor(now[2] / 1000)
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
  local left_ms = redis.call('PTTL', key)
  if left_ms >= 0 then
    redis.call('PEXPIRE', key, string.format('%.0f', left_ms - (ahead_ms - ARGV[3])))
  end
end
return ahead_ms
"""


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
        #: How many milliseconds the clock was ahead of Redis's when the registry has aged last.
        self._ahead_ms = 0
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

        Set it to True to have that: it takes ``time-machine`` or ``freezegun``, and False at the
        beginning. With it, an ``eta`` that code computes agrees with the levels.

        Raises:
            ModuleNotFoundError: Neither of them is installed.
        """
        return self.clock.is_shown

    @code_sees_it.setter
    def code_sees_it(self, is_shown: bool) -> None:
        self.clock.is_shown = is_shown
        self._show()

    def __call__(
        self,
        *,
        weeks: float = 0,
        days: float = 0,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
        to: datetime | None = None,
        wait: bool = True,
    ) -> None:
        """Travel ahead; all that falls due on the way has run when this returns.

        In the order of due: what is due later begins when all that was due before has ended,
        together with what it has sent without a delay.

        Args:
            weeks: How far, together with the next four.
            days: Days.
            hours: Hours.
            minutes: Minutes.
            seconds: Seconds.
            to: The instant to travel to instead, an aware datetime.
            wait: Whether to wait for what runs. False: all that is due by then is delivered at
                once.

        Raises:
            ValueError: The target has passed, or both a length and an instant are given.
            DidNotSettle: What runs on the way does not end.
        """
        way = timedelta(weeks=weeks, days=days, hours=hours, minutes=minutes, seconds=seconds)
        if to is None and not way:
            raise ValueError("travel takes a length of time, such as days=3, or to, an instant")
        if to is not None and way:
            raise ValueError(f"travel takes a length of time or to={to!r}, not both")
        now_ms = wall_clock.ms()
        way_ms = way // timedelta(milliseconds=1)
        until_ms = now_ms + way_ms if to is None else milliseconds_of(to)
        if until_ms < now_ms:
            raise ValueError(
                f"travel goes ahead only, not from {self.now} to {instant_of(until_ms)}"
            )
        with self._in_hand() as hand:
            if wait:
                self._go(hand, until_ms, lambda: False)
            self._arrive(until_ms)
            if wait:
                self._go(hand, until_ms, lambda: False)

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
            within_text = duration_text(within_ms)
            raise TimeoutError(
                f"the condition is not true within {within_text}: {what} at {self.now}"
            )

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

    def _go(self, hand: Hand, until_ms: int, condition: Callable[[], object]) -> bool:
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
            with registry_keys(self._app.rabbitdelay) as (client, pattern):
                self._ahead_ms = client.eval(AGE, 0, pattern, at_ms, self._ahead_ms)

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
        sent = set()
        for queue in queues:
            self._looks += 1
            sent.add(self._looks)
            made = self._app.amqp.as_task_v2(uuid4().hex, LOOK, (), {})
            Producer(self._connection.default_channel).publish(
                made.body,
                routing_key=queue,
                serializer=self._app.conf.task_serializer,
                headers={**made.headers, NUMBER: self._looks},
            )
        why = "it takes nothing from its queues"
        answer: dict[str, Any] = {}
        while sent:
            left = deadline - time.monotonic()
            self._answers.settimeout(min(max(left, 0.001), LOOK_AFTER_WORKER))
            try:
                answer = json.loads(self._answers.recv(65_536))
            except TimeoutError:
                if ended := self._why_ended():
                    raise DidNotSettle(f"at {self.now}, {ended}") from None
                if left > 0:
                    continue
                raise DidNotSettle(
                    f"the worker has not finished within {self._timeout:g} s at {self.now}: {why}"
                ) from None
            if answer["unfinished"]:
                why = ", ".join(answer["unfinished"])
            else:
                sent.discard(answer["look"])
        self._served = answer["served"].get(DISTRIBUTE, 0)
        return answer["taken"], answer["served"]


@contextmanager
def registry_keys(delays: Delays) -> Iterator[tuple[Any, str]]:
    """Connect to the registry's Redis; yield the client, and a pattern of the names of its keys."""
    import redis  # an extra

    settings, (prefix, *_) = delays.settings_of(RegistrySettings), how_kept(delays)
    options = {"decode_responses": True, **(settings.registry_options or {})}
    with redis.Redis.from_url(str(settings.registry_url), **options) as client:
        yield client, f"{prefix}:*"


def forget(delays: Delays) -> None:
    """Delete all that the registry knows."""
    with registry_keys(delays) as (client, pattern):
        if names := [*client.scan_iter(pattern, count=1000)]:
            client.delete(*names)
