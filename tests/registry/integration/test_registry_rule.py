"""Random sequences of what can happen to a task, in Redis and by the rule in Python.

``RABBITDELAY_SEQUENCES`` says how many are played on one server, and ``RABBITDELAY_SEED`` which
ones; on a cluster, a fourth as many are.
"""

import os
import random
from collections.abc import Callable
from typing import Any, Final

import pytest

from celery_rabbitdelay.levels.headers import Mark
from celery_rabbitdelay.registry import decision as model
from celery_rabbitdelay.registry.decision import (
    EMPTY,
    Arrival,
    Registration,
    Ticket,
    Verdict,
    new_copy,
)
from celery_rabbitdelay.registry.jobs import JobState
from celery_rabbitdelay.registry.record import record_of
from celery_rabbitdelay.registry.registry import Earlier, Registry
from tests.registry.integration.registering import MARGIN_MS, RedisSetup, now_ms
from tests.registry.registry_message import Message

SEQUENCES: Final = int(os.environ.get("RABBITDELAY_SEQUENCES", "800"))
SEED: Final = int(os.environ.get("RABBITDELAY_SEED", "0"))

#: Steps of a sequence at most, and messages of its task.
STEPS: Final = 14
MESSAGES: Final = 4

#: Milliseconds that decisions are kept, and when a message was due for which that is over.
SHORT_MS: Final = 60_000
LONG_AGO: Final = -100

QUEUE: Final = "queue"


