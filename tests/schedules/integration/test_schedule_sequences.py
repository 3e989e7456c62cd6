"""Random sequences of what can happen to the record of a schedule, in Redis and by the rule.

``RABBITDELAY_SEQUENCES`` says how many are played on one server; a hundred are on a cluster. A
failure prints what has happened, and the ``RABBITDELAY_SEED`` that begins with that sequence.
"""

import json
import os
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final

import pytest

from celery_rabbitdelay.levels.headers import Mark
from celery_rabbitdelay.registry.registry import NOTE_MS, Registry
from celery_rabbitdelay.schedules.record import Arriving, Decided, NotedSchedule, Records
from celery_rabbitdelay.schedules.recurrence import ALL, Occurrence, Recurrence
from tests import schedule_rule as rule
from tests.registry.integration.registering import KEEP_MS, MARGIN_MS, RedisSetup, now_ms
from tests.schedule_rule import Message, Record, Winner

SEQUENCES: Final = int(os.environ.get("RABBITDELAY_SEQUENCES", "400"))
SEED: Final = int(os.environ.get("RABBITDELAY_SEED") or random.randrange(10**9))

#: How many sequences are played at once, each in a record of its own, and their steps.
BATCH, STEPS = 100, 20

#: Between two instants: of those of ten minutes, more than the latest are remembered.
STEP_MS: Final = 700_000

#: The instant 0, in milliseconds, and the order 0. Both have as many digits as real ones.
BEGIN_MS: Final = now_ms() - 10 * STEP_MS
ORDER: Final = 1_800_000_000_000_000

#: What is noted beside the rule until the occurrence has come: see record.py.
MARKS: Final = {"unsent", "missed", "healed"}

#: Returns when a record expires, and its fields with their values: all in one text, for speed.
READ: Final = (
    "return cjson.encode({redis.call('PEXPIRETIME', KEYS[1]),"
    " unpack(redis.call('HGETALL', KEYS[1]))})"
)

OCCURRENCE: Final = Occurrence("", 0, Recurrence.of(timedelta(hours=1), "UTC"), ALL)


def ms_of(instant: int) -> int:
    return BEGIN_MS + instant * STEP_MS


def instant_of(ms: int | str | None) -> int | None:
    return (int(ms) - BEGIN_MS) // STEP_MS if ms else None


def record_of(found: Mapping[str, str]) -> Record | None:
    """Return what is noted in Redis, in the words of the rule."""
    if not found:
        return None
    winners = [each.partition(":") for each in found.get("winners", "").split()]
    decided = [(instant_of(ms), mark.rpartition(".")) for ms, _, mark in winners]
    behind, done = (instant_of(found.get(name)) for name in ("behind", "done"))
    return Record(
        order=int(found["order"]) - ORDER,
        begun=int(found["begun"]) and int(found["begun"]) - ORDER,
        first=instant_of(found.get("first")) or 0,
        revision=found.get("revision", ""),
        ahead=instant_of(found["ahead"]),
        behind=-1 if behind is None else behind,
        done=-1 if done is None else done,
        winners=tuple(
            Winner(instant or 0, Mark.of(mark), arrival) for instant, (mark, _, arrival) in decided
        ),
        is_paused=found.get("paused") == "1",
        is_deleted="deleted" in found,
    )


