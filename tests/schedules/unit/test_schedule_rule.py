"""All that can happen to the messages of a schedule, one step after the other, against the rule.

A world is what is noted about one schedule, its messages in RabbitMQ and at workers, and what was
promised. From each world, every step that is possible is taken, up to a number of faults and edits
that ``RABBITDELAY_DEPTH`` sets. A failure prints the shortest sequence of steps that leads to it.

A step that commutes with all others is taken at one time only. The clock moves when a message
arrives or an edit needs it: in between, nobody looks at it. No worker is slow: what it publishes
late might as well come late, and a message that it still holds, be redelivered late.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import pytest

from celery_rabbitdelay.levels.headers import Mark
from tests import schedule_rule as rule
from tests.schedule_rule import DROPPED, Decided, Message, Record, Winner

DEPTH = int(os.environ.get("RABBITDELAY_DEPTH", "1"))

#: The hours of each revision, and the last hour of the clock.
HOURS, LAST = {"A": range(1, 20), "B": range(1, 20), "C": range(1, 20, 2), "E": range(1, 3)}, 4

#: How many messages healing fills RabbitMQ up to, how often a message is put back, and how often
#: Redis is lost or restored.
MESSAGES, TURNS, TROUBLES = 4, 2, 2

#: The arrival that asks now: `World.tidy` renames those that are remembered.
NEW = "new"

#: The names of messages, and of arrivals.
NAMES = "abcdefghijklmnop"


def after(revision: str, instant: int) -> int | None:
    """Return the first instant of a revision after another one."""
    return next((hour for hour in HOURS[revision] if hour > instant), None)


class Copy(NamedTuple):
    """A message in RabbitMQ, or at a worker."""

    message: Message
    is_followed: bool = False  # what follows it was published before
    asked: str = ""  # the arrival whose answer a worker waits for

    def again(self) -> Copy:
        """Return it as RabbitMQ delivers it again, after its worker was killed."""
        return Copy(self.message._replace(redelivered=True), self.is_followed)

    def knowing(self, winning: Collection[str]) -> Copy:
        """Return it without the former arrivals that have decided nothing, but for one of them."""
        mark = self.message.mark
        former = tuple(arrival for arrival in mark.former if arrival in winning)
        former = former or mark.former[:1]
        return self._replace(message=self.message._replace(mark=mark._replace(former=former)))

    def renamed(self, names: Mapping[str, str], arrivals: Mapping[str, str]) -> Copy:
        """Return it with other names of its message and of its arrivals."""
        (name, generation, former), asked = self.message.mark, self.asked
        mark = Mark(names[name], generation, tuple(arrivals[each] for each in former))
        message = self.message._replace(mark=mark)
        return self._replace(message=message, asked=arrivals.get(asked, ""))


class World(NamedTuple):
    """What there is, and what was promised."""

    revisions: str  # what users put
    now: int
    record: Record | None
    copies: tuple[Copy, ...] = ()
    saved: Record | None = None  # what Redis may go back to
    known: Record | None = None  # what a worker remembers that was decided since
    troubles: int = 0
    # The promises.
    was_lost: bool = False  # Redis was lost or restored, since the deletion
    put: str | None = None  # all that may go on; "": nothing, after a deletion; None: not known
    is_paused: bool = False  # users have paused it
    is_sent: bool = True  # the message of the last put was sent
    owed: int | None = 1  # the next instant to decide; None: none, or it is not known
    early: frozenset[int] = frozenset()  # later ones that were decided, after Redis was lost
    decided: frozenset[tuple[int, str]] = frozenset()  # by which messages, since Redis was lost
    unrun: frozenset[str] = frozenset()  # messages that were decided, and have to run
    #: The same of before Redis was lost: one message of each instant and revision has to run.
    forgotten: frozenset[tuple[int, str]] = frozenset()
    ran: frozenset[str] = frozenset()  # messages that have run, since Redis was lost

    def turned(self, copy: Copy, *into: Copy) -> World:
        """Return the world in which a copy has become others, or was acknowledged."""
        at = self.copies.index(copy)
        return self._replace(copies=(*self.copies[:at], *self.copies[at + 1 :], *into))

    def fresh(self, instant: int, order: int, revision: str) -> World:
        """Return the world with one more message."""
        taken = {copy.message.name for copy in self.copies} | {name for _, name in self.decided}
        name = next(name for name in NAMES if name not in taken)
        sent = Copy(Message(instant, order, revision, Mark(name)))
        return self._replace(copies=(*self.copies, sent))

    def followed(self, copy: Copy, answer: Decided) -> World:
        """Return the world in which what follows a message was published."""
        if answer.following is None or (answer.goes_on and copy.is_followed):
            return self
        return self.fresh(answer.following, answer.order, copy.message.revision)

    def due(self) -> Iterator[tuple[str, Copy, World]]:
        """Yield each message that may arrive, or whose worker asks again, and the world then."""
        for copy in dict.fromkeys(self.copies):
            if copy.message.instant <= LAST:
                now = max(self.now, copy.message.instant)
                yield copy.message.name, copy, self._replace(now=now)

    def steps(self) -> Iterator[tuple[str, World]]:
        """Yield each step that is nobody's fault, and the world after it."""
        for name, copy, at in self.due():
            world, answer = at.decide(copy)
            word = "is dropped" if not answer.goes_on else "is left out"
            if answer.goes_on:
                world = world._replace(unrun=world.unrun - {name})
                word = "is left out" if answer.is_paused else "runs"
            if word == "runs":
                is_first = name not in world.ran
                assert is_first or copy.message.is_again, f"{name} runs twice without a redelivery"
                world = world._replace(ran=world.ran | {name})
            yield f"{name} {word}", world.followed(copy, answer).turned(copy)

    def faults(self) -> Iterator[tuple[str, World]]:
        """Yield each fault and each edit, and the world after it."""
        for name, copy, world in self.due():
            yield f"{name} is killed before it asks", world.turned(copy, copy.again())
            yield from world.put_back(copy, "cannot ask", copy.is_followed)
            if not any(each.asked for each in self.copies):
                asked, _ = world.decide(copy)
                yield from asked.put_back(copy, "gets no answer", copy.is_followed)
                waits = asked.turned(copy, copy._replace(asked=NEW))
                yield f"{name} asks, waits for the answer", waits
                yield f"{name} is sent twice", self._replace(copies=(*self.copies, copy))
            decided, answer = world.decide(copy)
            yield f"{name} is decided, is killed", decided.turned(copy, copy.again())
            followed = decided.followed(copy, answer)
            if followed is not decided:
                # Killed when it has run, less would be owed than now.
                yield f"{name} is followed, is killed", followed.turned(copy, copy.again())
            if answer.goes_on and not answer.is_paused:
                yield from followed.put_back(copy, "is queued", is_followed=True)
        yield from self.changes()
        yield from self.troubled()

    def put_back(self, copy: Copy, why: str, is_followed: bool) -> Iterator[tuple[str, World]]:
        """Yield what happens to a message that comes again later."""
        message, arrival = copy.message, copy.asked or NEW
        if message.mark.generation < TURNS:
            back = Copy(message.put_back(arrival), is_followed)
            word = f"{message.name} {why}, is put back"
            yield word, self.turned(copy, back)
            yield f"{word}, is killed", self.turned(copy, back, copy.again())
            again = copy._replace(message=message._replace(mark=message.mark.after(arrival)))
            unconfirmed = self.turned(copy, back, again._replace(asked=""))
            yield f"{word} unconfirmed, asks again", unconfirmed

    def decide(self, copy: Copy, arrival: str = NEW) -> tuple[World, Decided]:
        """Return the world after a message was decided, and the answer, which keeps promises."""
        message, before, owed, early = copy.message, self.record, self.owed, self.early
        instant, revision, name = message.instant, message.revision, message.name
        following = after(revision, instant)
        record, answer = rule.decide(before, message, following, copy.asked or arrival)
        assert record is not None
        if before is not None and (before.order, before.ahead) == (record.order, record.ahead):
            for now in range(self.now, LAST + 1) if before.done != record.done else ():
                former, latter = rule.since(before, now), rule.since(record, now)
                for each in self.revisions:
                    assert after(each, former) == after(each, latter), "an edit does not notice"
        # A new order, after Redis was lost, is as an edit.
        is_same = before is not None and before.order == record.order
        unrun = self.unrun if is_same else frozenset()
        forgotten = self.forgotten if is_same or before is None else frozenset()
        if not answer.goes_on:
            is_last = [each.message.name for each in self.copies].count(name) == 1
            assert not (is_last and name in unrun), f"{name} has not run, is dropped"
            same = [(each.message.instant, each.message.revision) for each in self.copies]
            is_last = same.count((instant, revision)) == 1
            is_lost = is_last and (instant, revision) in forgotten
            assert not is_lost, f"{name} was decided, is forgotten, is dropped"
            is_next = (instant, message.order) == (record.ahead, record.order)
            assert not is_next, f"{name} is dropped, and still awaited"
            return self._replace(record=record, unrun=unrun, forgotten=forgotten), answer
        assert answer.is_paused == self.is_paused, f"{name} does not see whether it is paused"
        assert self.put in (None, revision), f"{name} goes on as it was"
        assert instant in HOURS[revision], f"{name} goes on, which is no instant of {revision}"
        if before is not None and not self.was_lost:
            assert message.order == before.order, f"{name} goes on, of before the edit"
        if (instant, name) in self.decided:
            is_again = message.is_again or message.mark.former or copy.asked
            assert is_again, f"{name}, which was sent twice, goes on twice"
        else:
            assert instant not in dict(self.decided), f"{name} goes on after another of {instant}"
            assert instant == owed or self.was_lost, f"{name} is not what is owed"
            if owed is not None and instant >= owed:
                early |= {instant}
            while owed in early:
                early -= {owed}
                owed = after(revision, owed)
        is_known = self.saved is not None and instant == record.done
        world = self._replace(
            record=record,
            known=record._replace(winners=record.winners[-1:]) if is_known else self.known,
            owed=owed,
            early=early,
            decided=self.decided | {(instant, name)},
            unrun=unrun | {name},
            forgotten=forgotten - {(instant, revision)},
        )
        return world, answer

    def changes(self) -> Iterator[tuple[str, World]]:
        """Yield what users and healing do."""
        record, noted = self.record, (self.record, self.saved, self.known)
        orders = [each.message.order for each in self.copies] + [
            each.order for each in noted if each
        ]
        order = max(orders, default=0) + 1
        for revision in self.revisions:
            if record is None or record.revision != revision:
                for now in range(self.now, LAST + 1):
                    yield from self._replace(now=now).edits(revision, order)
        if record is None or record.is_deleted:
            return
        deleted = self._replace(was_lost=False, put="", is_paused=False, owed=None)
        deleted = deleted._replace(early=frozenset(), unrun=frozenset(), forgotten=frozenset())
        yield "is deleted", deleted._replace(record=rule.delete(record, order))
        word, paused = "is resumed" if record.is_paused else "is paused", not record.is_paused
        yield word, self._replace(record=record._replace(is_paused=paused), is_paused=paused)
        if record.ahead is not None and len(self.copies) < MESSAGES:
            healed = self.fresh(record.ahead, record.order, record.revision)
            yield "healing sends", healed._replace(is_sent=True)

    def edits(self, revision: str, order: int) -> Iterator[tuple[str, World]]:
        """Yield what happens when the schedule is put."""
        record, owed = self.record, self.owed
        first = after(revision, rule.since(record, self.now))
        if first is None:
            return
        if self.was_lost and owed is not None:
            # Nothing is known of a backlog that has not come yet, but that the same will come.
            same = [
                copy.message.instant for copy in self.copies if copy.message.revision == revision
            ]
            ahead = min(same, default=None) if record is None else record.ahead
            owed = None if ahead is None or ahead > owed else owed
        if not self.was_lost or (owed is not None and record is not None):
            owed = after(revision, self.now if owed is None else min(owed - 1, self.now))
        world = self._replace(
            record=rule.edit(record, order, revision, first),
            put=revision,
            owed=owed,
            early=self.early if owed == self.owed else frozenset(),
            unrun=frozenset(),
            forgotten=frozenset(
                each for each in self.forgotten if record is None and each[1] == revision
            ),
        )
        word, sent = f"{revision} is put at {self.now}", world.fresh(first, order, revision)
        yield f"{word}, is not sent", world._replace(is_sent=False)
        yield word, sent._replace(is_sent=True)

    def troubled(self) -> Iterator[tuple[str, World]]:
        """Yield what happens to Redis."""
        record, saved, known = self.record, self.saved, self.known
        if known is not None and saved is None:
            yield "a worker remembers", self.remembered(known)
        if self.troubles == TROUBLES:
            return
        if record is not None:
            yield "Redis is lost", self.without_redis(None)
            if saved is None:
                yield "Redis is saved", self._replace(saved=record, known=None)
        if saved is not None and saved != record:
            restored = self.without_redis(saved)._replace(saved=None)
            yield "Redis is restored", restored
            if known is not None and not self.troubles:
                # A worker remembers the last decision only.
                same = frozenset(each for each in self.decided if each[0] == known.done)
                remembered = restored.remembered(known)._replace(decided=same)
                yield "Redis is restored, a worker remembers", remembered

    def remembered(self, known: Record) -> World:
        record = rule.again(self.record, known)
        return self._replace(record=record, known=None, unrun=frozenset())

    def without_redis(self, record: Record | None) -> World:
        # A recurrence that was put since may be forgotten; so may a backlog that is lost twice.
        is_same = len({HOURS[revision] for revision in self.revisions}) == 1
        # If Redis is lost twice, the second time as it is asked, the occurrence may be lost.
        forgotten = {
            (copy.message.instant, copy.message.revision)
            for copy in self.copies
            if copy.message.name in self.unrun and not (copy.asked and self.was_lost)
        }
        is_owed = is_same and self.copies and not (self.was_lost or (record and record.is_deleted))
        return self._replace(
            record=record,
            troubles=self.troubles + 1,
            was_lost=True,
            put=None,
            is_paused=record is not None and record.is_paused,
            owed=self.owed if is_owed else None,
            decided=frozenset(),
            unrun=frozenset(),
            forgotten=self.forgotten | forgotten,
            ran=frozenset(),
        )

    def check(self, is_end: bool) -> None:
        """Check what is noted; and that, in the end, what is owed is decided.

        In the end all workers are killed, all messages come, and healing sends one.

        Args:
            is_end: Whether no message may arrive any more; or else another world is the end.
        """
        record, is_healed, arrival = self.record, False, NEW
        is_there = record is not None and not record.is_deleted
        assert is_there or not self.put, "it is not noted that it was put"
        is_noted = record is None or record.is_paused == self.is_paused
        assert is_noted, "it is not noted whether it is paused"
        copies = tuple(copy.again() if copy.asked else copy for copy in self.copies)
        if copies == self.copies and not is_end:
            return
        world = self._replace(copies=copies)
        while self.put != "" and (world.copies or not is_healed):
            if not world.copies:
                is_healed = True
                if record is None or record.is_deleted or record.ahead is None:
                    break
                assert self.was_lost or not self.is_sent, "only healing goes on"
                world = world.fresh(record.ahead, record.order, record.revision)
            copy, before = world.copies[0], world.decided
            assert copy.message.instant <= 2 * LAST, f"{self.owed} is lost"
            arrival += NEW
            world, answer = world.decide(copy, arrival)
            if world.decided != before and self.owed in (None, copy.message.instant):
                return
            record, unrun = world.record, world.unrun - {copy.message.name}
            world = world.followed(copy, answer).turned(copy)._replace(unrun=unrun)
        if record is not None and not record.is_deleted:
            later = after(record.revision, max(record.done, self.now))
            assert (later, self.owed) == (None, None), "no instant follows any more"

    def tidy(self, *, is_last: bool) -> World:
        """Return the same world for all that differ only in what nobody sees any more.

        These are the names of messages and arrivals; which former arrivals have decided nothing;
        what Redis was, once it will not be restored; and messages of an order that is over, which
        are dropped and change nothing, once Redis will not be lost.

        Args:
            is_last: Whether no fault follows.
        """
        record, saved, known, copies = self.record, self.saved, self.known, self.copies
        troubles = TROUBLES if is_last else self.troubles
        if is_last or (troubles == TROUBLES and saved is not None):
            saved = known = None
        if record is not None and troubles == TROUBLES:
            copies = tuple(copy for copy in copies if not _is_over(record, copy.message))
        noted = [winner for each in (record, saved, known) if each for winner in each.winners]

        def rank(copy: Copy) -> tuple[object, ...]:
            (*says, mark, is_redelivered, is_in_doubt), is_followed, asked = copy
            knows = [winner.arrival in (*mark.former, asked) for winner in noted]
            wins = [winner.mark.name == mark.name for winner in noted]
            faults = is_redelivered, is_in_doubt, is_followed, asked != "", mark.former != ()
            return *says, mark.generation, *faults, wins, knows

        winning = {winner.arrival for winner in noted}
        copies = tuple(sorted((copy.knowing(winning) for copy in copies), key=rank))
        names = _renamed(copy.message.name for copy in copies)
        arrivals = _renamed(
            arrival for copy in copies for arrival in (*copy.message.mark.former, copy.asked)
        )

        def renamed(record: Record | None) -> Record | None:
            return record and record._replace(
                winners=tuple(
                    Winner(instant, mark._replace(name=names[mark.name]), arrivals.get(arrival, ""))
                    if mark.name in names
                    else Winner(instant, Mark(), "")
                    for instant, mark, arrival in record.winners
                )
            )

        return self._replace(
            record=renamed(record),
            saved=renamed(saved),
            known=renamed(known),
            troubles=troubles,
            copies=tuple(copy.renamed(names, arrivals) for copy in copies),
            decided=frozenset((instant, names.get(name, "")) for instant, name in self.decided),
            unrun=frozenset(names[name] for name in self.unrun if name in names),
            ran=frozenset(names[name] for name in self.ran if name in names),
        )


