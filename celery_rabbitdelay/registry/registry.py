"""The registry of one prefix: what is noted about tasks that wait, and asked when they arrive."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final, NamedTuple, TypeVar

from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.warning_limit import WarningLimit
from celery_rabbitdelay.registry.decision import (
    Arrival,
    Decision,
    Outcome,
    Registration,
    Ticket,
    Verdict,
    new_copy,
)
from celery_rabbitdelay.registry.index import SHARDS, Index, KeyKind, Kind, Names
from celery_rabbitdelay.registry.jobs import Jobs, JobState
from celery_rabbitdelay.registry.pauses import Pauses, Questions
from celery_rabbitdelay.registry.store import UNREADABLE, ScriptCall, Store, readable

#: For how many milliseconds a cancel of a task of which nothing waits is remembered, because it is
#: not known when one of its messages may arrive: ten years.
NOTE_MS: Final = 315_360_000_000

#: The latest instant until which a record lives, from now on, in milliseconds: a hundred years. Any
#: sender may have written the due time of an arrival.
MAX_LIFE_MS: Final = 100 * 366 * 86_400_000

#: Seconds that a caller of :meth:`Registry.alone` waits for another at most, and between two looks.
ALONE_LEASE: Final = 10.0
LEASE_SLEEP: Final = 0.02

#: What ``claim.lua`` answers about the newest task under a key, before the id of the one before.
_NEWEST: Final = "newest "

#: What ``cancel.lua`` answers about a task with a key, before its order and its key.
_DONE: Final = "done "

#: What ``arrive.lua`` answers about a task that would run, if it were not paused.
_PAUSED: Final = "paused"

_VERDICTS: Final = frozenset(each.value for each in Verdict)

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")


#: Seconds for which a :class:`Breaker` is open after a failure.
PAUSE: Final = 2.0


class Breaker:
    """Says whether a call is worth trying: for some time after a failure, calls fail at once.

    Args:
        now: Returns the time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._again_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether calls are to be left out."""
        return self._now() < self._again_at

    def call(self, ask: Callable[[], AnswerT]) -> AnswerT:
        """Return what a call returns.

        Raises:
            RegistryUnavailable: Redis did not answer, or the breaker is open.
        """
        if self.is_open:
            raise RegistryUnavailable("Redis did not answer a moment ago")
        try:
            return ask()
        except RegistryUnavailable:
            self._again_at = self._now() + PAUSE
            raise


class Earlier(NamedTuple):
    """What it takes to let a task run earlier than it was sent for.

    Attributes:
        name: The task's name.
        message: What it takes to send the task anew; empty if it is not tracked.
    """

    name: str
    message: str


class Registry:
    """What is noted about the tasks under one prefix.

    All methods raise :class:`.RegistryUnavailable` if Redis does not answer in time, or refuses.

    Args:
        store: Where the notes are kept.
        prefix: The prefix of all keys; the same as that of the levels.
        keep_ms: For how many milliseconds a decision outlives the task that it is about.
        margin_ms: For how many milliseconds a task may be late. Then it is not listed any more, and
            the name of its job is free.

    Attributes:
        index: The tracked tasks under the prefix.
        jobs: The jobs under the prefix.
        pauses: The pauses under the prefix.
        names: The names of all keys.
        store: Where the notes are kept.
        breaker: Leaves out questions for a while after one that Redis has not answered.
        keep_ms: For how many milliseconds a decision outlives the task that it is about.
    """

    def __init__(self, store: Store, prefix: str, keep_ms: int, margin_ms: int) -> None:
        self.store = store
        self.names = Names(prefix)
        self.pauses = Pauses(store, self.names)
        self.index = Index(store, self.names, margin_ms, self.pauses.oldest_ms)
        self.jobs = Jobs(store, self.names, keep_ms, margin_ms)
        self.breaker = Breaker()
        self.keep_ms = keep_ms
        self._questions = Questions()
        self._unreadable = WarningLimit(logger, "Tasks that were sent, and are not registered")

    def close(self) -> None:
        """Close the connections to Redis."""
        self.store.close()

    def reserve(self, name: str, number: int, per_second: float) -> float:
        """Reserve room for tasks at a rate that several senders share.

        Args:
            name: The name that the senders have agreed on.
            number: How many tasks.
            per_second: How many a second all senders together may send.

        Returns:
            After how many seconds the tasks may be sent.
        """
        call = ScriptCall("reserve", [self.names.of("rate", name)], [(number, per_second)])
        ((wait_ms,),) = self.store.of_each(call)
        return float(wait_ms) / 1000

    def now_ms(self) -> int:
        """Return the time by the clock of Redis, in milliseconds since 1970-01-01 UTC.

        In a cluster, it is the latest time of all servers: no registered task was sent later.
        """
        shards = range(SHARDS if self.store.is_cluster else 1)
        keys = [f"{self.names.prefix}:{{{shard}}}:now" for shard in shards]
        (answers,) = self.store.of_each(ScriptCall("ask", keys, [("key",)] * len(keys)))
        return max(map(int, answers)) // 1000

    def ask(self, tasks: Sequence[tuple[str, str]]) -> list[Ticket]:
        """Return what the messages of tasks carry that are about to be sent; change nothing.

        Args:
            tasks: For each its id, empty if no task had it before, and its key, empty for none.
        """
        ids = [task_id for task_id, _ in tasks if task_id]
        keys = [key for _, key in tasks if key]
        if not ids and not keys:
            keys = [""]  # Redis has to answer all the same
        names = [*self._keys("task", ids), *self._keys("key", keys)]
        kinds = [("task",)] * len(ids) + [("key",)] * len(keys)
        (answers,) = self.store.of_each(ScriptCall("ask", names, kinds))
        life_of = dict(zip(ids, answers[: len(ids)], strict=True))
        next_order = dict(zip(keys, map(int, answers[len(ids) :]), strict=True))
        tickets = []
        for task_id, key in tasks:
            life = life_of.get(task_id, "")
            order = next_order[key] if key else 0
            next_order[key] = order + 1
            tickets.append(Ticket(int(life) if life.isdigit() else 0, order))
        return tickets

    def decide(self, arrivals: Sequence[Arrival], notes: bool = True) -> list[Decision]:
        """Decide what becomes of tasks that have arrived, by the rule in ``arrive.lua``.

        One round trip to each server, and another one before it if one of them has a key, or a job
        that is not known to be committed or aborted. A call whose answer is lost can be repeated.

        Args:
            arrivals: The tasks.
            notes: Whether to note what is decided; otherwise they go on waiting, and only their
                records and jobs are asked.
        """
        latest = wall_clock.ms() + MAX_LIFE_MS
        words = self._said_of_jobs(arrivals)
        if notes:
            words.update(self._said_of_keys(arrivals))
        fields = [
            (
                *(each.copy, str(each.ticket.life), each.attempt, str(min(each.due_ms, latest))),
                *(each.once, f"{each.mark.name}.{each.mark.generation}.{each.name}"),
                *(f".{'.'.join(each.mark.former)}.", each.heir_of, each.has_options),
                *(min(each.put_back_ms, latest), words.get(number, "run"), bool(each.paused_ms)),
            )
            for number, each in enumerate(arrivals)
        ]
        records = self._keys("task", [each.task_id for each in arrivals])
        call = ScriptCall("arrive", records, fields, self.keep_ms, (int(notes),))
        (answers,) = self.store.of_each(call)
        return [self._decision(*each) for each in zip(answers, arrivals, strict=True)]

    def _decision(self, word: str, arrival: Arrival) -> Decision:
        if word.isdigit():
            return Decision(Verdict.LATER, int(word), is_new_due=True)
        if word in (Verdict.LATER.value, _PAUSED):
            now_ms = wall_clock.ms()
            is_paused = word == _PAUSED
            since_ms = max(arrival.due_ms, arrival.paused_ms if is_paused else 0)
            until_ms = now_ms + self._questions.after_ms(now_ms - since_ms)
            return Decision(Verdict.LATER, until_ms, is_paused=is_paused)
        if word not in _VERDICTS:
            return Decision(Verdict.UNREADABLE, why=word.removeprefix(UNREADABLE), is_answer=False)
        return Decision(Verdict(word))

    def _said_of_jobs(self, arrivals: Sequence[Arrival]) -> dict[int, str]:
        """Return what the jobs of arrivals say, by their positions."""
        asked = {(each.job, each.job_id) for each in arrivals if each.job}
        states = self.jobs.states(asked) if asked else {}
        words = {}
        for number, each in enumerate(arrivals):
            if each.job:
                state = states.get((each.job, each.job_id))
                words[number] = state if isinstance(state, str) else _WORDS[state]
        return words

    def _said_of_keys(self, arrivals: Sequence[Arrival]) -> Iterator[tuple[int, str]]:
        """Yield what the keys of arrivals say if they let them not run, by their positions.

        An arrival claims its key: its sender may not have got round to it.
        """
        keyed = [number for number, each in enumerate(arrivals) if each.key and each.ticket.order]
        if not keyed:
            return
        (claimed,) = self.store.of_each(self._claims([arrivals[number] for number in keyed]))
        for number, word in zip(keyed, claimed, strict=True):
            if not word.startswith(_NEWEST):
                yield number, word

    def _claims(self, claims: Sequence[Arrival | Registration]) -> ScriptCall:
        """Return what says which tasks are the newest under their keys."""
        latest = wall_clock.ms() + MAX_LIFE_MS
        fields = [
            (str(each.ticket.order), each.task_id, str(min(each.due_ms, latest))) for each in claims
        ]
        keys = self._keys("key", [each.key for each in claims])
        return ScriptCall("claim", keys, fields, self.keep_ms)

    def register(self, registrations: Sequence[Registration]) -> list[str]:
        """Note messages that the broker has confirmed; those with a key supersede older ones.

        To do so again changes nothing. One round trip to each server, and another one if tasks are
        superseded, which takes them from the lists.

        Returns:
            The state of each: ``waiting``, ``arrived`` (it was let run already), ``released``
            (another message of the attempt was), ``cancelled``, or ``superseded`` (a newer task has
            its key). If its record cannot be read, a text that says so, and it is logged.
        """
        latest = wall_clock.ms() + MAX_LIFE_MS
        fields = [
            (
                *(each.copy, str(each.ticket.life), each.attempt, str(min(each.due_ms, latest))),
                *(each.key, str(each.ticket.order), _kind(each), each.job, each.message),
            )
            for each in registrations
        ]
        ids = [each.task_id for each in registrations]
        keyed = [number for number, each in enumerate(registrations) if each.key]
        claims = [registrations[number] for number in keyed]
        states, claimed = self.store.of_each(
            ScriptCall("register", self._keys("task", ids), fields, self.keep_ms),
            self._claims(claims),
        )
        older: dict[str, int] = {}
        for number, word in zip(keyed, claimed, strict=True):
            each = registrations[number]
            if word == "superseded":
                states[number] = word
                older[each.task_id] = max(each.ticket.order + 1, older.get(each.task_id, 0))
            elif word.startswith(_NEWEST):
                before = word.removeprefix(_NEWEST)
                if before not in ("", each.task_id):
                    older[before] = max(each.ticket.order, older.get(before, 0))
        if older:
            orders = [(order,) for order in older.values()]
            self.store.of_each(ScriptCall("unlist", self._keys("task", list(older)), orders))
        for task_id, word in zip(ids, states, strict=True):
            if word.startswith(UNREADABLE) and self._unreadable.allows(word):
                logger.error("Task %s was sent, and is not registered: %s", task_id, word)
        return states

    def cancel(self, task_ids: Sequence[str], also_future: bool = True) -> list[Outcome]:
        """Cancel tasks: from now on, none of their messages is let run when it arrives.

        Args:
            task_ids: Their ids.
            also_future: Whether to note it for tasks of which nothing is known: those that are
                neither tracked nor under a key, and those that are sent later.

        Raises:
            RegistryUnavailable: As all methods; or the record of a task cannot be read. All others
                are cancelled.
        """
        found = zip(task_ids, self.cancel_each(task_ids, also_future), strict=True)
        return [readable(f"the record of task {task_id}", outcome) for task_id, outcome in found]

    def cancel_each(self, task_ids: Sequence[str], also_future: bool = True) -> list[Outcome | str]:
        """Cancel tasks as :meth:`cancel`.

        Returns:
            For each its outcome, or if its record cannot be read, a text that says so.

        Raises:
            RegistryUnavailable: Redis did not answer; some of them may be cancelled.
        """
        ids = list(dict.fromkeys(task_ids))
        nothing: list[tuple[str, ...]] = [()] * len(ids)
        shared = NOTE_MS + self.keep_ms, int(also_future)
        call = ScriptCall("cancel", self._keys("task", ids), nothing, self.keep_ms, shared)
        (answers,) = self.store.of_each(call)
        newest = self._newest_orders(answers)
        found = dict[str, Outcome | str]()
        for task_id, answer in zip(ids, answers, strict=True):
            if answer.startswith(UNREADABLE):
                found[task_id] = answer
                continue
            outcome, _, more = answer.partition(" ")
            order, _, key = more.partition(" ")
            is_superseded = order != "" and int(order) < newest[key]
            found[task_id] = Outcome.CANCELLED if is_superseded else Outcome(outcome)
        return [found[task_id] for task_id in task_ids]

    def _newest_orders(self, answers: Sequence[str]) -> dict[str, int]:
        """Return the orders of the newest tasks under the keys that a cancel has found."""
        keyed = (answer.split(" ", 2) for answer in answers if answer.startswith(_DONE))
        keys = list(dict.fromkeys(key for _, _, key in keyed))
        if not keys:
            return {}
        names = [self.names.of("key", key) for key in keys]
        newest = self.store.commands(lambda pipe: [pipe.get(name) for name in names])
        orders = [(each or "").partition(" ")[0] for each in newest]
        return dict(zip(keys, (int(each) if each.isdigit() else 0 for each in orders), strict=True))

    def waiting_under(self, key: str) -> list[str]:
        """Return the id of the newest task that was sent under a key, in a list; empty if none."""
        order, task_id = self.newest_under(key)
        return [task_id] if order else []

    def newest_under(self, key: str) -> tuple[str, str]:
        """Return the order and the id of the newest task that was sent under a key; or empty."""
        (found,) = self.store.commands(lambda pipeline: pipeline.get(self.names.of("key", key)))
        order, _, task_id = (found or "").partition(" ")
        return order, task_id

    def postpone(self, task_id: str, due_ms: int, also_future: bool = True) -> Outcome | Earlier:
        """Let a task run at another time.

        Args:
            task_id: The task's id.
            due_ms: When it may run, in milliseconds since 1970-01-01 UTC.
            also_future: As for :meth:`cancel`.

        Returns:
            What was found; or if it is to run earlier than it was sent for, what it takes to send
            a second message of it, which is then registered.
        """
        record, key, newest = self.names.of("task", task_id), "", ""
        while True:
            arguments = [(str(min(due_ms, wall_clock.ms() + MAX_LIFE_MS)), newest, key)]
            shared = (int(also_future),)
            call = ScriptCall("postpone", [record], arguments, self.keep_ms, shared)
            ((answer,),) = self.store.of_each(call)
            word, *more = readable(f"the record of task {task_id}", answer)
            if word == "earlier":
                kind, message = more
                return Earlier(Kind.of(kind).task if kind else "", message)
            if word != "key":
                return Outcome(word)
            (key,) = more
            newest, _ = self.newest_under(key)

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Run a block that no other process runs for this name.

        If one takes longer than a lease, or dies, the next one goes on.
        """
        lease = partial(self.store.lease, self.names.of("alone", name), new_copy())
        end = time.monotonic() + ALONE_LEASE
        while not lease(int(ALONE_LEASE * 1000)) and time.monotonic() < end:
            time.sleep(LEASE_SLEEP)
        try:
            yield
        finally:
            with suppress(RegistryUnavailable):  # it ends by itself
                lease(0)

    def _keys(self, kind: KeyKind, names: Sequence[str]) -> list[str]:
        return [self.names.of(kind, each) for each in names]


#: What a job's state means for its tasks; None for a job that Redis has lost.
_WORDS: Final = {
    None: "run",
    JobState.COMMITTED: "run",
    JobState.OPEN: "later",
    JobState.ABORTED: "expired",
}


def _kind(sent: Registration) -> str:
    """Return what a task is indexed by; empty if it is not tracked."""
    return Kind(sent.name, sent.queue).text if sent.name else ""
