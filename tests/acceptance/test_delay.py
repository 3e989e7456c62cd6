"""Delayed tasks and control commands, on nodes that stay alive."""

from __future__ import annotations

from pytest_celery import CeleryTestSetup

from celery_rabbitdelay.testing import wait_for
from tests.acceptance.journal import Journal, assert_each_ran_once, assert_none_was_early


def test_a_delayed_task_runs_once_and_never_early(journal: Journal) -> None:
    publications = [journal.publish(delay) for delay in (0.1, 0.7, 1, 1.5, 2.3, 3)]

    starts = journal.wait_until_all_started(publications, timeout=60)

    assert_each_ran_once(starts, publications)
    assert_none_was_early(starts, publications)


def test_the_worker_answers_a_ping(celery_setup: CeleryTestSetup) -> None:
    answers: list[dict[str, dict[str, str]]] = []

    def answered() -> bool:
        answers[:] = celery_setup.app.control.ping(timeout=1)
        return bool(answers)

    wait_for(answered, "answer to control.ping")

    assert answers == [{celery_setup.worker.hostname(): {"ok": "pong"}}]
