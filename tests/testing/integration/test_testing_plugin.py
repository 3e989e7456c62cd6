"""The plugin of pytest, in projects of users."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from celery_rabbitdelay.testing import RedisServer
from tests.private_broker import QUIET
from tests.rabbitmq_node import RabbitMQNode

APPLICATION = """
from celery_rabbitdelay import Celery

app = Celery("reminders", broker="amqp://", backend="redis://")
app.conf.rabbitdelay_registry_url = "redis://"

@app.task
def remind(order):
    return order
"""

TESTS = """
from datetime import timedelta
from reminders import remind

def test_one(rabbitdelay_app, rabbitdelay_worker, travel):
    result = remind.apply_async((1,), delay=timedelta(days=3))
    travel(days=3)
    assert result.get(timeout=300) == 1
    remind.apply_async((2,), delay=3600, key="left")

def test_nothing_is_left(rabbitdelay_app, rabbitdelay_worker, travel):
    assert travel.nothing_waits()
    assert rabbitdelay_app.rabbitdelay.cancel(key="left").value == "unknown"

def test_others_go_by_the_systems_clock():
    from celery_rabbitdelay.levels import wall_clock
    assert wall_clock.ns is wall_clock._system_ns
"""

OVERRIDDEN = """
import pytest
from celery import Celery
from celery_rabbitdelay import install

elsewhere = Celery("elsewhere", broker="amqp://nowhere", backend="redis://nowhere")
install(elsewhere)
# It is used before the tests.
elsewhere.backend, elsewhere.pool, elsewhere.rabbitdelay.pool, elsewhere.amqp.producer_pool

@elsewhere.task
def remind(order):
    print(f"reminded of {order}")

@pytest.fixture(scope="session")
def rabbitdelay_celery_app():
    return elsewhere

def test_it(rabbitdelay_worker, travel):
    result = remind.apply_async((7,), countdown=3600)
    travel(hours=1)
    assert "reminded of 7" in rabbitdelay_worker.log
    assert result.successful()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "reminders.py").write_text(APPLICATION)
    (tmp_path / "test_reminders.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nrabbitdelay_app = reminders:app\n")
    return tmp_path


def run(project: Path, *options: str, expected: int = 0) -> str:
    """Run pytest in a project; return what it has printed."""
    environment = {name: text for name, text in os.environ.items() if "PYTEST" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=project,
        env={**environment, "PYTHONPATH": os.pathsep.join([str(project), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout


def test_servers_that_are_named_are_used_and_left_as_they_were(
    project: Path, broker_root: Path | None, private_redis: RedisServer
) -> None:
    with RabbitMQNode(broker_root, QUIET, management=True) as broker:
        servers = [
            f"--rabbitdelay-broker={broker.url}",
            f"--rabbitdelay-management={broker.management_url}",
            f"--rabbitdelay-redis={private_redis.url}",
        ]
        assert "3 passed" in run(project, *servers, "-o", "rabbitdelay_worker=thread")
        assert broker.ctl("list_vhosts").split() == ["/"]
        broker.kill()
        shown = run(project, *servers, expected=1)
        assert "cannot make a virtual host for the tests" in shown
        assert "--rabbitdelay-management" in shown


def test_private_servers_also_run_a_second_application_that_a_fixture_gives(
    project: Path,
) -> None:
    (project / "test_elsewhere.py").write_text(OVERRIDDEN)
    assert "4 passed" in run(project)


def test_it_says_how_to_name_an_application(project: Path) -> None:
    nameless = ("--rabbitdelay-broker=amqp://nowhere", "-o", "rabbitdelay_app=")
    assert "set rabbitdelay_app = shop.tasks:app" in run(project, *nameless, expected=1)
