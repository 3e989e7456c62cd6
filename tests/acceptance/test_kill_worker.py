"""A worker that dies without warning takes no delayed task with it."""

from __future__ import annotations

from pytest_celery import CeleryTestSetup

from tests.acceptance.journal import (
    Journal,
    assert_each_ran_once,
    assert_none_was_early,
    assert_nothing_is_left_to_run,
)

#: Seconds; long enough for the tasks to be published and the worker to be killed before any is due.
DELAY = 10


def test_all_tasks_run_after_the_worker_was_killed_while_they_waited(
    celery_setup: CeleryTestSetup, journal: Journal
) -> None:
    publications = [journal.publish(DELAY) for _ in range(200)]

    celery_setup.worker.kill()
    assert journal.starts() == []
    celery_setup.worker.restart()

    starts = journal.wait_until_all_started(publications, timeout=120)
    assert_none_was_early(starts, publications)
    assert_nothing_is_left_to_run(celery_setup)
    assert_each_ran_once(journal.starts(), publications)
