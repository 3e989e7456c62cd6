"""What the registry promises holds although processes are killed."""

import json
import signal
import time
from collections import Counter
from typing import Any
from uuid import uuid4

from celery.states import REVOKED

from celery_rabbitdelay import Outcome
from celery_rabbitdelay.testing import wait_for
from tests.kernel.integration.notes import Notes
from tests.kernel.integration.shop import PATIENCE, named
from tests.kernel.integration.worker import ShopProcess, Worker
from tests.registry.integration.registry_fixtures import (
    module_settings,
    module_worker,
    redis_setup,
    shop,
)

__all__ = ["module_settings", "module_worker", "redis_setup", "shop"]

#: Seconds; long enough to kill the process that decides about a task before the task is due.
LONG = 15.0


def test_a_cancelled_task_never_runs_although_all_workers_were_killed(
    module_settings: dict[str, Any], make_shop: Any, prefix: str
) -> None:
    # Queues that no other worker serves.
    configuration = {**module_settings, "prefix": prefix, "rabbitdelay_prefix": prefix}
    shop, due = make_shop(**configuration), time.time() + LONG
    noted, row_id = Notes(shop), uuid4().hex
    kinds: dict[str, dict[str, Any]] = {
        "tracked": {"track": True},
        "plain": {},
        "fanout": {"exchange": named(shop, "fanout"), "routing_key": "x"},
    }
    with Worker(configuration) as worker:
        results = [noted.send(kind, delay=LONG, **options) for kind, options in kinds.items()]
        rows = [noted.row("row", delay=LONG, task_id=row_id)]
        shop.rabbitdelay.send_many("note", rows, envelopes=True)
        retried = shop.tasks["retry"].apply_async(([], 2, {"countdown": LONG}))
        wait_for(lambda: retried.state == "RETRY", "the retry", PATIENCE)
        results += [retried, shop.AsyncResult(row_id)]
        outcomes = [shop.rabbitdelay.cancel(each) for each in results]
        assert outcomes == [Outcome.DONE, *[Outcome.NOTED] * 4]
        worker.kill()
    with Worker(configuration):
        assert noted.until(due - time.time()) == []
        wait_for(lambda: {each.state for each in results} == {REVOKED}, "all results", PATIENCE)


def steps_of(configuration: dict[str, Any], what: str, given: dict[str, Any]) -> int:
    """Run a program of :mod:`tests.registry.integration.registry_shop` to its end."""
    module, text = "tests.registry.integration.registry_shop", json.dumps(given)
    return int(ShopProcess.run_module(module, configuration, what, given=text).stdout)


def kill_at(step: int, configuration: dict[str, Any], what: str, given: dict[str, Any]) -> None:
    """Run the same until it kills itself at a step."""
    module, text = "tests.registry.integration.registry_shop", json.dumps(given)
    killed = ShopProcess.run_module(module, configuration, what, str(step), given=text)
    assert killed.returncode == -signal.SIGKILL


def test_a_process_that_is_killed_at_any_step_silences_no_task_and_makes_none_run_twice(
    module_settings: dict[str, Any], shop: Any, noted: Notes
) -> None:
    def send(name: str, key: str) -> dict[str, Any]:
        return {"args": [name], "kwargs": {"key": noted.key}, "delay": LONG, "key": key}

    def postpone(name: str) -> dict[str, Any]:
        return {"task": str(noted.send(name, delay=LONG, track=True).id), "delay": 1}

    # Before and after the registry is asked, the message is published, and it is registered.
    assert steps_of(module_settings, "send", send("unused", noted.key)) == 6
    assert steps_of(module_settings, "postpone", postpone("whole")) == 6
    for step in range(1, 7):
        key = f"order:{uuid4().hex}"
        shop.tasks["note"].apply_async(**send(f"first-{step}", key))
        kill_at(step, module_settings, "send", send(f"second-{step}", key))
        kill_at(step, module_settings, "postpone", postpone(f"moved-{step}"))
    found = Counter(noted.until(LONG))
    # A send that does not return supersedes nothing until it is registered.
    assert {f"first-{step}" for step in range(1, 6)} <= found.keys()
    assert ("first-6" in found, "second-6" in found) == (False, True)
    assert [found[each] for each in ("whole", *(f"moved-{n}" for n in range(1, 7)))] == [1] * 7
