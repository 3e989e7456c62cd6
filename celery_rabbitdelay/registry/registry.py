"""The registry of one prefix: records of waiting tasks, consulted when their messages arrive."""

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
from celery_rabbitdelay.registry.index import Index, Kind, Names
from celery_rabbitdelay.registry.jobs import Jobs, JobState
from celery_rabbitdelay.registry.pauses import Pauses, Questions
from celery_rabbitdelay.registry.store import UNREADABLE, ScriptCall, Store, readable

#: How long the cancellation of an unknown task is kept, in milliseconds: ten years. Its message may
#: arrive at any time.
NOTE_MS: Final = 315_360_000_000

#: The longest life of a record, in milliseconds: a hundred years. Without this limit, a sender
#: could make a record live forever, because a message may have any due time.
MAX_LIFE_MS: Final = 100 * 366 * 86_400_000

#: The longest wait for the lock of :meth:`Registry.alone`, and the pause between two attempts, in
#: seconds.
ALONE_LEASE: Final = 10.0
LEASE_SLEEP: Final = 0.02

#: The beginning of an answer of ``claim.lua``: the task is the newest with its key. The id of the
#: previous newest task follows.
_NEWEST: Final = "newest "

#: The beginning of an answer of ``cancel.lua``: a waiting task with a key was cancelled. The task's
#: order and key follow.
_DONE: Final = "done "

#: The answer of ``arrive.lua`` about a task that only a pause keeps from running.
_PAUSED: Final = "paused"

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")


#: Seconds for which a :class:`Breaker` is open after a failure.
PAUSE: Final = 2.0