class Sequence:
    """A schedule, its messages, and what happens to them.

    Args:
        setup: Redis.
        registry: The registry in it.
        seed: Which sequence it is.
    """

    def __init__(self, setup: RedisSetup, registry: Registry, seed: int) -> None:
        self.client, self.records = setup.client, Records(registry)
        self.chance = random.Random(seed)
        self.name = f"schedule-{seed}"
        self.key = registry.names.of("schedule", self.name)
        self.record: Record | None = None
        self.former: Record | None = None  # as the step began
        self.is_lost = True  # what the schedule sends
        self.read: list[NotedSchedule | None] = [None]  # an edit may know an older one
        self.saved: tuple[Any, ...] = None, True, None, 0
        self.messages: list[Message] = []
        self.decided: list[tuple[Record, Arriving]] = []
        self.order = self.names = 0
        self.asks: list[tuple[Message, int | None, Arriving]] = []
        self.again: list[Arriving] = []
        self.is_put = self.is_unreadable = False
        self.told = [f"RABBITDELAY_SEED={seed} RABBITDELAY_SEQUENCES=1"]

    def say(self, what: str, found: object, expected: object) -> None:
        self.told.append(f"{what}: {expected}")
        assert found == expected, "\n".join([*self.told, f"but in Redis: {found}"])

    def step(self) -> None:
        """Let something happen; the caller asks Redis ``asks`` and ``again``, those of all."""
        self.former, self.asks, self.again = self.record, [], []
        self.is_put = self.is_unreadable = False
        edits = (self.put, self.put, self.put, self.delete, self.note, self.note, self.invent)
        troubles = (self.lose, self.save, self.restore, self.remember, self.remember, self.spoil)
        if not self.messages:
            self.put()
        elif self.chance.random() < 0.3:
            self.chance.choice((*edits, *troubles))()
        else:
            self.arrive()

    def send(self, instant: int, order: int, revision: str) -> None:
        self.names += 1
        self.messages.append(Message(instant, order, revision, Mark(f"{self.names:x}")))

    def invent(self) -> None:
        """Add a message that nobody has sent, and that may have the name of another one."""
        order, instant = self.chance.randint(1, self.order + 2), self.chance.randint(0, 12)
        self.send(instant, order, self.chance.choice("ab"))
        name = f"{self.chance.randint(1, self.names):x}"
        self.messages[-1] = self.messages[-1]._replace(mark=Mark(name))

    def arrive(self) -> None:
        for _ in range(self.chance.choice((1, 1, 2))):
            # What was sent last comes most often.
            at = max(len(self.messages) - 1 - int(self.chance.expovariate(0.6)), 0)
            if self.chance.random() < 0.2:
                self.messages[at] = self.messages[at].put_back(self.chance.choice("ab"))
            self.ask(self.messages[at]._replace(redelivered=self.chance.random() < 0.3))

    def ask(self, message: Message) -> None:
        step = self.chance.choice((1, 1, 1, 1, 2, 5, None))
        following = None if step is None else message.instant + step
        arriving = self.arriving(message, following, self.chance.choice("ab"))
        self.asks.append((message, following, arriving))

    def arriving(self, message: Message, following: int | None, arrival: str) -> Arriving:
        instant_ms, order = ms_of(message.instant), ORDER + message.order
        says = OCCURRENCE._replace(name=self.name, instant_ms=instant_ms, order=order)
        says = says._replace(revision=message.revision, message=message.name)
        following_ms = None if following is None else ms_of(following)
        return Arriving(says, message.arrival(arrival), following_ms)

    def spoil(self) -> None:
        """Have something else at the key for this step."""
        self.lose()
        self.client.set(self.key, "a text")
        self.is_unreadable = True
        self.arrive()

    def answered(self, found: Decided | None) -> None:
        """Compare the answer to the first question with the rule's."""
        message, following, arriving = self.asks.pop(0)
        arrival = arriving.arrival.name
        what = f"{message} arrives as {arrival}, {following} follows"
        if found is None or self.is_unreadable:
            self.say(what, found, None if self.is_unreadable else "an answer")
            return
        before = self.record
        self.record, expected = rule.decide(before, message, following, arrival)
        self.is_lost |= before is None or message.order > before.order
        self.order = max(self.order, self.record.order if self.record else 0)
        given = found.goes_on, instant_of(found.following_ms), found.is_paused, found.order - ORDER
        if found[:2] == (False, None):
            self.say(what, rule.DROPPED, expected._replace(is_paused=False, order=0))
            return
        self.say(what, rule.Decided(*given), expected)
        assert found.is_lost == self.is_lost, self.told
        if expected.following is not None:
            self.send(expected.following, expected.order, message.revision)
        ahead = following if expected.following is None else expected.following
        said = message._replace(order=expected.order)
        winners = (Winner(said.instant, said.mark._replace(former=()), arrival),)
        known = Record(said.order, 0, 0, said.revision, ahead, -1, said.instant, winners)
        self.decided.append((known, self.arriving(said, ahead, arrival)))

    def remember(self) -> None:
        """Have a worker note again what it remembers, most often what it has decided last."""
        if self.decided:
            known, arriving = self.chance.choice((self.decided[-1], *self.decided[-3:]))
            if self.chance.random() < 0.3:  # of an edit that Redis has lost
                self.order += 2
                known = known._replace(order=self.order)
                says = arriving.occurrence._replace(order=ORDER + self.order)
                arriving = arriving._replace(occurrence=says)
            self.is_lost |= self.record is None or known.order > self.record.order
            self.record = rule.again(self.record, known)
            self.again.append(arriving)
            self.told.append(f"a worker remembers {known}")

    def is_as(self, before: NotedSchedule | None) -> bool:
        was = before and (before.order - ORDER, instant_of(before.ahead_ms))
        return was == (self.record and (self.record.order, self.record.ahead))

    def edit(self, before: NotedSchedule | None, *put: Any) -> bool:
        return self.records.edit(self.name, before, ORDER + self.order, *put)

    def put(self) -> None:
        before, now = self.chance.choice(self.read[-2:]), self.chance.randint(0, 6)
        self.order += 2
        first = rule.since(self.record, now) + self.chance.choice((1, 1, 3))
        revision, paused = self.chance.choice("ab"), self.chance.choice((None, None, True, False))
        sent = Message(first, self.order, revision, Mark())
        occurrence = self.arriving(sent, None, "").occurrence
        found, self.is_put = self.edit(before, occurrence, "x", paused), self.is_as(before)
        self.say(f"put {revision} {self.order} for {first}, {paused=}", found, self.is_put)
        if self.is_put:
            self.record, self.is_lost = rule.edit(self.record, self.order, revision, first), False
            if paused is not None:
                self.record = self.record._replace(is_paused=paused)
            self.send(first, self.order, revision)
            if self.chance.random() < 0.2:  # more than are remembered come
                self.is_put = False
                for later in range(first, first + rule.WINNERS + 2):
                    self.send(later, self.order, revision)
                    self.ask(self.messages[-1])

    def delete(self) -> None:
        before, self.order = self.chance.choice(self.read[-2:]), self.order + 2
        if before is not None:
            expected = self.is_as(before)
            found = self.edit(before)
            self.say(f"delete {self.order}", found, expected)
            if expected:
                self.record = rule.delete(self.record, self.order)
                until_ms = (before.ahead_ms or 0) + KEEP_MS + NOTE_MS
                assert self.client.pexpiretime(self.key) >= until_ms, self.told

    def note(self) -> None:
        """Pause and resume; and, as healing does, send again what is ahead."""
        if self.record is not None:
            is_paused = self.chance.random() < 0.5
            marks: dict[str, Any] = dict.fromkeys(MARKS, 1)
            self.records.note(self.name, paused=int(is_paused), last="1 1 ran", **marks)
            self.told.append(f"{is_paused=}")
            self.record = self.former = self.record._replace(is_paused=is_paused)
            if self.record.ahead is not None:
                self.send(self.record.ahead, self.record.order, self.record.revision)

    def lose(self) -> None:
        self.client.delete(self.key)
        self.record, self.is_lost = None, True
        self.told.append("lost")

    def save(self) -> None:
        expiry_ms = max(self.client.pexpiretime(self.key), 0)
        self.saved = self.record, self.is_lost, self.client.dump(self.key), expiry_ms
        self.told.append("saved")

    def restore(self) -> None:
        self.lose()
        self.record, self.is_lost, text, expiry_ms = self.saved
        self.former = self.record
        self.told.append(f"restored: {self.record}")
        if text is not None:
            self.client.restore(self.key, expiry_ms, text, absttl=True)

    def compare(self, answer: str) -> None:
        """Compare what is noted with the rule, after a step."""
        expiry_ms, *flat = json.loads(answer)
        found = dict(zip(flat[::2], flat[1::2], strict=True))
        self.say("noted", record_of(found), self.record)
        noted, record = NotedSchedule.of(found), self.record
        if self.read[-1] != noted:
            self.read.append(noted)
        assert (noted is None) == (record is None), self.told
        if record is None or noted is None:
            return
        assert noted.done_ms == (ms_of(record.done) if record.done >= 0 else -1), self.told
        is_there = not (self.is_lost or record.is_deleted)
        assert ("message" in found) == ("occurrence" in found) == is_there, self.told
        if self.former is None or self.former[:4:3] != record[:4:3]:  # its order, what is ahead
            assert MARKS & set(found) == ({"unsent"} if self.is_put else set()), self.told
        assert not (record.is_deleted and self.former != record and "last" in found), self.told
        until_ms = BEGIN_MS + KEEP_MS + record.is_deleted * NOTE_MS
        assert expiry_ms == -1 if record.ahead is not None else expiry_ms > until_ms, self.told