class Sequence:
    """A task, and what happens to it.

    Args:
        registry: The registry, in Redis.
        chance: What decides.
        name: The name of task, key and job.
    """

    def __init__(self, registry: Registry, chance: random.Random, name: str) -> None:
        self.registry = registry
        self.chance = chance
        self.task_id = self.key = self.job = name
        self.base_ms = now_ms() + 10_000
        self.record = EMPTY
        self.newest, self.holder = 0, ""
        self.job_state, self.job_id = "", ""
        self.is_paused = False
        self.has_key = chance.random() < 0.4
        self.has_name = self.has_key or chance.random() < 0.8
        self.once = chance.random() < 0.4
        if chance.random() < 0.3:
            registry.jobs.open(self.job, 3_600_000)
            state, self.job_id = registry.jobs.join(self.job, self.base_ms)
            assert state is JobState.OPEN
            self.job_state = "open"
        self.is_listed = False
        self.messages: list[Message] = []
        self.told: list[str] = []

    def play(self) -> None:
        """Take steps; raise where Redis says something else than the rule."""
        steps: list[Callable[[], None]] = [
            *(self.send, self.send, self.retry, self.replace, self.copy, self.cancel),
            *[self.arrive] * 6,
            *(self.postpone, self.postpone, self.supersede, self.end_job, self.forget, self.pause),
        ]
        self.send()
        for _ in range(self.chance.randrange(3, STEPS)):
            self.chance.choice(steps)()
            is_listed = bool(self.registry.index.tasks([self.task_id]))
            assert is_listed == self.is_listed, (is_listed, self.record, self.told)
            found = record_of(self.registry, self.task_id)
            shown = "unknown" if found is None else f"{found.state.value} {found.key} {found.job}"
            assert shown.startswith(self.shown), (shown, self.shown, self.record, self.told)

    @property
    def shown(self) -> str:
        """How the state of the task has to begin."""
        record = self.record
        if record.is_cancelled(record.life):
            return "cancelled"
        if record.waits is not None:
            return "superseded" if 0 < record.order < self.newest else "waiting"
        if record.dropped:
            verdict, _, by = record.dropped.partition(" ")
            return f"{verdict} {by} None" if verdict == "superseded" else f"{verdict} None {by}"
        if record.ran is not None:
            return "arrived"
        return "unknown" if record.not_before is None else "noted"

    def ms(self, due: int) -> int:
        return self.base_ms + due * 1000

    def arrival(self, message: Message) -> Arrival:
        return Arrival(
            self.task_id,
            self.ms(message.due),
            message.attempt,
            message.copy,
            Ticket(message.life, message.order),
            self.key if message.order else "",
            self.job if message.in_job else "",
            self.job_id if message.in_job else "",
            QUEUE if message.once else "",
            Mark(message.name, message.generation, message.former),
            new_copy() if message.once else "",
            message.redelivered,
            message.in_doubt,
            # One that was due long ago and is not old was put back since.
            0 if message.is_old or message.due != LONG_AGO else now_ms(),
            self.base_ms if self.is_paused else 0,
        )

    def word(self, message: Message) -> str:
        if message.order and message.order < self.newest:
            return "replaced" if self.holder == self.task_id else "superseded"
        if not message.in_job:
            return "run"
        return {"open": "later", "committed": "run", "aborted": "expired"}[self.job_state]

    def claim(self, message: Message, holder: str) -> None:
        if message.order > self.newest:
            self.newest, self.holder = message.order, holder

    def say(self, what: str, found: object, expected: object) -> None:
        self.told.append(f"{what}: {found}")
        assert found == expected, f"{what}: {found} in Redis, {expected} by the rule; {self.told}"

    def arrive(self) -> None:
        if not self.messages:
            return
        message = self.chance.choice(self.messages)
        self.messages.remove(message)
        word = self.word(message)
        self.claim(message, self.task_id)
        arrival = self.arrival(message)
        sent = message.arrival(arrival.name, self.is_paused)
        sent = sent._replace(key=arrival.key, job=arrival.job)
        given = (sent, word, message.is_old)
        self.record, expected = model.arrive(self.record, *given)
        (decision,) = self.registry.decide([arrival])
        self.is_listed &= self.record.waits is not None
        found = str(decision.until_ms) if decision.is_new_due else decision.verdict.value
        if expected.isdigit() or expected.startswith("-"):
            self.say(f"arrive {message}", found, str(self.ms(int(expected))))
            message = message._replace(due=int(expected), is_old=False)
        else:
            expected = "later" if expected == "paused" else expected
            self.say(f"arrive {message}", found, expected)
        # It may be delivered again: because it waits, its answer was lost, or its worker is killed.
        if decision.verdict is Verdict.LATER:
            message = message._replace(is_old=False)
        again = (Verdict.LATER, Verdict.RUN, Verdict.DUPLICATE)
        if decision.verdict in again and self.chance.random() < 0.7:
            redelivered = message.redelivered or self.chance.random() < 0.3
            message = message._replace(redelivered=redelivered)
            is_put_back = message.once and self.chance.random() < 0.5
            self.messages.append(message.put_back(arrival.name) if is_put_back else message)

    def pause(self) -> None:
        self.is_paused = not self.is_paused

    def send(
        self, attempt: str = "0.0", life: int | None = None, due: int = 5, order: int | None = None
    ) -> None:
        if len(self.messages) >= MESSAGES:
            return
        (ticket,) = self.registry.ask([(self.task_id, self.key if self.has_key else "")])
        self.say("ask", ticket.life, model.next_life(self.record))
        assert not self.has_key or ticket.order > self.newest
        if life is None:
            is_known = self.once or self.chance.random() < 0.9
            life = (0 if self.once else ticket.life) if is_known else -1
        message = Message(
            new_copy() if self.has_name else "",
            life,
            attempt,
            due,
            ticket.order if order is None else order,
            self.once,
            new_copy() if self.once else "",
            in_job=bool(self.job_state),
        )
        self.messages.append(message)
        if message.copy and self.chance.random() < 0.8:
            self.register(message)

    def register(self, message: Message) -> None:
        self.record, expected = model.register(self.record, message.registration)
        self.claim(message, self.task_id)
        (found,) = self.registry.register([self.registration(message)])
        is_superseded = message.order and self.word(message) == "superseded"
        if self.record.copy == message.copy:
            self.is_listed = not is_superseded
        self.say(f"register {message}", found, "superseded" if is_superseded else expected)

    def registration(self, message: Message) -> Registration:
        arrival = self.arrival(message)
        known = (arrival.task_id, arrival.copy, arrival.due_ms, arrival.attempt, arrival.ticket)
        return Registration(*known, arrival.key, "name", arrival.job, "to send")

    def _after(self, retries: int, nesting: int) -> None:
        """Send what follows an attempt that runs."""
        won = [full for full, _ in self.record.won if full[0].isdigit()]
        if won:
            life, attempt = self.chance.choice(sorted(won))
            before = [int(part) for part in attempt.split(".")]
            self.send(f"{before[0] + retries}.{before[1] + nesting}", int(life))

    def retry(self) -> None:
        self._after(1, 0)

    def replace(self) -> None:
        self._after(0, 1)

    def copy(self) -> None:
        """RabbitMQ has a message twice."""
        if self.messages and len(self.messages) < MESSAGES:
            self.messages.append(self.chance.choice(self.messages))

    def cancel(self) -> None:
        also_future = self.chance.random() < 0.6
        self.record, expected = model.cancel(self.record, self.newest, also_future)
        self.is_listed &= self.record.waits is not None
        (found,) = self.registry.cancel([self.task_id], also_future)
        self.say("cancel", found.value, expected)

    def postpone(self) -> None:
        due, newest = self.chance.choice((1, 3, 9)), self.newest
        waits, order = self.record.waits, self.record.order
        is_listed = not (order and order < newest)
        also_future = self.chance.random() < 0.6
        self.record, expected = model.postpone(self.record, due, newest, also_future)
        found = self.registry.postpone(self.task_id, self.ms(due), also_future)
        if not isinstance(found, Earlier):
            self.say(f"postpone to {due}", found.value, expected)
            return
        assert is_listed
        self.say(f"postpone to {due}", "earlier", expected)
        assert found == Earlier("name", "to send")
        if waits is not None and self.chance.random() < 0.8:
            life, attempt = waits
            self.send(attempt, int(life) if life.isdigit() else -1, due, order)

    def supersede(self) -> None:
        if self.has_key:
            (ticket,) = self.registry.ask([("", self.key)])
            newer = Registration(f"{self.task_id}-newer", new_copy(), self.ms(5), key=self.key)
            found = self.registry.register([newer._replace(ticket=ticket)])
            assert found == ["waiting"]
            if self.holder == self.task_id and self.record.order < ticket.order:
                self.is_listed = False
            self.newest, self.holder = ticket.order, newer.task_id

    def end_job(self) -> None:
        if self.job_state == "open":
            self.job_state = self.chance.choice(("committed", "aborted"))
            self.registry.jobs.end(self.job, JobState(self.job_state))

    def forget(self) -> None:
        """Let a long time pass, in which Redis forgets."""
        if self.chance.random() < 0.7:
            return
        names = self.registry.names

        def forget(pipeline: Any) -> None:
            pipeline.delete(names.of("task", self.task_id))
            pipeline.delete(names.of("key", self.key))

        self.registry.store.commands(forget)
        self.record, self.newest, self.holder = EMPTY, 0, ""
        self.is_listed = False
        self.messages = [each._replace(is_old=True, due=LONG_AGO) for each in self.messages]


@pytest.mark.timeout(3600)
def test_the_scripts_decide_as_the_rule_does(redis_setup: RedisSetup, prefix: str) -> None:
    store = redis_setup.connect()
    registry = Registry(store, prefix, SHORT_MS, MARGIN_MS)
    chance = random.Random(SEED)
    for number in range(SEQUENCES // 4 if store.is_cluster else SEQUENCES):
        Sequence(registry, chance, f"task-{number}").play()
    store.close()
