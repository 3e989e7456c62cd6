"""Random sequences of what users do to tasks that wait, against a model of a page.

A real broker, a Redis of its own for the registry, and a worker process; delays of some seconds.
``RABBITDELAY_SEQUENCES`` says how many sequences are played.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from celery_rabbitdelay import NotTracked, Outcome, RegistryUnavailable
from celery_rabbitdelay.testing import RedisServer, wait_for
from tests.integration.shop import make_app
from tests.integration.worker import Worker

#: How many sequences are played, and how long each is at most.
SEQUENCES = int(os.environ.get("RABBITDELAY_SEQUENCES", "4"))
STEPS = 25

#: Seconds until everything that has to run has run.
PATIENCE = 90

KEYS = (None, None, "a", "b")
DELAYS = st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.5])


@dataclass
class Expected:
    """What the model knows of one task.

    Attributes:
        runs: Whether it has to run; None if it may.
        not_before: The instant before which it must not run.
        key: Its key.
        due: When it leaves the levels, as far as anybody has decided.
        tracked: Whether the registry knows of it.
        first_due: When it was due as it was sent.
    """

    runs: bool | None
    not_before: float
    key: str | None
    due: float
    tracked: bool
    first_due: float = field(init=False)

    def __post_init__(self) -> None:
        self.first_due = self.due

    def stop(self, certain: bool) -> None:
        """Note that it was told not to run; that is certain if it cannot have arrived before."""
        if self.runs is not False:
            self.runs = False if certain else None


class Registry(RuleBasedStateMachine):
    """Users, a worker and Redis, each doing what it likes."""

    broken = False

    def __init__(self) -> None:
        super().__init__()
        self.app = STAGE.app
        self.salt = uuid4().hex
        self.tasks: dict[str, Expected] = {}
        self.crashed = False
        self.was_lost = False

    @initialize()
    def start(self) -> None:
        STAGE.ensure()

    def _send(self, delay: float, key: str | None, **options: Any) -> tuple[str, float]:
        task_id = options.pop("task_id", uuid4().hex)
        if key is not None:
            options["key"] = f"{self.salt}:{key}"
        due = time.time() + delay
        given = {"key": self.salt}
        task = self.app.tasks["note"]
        task.apply_async((task_id,), given, task_id=task_id, delay=delay, **options)
        return task_id, due

    def _supersede(self, key: str | None, but: str) -> None:
        now = time.time()
        for task_id, other in self.tasks.items():
            if key is not None and other.key == key and task_id != but:
                other.stop(certain=now < other.due)

    @rule(delay=DELAYS, key=st.sampled_from(KEYS), track=st.booleans())
    def send(self, delay: float, key: str | None, track: bool) -> None:
        task_id, due = self._send(delay, key, track=track)
        self.tasks[task_id] = Expected(True, due, key, due, track and delay > 0)
        self._supersede(key, task_id)

    @rule(delay=DELAYS.filter(bool))
    def send_twice_with_once(self, delay: float) -> None:
        task_id, due = self._send(delay, None, once=True)
        self._send(delay, None, once=True, task_id=task_id)
        self.tasks[task_id] = Expected(True, due, None, due, False)

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.tasks)))
        expected = self.tasks[task_id]
        outcome = self.app.rabbitdelay.cancel(task_id)
        if expected.tracked and not self.was_lost:
            assert outcome is not Outcome.UNKNOWN
            if outcome is Outcome.RELEASED:
                # Celery's revoke may still come before its start.
                expected.runs = None if expected.runs else expected.runs
                return
        expected.stop(certain=outcome is Outcome.DONE or time.time() < expected.due)

    @precondition(lambda self: self.tasks)
    @rule(data=st.data(), delay=DELAYS.filter(bool))
    def postpone(self, data: st.DataObject, delay: float) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.tasks)))
        expected = self.tasks[task_id]
        later = time.time() + delay
        try:
            outcome = self.app.rabbitdelay.postpone(task_id, delay=delay)
        except NotTracked:
            assert not expected.tracked or self.was_lost
            return
        if outcome in (Outcome.RELEASED, Outcome.CANCELLED):
            return
        certain = outcome is Outcome.DONE or time.time() < expected.due
        if outcome is Outcome.UNKNOWN:
            # Nothing is known of when it was due, so it never runs before that.
            later = max(later, expected.first_due)
        if certain:
            expected.not_before = expected.due = later
        else:
            # It may have arrived before.
            expected.not_before = min(later, expected.not_before)

    @precondition(lambda self: not self.crashed)
    @rule()
    def crash_the_worker(self) -> None:
        self.crashed = True
        STAGE.crash_worker()

    @precondition(lambda self: not self.was_lost)
    @rule()
    def lose_redis(self) -> None:
        self.was_lost = True
        STAGE.redis.kill()
        with pytest.raises(RegistryUnavailable):
            self._send(5, "a")
        STAGE.redis.start()
        for expected in self.tasks.values():
            # What was noted is gone: what was not to run may run, and not when it was to.
            expected.not_before = min(expected.not_before, time.time() - 3600)
            expected.due = min(expected.due, expected.first_due)
            if expected.runs is False:
                expected.runs = None
            # Nothing is known of it any more, but its message says when it was sent under its key.
            expected.tracked = False

    def teardown(self) -> None:
        last = max([each.due for each in self.tasks.values()], default=0.0)
        barrier, _ = self._send(max(last - time.time(), 0) + 0.5, None)
        awaited = {name for name, each in self.tasks.items() if each.runs} | {barrier}
        try:
            wait_for(lambda: awaited <= self._runs().keys(), "the tasks that have to run", PATIENCE)
        except TimeoutError:
            missing = {n: self.tasks.get(n) for n in awaited - self._runs().keys()}
            raise AssertionError(f"never ran: {missing}") from None
        for task_id, at in self._runs().items():
            if task_id not in self.tasks:
                continue
            expected = self.tasks[task_id]
            assert expected.runs is not False, f"ran, and should not: {expected}"
            assert min(at) >= expected.not_before - 0.001, f"ran too early: {at}, {expected}"
            if not self.crashed and not self.was_lost:
                assert len(at) == 1, f"ran {len(at)} times: {expected}"
        STAGE.played += 1

    def _runs(self) -> dict[str, list[float]]:
        runs: dict[str, list[float]] = {}
        for each in self.app.backend.client.lrange(self.salt, 0, -1):
            seen = json.loads(each)
            runs.setdefault(seen["given"][0], []).append(seen["at"])
        return runs


class Stage:
    """The servers, shared by all sequences."""

    def __init__(self, configuration: dict[str, Any]) -> None:
        self.redis = RedisServer()
        self.redis.start()
        self.configuration = {
            **configuration,
            "task_acks_late": True,
            "rabbitdelay_registry_url": self.redis.url,
        }
        self.app: Any = make_app(self.configuration)
        self.worker = Worker(self.configuration)
        self.worker.start()
        self.played = 0

    def ensure(self) -> None:
        """Have a worker and Redis run, as at the start of each sequence."""
        if not self.redis.running:
            self.redis.start()

    def crash_worker(self) -> None:
        self.worker.kill()
        self.worker.start()

    def stop(self) -> None:
        self.worker.stop()
        self.app.close()
        self.redis.stop()


STAGE: Stage


@pytest.fixture
def stage(configuration: dict[str, Any]) -> Iterator[Stage]:
    global STAGE  # Hypothesis makes the machines
    STAGE = Stage(configuration)
    yield STAGE
    STAGE.stop()


@pytest.mark.timeout(1800)
def test_what_runs_how_often_and_not_before_when_is_what_the_model_says(stage: Stage) -> None:
    run_state_machine_as_test(
        Registry,
        settings=settings(
            max_examples=SEQUENCES,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            # Each sequence takes seconds, and a shorter one would take hundreds of them.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert stage.played >= SEQUENCES
