"""Neither a worker nor a RabbitMQ node that dies without warning takes a delayed task with it."""

from __future__ import annotations

import pytest
from pytest_celery import CeleryTestSetup

from tests.acceptance.journal import (
    Journal,
    assert_each_ran_once_and_none_early,
    assert_nothing_is_left_to_run,
)


@pytest.mark.parametrize(
    ("victim", "tasks", "delay"),
    # The delay is long enough for the tasks to be published, and the victim to be killed and
    # started again, before any is due.
    [("broker", 1000, 40), ("worker", 200, 20)],
)
def test_all_tasks_run_after_one_was_killed_while_they_waited(
    celery_setup: CeleryTestSetup, journal: Journal, victim: str, tasks: int, delay: int
) -> None:
    with celery_setup.app.rabbitdelay.pipeline():
        published = dict(journal.publish(delay) for _ in range(tasks))

    node = getattr(celery_setup, victim)
    node.kill()
    assert journal.starts() == []
    node.restart()

    # Where the broker is back only after they were due, RabbitMQ may try again after three minutes.
    journal.wait_until_started(tasks, timeout=300)
    assert_nothing_is_left_to_run(celery_setup)
    assert_each_ran_once_and_none_early(journal.starts(), published)
