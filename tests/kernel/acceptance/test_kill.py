"""Neither a worker nor a RabbitMQ node that dies without warning takes a delayed task with it."""

import time

import pytest
from pytest_celery import CeleryTestSetup

from celery_rabbitdelay.levels import headers
from tests.kernel.integration.notes import Notes


@pytest.mark.parametrize(
    ("victim", "tasks", "delay"),
    # The delay is long enough for the tasks to be published, and the victim to be killed and
    # started again, before any is due.
    [("broker", 1000, 40), ("worker", 200, 20)],
)
def test_all_tasks_run_once_and_none_early_after_one_was_killed_while_they_waited(
    celery_setup: CeleryTestSetup, victim: str, tasks: int, delay: int
) -> None:
    notes, not_before = Notes(celery_setup.app), []
    with celery_setup.app.rabbitdelay.pipeline():
        for number in range(tasks):
            not_before.append(time.time() + delay)
            notes.send(number, delay=delay)
    node = getattr(celery_setup, victim)
    node.kill()
    assert notes() == []
    node.restart()
    # Where the broker is back only after they were due, RabbitMQ may try again after three minutes.
    noted = notes.wait(tasks, timeout=300)
    assert sorted(notes()) == [*range(tasks)]
    for note in noted:
        assert note["at"] >= not_before[note["given"][0]]
        assert note["at"] * 1000 >= note["headers"][headers.DUE]
    notes.forget()
