"""All that can happen to the messages of a schedule, one step after the other, against the rule.

A world is what is noted about one schedule, its messages in RabbitMQ and at workers, and what was
promised. From each world, every step that is possible is taken, up to a depth, which
``RABBITDELAY_DEPTH`` sets. A failure prints the shortest sequence of steps that leads to it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import pytest

from tests import schedule_rule as rule
from tests.schedule_rule import Decided, Message, Record

Each = TypeVar("Each")

DEPTH = int(os.environ.get("RABBITDELAY_DEPTH", "4"))

#: How many messages healing fills RabbitMQ up to, and how many workers are busy at once.
MESSAGES, WORKERS = 4, 2

#: How often a message is put back, and how often Redis is lost or restored.
TURNS, TROUBLES = 2, 2

#: The last hour of the clock.
LAST = 4

#: The distance between two orders, so that one lies between them.
GAP = 4

#: The arrival whose answer was lost, and any other.
ASKING, OTHER = "asking", "other"

#: The ends of the steps that are nobody's fault.
EXPECTED = ("passes", "dropped", "runs", "left out")


class Every(NamedTuple):
    """A recurrence: every so many hours from ``start`` until ``end``."""

    start: int
    step: int
    end: int = 99

    def after(self, instant: int) -> int | None:
        """Return the first instant after another one."""
        later = max(self.start, instant + 1)
        later += (self.start - later) % self.step
        return later if later <= self.end else None


class Recurrences(dict[str, Every]):
    """The recurrence of each revision."""

    def __hash__(self) -> int:  # type: ignore[override]
        return 0


class Sent(NamedTuple):
    """A message, and whether its follower was published before."""

    message: Message
    is_followed: bool = False

    def put_back(self, *, is_followed: bool) -> Sent:
        message = self.message._replace(turns=self.message.turns + 1, redelivered=False)
        return Sent(message, is_followed)

    def again(self) -> Sent:
        return self._replace(message=self.message._replace(redelivered=True))


class Held(NamedTuple):
    """A message at a worker.

    Attributes:
        sent: The message.
        decided: What the worker was answered; None if it waits for the answer.
        revision: The revision of the record at that time.
        is_excused: Whether the schedule was deleted, or Redis lost, after the decision.
    """

    sent: Sent
    decided: Decided | None
    revision: str = ""
    is_excused: bool = False


class World(NamedTuple):
    """What there is.

    Attributes:
        recurrences: The recurrence of each revision.
        now: The hour.
        record: What is noted.
        waiting: The messages in RabbitMQ.
        held: Those at workers.
        saved: What Redis may go back to.
        known: What a worker remembers that was decided since.
        troubles: How often Redis was lost or restored.
        runs: The instants that have run since the deletion, and the messages that ran.
        redelivered: The messages of which a copy was redelivered.
        floor: No message of a lower order may run.
        revision: The only one that may run; empty after a deletion, None if Redis was lost since.
        was_lost: Whether Redis was lost or restored since the deletion.
        owed: The next instant to decide; None if nothing is promised.
        early: Later ones that were decided, after Redis was lost.
    """

    recurrences: Recurrences
    now: int
    record: Record | None
    waiting: tuple[Sent, ...]
    held: tuple[Held, ...] = ()
    saved: Record | None = None
    known: Record | None = None
    troubles: int = 0
    runs: frozenset[tuple[int, str]] = frozenset()
    redelivered: frozenset[str] = frozenset()
    floor: int = 0
    revision: str | None = "A"
    was_lost: bool = False
    owed: int | None = 1
    early: frozenset[int] = frozenset()

    @property
    def messages(self) -> tuple[Sent, ...]:
        return (*self.waiting, *(held.sent for held in self.held))

    def fresh(self, instant: int, order: int, revision: str) -> World:
        """Return the world with one more message."""
        taken = {sent.message.name for sent in self.messages}
        name = next(name for name in "abcdefghijklmnopqrstuvwxyz" if name not in taken)
        return self.sent(Sent(Message(instant, order, revision, name)))

    def sent(self, *sent: Sent) -> World:
        return self._replace(waiting=(*self.waiting, *sent))

    def killed(self, sent: Sent) -> World:
        """Return the world after the worker of a message was killed."""
        world = self._replace(redelivered=self.redelivered | {sent.message.name})
        return world.sent(sent.again())

    def steps(self) -> Iterator[tuple[str, World]]:
        """Yield each step, and the world after it."""
        if self.now < LAST:
            yield "an hour passes", self._replace(now=self.now + 1)
        for sent in dict.fromkeys(self.waiting):
            if sent.message.instant <= self.now:
                yield from self.deliveries(sent)
        for held in dict.fromkeys(self.held):
            world = self._replace(held=without(self.held, held))
            name = held.sent.message.name
            if held.decided is not None:
                yield from world.ends(held)
                continue
            yield f"{name}, which waited for the answer, is killed", world.killed(held.sent)
            yield from world.put_back(held.sent, "waited for the answer")
            yield from world.asks(held.sent, ASKING)
        yield from self.changes()
        yield from self.troubled()

    def deliveries(self, sent: Sent) -> Iterator[tuple[str, World]]:
        """Yield what happens when RabbitMQ delivers a message."""
        world, name = self._replace(waiting=without(self.waiting, sent)), sent.message.name
        if not sent.message.redelivered:
            yield f"{name} is killed before it asks", world.killed(sent)
        yield from world.put_back(sent, "cannot ask")
        yield from world.asks(sent, OTHER)
        if all(held.decided for held in self.held):
            asked = world.decide(sent, ASKING)[0]
            yield from asked.put_back(sent, "asks, gets no answer")
            yield f"{name} asks, gets no answer, is killed", asked.killed(sent)
            if len(self.held) < WORKERS:
                asked = asked._replace(held=(*self.held, Held(sent, None)))
                yield f"{name} asks, waits for the answer", asked

    def asks(self, sent: Sent, arrival: str) -> Iterator[tuple[str, World]]:
        world, decided = self.decide(sent, arrival)
        held = Held(sent, decided, world.record.revision if world.record else "")
        yield from world.ends(held)
        if decided.goes_on and len(self.held) < WORKERS:
            yield f"{sent.message.name} is decided, is slow", world._replace(
                held=(*self.held, held)
            )

    def put_back(self, sent: Sent, why: str) -> Iterator[tuple[str, World]]:
        """Yield what happens to a message while Redis does not answer."""
        if sent.message.turns < TURNS:
            back = self.sent(sent.put_back(is_followed=sent.is_followed))
            yield f"{sent.message.name} {why}, is put back", back
            yield f"{sent.message.name} {why}, is put back, is killed", back.killed(sent)

    def decide(self, sent: Sent, arrival: str) -> tuple[World, Decided]:
        """Return the world after a message was decided, and the answer."""
        message, before, owed = sent.message, self.record, self.owed
        following = self.recurrences[message.revision].after(message.instant)
        record, decided = rule.decide(before, message, following, arrival)
        assert record is not None
        if before is not None and (before.order, before.ahead) == (record.order, record.ahead):
            for each in self.recurrences.values():
                first = each.after(rule.since(before, self.now))
                assert first == each.after(rule.since(record, self.now)), "an edit does not notice"
        if not decided.goes_on:
            return self._replace(record=record), decided
        assert decided.is_paused == record.is_paused == (before is not None and before.is_paused)
        assert message.order >= self.floor, f"{message.name} goes on, of before the edit"
        if self.revision is not None:
            assert message.revision == self.revision, f"{message.name} goes on as it was"
        early = self.early
        is_new = before is None or all(each.instant != message.instant for each in before.winners)
        if owed is not None and is_new:
            assert message.instant == owed or self.was_lost, f"{message.name} is not what is owed"
            if message.instant >= owed:
                early |= {message.instant}
            while owed in early:
                early -= {owed}
                owed = self.recurrences[message.revision].after(owed)
        known = self.known
        if self.saved is not None and message.instant == record.done:
            known = record._replace(winners=record.winners[-1:])
        return self._replace(record=record, owed=owed, early=early, known=known), decided

    def ends(self, held: Held) -> Iterator[tuple[str, World]]:
        """Yield how a worker may end with a message."""
        (message, is_followed), decided, sent = held.sent, held.decided, held.sent
        assert decided is not None
        world, publishes = self, ""
        if decided.following is not None and not is_followed:
            yield f"{message.name} is decided, is killed", self.killed(sent)
            # The name must differ from that of the message itself, too.
            world = self.sent(sent).fresh(decided.following, decided.order, held.revision)
            world = world._replace(waiting=without(world.waiting, sent))
            publishes = f" and followed by {world.waiting[-1].message.name}"
        start = f"{message.name} is decided{publishes}"
        yield f"{start}, is killed", world.killed(sent)
        if not decided.goes_on:
            yield f"{start}, is dropped", world
            return
        if message.turns < TURNS and not decided.is_paused:
            back = world.sent(sent.put_back(is_followed=True))
            yield f"{start}, is queued", back
            yield f"{start}, is queued, is killed", back.killed(sent)
        if decided.is_paused:
            yield f"{start}, is left out", world
            return
        if not held.is_excused:
            world = world.ran(message)
        yield f"{start}, runs", world
        yield f"{start}, runs, is killed", world.killed(sent)

    def ran(self, message: Message) -> World:
        for instant, name in self.runs:
            if instant == message.instant:
                assert name == message.name, f"{message.name} runs after another of {instant}"
                assert name in self.redelivered, f"{name} runs again"
        return self._replace(runs=self.runs | {(message.instant, message.name)})

    def changes(self) -> Iterator[tuple[str, World]]:
        """Yield what users and healing do."""
        record = self.record
        order = GAP + max(
            self.floor,
            *(each.order for each in (record, self.saved, self.known) if each is not None),
            *(sent.message.order for sent in self.messages),
            0,
        )
        is_there = record is not None and not record.is_deleted
        for revision in self.recurrences:
            if record is None or record.is_deleted or record.revision != revision:
                yield from self.edits(revision, order)
        if record is None or not record.is_deleted:
            yield "is deleted", self.excused()._replace(
                record=rule.delete(record, order),
                runs=frozenset(),
                floor=order,
                revision="",
                was_lost=False,
                owed=None,
            )
        if record is not None and is_there:
            word = "is resumed" if record.is_paused else "is paused"
            yield word, self._replace(record=record._replace(is_paused=not record.is_paused))
            if record.ahead is not None and len(self.messages) < MESSAGES:
                healed = self.fresh(record.ahead, record.order, record.revision)
                yield f"healing sends {healed.waiting[-1].message.name}", healed

    def edits(self, revision: str, order: int) -> Iterator[tuple[str, World]]:
        """Yield what happens when the schedule is put."""
        every, owed = self.recurrences[revision], self.owed
        first = every.after(rule.since(self.record, self.now))
        if self.revision == "":
            owed = every.after(self.now)
        elif owed is not None and self.record is None:
            same = (each.message for each in self.messages if each.message.revision == revision)
            owed = owed if any(each.instant <= owed for each in same) else None
        elif owed is not None:
            owed = every.after(min(owed - 1, self.now))
        world = self._replace(
            record=rule.edit(self.record, order, revision, first),
            floor=self.floor if self.was_lost else order,
            revision=revision,
            owed=owed,
            early=self.early if owed == self.owed else frozenset(),
        )
        yield f"{revision} is put, is not sent", world
        if first is not None:
            sent = world.fresh(first, order, revision)
            yield f"{revision} is put, {sent.waiting[-1].message.name} is sent", sent

    def excused(self) -> World:
        return self._replace(held=tuple(each._replace(is_excused=True) for each in self.held))

    def troubled(self) -> Iterator[tuple[str, World]]:
        """Yield what happens to Redis."""
        if self.known is not None and self.saved is None:
            record = rule.again(self.record, self.known)
            yield "a worker remembers", self._replace(record=record, known=None)
        if self.troubles == TROUBLES:
            return
        if self.record is not None:
            yield "Redis is lost", self.without_redis(None)
            if self.saved is None:
                yield "Redis is saved", self._replace(saved=self.record, known=None)
        if self.saved is not None and self.saved != self.record:
            restored = self.without_redis(self.saved)._replace(saved=None)
            yield "Redis is restored", restored
            if self.known is not None and self.record is not None:
                yield "Redis is restored, a worker remembers", restored._replace(
                    record=rule.again(self.saved, self.known),
                    known=None,
                    held=self.held,
                    runs=self.runs,
                )

    def without_redis(self, record: Record | None) -> World:
        # Whose recurrence it is that goes on, is not known.
        is_owed = len(set(self.recurrences.values())) == 1 and bool(self.messages)
        is_owed = is_owed and not (record is not None and record.is_deleted)
        return self.excused()._replace(
            record=record,
            troubles=self.troubles + 1,
            runs=frozenset(),
            floor=0,
            revision=None,
            was_lost=True,
            owed=self.owed if is_owed else None,
        )

    def check_goes_on(self) -> None:
        """Check that an instant is decided once all messages have come, and healing sent one."""
        if self.revision == "":
            return
        record, queue = self.record, [*self.messages]
        is_healed = False
        while queue or not is_healed:
            if not queue:
                is_healed = True
                if record is None or record.is_deleted or record.ahead is None:
                    break
                queue.append(Sent(Message(record.ahead, record.order, record.revision, "healed")))
            message, is_followed = queue.pop(0)
            following = self.recurrences[message.revision].after(message.instant)
            before = record
            record, decided = rule.decide(record, message, following, OTHER)
            assert record is not None
            is_new = before is None or all(
                each.instant != message.instant for each in before.winners
            )
            if decided.goes_on and is_new and self.owed in (None, message.instant):
                return
            assert message.instant <= 2 * LAST, f"{self.owed} is lost"
            if decided.following is not None and not is_followed:
                follower = Message(decided.following, decided.order, record.revision, "follower")
                queue.append(Sent(follower))
        if record is None or record.is_deleted:
            return
        recurrence = self.recurrences[record.revision]
        has_ended = recurrence.after(max(record.done, self.now)) is None and self.owed is None
        assert has_ended, "no instant follows any more"

    def tidy(self) -> World:
        """Return the world with what differs in nothing but names and orders made the same."""
        is_asking = any(held.decided is None for held in self.held)
        records = [each for each in (self.record, self.saved, self.known) if each is not None]
        winning = {each.name: each.instant for record in records for each in record.winners}
        live = sorted(
            self.messages, key=lambda each: (each[0][:3], each[0][4:], each[0].name not in winning)
        )
        names: dict[str, str] = {}
        for sent in live:
            names.setdefault(sent.message.name, "abcdefghijkl"[len(names)])
        given = {0, self.floor}
        given.update(sent.message.order for sent in live)
        for record in records:
            given.update((record.order, record.begun))
        given.update(held.decided.order for held in self.held if held.decided)
        orders = {order: GAP * at for at, order in enumerate(sorted(given))}

        def noted(record: Record | None) -> Record | None:
            if record is None:
                return None
            winners = tuple(
                each._replace(
                    name=names[each.name],
                    arrival=each.arrival if is_asking and each.arrival == ASKING else "",
                )
                if each.name in names
                else rule.Winner(each.instant, "", 0, "")
                for each in record.winners
            )
            return record._replace(
                order=orders[record.order], begun=orders[record.begun], winners=winners
            )

        def told(sent: Sent) -> Sent:
            message = sent.message
            return sent._replace(
                message=message._replace(name=names[message.name], order=orders[message.order])
            )

        return self._replace(
            record=noted(self.record),
            saved=noted(self.saved),
            known=noted(self.known),
            waiting=tuple(sorted(told(sent) for sent in self.waiting)),
            held=tuple(
                sorted(
                    (
                        held._replace(
                            sent=told(held.sent),
                            decided=held.decided
                            and held.decided._replace(order=orders[held.decided.order]),
                        )
                        for held in self.held
                    ),
                    key=repr,
                )
            ),
            runs=frozenset((instant, names.get(name, "")) for instant, name in self.runs),
            redelivered=frozenset(names[name] for name in self.redelivered if name in names),
            floor=orders[self.floor],
        )


def without(among: tuple[Each, ...], one: Each) -> tuple[Each, ...]:
    at = among.index(one)
    return (*among[:at], *among[at + 1 :])


def explore(start: World, depth: int) -> int:
    """Take every step from every world; return how many worlds there are.

    Args:
        start: The first world.
        depth: How many steps of a sequence are none of :data:`EXPECTED`.
    """
    former: dict[World, tuple[World, str] | None] = {start: None}
    levels: list[deque[World]] = [deque([start]), *(deque[World]() for _ in range(depth))]
    reached = {start: 0}
    for level, worlds in enumerate(levels):
        while worlds:
            world, word = worlds.popleft(), "in the end"
            if reached[world] < level:
                continue
            try:
                world.check_goes_on()
                for word, after in world.steps():
                    at = level + (not word.endswith(EXPECTED))
                    if at > depth:
                        continue
                    after = after.tidy()
                    if at < reached.get(after, depth + 1):
                        reached[after], former[after] = at, (world, word)
                        levels[at].append(after)
            except AssertionError as wrong:
                sequence = [f"{word}: {wrong}"]
                step = former[world]
                while step is not None:
                    sequence.append(step[1])
                    step = former[step[0]]
                pytest.fail("\n".join([*reversed(sequence), f"from {world}"]), pytrace=False)
    return len(reached)


EVERY_HOUR = Every(1, 1)
ARGUMENTS = Recurrences(A=EVERY_HOUR, B=EVERY_HOUR)
OTHER_HOURS = Recurrences(A=EVERY_HOUR, B=Every(1, 2))
ENDING = Recurrences(A=Every(1, 1, 2), B=Every(1, 2))


@pytest.mark.parametrize("now", [1, 3])
@pytest.mark.parametrize(
    "recurrences", [ARGUMENTS, OTHER_HOURS, ENDING], ids=["arguments", "hours", "ending"]
)
def test_whatever_happens(recurrences: Recurrences, now: int) -> None:
    record = rule.edit(None, GAP, "A", 1)
    world = World(recurrences, now, record, (), floor=GAP)
    world = world.fresh(1, GAP, "A").fresh(1, GAP, "A").tidy()
    count = explore(world, DEPTH)
    print(count)
