"""A Django project with its results and its schedule in the database, run by its own commands."""

from collections.abc import Iterator
from typing import Any

import pytest
from kombu import Connection

from celery_rabbitdelay.levels.layout import custom
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.declaration import delete
from tests.kernel.acceptance import django_project
from tests.kernel.integration.arrivals import wait_until_waiting

#: Seconds that no test lasts, so that a task which waits so long is seen waiting.
LONG = 950

#: Where such a task waits first.
LONG_QUEUE = "django_shop.seconds.900"

#: The levels that the project's settings name.
LEVELS = custom([("seconds", 10, 100), ("seconds", 10, 10), ("seconds", 10, 1), ("ms", 10, 0.1)])


@pytest.fixture(scope="module", params=django_project.APPLICATIONS)
def project(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    module_broker_url: str,
    broker_use_ssl: dict[str, Any] | bool,
) -> Iterator[django_project.Project]:
    """The project with its tables, its application written in both ways, and a worker."""
    folder = tmp_path_factory.mktemp("django") / "shop"
    settings = {"CELERY_BROKER_URL": module_broker_url, "CELERY_BROKER_USE_SSL": broker_use_ssl}
    project = django_project.Project(folder, django_project.APPLICATIONS[request.param], settings)
    migrated = project.run(django_project.MIGRATE)
    assert migrated.returncode == 0, migrated.stderr
    with django_project.ProjectProcess(project, f"{django_project.WORKER} -c 1", " ready."):
        yield project
    with Connection(module_broker_url, ssl=broker_use_ssl) as connection:
        delete(connection, Topology("django_shop", LEVELS), force=True)
        channel: Any = connection.default_channel
        channel.queue_delete("django_shop")
        channel.exchange_delete("django_shop")


@pytest.fixture
def connection(project: django_project.Project) -> Iterator[Connection]:
    url, ssl = (project.settings[f"CELERY_BROKER_{name}"] for name in ("URL", "USE_SSL"))
    with Connection(url, ssl=ssl) as connection:
        yield connection
        channel: Any = connection.default_channel
        channel.queue_purge(LONG_QUEUE)


def test_a_shared_task_runs_when_it_is_due_and_its_result_is_in_the_database(
    project: django_project.Project, connection: Connection
) -> None:
    sent_at = project.call(
        "import time\n"
        "from orders.tasks import remind\n"
        "answer = time.time()\n"
        "remind.apply_async((1,), delay=1.5)\n"
        "remind.apply_async((2,), countdown=1.5)\n"
        f"remind.apply_async((3,), delay={LONG})"
    )
    wait_until_waiting(connection, LONG_QUEUE, 1)
    for seen in project.wait_for_results("orders.tasks.remind", 2):
        assert sent_at + 1.5 - 0.001 <= seen["due"] <= seen["at"]
        assert seen["eta"] is None, "a worker held it"


# What follows does not depend on how the application is written.


@pytest.mark.parametrize("project", ["Celery"], indirect=True)
def test_tasks_are_sent_and_confirmed_after_the_commit_and_not_after_a_rollback(
    project: django_project.Project, connection: Connection
) -> None:
    seen, orders = project.call(
        "from celery_rabbitdelay import signals\n"
        "from django.db import connection, transaction\n"
        "from orders.models import Order\n"
        "from orders.sales import place_order, place_orders\n"
        "seen = []\n"
        "def note(**task): seen.append(connection.in_atomic_block)\n"
        "signals.delayed.connect(note)\n"
        "with transaction.atomic():\n"
        f"    place_order('Ada', {LONG})\n"
        "    assert not seen\n"
        "try:\n"
        "    with transaction.atomic():\n"
        f"        place_order('Eve', {LONG})\n"
        "        raise ValueError\n"
        "except ValueError:\n"
        "    orders = Order.objects.filter(customer='Eve').count()\n"
        f"place_orders(['Bob', 'Cem', 'Dee'], {LONG})\n"
        "answer = [seen, orders]"
    )
    assert (seen, orders) == ([False] * 4, 0)
    # Eve's would have been sent before the last ones.
    wait_until_waiting(connection, LONG_QUEUE, 4)


@pytest.mark.parametrize("project", ["Celery"], indirect=True)
def test_a_periodic_task_of_the_database_sends_delayed_tasks(
    project: django_project.Project,
) -> None:
    before, _ = project.call(
        "from django_celery_results.models import TaskResult\n"
        "from orders.models import Order\n"
        "from orders.sales import remind_every_second\n"
        "Order.objects.all().delete()\n"
        "remind_every_second()\n"
        "before = TaskResult.objects.filter(task_name='orders.tasks.remind').count()\n"
        "answer = [before, Order.objects.create(customer='Ada').pk]"
    )
    with django_project.ProjectProcess(
        project, f"{django_project.BEAT} --max-interval 1", "beat: Starting"
    ):
        project.wait_for_results("orders.tasks.remind_all", 1, periodic="remind all")
        (*_, seen) = project.wait_for_results("orders.tasks.remind", before + 1)
    assert seen["due"] <= seen["at"]