def _renamed(found: Iterable[str]) -> dict[str, str]:
    """Return a name in the order in which they come for each that is not empty."""
    return dict(zip(filter(None, dict.fromkeys(found)), NAMES, strict=False))


def _is_over(record: Record, message: Message) -> bool:
    """Return whether no message will make the rule let this one go on, or note anything for it."""
    is_backlog = message.order < record.begun and message.instant < record.first
    if message.order >= record.order or is_backlog:
        return False
    following = after(message.revision, message.instant)
    return rule.decide(record, message, following, NEW) == (record, DROPPED)


def explore(begin: World, depth: int) -> int:
    """Take every step from every world; return how many worlds there are.

    Args:
        begin: The first world.
        depth: How many faults and edits a sequence has.
    """
    former: dict[World, tuple[World, str] | None] = {begin: None}
    reached, queue = {begin: 0}, deque([(begin, 0)])
    while queue:
        (world, level), is_end = queue.popleft(), True
        if reached[world] < level:
            continue
        try:
            for at, steps in enumerate((world.steps(), world.faults())[: depth + 1 - level], level):
                for word, later in steps:
                    is_end = is_end and at > level
                    later = later.tidy(is_last=at == depth)
                    if at < reached.get(later, depth + 1):
                        reached[later], former[later] = at, (world, word)
                        (queue.append if at > level else queue.appendleft)((later, at))
            word = "in the end"
            world.check(is_end)
        except AssertionError as wrong:
            sequence, step = [f"{word}: {wrong}"], former[world]
            while step is not None:
                sequence.append(step[1])
                step = former[step[0]]
            pytest.fail("\n".join([*reversed(sequence), f"from {world}"]), pytrace=False)
    return len(reached)


