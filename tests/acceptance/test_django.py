"""A Django project with its results and its schedule in the database, run by its own commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from amqp.exceptions import ChannelError
from kombu import Connection

from celery_rabbitdelay.publishing.declaration import delete
from tests.acceptance.django_project import (
    APPLICATIONS,
    QUEUE,
    TOPOLOGY,
    WORKER,
    Project,
    ProjectProcess,
)
from tests.integration.arrivals import count, wait_until_waiting

#: Seconds that no test lasts, so that a task which waits so long is seen waiting.
LONG = 950

#: Where such a task waits first.
LONG_QUEUE = f"{TOPOLOGY.prefix}.seconds.900"


@pytest.fixture(scope="module", params=APPLICATIONS)
def project(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    module_broker_url: str,
    broker_use_ssl: dict[str, Any] | bool,
) -> Iterator[Project]:
    """The project with its tables, its application written in both ways, and a worker."""
    folder = tmp_path_factory.mktemp("django") / "shop"
    settings = {"CELERY_BROKER_URL": module_broker_url, "CELERY_BROKER_USE_SSL": broker_use_ssl}
    project = Project(folder, APPLICATIONS[request.param], settings)
    project.migrate()
    with ProjectProcess.worker(project):
        yield project
    with Connection(module_broker_url, ssl=broker_use_ssl) as connection:
        delete(connection, TOPOLOGY, force=True)
        channel: Any = connection.default_channel
        channel.queue_delete(QUEUE)
        channel.exchange_delete(QUEUE)


@pytest.fixture
def connection(project: Project) -> Iterator[Connection]:
    """A connection to the project's broker, whose levels are empty."""
    url, ssl = (project.settings[f"CELERY_BROKER_{name}"] for name in ("URL", "USE_SSL"))
    with Connection(url, ssl=ssl) as connection:
        with connection.channel() as channel, suppress(ChannelError):
            cast("Any", channel).queue_purge(LONG_QUEUE)
        yield connection


def test_a_shared_task_runs_when_it_is_due_and_its_result_is_in_the_database(
    project: Project, connection: Connection
) -> None:
    before = len(project.results("orders.tasks.remind"))
    sent_at = project.call(
        "import time\n"
        "from orders.tasks import remind\n"
        "answer = time.time()\n"
        "remind.apply_async((1,), delay=1.5)\n"
        "remind.apply_async((2,), countdown=1.5)\n"
        f"remind.apply_async((3,), delay={LONG})"
    )
    wait_until_waiting(connection, LONG_QUEUE, 1)
    for seen in project.wait_for_results("orders.tasks.remind", before + 2)[before:]:
        assert sent_at + 1.5 - 0.001 <= seen["due"] <= seen["at"]
        assert seen["eta"] is None, "a worker held it"


# What follows does not depend on how the application is written.


@pytest.mark.parametrize("project", ["Celery"], indirect=True)
def test_a_task_is_sent_after_the_commit_and_not_after_a_rollback(
    project: Project, connection: Connection
) -> None:
    waits_inside, orders = project.call(
        "from django.db import transaction\n"
        "from django_shop import celery_app\n"
        "from orders.models import Order\n"
        "from orders.sales import place_order\n"
        "with transaction.atomic(), celery_app.connection() as connection:\n"
        f"    place_order('Ada', {LONG})\n"
        f"    name = '{LONG_QUEUE}'\n"
        "    waiting = connection.default_channel.queue_declare(name, passive=True)\n"
        "try:\n"
        "    with transaction.atomic():\n"
        f"        place_order('Eve', {LONG})\n"
        "        raise ValueError\n"
        "except ValueError:\n"
        "    orders = Order.objects.filter(customer='Eve').count()\n"
        f"place_order('Bob', {LONG})\n"
        "answer = [waiting.message_count, orders]"
    )
    assert (waits_inside, orders) == (0, 0)
    # Bob's task was sent last, so Eve's would be here too.
    wait_until_waiting(connection, LONG_QUEUE, 2)
    assert count(connection, LONG_QUEUE) == 2


@pytest.mark.parametrize("project", ["Celery"], indirect=True)
def test_many_tasks_are_confirmed_together_after_the_commit(
    project: Project, connection: Connection
) -> None:
    seen = project.call(
        "from celery_rabbitdelay import signals\n"
        "from django.db import connection\n"
        "from orders.sales import place_orders\n"
        "answer = []\n"
        "def note(**task): answer.append(connection.in_atomic_block)\n"
        "signals.delayed.connect(note)\n"
        f"place_orders(['Ada', 'Bob', 'Eve'], {LONG})"
    )
    assert seen == [False] * 3
    wait_until_waiting(connection, LONG_QUEUE, 3)


@pytest.mark.parametrize("project", ["Celery"], indirect=True)
def test_a_periodic_task_of_the_database_sends_delayed_tasks(project: Project) -> None:
    before = len(project.results("orders.tasks.remind"))
    project.call(
        "from orders.models import Order\n"
        "from orders.sales import remind_every_second\n"
        "Order.objects.all().delete()\n"
        "remind_every_second()\n"
        "answer = Order.objects.create(customer='Ada').pk"
    )
    with ProjectProcess.beat(project):
        project.wait_for_results("orders.tasks.remind_all", 1, periodic="remind all")
        (*_, seen) = project.wait_for_results("orders.tasks.remind", before + 1)
    assert seen["due"] <= seen["at"]


def test_a_wrong_setting_ends_the_worker_and_is_named_as_django_s_settings_name_it(
    tmp_path: Path, module_broker_url: str
) -> None:
    settings = {"CELERY_BROKER_URL": module_broker_url, "CELERY_RABBITDELAY_TICK": -1}
    run = Project(tmp_path / "shop", APPLICATIONS["Celery"], settings).run(WORKER)
    assert run.returncode != 0
    assert "CELERY_RABBITDELAY_TICK = -1: takes a positive number of seconds" in run.stderr
