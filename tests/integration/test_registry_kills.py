"""What the registry promises holds although processes are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from typing import Any
from uuid import uuid4

from celery.states import REVOKED

from celery_rabbitdelay import Outcome
from celery_rabbitdelay.testing import wait_for
from tests.integration.notes import Notes
from tests.integration.registry_fixtures import module_settings, module_worker, redis_setup, shop
from tests.integration.shop import PATIENCE, named
from tests.integration.worker import ShopProcess, Worker

__all__ = ["module_settings", "module_worker", "redis_setup", "shop"]

#: Seconds; long enough to kill the process that decides about a task before the task is due.
LONG = 15.0


def run_program(
    configuration: dict[str, Any], what: str, given: dict[str, Any], step: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one of the programs of :mod:`tests.integration.registry_shop` to its end."""
    return ShopProcess.run_module(
        "tests.integration.registry_shop",
        configuration,
        *([what] if step is None else [what, str(step)]),
        given=json.dumps(given),
    )


def test_a_cancelled_task_never_runs_although_all_workers_were_killed(
    module_settings: dict[str, Any], make_shop: Any, prefix: str
) -> None:
    # Queues that no other worker serves.
    configuration = {**module_settings, "prefix": prefix, "rabbitdelay_prefix": prefix}
    shop, due = make_shop(**configuration), time.time() + LONG
    noted = Notes(shop)
    with Worker(configuration) as worker:
        results = {
            "plain": noted.send("plain", delay=LONG),
            "tracked": noted.send("tracked", delay=LONG, track=True),
            "meditates": noted.send("meditates", delay=LONG),
            "fanout": noted.send(
                "fanout", delay=LONG, exchange=named(shop, "fanout"), routing_key="x"
            ),
            "priority": noted.send("priority", delay=LONG, priority=9),
        }
        ids = [uuid4().hex for _ in range(5)]
        rows = [noted.row("row", delay=LONG, task_id=each) for each in ids]
        shop.rabbitdelay.send_many("note", rows, envelopes=True)
        retried = shop.tasks["retry"].apply_async(([], 2, {"countdown": LONG}))
        wait_for(lambda: retried.state == "RETRY", "the retry", PATIENCE)
        results |= {"retry": retried, **{each: shop.AsyncResult(each) for each in ids}}
        for name, result in results.items():
            outcome = shop.rabbitdelay.cancel(result)
            assert outcome is (Outcome.DONE if name == "tracked" else Outcome.NOTED)
        worker.kill()
    shop.rabbitdelay.registry.cancel([uuid4().hex for _ in range(60_000)])
    with Worker(configuration):
        assert noted.until(due - time.time()) == []
        wait_for(
            lambda: all(result.state == REVOKED for result in results.values()),
            "all results",
            PATIENCE,
        )


def test_of_a_hundred_supersedes_by_two_processes_at_once_the_last_one_runs(
    module_settings: dict[str, Any], shop: Any, noted: Notes
) -> None:
    key = f"order:{uuid4().hex}"
    options = {"key": key, "delay": 20, "kwargs": {"key": noted.key}}
    with Worker(module_settings):
        programs = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.integration.registry_shop", "supersede"],
                env={**os.environ, **ShopProcess.environment(module_settings)},
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
        (found,) = noted.until(20)
    assert found in ("a-49", "b-49")
    assert shop.AsyncResult(newest).state == "SUCCESS"


def test_a_supersede_whose_process_is_killed_before_it_is_registered_leaves_the_earlier_task(
    module_settings: dict[str, Any], shop: Any, noted: Notes
) -> None:
    def options(name: str, key: str) -> dict[str, Any]:
        return {"args": [name], "kwargs": {"key": noted.key}, "delay": LONG, "key": key}

    counted = run_program(module_settings, "send", options("unused", f"unused:{uuid4().hex}"))
    count = int(counted.stdout)
    # Before and after the registry is asked (1, 2), it is published (3, 4), and registered (5, 6).
    assert count == 6
    for step in range(1, count + 1):
        key = f"order:{uuid4().hex}"
        shop.tasks["note"].apply_async(**options(f"first-{step}", key))
        killed = run_program(module_settings, "send", options(f"second-{step}", key), step)
        assert killed.returncode == -signal.SIGKILL
    found = noted.until(LONG)
    for step in range(1, 6):
        assert f"first-{step}" in found, "it was silenced by a send that did not return"
    for step in range(6, count + 1):
        assert f"first-{step}" not in found
        assert f"second-{step}" in found


def test_a_job_whose_end_is_killed_before_or_after_its_write_runs_as_a_whole_or_not_at_all(
    module_settings: dict[str, Any], shop: Any, noted: Notes
) -> None:
    for verb in ("commit", "abort"):
        for step in (1, 2):
            job = f"{verb}-{step}-{noted.key}"
            # The others may expire at any time.
            is_committed = (verb, step) == ("commit", 2)
            shop.rabbitdelay.open_job(job, expires=120 if is_committed else 8)
            rows = [noted.row((verb, step), delay=0.3)] * 50
            shop.rabbitdelay.send_many(shop.tasks["note"], rows, job=job)
            killed = run_program(module_settings, verb, {"job": job}, step)
            assert killed.returncode == -signal.SIGKILL
    wait_for(lambda: len(noted()) >= 50, "the committed job", PATIENCE)
    assert noted.until(15) == [["commit", 2]] * 50


def test_a_task_that_is_moved_to_earlier_runs_once_although_the_process_is_killed(
    module_settings: dict[str, Any], noted: Notes
) -> None:
    def sent(word: str) -> str:
        return str(noted.send(word, delay=LONG, track=True).id)

    whole = {"task_id": sent("whole"), "delay": 1}
    count = int(run_program(module_settings, "postpone", whole).stdout)
    # Around the question, the publish and the registration.
    assert count == 6
    for step in range(1, count + 1):
        one = {"task_id": sent(f"killed-{step}"), "delay": 1}
        assert run_program(module_settings, "postpone", one, step).returncode == -signal.SIGKILL
    found = noted.until(LONG)
    assert Counter(found) == Counter(["whole", *(f"killed-{step}" for step in range(1, count + 1))])