class Breaker:
    """A circuit breaker: after a failure, calls fail at once for :data:`PAUSE` seconds.

    Args:
        now: Returns the time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._again_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether calls fail without asking Redis."""
        return self._now() < self._again_at

    def call(self, ask: Callable[[], AnswerT]) -> AnswerT:
        """Make a call unless the breaker is open, and return its result.

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
    """A postponement to an earlier time: the caller has to send a second message.

    Attributes:
        name: The task's name.
        message: The stored message of the task; empty if the task is not tracked.
    """

    name: str
    message: str


class Registry:
    """The records of the tasks under one prefix.

    All methods raise :class:`.RegistryUnavailable` if Redis refuses a command or answers too late.

    Args:
        store: Redis.
        prefix: The prefix of all keys; the same as the prefix of the levels.
        keep_ms: How long a decision is kept after its task, in milliseconds.
        margin_ms: How late a task may be, in milliseconds. Later tasks are not listed, and the
            names of their jobs are free.

    Attributes:
        index: The tracked tasks under the prefix.
        jobs: The jobs under the prefix.
        pauses: The pauses under the prefix.
        names: The names of all keys.
        store: Redis.
        breaker: Makes calls fail at once for a while after Redis has not answered.
        keep_ms: How long a decision is kept after its task, in milliseconds.
    """

    def __init__(self, store: Store, prefix: str, keep_ms: int, margin_ms: int) -> None:
        self.store = store
        self.names: Names = Names(prefix)
        self.pauses: Pauses = Pauses(store, self.names)
        self.index: Index = Index(store, self.names, margin_ms, self.pauses.oldest_ms)
        self.jobs: Jobs = Jobs(store, self.names, keep_ms, margin_ms)
        self.breaker: Breaker = Breaker()
        self.keep_ms = keep_ms
        self._questions = Questions()
        self._unreadable = WarningLimit(logger, "Tasks that were sent but not registered")

    def close(self) -> None:
        """Close the connections to Redis."""
        self.store.close()

    def reserve(self, name: str, number: int, per_second: float) -> float:
        """Reserve room for tasks at a rate that several senders share.

        Args:
            name: The name of the rate; the same for all its senders.
            number: The number of tasks.
            per_second: The rate of all senders together, in tasks per second.

        Returns:
            The seconds to wait before sending the tasks.
        """
        call = ScriptCall("reserve", [self.names.of("rate", name)], [(number, per_second)])
        ((wait_ms,),) = self.store.of_each(call)
        return float(wait_ms) / 1000

    def now_ms(self) -> int:
        """Return the time by the clock of Redis, in milliseconds since 1970-01-01 UTC.

        In a cluster, return the latest time of all servers: every registered task was sent before.
        """
        keys = self.names.in_shards("now")[: None if self.store.is_cluster else 1]
        (answers,) = self.store.of_each(ScriptCall("ask", keys, [("key",)] * len(keys)))
        return max(map(int, answers)) // 1000

    def ask(self, tasks: Sequence[tuple[str, str]]) -> list[Ticket]:
        """Return the tickets for tasks that are about to be sent, without writing anything.

        Args:
            tasks: The id and the key of every task. The id is empty for a new task; the key is
                empty for a task without a key.
        """
        ids = [task_id for task_id, _ in tasks if task_id]
        keys = [key for _, key in tasks if key]
        if not ids and not keys:
            keys = [""]  # still proves that Redis answers
        names = self.names.each("task", ids) + self.names.each("key", keys)
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
        """Decide whether arrived tasks run, with the rule in ``arrive.lua``.

        The decision takes one round trip per server, and a second one for tasks with a key, or with
        a job whose outcome is not cached. If an answer is lost, the call may be repeated.

        Args:
            arrivals: The tasks.
            notes: Whether to record the decisions. If False, the tasks keep waiting, and the
                registry does not look up their keys.
        """
        latest = wall_clock.ms() + MAX_LIFE_MS
        words = self._words_of_jobs(arrivals)
        if notes:
            words.update(self._words_of_keys(arrivals))
        fields = [
            (
                *(each.copy, str(each.ticket.life), each.attempt, str(min(each.due_ms, latest))),
                *(each.once, *each.identity, each.has_options),
                *(min(each.put_back_ms, latest), word, each.dropped_by(word), bool(each.paused_ms)),
            )
            for number, each in enumerate(arrivals)
            for word in (words.get(number, "run"),)
        ]
        records = self.names.each("task", [each.task_id for each in arrivals])
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
        if word.startswith(UNREADABLE):
            return Decision(Verdict.UNREADABLE, why=word.removeprefix(UNREADABLE), is_answer=False)
        return Decision(Verdict(word))

    def _words_of_jobs(self, arrivals: Sequence[Arrival]) -> dict[int, str]:
        """Return the verdicts of the arrivals' jobs, by position of the arrival."""
        asked = {(each.job, each.job_id) for each in arrivals if each.job}
        states = self.jobs.states(asked) if asked else {}
        words = {}
        for number, each in enumerate(arrivals):
            if each.job:
                state = states.get((each.job, each.job_id))
                words[number] = state if isinstance(state, str) else _WORDS[state]
        return words

    def _words_of_keys(self, arrivals: Sequence[Arrival]) -> Iterator[tuple[int, str]]:
        """Yield the position and the verdict of every arrival that its key keeps from running.

        Every arrival claims its key, in case the sender died before it could claim the key.
        """
        keyed = [number for number, each in enumerate(arrivals) if each.key and each.ticket.order]
        if not keyed:
            return
        (claimed,) = self.store.of_each(self._claims([arrivals[number] for number in keyed]))
        for number, word in zip(keyed, claimed, strict=True):
            if not word.startswith(_NEWEST):
                yield number, word

    def _claims(self, claims: Sequence[Arrival | Registration]) -> ScriptCall:
        """Return the call that finds out which tasks are the newest of their keys."""
        latest = wall_clock.ms() + MAX_LIFE_MS
        fields = [
            (str(each.ticket.order), each.task_id, str(min(each.due_ms, latest))) for each in claims
        ]
        keys = self.names.each("key", [each.key for each in claims])
        return ScriptCall("claim", keys, fields, self.keep_ms)

    def register(self, registrations: Sequence[Registration]) -> list[str]:
        """Record messages that the broker has confirmed; a task with a key supersedes older ones.

        Repeating the call changes nothing. The call takes one round trip per server, and a second
        one if it has to remove superseded tasks from the index.

        Returns:
            The state of every task: ``waiting``, ``arrived`` (this message was allowed to run),
            ``released`` (another message of the attempt was allowed to run), ``cancelled``, or
            ``superseded`` (a newer task has its key). For an unreadable record, an error text,
            which is also logged.
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
            ScriptCall("register", self.names.each("task", ids), fields, self.keep_ms),
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
            self.store.of_each(ScriptCall("unlist", self.names.each("task", list(older)), orders))
        for task_id, word in zip(ids, states, strict=True):
            if word.startswith(UNREADABLE) and self._unreadable.allows(word):
                logger.error("Task %s was sent but not registered: %s", task_id, word)
        return states

    def cancel(self, task_ids: Sequence[str], also_future: bool = True) -> list[Outcome]:
        """Cancel tasks: when their messages arrive, the tasks do not run.

        Args:
            task_ids: The ids of the tasks.
            also_future: Whether to cancel unknown ids too: tasks without ``track`` and key, and
                tasks that are sent later.

        Raises:
            RegistryUnavailable: Redis did not answer, or the record of a task cannot be read. In
                the second case, all other tasks are cancelled.
        """
        found = zip(task_ids, self.cancel_each(task_ids, also_future), strict=True)
        return [readable(f"the record of task {task_id}", outcome) for task_id, outcome in found]

    def cancel_each(self, task_ids: Sequence[str], also_future: bool = True) -> list[Outcome | str]:
        """Cancel tasks like :meth:`cancel`, reporting unreadable records instead of raising.

        Returns:
            The outcome for every task, or an error text if its record cannot be read.

        Raises:
            RegistryUnavailable: Redis did not answer; some of the tasks may be cancelled.
        """
        ids = list(dict.fromkeys(task_ids))
        nothing: list[tuple[str, ...]] = [()] * len(ids)
        shared = NOTE_MS + self.keep_ms, int(also_future)
        call = ScriptCall("cancel", self.names.each("task", ids), nothing, self.keep_ms, shared)
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
        """Return the order of the newest task of every key in the answers of ``cancel.lua``."""
        keyed = (answer.split(" ", 2) for answer in answers if answer.startswith(_DONE))
        keys = list(dict.fromkeys(key for _, _, key in keyed))
        if not keys:
            return {}
        names = self.names.each("key", keys)
        newest = self.store.commands(lambda pipe: [pipe.get(name) for name in names])
        orders = [(each or "").partition(" ")[0] for each in newest]
        return dict(zip(keys, (int(each) if each.isdigit() else 0 for each in orders), strict=True))

    def waiting_under(self, key: str) -> list[str]:
        """Return a list with the id of the newest task under a key, or an empty list."""
        order, task_id = self.newest_under(key)
        return [task_id] if order else []

    def newest_under(self, key: str) -> tuple[str, str]:
        """Return the order and the id of the newest task under a key, or two empty strings."""
        (found,) = self.store.commands(lambda pipeline: pipeline.get(self.names.of("key", key)))
        order, _, task_id = (found or "").partition(" ")
        return order, task_id

    def postpone(self, task_id: str, due_ms: int, also_future: bool = True) -> Outcome | Earlier:
        """Change the due time of a task.

        Args:
            task_id: The task's id.
            due_ms: The new due time, in milliseconds since 1970-01-01 UTC.
            also_future: As for :meth:`cancel`.

        Returns:
            The outcome. If the new due time is earlier than the first due time of all messages, an
            :class:`Earlier`: the caller then sends and registers another message.
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
        """Hold the lock with this name while a block runs.

        The lock expires: if its holder dies or takes too long, the next caller proceeds.
        """
        lease = partial(self.store.lease, self.names.of("alone", name), new_copy())
        end = time.monotonic() + ALONE_LEASE
        while not lease(int(ALONE_LEASE * 1000)) and time.monotonic() < end:
            time.sleep(LEASE_SLEEP)
        try:
            yield
        finally:
            with suppress(RegistryUnavailable):  # the lease expires by itself
                lease(0)


#: The verdict on a job's tasks by the job's state; None stands for a job that Redis has lost.
_WORDS: Final = {
    None: "run",
    JobState.COMMITTED: "run",
    JobState.OPEN: "later",
    JobState.ABORTED: "expired",
}


def _kind(sent: Registration) -> str:
    """Return the kind under which a task is indexed; empty if it is not tracked."""
    return Kind(sent.name, sent.queue).text if sent.name else ""