#: What has happened before.
DELETED = ("is deleted", "Redis is saved", "A is put at 1", "healing sends")
STARTS = {
    "soon": (),
    "resent": (),
    "lost": ("Redis is lost", "A is put at 3"),
    "deleted": DELETED,
    "forgotten": ("Redis is saved", "a is followed, is killed", "Redis is restored"),
    "restored": (*DELETED, "B is put at 1", "e runs", "Redis is restored"),
    "replaced": ("Redis is lost", "C is put at 1, is not sent", "A is put at 1, is not sent"),
}


def start(revisions: str, begin: str) -> World:
    """Return a world in which the first message was sent twice, and what has followed.

    Healing has sent another one; or, for ``resent``, the same one was sent again, unconfirmed.
    """
    revision = revisions[0]
    world = World(revisions, 1, rule.edit(None, 1, revision, 1), put=revision)
    sent = world.fresh(1, 1, revision)
    world = (
        sent._replace(copies=sent.copies * 2) if begin == "resent" else sent.fresh(1, 1, revision)
    )
    for step in STARTS[begin]:
        happens = (*world.steps(), *world.faults())
        world = next(later for word, later in happens if word == step)
    return world.tidy(is_last=False)


@pytest.mark.parametrize(
    ("revisions", "begin"),
    [
        *(("AB", begin) for begin in STARTS if begin != "replaced"),
        *(("AC", begin) for begin in ("soon", "replaced")),
        ("EC", "soon"),
    ],
)
def test_whatever_happens(revisions: str, begin: str) -> None:
    explore(start(revisions, begin), DEPTH - (begin == "restored"))  # by far the most worlds
