"""What the registry promises holds although processes are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from celery.states import REVOKED
from kombu.exceptions import EncodeError

from celery_rabbitdelay import Outcome, Row
from celery_rabbitdelay.testing import wait_for
from tests.integration.shop import PATIENCE, named
from tests.integration.worker import ShopProcess, Worker

#: Seconds; long enough to kill the process that decides about a task before the task is due.
LONG = 8.0


@pytest.fixture
def settings(configuration: dict[str, Any], redis_url: str) -> dict[str, Any]:
    return {**configuration, "rabbitdelay_registry_url": redis_url}


@pytest.fixture
def shop(settings: dict[str, Any], make_shop: Callable[..., Any]) -> Any:
    return make_shop(**settings)


@pytest.fixture
def worker(settings: dict[str, Any], shop: Any) -> Iterator[Worker]:
    with Worker(settings) as worker:
        yield worker


@pytest.fixture
def note(shop: Any) -> Iterator[str]:
    """The list in Redis in which tasks note that they ran."""
    key = f"noted-{uuid4().hex}"
    yield key
    shop.backend.client.delete(key)


def given(shop: Any, note: str) -> list[list[Any]]:
    """Return the arguments of the tasks that ran."""
    return [json.loads(each)["given"] for each in shop.backend.client.lrange(note, 0, -1)]


def ran(shop: Any, note: str) -> list[Any]:
    """Return the first arguments of the tasks that ran."""
    return [arguments[0] for arguments in given(shop, note)]


def wait_for_a_later_task(shop: Any, note: str, due: float) -> None:
    """Wait until a task has run that is due after all others."""
    word = f"barrier-{uuid4().hex}"
    delay = max(due - time.time(), 0) + 0.5
    shop.tasks["note"].apply_async((word,), {"key": note}, delay=delay)
    wait_for(lambda: word in ran(shop, note), "a later task", delay + PATIENCE)


def without_barriers(found: list[Any]) -> list[Any]:
    return [each for each in found if not str(each).startswith("barrier-")]


def run_program(
    settings: dict[str, Any], what: str, given: dict[str, Any], step: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one of the programs of :mod:`tests.integration.registry_shop` to its end."""
    arguments = [what] if step is None else [what, str(step)]
    return subprocess.run(
        [sys.executable, "-m", "tests.integration.registry_shop", *arguments],
        env={**os.environ, **ShopProcess.environment(settings)},
        input=json.dumps(given),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )


@pytest.mark.timeout(300)
def test_a_cancelled_task_never_runs_although_all_workers_were_killed(
    settings: dict[str, Any], shop: Any, note: str
) -> None:
    task = shop.tasks["note"]
    due = time.time() + LONG
    kwargs: dict[str, Any] = {"kwargs": {"key": note}}
    with Worker(settings) as worker:
        results = {
            "plain": task.apply_async(("plain",), delay=LONG, **kwargs),
            "tracked": task.apply_async(("tracked",), delay=LONG, track=True, **kwargs),
            "meditates": task.apply_async(("meditates",), delay=LONG, **kwargs),
            "fanout": task.apply_async(
                ("fanout",), delay=LONG, exchange=named(shop, "fanout"), routing_key="x", **kwargs
            ),
            "priority": task.apply_async(("priority",), delay=LONG, priority=9, **kwargs),
        }
        ids = [uuid4().hex for _ in range(5)]
        rows = [Row(args=("row",), kwargs={"key": note}, delay=LONG, task_id=each) for each in ids]
        shop.rabbitdelay.send_many(task, rows, envelopes=True)
        retried = shop.tasks["retry"].apply_async(([], 2, {"countdown": LONG}))
        wait_for(lambda: retried.state == "RETRY", "the retry", PATIENCE)
        results |= {"retry": retried, **{each: shop.AsyncResult(each) for each in ids}}
        for name, result in results.items():
            outcome = shop.rabbitdelay.cancel(result)
            assert outcome is (Outcome.DONE if name == "tracked" else Outcome.UNKNOWN)
        worker.kill()
    shop.rabbitdelay.registry.cancel([uuid4().hex for _ in range(60_000)])
    with Worker(settings):
        wait_for_a_later_task(shop, note, due)
        wait_for(
            lambda: all(result.state == REVOKED for result in results.values()),
            "all results",
            PATIENCE,
        )
    assert without_barriers(ran(shop, note)) == []