def test_of_a_message_that_was_sent_twice_only_the_one_that_went_on_goes_on_again(
    redis_setup: RedisSetup, prefix: str
) -> None:
    records = Records(Registry(redis_setup.connect(), prefix, KEEP_MS, MARGIN_MS))
    occurrence = OCCURRENCE._replace(name="twice", instant_ms=BEGIN_MS, message="0b")
    sent = Message(0, 0, "", Mark("0b"))

    def goes_on(message: Message, arrival: str) -> bool:
        (found,) = records.decide([Arriving(occurrence, message.arrival(arrival))])
        return found is not None and found.goes_on

    assert goes_on(sent, "a1")
    assert not goes_on(sent, "b1")
    # Redis was away at that arrival, or its answer was lost.
    assert not goes_on(sent.put_back("b1"), "b2")
    # It waits for the end of a run.
    assert goes_on(sent.put_back("a1"), "a2")
    assert not goes_on(sent.put_back("b1").put_back("b2"), "b3")
    # Its worker was killed; then another one was paused.
    assert goes_on(sent.put_back("a1")._replace(redelivered=True), "a3")
    assert goes_on(sent.put_back("a1")._replace(redelivered=True).put_back(""), "a4")


@pytest.mark.timeout(3600)
def test_the_scripts_decide_as_the_rule_does(redis_setup: RedisSetup, prefix: str) -> None:
    store = redis_setup.connect()
    registry = Registry(store, prefix, KEEP_MS, MARGIN_MS)
    records = Records(registry)
    count = min(SEQUENCES, BATCH) if store.is_cluster else SEQUENCES
    for begin in range(SEED, SEED + count, BATCH):
        seeds = range(begin, min(begin + BATCH, SEED + count))
        played = [Sequence(redis_setup, registry, seed) for seed in seeds]

        def read(pipeline: Any, played: list[Sequence] = played) -> None:
            for each in played:
                pipeline.execute_command("EVAL", READ, 1, each.key)

        for _ in range(STEPS):
            with ThreadPoolExecutor(4) as threads:
                list(threads.map(Sequence.step, played))
            asked = [(each, arriving) for each in played for _, _, arriving in each.asks]
            answers = records.decide([arriving for _, arriving in asked])
            for (each, _), answer in zip(asked, answers, strict=True):
                each.answered(answer)
            again = [(each, arriving) for each in played for arriving in each.again]
            noted = records.decide([arriving for _, arriving in again], notes_again=True)
            for (each, _), answer in zip(again, noted, strict=True):
                assert each.is_unreadable or answer is not None
            for each in played:
                if each.is_unreadable:
                    each.lose()
            for each, text in zip(played, store.commands(read), strict=True):
                each.compare(text)
        redis_setup.client.delete(*(each.key for each in played))
    store.close()


def test_a_note_of_an_empty_text_deletes_the_field(redis_setup: RedisSetup, prefix: str) -> None:
    registry = Registry(redis_setup.connect(), prefix, KEEP_MS, MARGIN_MS)
    records, key = Records(registry), registry.names.of("schedule", "daily")
    records.note("daily", unsent="1", missed=2)
    records.note("daily", unsent="")
    assert redis_setup.client.hgetall(key) == {"missed": "2"}
    redis_setup.client.delete(key)
    registry.store.close()
