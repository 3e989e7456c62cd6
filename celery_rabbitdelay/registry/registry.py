"""The registry of one prefix: what is noted about tasks that wait, and asked when they arrive."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple
from uuid import uuid4

from celery_rabbitdelay.registry.connection import Call, Store
from celery_rabbitdelay.registry.decision import Arrival, Decision, Outcome, Verdict
from celery_rabbitdelay.registry.index import Index
from celery_rabbitdelay.registry.jobs import Jobs, JobState
from celery_rabbitdelay.registry.names import Names, shard_of

__all__ = ["Earlier", "Registration", "Registry"]

#: How many tasks a script decides about or cancels: Redis serves nobody else meanwhile.
TASKS_PER_CALL: Final = 500

#: Milliseconds after which a task of an open job asks again.
JOB_PAUSE_MS: Final = 5000

#: The latest instant until which a record lives, from now on, in milliseconds: a hundred years. Any
#: sender may have written the due time of an arrival.
MAX_LIFE_MS: Final = 100 * 366 * 86_400_000


class Registration(NamedTuple):
    """A message that was sent, to be registered.

    Attributes:
        task_id: The task's id.
        copy: The message's name; see :data:`~celery_rabbitdelay.registry.decision.COPY`.
        due_ms: When it is due, in milliseconds since 1970-01-01 UTC.
        key: The key that it was sent with; empty if it has none.
        is_retry: Whether it is a retry, which never supersedes a newer task.
        name: The task's name, if the task is tracked; otherwise empty.
        job: The job that it was sent with, likewise.
        message: What it takes to send the task anew, likewise.
    """

    task_id: str
    copy: str
    due_ms: int
    key: str = ""
    is_retry: bool = False
    name: str = ""
    job: str = ""
    message: str = ""


class _Superseded(NamedTuple):
    """A message that must not run, because a newer one has its key.

    Attributes:
        key: The key.
        record: The key in Redis of its task's record.
        copy: Its name.
        lives: Until when the record lives, in milliseconds since 1970-01-01 UTC.
        instead: The name of the message of the same task that runs instead; empty if it is another
            task.
    """

    key: str
    record: str
    copy: str
    lives: str
    instead: str = ""


class Earlier(NamedTuple):
    """What it takes to let a task run earlier than it was sent for.

    Attributes:
        copy: The name of the message that waits.
        message: What it takes to send the task anew; empty if it is not tracked.
    """

    copy: str
    message: str


class Registry:
    """What is noted about the tasks under one prefix.

    All methods raise :class:`.RegistryUnavailable` if Redis does not answer in time, or refuses.

    Args:
        store: Where the notes are kept.
        prefix: The prefix of all keys; the same as that of the levels.
        margin_ms: For how many milliseconds after it is due a task may still arrive.
        longest_ms: The longest delay of a task of which nothing is known, in milliseconds.

    Attributes:
        index: The tracked tasks under the prefix.
        jobs: The jobs under the prefix.
        names: The names of all keys.
        store: Where the notes are kept.
    """

    def __init__(self, store: Store, prefix: str, margin_ms: int, longest_ms: int) -> None:
        self.store = store
        self.names = Names(prefix)
        self.index = Index(store, self.names)
        self.jobs = Jobs(store, self.names, margin_ms)
        self._margin_ms = margin_ms
        self._longest_ms = longest_ms

    @staticmethod
    def new_copy() -> str:
        """Return a name for a message."""
        return uuid4().hex[:16]

    def reserve(self, name: str, number: int, per_second: float) -> float:
        """Reserve room for tasks at a rate that several senders share.

        Args:
            name: The name that the senders have agreed on.
            number: How many tasks.
            per_second: How many a second all senders together may send.

        Returns:
            After how many seconds the tasks may be sent.
        """
        wait_ms: int = self.store.call("reserve", [self.names.rate(name)], number, str(per_second))
        return wait_ms / 1000

    def look(self, arrivals: Sequence[Arrival]) -> list[Decision]:
        """Return what :meth:`decide` would decide, and note nothing: the tasks go on waiting."""
        return self._decide(arrivals, [""] * len(arrivals), False)

    def decide(self, arrivals: Sequence[Arrival], marks: Sequence[str]) -> list[Decision]:
        """Decide what becomes of tasks that have arrived.

        One round trip to each server, and another one for jobs that are not known to be committed
        or aborted. A call whose answer is lost can be repeated with the same marks.

        Args:
            arrivals: The arrivals.
            marks: For each, the mark that it leaves if only the first arrival may run.
        """
        return self._decide(arrivals, marks, True)

    def _decide(
        self, arrivals: Sequence[Arrival], marks: Sequence[str], is_release: bool
    ) -> list[Decision]:
        states = self.jobs.states({each.job for each in arrivals if each.job})
        latest = _now_ms() + MAX_LIFE_MS
        groups = self._grouped([arrival.task_id for arrival in arrivals])
        calls = []
        for numbers in groups:
            arguments: list[str | int] = [self._margin_ms]
            for number in numbers:
                each = arrivals[number]
                word = _WORDS[states.get(each.job)]
                if word == "run" and not is_release:
                    word = "later"
                arguments += (
                    each.copy,
                    min(each.due_ms, latest),
                    each.once,
                    marks[number],
                    int(each.redelivered),
                    word,
                )
            keys = [self.names.task(arrivals[number].task_id) for number in numbers]
            calls.append(Call("decide", keys, arguments))
        words: dict[int, str] = {}
        for numbers, answer in zip(groups, self.store.call_each(calls), strict=True):
            words.update(zip(numbers, answer, strict=True))
        decisions = [
            _decision(words[number], states.get(each.job)) for number, each in enumerate(arrivals)
        ]
        self._extend_jobs(arrivals, decisions, states)
        return decisions

    def _extend_jobs(
        self,
        arrivals: Sequence[Arrival],
        decisions: Sequence[Decision],
        states: Mapping[str, JobState],
    ) -> None:
        # A task that was postponed arrives later than the open job was told when it was sent.
        latest: dict[str, int] = defaultdict(int)
        for each, decision in zip(arrivals, decisions, strict=True):
            if decision.is_new_due and states.get(each.job) is JobState.OPEN:
                latest[each.job] = max(latest[each.job], decision.until_ms)
        self.jobs.extend({job: self._lives(due_ms) for job, due_ms in latest.items()})

    def register(self, registrations: Sequence[Registration]) -> list[str]:
        """Note messages that the broker has confirmed; those with a key supersede older ones.

        Two calls for messages under one key: the one that Redis gets last wins. One round trip, if
        all keys are on one server. On a cluster, messages with a key take up to two more: a message
        is registered once its key is claimed, and a superseded one is forgotten under its key once
        it is noted as superseded. Whoever dies in between leaves tasks that run, and that the next
        message under the key supersedes.

        Returns:
            The state of each: ``waiting``, ``released`` (it has arrived already), ``cancelled``, or
            ``superseded`` (a newer task has its key, which one is if it is a retry, was registered
            before, or stands further down).
        """
        keyed = [number for number, each in enumerate(registrations) if each.key]
        claims = [self._claim(registrations[number]) for number in keyed]
        calls = [self._register(each) for each in registrations]
        if not self.store.is_cluster:
            return list(self.store.call_each(claims + calls)[len(claims) :])
        answers = dict(zip(keyed, self.store.call_each(claims), strict=True))
        states: list[str] = self.store.call_each(calls)
        superseded: list[_Superseded] = []
        for number, answer in answers.items():
            each = registrations[number]
            if answer == ["superseded"]:
                own = (self.names.task(each.task_id), each.copy, str(self._lives(each.due_ms)))
                superseded.append(_Superseded(each.key, *own))
            elif states[number] != "superseded":
                superseded += _superseded(each, self.names.task(each.task_id), answer)
        self._void(superseded)
        positions = {registrations[number].copy: number for number in keyed}
        for older in superseded:
            if older.copy in positions:
                states[positions[older.copy]] = "superseded"
        return states

    def _register(self, each: Registration) -> Call:
        arguments = (each.copy, each.due_ms, self._lives(each.due_ms), each.key)
        more = (each.name, each.job, each.message)
        return Call("register", [self.names.task(each.task_id)], (*arguments, *more))

    def supersede(self, key: str) -> None:
        """Note that a task was sent under a key, without a delay: no older one may run."""
        newest = Registration("", self.new_copy(), _now_ms(), key)
        (answer,) = self.store.call_each([self._claim(newest)])
        self._void(_superseded(newest, "", answer))

    def _claim(self, each: Registration) -> Call:
        lives, here = self._lives(each.due_ms), int(not self.store.is_cluster)
        record = self.names.task(each.task_id)
        arguments = (each.task_id, each.copy, lives, record, int(each.is_retry), here)
        return Call("claim", [self.names.key(each.key)], arguments)

    def _void(self, superseded: Sequence[_Superseded]) -> None:
        """Take the further steps that a cluster needs; see ``claim.lua``."""
        self.store.call_each([Call("void", [each.record], each[2:]) for each in superseded])
        copies: dict[str, list[str]] = defaultdict(list)
        for each in superseded:
            copies[each.key].append(each.copy)
        self.store.call_each(
            [Call("disclaim", [self.names.key(key)], each) for key, each in copies.items()]
        )

    def cancel(self, task_ids: Sequence[str]) -> list[Outcome]:
        """Cancel tasks: from now on, none of them is let run when it arrives.

        Args:
            task_ids: Their ids. Of a task that is neither tracked nor under a key, nothing is
                known; then the note lives for the longest delay.
        """
        ids = list(dict.fromkeys(task_ids))
        groups = self._grouped(ids)
        lifes = (self._margin_ms, min(self._longest_ms + self._margin_ms, MAX_LIFE_MS))
        records = [self.names.task(task_id) for task_id in ids]
        calls = [Call("cancel", [records[number] for number in each], lifes) for each in groups]
        found: dict[str, str] = {}
        for numbers, answer in zip(groups, self.store.call_each(calls), strict=True):
            found.update(zip((ids[number] for number in numbers), answer, strict=True))
        return [Outcome(found[task_id]) for task_id in task_ids]

    def waiting_under(self, key: str) -> list[str]:
        """Return the ids of the tasks that were sent under a key and are not superseded."""
        (found,) = self.store.commands(lambda pipeline: pipeline.hgetall(self.names.key(key)))
        ids = (
            self.names.id_of(value.partition(" ")[2])
            for field, value in found.items()
            if field.startswith("copy:")
        )
        return list(dict.fromkeys(ids))

    def postpone(self, task_id: str, due_ms: int) -> Outcome | Earlier:
        """Let a task run at another time.

        Args:
            task_id: The task's id.
            due_ms: When it may run, in milliseconds since 1970-01-01 UTC.

        Returns:
            What was found; or if it is to run earlier than it was sent for, what it takes to send
            it anew.
        """
        key = self.names.task(task_id)
        word, *more = self.store.call("postpone", [key], due_ms, self._lives(due_ms))
        if word == "earlier":
            return Earlier(*more)
        if more and more[0]:
            # Otherwise a message that is sent under the key later on would not supersede it.
            self.store.call("extend", [self.names.key(more[0])], self._lives(due_ms))
        return Outcome(word)

    def announce(self, task_id: str, first: str, second: str, due_ms: int) -> Outcome:
        """Note that a second message of a task is about to be sent; only one of them may run.

        The one that arrives first runs, even if :meth:`replace` is never called.

        Args:
            task_id: The task's id.
            first: The name of the first message.
            second: The name of the second message.
            due_ms: When the second one is due, in milliseconds since 1970-01-01 UTC.
        """
        arguments = (first, second, self._lives(due_ms))
        return Outcome(self.store.call("announce", [self.names.task(task_id)], *arguments))

    def replace(self, task_id: str, first: str, second: str, due_ms: int) -> Outcome:
        """Let the second message of a task replace the first, once the broker has confirmed it.

        Args:
            task_id: The task's id.
            first: The name of the first message.
            second: The name of the second message.
            due_ms: When the second one is due, in milliseconds since 1970-01-01 UTC.
        """
        arguments = (first, second, due_ms, self._lives(due_ms))
        return Outcome(self.store.call("replace", [self.names.task(task_id)], *arguments))

    def _grouped(self, task_ids: Sequence[str]) -> list[list[int]]:
        """Return the positions of the tasks whose records may be changed in one call."""
        groups: dict[int, list[int]] = defaultdict(list)
        for number, task_id in enumerate(task_ids):
            groups[shard_of(task_id) if self.store.is_cluster else 0].append(number)
        return [
            group[start : start + TASKS_PER_CALL]
            for group in groups.values()
            for start in range(0, len(group), TASKS_PER_CALL)
        ]

    def _lives(self, due_ms: int) -> int:
        """Return until when a record lives whose task is due then."""
        return min(due_ms, _now_ms() + MAX_LIFE_MS) + self._margin_ms


#: What a job's state means for its tasks; None for no job, or one that Redis has lost.
_WORDS: Final = {
    None: "run",
    JobState.COMMITTED: "run",
    JobState.OPEN: "later",
    JobState.ABORTED: "expired",
}


def _superseded(newest: Registration, own_record: str, answer: Sequence[str]) -> list[_Superseded]:
    """Read what the script ``claim`` returns for a message."""
    return [
        _Superseded(newest.key, record, copy, lives, newest.copy if record == own_record else "")
        for record, copy, lives in zip(*[iter(answer)] * 3, strict=True)
    ]


def _decision(word: str, job: JobState | None) -> Decision:
    if word.isdigit():
        return Decision(Verdict.LATER, int(word), is_new_due=True)
    if word == "run" and job is JobState.OPEN:
        return Decision(Verdict.LATER, _now_ms() + JOB_PAUSE_MS)
    return Decision(Verdict(word))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