@pytest.mark.timeout(300)
def test_of_a_hundred_supersedes_by_two_processes_at_once_the_last_one_runs(
    settings: dict[str, Any], shop: Any, worker: Worker, note: str
) -> None:
    key = f"order:{uuid4().hex}"
    options = {"key": key, "delay": 6, "kwargs": {"key": note}}
    with Worker(settings):
        programs = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.integration.registry_shop", "supersede"],
                env={**os.environ, **ShopProcess.environment(settings)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        for name, program in zip("ab", programs, strict=True):
            assert program.stdin is not None
            json.dump({"name": name, "times": 50, "options": options}, program.stdin)
            program.stdin.close()
        for program in programs:
            assert program.wait(timeout=PATIENCE) == 0
        (newest,) = shop.rabbitdelay.registry.waiting_under(key)
        wait_for_a_later_task(shop, note, time.time() + 6)
    last = {"a-49", "b-49"}
    found = without_barriers(ran(shop, note))
    assert len(found) == 1, found
    assert found[0] in last
    assert shop.AsyncResult(newest).state == "SUCCESS"


@pytest.mark.timeout(300)
def test_a_supersede_whose_process_is_killed_before_it_is_registered_leaves_the_earlier_task(
    settings: dict[str, Any], shop: Any, worker: Worker, note: str
) -> None:
    def options(name: str, key: str) -> dict[str, Any]:
        return {"args": [name], "kwargs": {"key": note}, "delay": LONG, "key": key}

    counted = run_program(settings, "send", options("unused", f"unused:{uuid4().hex}"))
    count = int(counted.stdout)
    # Before and after the registry is asked (1, 2), it is published (3, 4), and registered (5, 6).
    assert count == 6
    for step in range(1, count + 1):
        key = f"order:{uuid4().hex}"
        shop.tasks["note"].apply_async(**options(f"first-{step}", key))
        killed = run_program(settings, "send", options(f"second-{step}", key), step)
        assert killed.returncode == -signal.SIGKILL
    wait_for_a_later_task(shop, note, time.time() + LONG)
    found = without_barriers(ran(shop, note))
    for step in range(1, 6):
        assert f"first-{step}" in found, "it was silenced by a send that did not return"
    for step in range(6, count + 1):
        assert f"first-{step}" not in found
        assert f"second-{step}" in found


@pytest.mark.timeout(300)
def test_a_supersede_that_cannot_be_published_leaves_the_earlier_task_alone(
    shop: Any, worker: Worker, note: str
) -> None:
    key = f"order:{uuid4().hex}"
    task = shop.tasks["note"]
    task.apply_async(("first",), {"key": note}, delay=2, key=key)
    with pytest.raises(EncodeError):
        task.apply_async(("second", object()), {"key": note}, delay=1, key=key)
    wait_for_a_later_task(shop, note, time.time() + 2)
    assert without_barriers(ran(shop, note)) == ["first"]


@pytest.mark.timeout(300)
def test_a_job_whose_end_is_killed_before_or_after_its_write_runs_as_a_whole_or_not_at_all(
    settings: dict[str, Any], shop: Any, worker: Worker, note: str
) -> None:
    for verb in ("commit", "abort"):
        for step in (1, 2):
            job = f"{verb}-{step}-{note}"
            shop.rabbitdelay.open_job(job, expires=8)
            rows = [Row(args=(verb, step), kwargs={"key": note}, delay=0.3) for _ in range(50)]
            shop.rabbitdelay.send_many(shop.tasks["note"], rows, job=job)
            killed = run_program(settings, verb, {"job": job}, step)
            assert killed.returncode == -signal.SIGKILL
    wait_for(lambda: len(ran(shop, note)) >= 50, "the committed job", PATIENCE)
    wait_for_a_later_task(shop, note, time.time() + 15)
    found = [each for each in given(shop, note) if len(each) == 2]
    assert found == [["commit", 2]] * 50


@pytest.mark.timeout(300)
def test_a_task_that_is_moved_to_earlier_runs_once_although_the_process_is_killed(
    settings: dict[str, Any], shop: Any, worker: Worker, note: str
) -> None:
    def sent(word: str) -> str:
        options = {"args": [word], "kwargs": {"key": note}, "delay": LONG, "track": True}
        return str(shop.tasks["note"].apply_async(**options).id)

    whole = {"task_id": sent("whole"), "delay": 1}
    count = int(run_program(settings, "postpone", whole).stdout)
    # Around the question, the publish and the registration.
    assert count == 6
    for step in range(1, count + 1):
        one = {"task_id": sent(f"killed-{step}"), "delay": 1}
        assert run_program(settings, "postpone", one, step).returncode == -signal.SIGKILL
    wait_for_a_later_task(shop, note, time.time() + LONG)
    found = without_barriers(ran(shop, note))
    assert Counter(found) == Counter(["whole", *(f"killed-{step}" for step in range(1, count + 1))])
