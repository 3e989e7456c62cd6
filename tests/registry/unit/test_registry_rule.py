"""All that can happen to the messages of a task, one after the other, against the registry's rule.

A world is what is noted about one task, its messages in RabbitMQ and at workers, a newer task under
its key, and its job. From each world, every step that is possible is taken, up to a depth. In each
world: nothing is lost, nothing runs twice but by redelivery, and nothing runs after a decision.
``RABBITDELAY_DEPTH`` says how deep.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from celery_rabbitdelay.registry import decision as registry_model
from tests.registry.registry_message import Message

DEPTH = int(os.environ.get("RABBITDELAY_DEPTH", "3"))

#: How many messages a task has at most.
MESSAGES = 4

#: When a message was due that arrives after Redis has forgotten.
LONG_AGO = -100

#: The orders of the task, and of the newer one under its key.
OWN, NEWER = 1, 9


class World(NamedTuple):
    """What there is.

    Attributes:
        record: What is noted about the task.
        waiting: Its messages in RabbitMQ.
        running: Those that a worker runs.
        newest: The order of the newest message under the key.
        holder: The attempt that this message is of; empty if it is of another task.
        job: ``open``, ``committed`` or ``aborted``.
        is_paused: Whether its name is paused.
        runs: What has run: the attempt, the message's name, and whether by redelivery.
        ended: The attempts of which a run has ended.
        asked: How many arrivals there were, with ``once``.
        excused: The attempts that need not run.
        stopped: The life up to which no message may run any more; None for none.
        sent: How many messages were sent.
    """

    record: registry_model.Record
    waiting: tuple[Message, ...]
    running: tuple[Message, ...] = ()
    newest: int = 0
    holder: tuple[str, ...] = ()
    job: str = "open"
    is_paused: bool = False
    runs: tuple[tuple[tuple[str, str], str, bool], ...] = ()
    ended: frozenset[tuple[str, str]] = frozenset()
    asked: int = 0
    excused: frozenset[tuple[str, str]] = frozenset()
    stopped: int | None = None
    sent: int = 1

    def word(self, message: Message) -> str:
        """Return what key and job say when a message arrives."""
        if message.order and message.order < self.newest:
            return "replaced" if self.holder else "superseded"
        if not message.in_job:
            return "run"
        return {"open": "later", "committed": "run", "aborted": "expired"}[self.job]

    def arrived(self, message: Message, *, answer: bool = True, confirmed: bool = True) -> World:
        """Return the world after a message has arrived.

        Args:
            message: The message.
            answer: Whether the worker gets the answer; otherwise it puts the message back.
            confirmed: Whether it knows that it has put it back; otherwise it asks again.
        """
        word, before = self.word(message), self.record
        name = f"a{self.asked}" if message.once else ""
        record, verdict = registry_model.arrive(
            before, message.arrival(name, self.is_paused), word, message.is_old
        )
        world = self.claimed(message)._replace(
            record=record,
            waiting=without(self.waiting, message),
            asked=self.asked + message.once,
        )
        # It asks now and then, so that what it asks for is not forgotten.
        back = message.put_back(name) if message.once else message
        back = back._replace(is_old=message.is_old and not answer)
        if answer and verdict.isdigit():
            back = back._replace(due=int(verdict))
        if not answer or verdict.isdigit() or verdict in ("later", "paused"):
            world = world._replace(waiting=added(world.waiting, back))
            if confirmed or not message.once:
                return world
            again = message._replace(former=(*message.former, name))
            return world._replace(waiting=added(world.waiting, again))
        if verdict == "run":
            world.check_run(message, before)
            by_redelivery = message.redelivered or message.in_doubt
            done = (message.full, message.copy or message.name, by_redelivery)
            if message.once and not by_redelivery:
                assert done not in self.runs, "a copy runs"
            runs = tuple(sorted({*self.runs, done}))
            return world._replace(running=added(self.running, message), runs=runs)
        if verdict == "cancelled":
            assert message.life <= (-1 if self.stopped is None else self.stopped), (
                "without a cancellation"
            )
        if verdict in ("cancelled", "superseded", "expired", "forgotten"):
            return world._replace(excused=self.excused | {message.full})
        if verdict == word == "replaced" and self.holder != message.full:
            # The newest message of the task under its key is of another life.
            return world._replace(excused=self.excused | {message.full})
        return world

    def claimed(self, message: Message) -> World:
        """Return the world in which the key knows of a message."""
        if message.order <= self.newest:
            return self
        return self._replace(newest=message.order, holder=message.full)

    def check_run(self, message: Message, before: registry_model.Record) -> None:
        """Raise if a message must not run."""
        assert not self.is_paused, "although it is paused"
        assert not (self.stopped is not None and message.life <= self.stopped), (
            "after a cancellation"
        )
        has_won = (
            dict(before.won).get(message.full) == message.copy
            if message.copy
            else bool(dict(before.marks).get(message.attempt))
        )
        if has_won:
            return  # a decision came after it had been let run
        assert not (message.order and message.order < self.newest), "after a newer one"
        assert not (message.in_job and self.job != "committed"), "without a commit"
        assert not message.is_old or before.waits, "although decisions are forgotten"
        assert (before.not_before or LONG_AGO) <= message.due, "before it may"

    def steps(self) -> Iterator[tuple[str, World]]:
        """Yield every world that may come next."""
        for each in set(self.waiting):
            yield "arrive", self.arrived(each)
            yield "lose the answer", self.arrived(each, answer=False)
            has_room, again = len(self.waiting) < MESSAGES, redelivered(each)
            if has_room and not each.redelivered:
                for answer in (True, False) if each.once else (False,):
                    world = self.arrived(each, answer=answer)
                    if len(world.waiting) == len(self.waiting):
                        world = world._replace(waiting=added(world.waiting, again))
                        yield "put back, and redeliver", world
            if each.once:
                back = each.put_back(f"a{self.asked}")
                waiting = added(without(self.waiting, each), back)
                yield "do not reach Redis", self._replace(waiting=waiting, asked=self.asked + 1)
            if each.once and has_room:
                yield "duplicate", self._replace(waiting=added(self.waiting, each))
                for answer in (True, False):
                    yield "ask again", self.arrived(each, answer=answer, confirmed=False)
        for each in set(self.running):
            gone = self._replace(running=without(self.running, each))
            again = redelivered(each)
            yield "redeliver", gone._replace(waiting=added(self.waiting, again))
            gone = gone._replace(ended=self.ended | {each.full})
            yield "finish", gone
            if self.sent < MESSAGES:
                retries, nesting = map(int, each.attempt.split("."))
                for attempt in (f"{retries + 1}.{nesting}", f"{retries}.{nesting + 1}"):
                    further = self.message(each, life=each.life, attempt=attempt)
                    yield "retry, not noted", gone.with_message(further)
                    yield "retry", gone.with_message(further).noting(further)
        for also_future in (True, False):
            yield "cancel", self.cancelled(also_future)
            for due in (1, 9):
                yield from self.postponed(due, also_future)
        yield "pause, or resume", self._replace(is_paused=not self.is_paused)
        if KIND.order:
            is_newer = self.newest < NEWER
            yield "supersede", self._replace(newest=NEWER, holder=()) if is_newer else self
        if self.job == "open" and KIND.in_job:
            yield "commit", self._replace(job="committed")
            yield "abort", self._replace(job="aborted")
        if self.sent < MESSAGES:
            life = 0 if KIND.once else registry_model.next_life(self.record)
            order = (self.newest // NEWER * NEWER + OWN + self.sent) * bool(KIND.order)
            for each_life in (life,) if KIND.once else (life, -1):
                new = self.message(KIND, life=each_life, attempt="0.0", order=order)
                yield "send again, not noted", self.with_message(new)
                yield "send again", self.with_message(new).noting(new)
        if not self.running:
            yield "expire", self.forgetful()

    def message(self, like: Message, **changed: Any) -> Message:
        """Return a further message."""
        name = f"m{self.sent}" if like.copy else ""
        fresh = {"due": 5, "redelivered": False, "is_old": False, "name": f"k{self.sent}"}
        fresh |= {"generation": 0, "former": (), "in_doubt": False}
        return like._replace(**{"copy": name, **fresh, **changed})

    def with_message(self, message: Message) -> World:
        """Return the world with one more message."""
        return self._replace(waiting=added(self.waiting, message), sent=self.sent + 1)

    def noting(self, message: Message) -> World:
        """Return the world in which a message is registered, and its key claimed."""
        if not message.copy:
            return self
        record, _ = registry_model.register(self.record, message.registration)
        return self.claimed(message)._replace(record=record)

    def cancelled(self, also_future: bool) -> World:
        stopped = registry_model.next_life(self.record)
        record, found = registry_model.cancel(self.record, self.newest, also_future)
        if found == "unknown":
            assert record == self.record, "something was noted"
            return self
        return self._replace(record=record, stopped=max(stopped, self.stopped or 0))

    def postponed(self, due: int, also_future: bool) -> Iterator[tuple[str, World]]:
        newest = self.newest
        record, found = registry_model.postpone(self.record, due, newest, also_future)
        assert found != "unknown" or record == self.record, "something was noted"
        world = self._replace(record=record)
        if found != "earlier":
            yield "postpone", world
            return
        yield "postpone to earlier, and die", world
        if self.sent < MESSAGES:
            assert record.waits is not None
            life, attempt = record.waits
            changed = {"life": int(life) if life.isdigit() else -1, "attempt": attempt}
            second = self.message(KIND, **changed, order=record.order, due=due)
            yield "postpone to earlier, not noted", world.with_message(second)
            yield "postpone to earlier", world.with_message(second).noting(second)

    def forgetful(self) -> World:
        """Return the world long after all is due: Redis has forgotten."""
        return World(
            registry_model.EMPTY,
            tuple(sorted(each._replace(is_old=True, due=LONG_AGO) for each in self.waiting)),
            excused=frozenset(each.full for each in self.waiting),
            sent=self.sent,
            newest=0,
            job=self.job,
            is_paused=self.is_paused,
            asked=self.asked,
        )

    def check(self) -> None:
        """Raise if something has run twice, or will be lost."""
        runs: dict[tuple[str, str], set[str]] = {}
        for full, copy, _ in self.runs:
            runs.setdefault(full, set()).add(copy)
        assert all(len(copies) == 1 for copies in runs.values()), "two messages of an attempt"
        job = "committed" if self.job == "open" else self.job
        end = self._replace(job=job, is_paused=False)
        for _ in range(3 * MESSAGES):
            for each in end.waiting:
                end = end.arrived(each)
        assert not end.waiting, "waits for ever"
        done = end.ended | {each.full for each in end.running} | end.excused
        lost = {each.full for each in self.waiting} - done
        assert not lost, f"lost: {lost}"


KIND = Message("m0")


def redelivered(message: Message) -> Message:
    """Return a message that arrives once more."""
    return message._replace(redelivered=True)


def without(messages: tuple[Message, ...], message: Message) -> tuple[Message, ...]:
    at = messages.index(message)
    return messages[:at] + messages[at + 1 :]


def added(messages: tuple[Message, ...], message: Message) -> tuple[Message, ...]:
    return tuple(sorted((*messages, message)))


def explore(start: World, depth: int) -> int:
    """Take every step from every world, up to a depth; return how many worlds there are."""
    seen = {start}
    edge: list[tuple[World, tuple[str, ...]]] = [(start, ())]
    for _ in range(depth):
        following = []
        for world, way in edge:
            with _told(world, way):
                others = list(world.steps())
            for step, other in others:
                if other not in seen:
                    seen.add(other)
                    further = other, (*way, step)
                    with _told(*further):
                        other.check()
                    following.append(further)
        edge = following
    return len(seen)


@contextmanager
def _told(world: World, way: tuple[str, ...]) -> Iterator[None]:
    """Say of a failure in which world it was, and how that has come about."""
    try:
        yield
    except AssertionError as broken:
        raise AssertionError(f"{broken}; after {way}, in {world}") from broken


KINDS = {
    "tracked": Message("m0", due=5),
    "under a key": Message("m0", due=5, order=OWN),
    "once": Message("", due=5, once=True, name="k0"),
    "tracked, once": Message("m0", due=5, once=True, name="k0"),
    "once, in a job": Message("", due=5, once=True, name="k0", in_job=True),
    "in a job, under a key": Message("m0", due=5, order=OWN, in_job=True),
}


@pytest.mark.parametrize("noted", [True, False], ids=["registered", "not registered"])
@pytest.mark.parametrize("kind", KINDS)
def test_none_is_lost_or_runs_twice(
    kind: str, noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.KIND", KINDS[kind])
    start = World(registry_model.EMPTY, (KINDS[kind],))
    worlds = explore(start.noting(KINDS[kind]) if noted else start, DEPTH)
    assert worlds > 100
