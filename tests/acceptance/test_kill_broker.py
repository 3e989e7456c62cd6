"""A RabbitMQ node that dies without warning still knows every delayed task when it is back."""

from __future__ import annotations

import pytest
from pytest_celery import CeleryTestSetup

from tests.acceptance.journal import (
    Journal,
    assert_each_ran_once,
    assert_none_was_early,
    assert_nothing_is_left_to_run,
)

#: Seconds; long enough for the tasks to be published, and the node to be killed and started again,
#: before any is due.
DELAY = 25


@pytest.mark.kills_the_broker
def test_all_tasks_run_after_the_broker_was_killed_while_they_waited(
    celery_setup: CeleryTestSetup, journal: Journal
) -> None:
    publications = [journal.publish(DELAY) for _ in range(1000)]

    celery_setup.broker.kill()
    assert journal.starts() == []
    celery_setup.broker.restart()

    starts = journal.wait_until_all_started(publications, timeout=120)
    assert_none_was_early(starts, publications)
    assert_nothing_is_left_to_run(celery_setup)
    assert_each_ran_once(journal.starts(), publications)
