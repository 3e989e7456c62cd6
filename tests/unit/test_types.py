"""What a type checker knows of a user's project."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from pathlib import Path

import amqp
import billiard
import celery
import click
import kombu
import pytest
import vine

import celery_rabbitdelay

#: What it shall say of a line stands behind it: the type that it reveals, or that it is
#: refused. All other lines have no error.
PROJECT = """\
from datetime import timedelta
from typing import Any
import celery
from celery_rabbitdelay import Celery, Row, Task, install, shared_task
from celery_rabbitdelay.testing import Travel, Worker, recorded

app = Celery("shop", broker="amqp://")
reveal_type(app.rabbitdelay)  # RabbitDelay
reveal_type(app.rabbitdelay.cancel("id"))  # Outcome

@app.task
def remind(order: int) -> str:
    return f"Order {order}"

reveal_type(remind)  # Task
reveal_type(remind(1))  # str
remind.apply_async(args=(1,), kwargs={}, delay=timedelta(days=3), tolerance=60, queue="orders")
remind.apply_async((1,), countdown=60, key="order:1", job="import", once=True, track=True)
remind.apply_async((1,), delay="60")  # refused
remind.apply_async((1,), dealy=60)  # refused
remind.apply_async((1,), delay=60, key=7)  # refused
remind.delay(1)
remind.delay("one")  # refused
reveal_type(remind.s(1).set(delay=60))  # DelayingSignature
celery.chain(remind.s(1), remind.si(2).set(delay=60)).apply_async()
celery.group(remind.s(order) for order in range(3)).apply_async(delay=60)
app.signature("shop.remind", (1,)).set(delay=60)
app.send_task("shop.remind", (1,), delay=60, tolerance=1)
app.rabbitdelay.send_many(remind, [Row((1,), delay=60)], track=True)

def test_a_reminder(rabbitdelay_worker: Worker, travel: Travel) -> None:
    travel(days=3)
    travel(days="3")  # refused
    travel.until(travel.nothing_waits, within=timedelta(days=7))
    reveal_type(rabbitdelay_worker.log)  # str
    with recorded(app) as sent:
        reveal_type(sent.one(remind, delay=timedelta(days=3)))  # Sent

@app.task(bind=True, acks_late=True, rabbitdelay=True, once=True, track=None)
def fetch(self: Task[..., None], url: str, *, timeout: float = 1) -> None:
    raise self.retry(delay=60, max_retries=3, track=True)

fetch.delay("https://example.org", timeout=7)
fetch.delay(timeout=7)  # refused

@app.task(once="yes")  # refused
def sell(order: int) -> None: ...

@shared_task(name="pack")
def pack(order: int) -> None: ...

pack.apply_async_on_commit((1,), delay=60)
pack.delay_on_commit("one")  # refused

installed = install(celery.Celery("shop"))
reveal_type(installed.rabbitdelay)  # RabbitDelay

def send(any_app: celery.Celery) -> None:
    any_app.send_task("shop.remind", (1,), delay=60)

send(app)

@celery.shared_task
def ship(order: int) -> None: ...

ship.apply_async((1,), delay=60)  # refused
celery.current_app.rabbitdelay  # refused
"""

#: The packages in a user's environment, apart from this one.
INSTALLED = (celery, kombu, amqp, billiard, vine, click)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project, with an environment of its own, in which celery-types is installed."""
    venv.create(tmp_path / "venv", symlinks=True)
    (site_packages,) = tmp_path.glob("venv/lib/python*/site-packages")
    for module in (celery_rabbitdelay, *INSTALLED):
        assert module.__file__ is not None
        package = Path(module.__file__).parent
        (site_packages / package.name).symlink_to(package)
        stubs = package.with_name(f"{package.name}-stubs")
        if stubs.exists():
            (site_packages / stubs.name).symlink_to(stubs)
    assert (site_packages / "celery-stubs").exists()
    (tmp_path / "shop.py").write_text(PROJECT)
    return tmp_path


def by_mypy(project: Path) -> tuple[dict[int, str], set[int]]:
    """Return the types that lines reveal, and the lines with errors."""
    options = ("--strict", "--no-incremental", "--python-executable", "venv/bin/python")
    command = (sys.executable, "-m", "mypy", *options, "shop.py")
    result = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stdout + result.stderr  # there are errors
    types, errors = {}, set()
    for number, kind, text in re.findall(
        r"^shop\.py:(\d+): (error|note): (.*)$", result.stdout, re.M
    ):
        if kind == "error":
            errors.add(int(number))
        elif revealed := re.match(r'Revealed type is "(.*)"$', text):
            types[int(number)] = revealed[1]
    return types, errors


def test_a_type_checker_knows_the_options(project: Path) -> None:
    types, errors = by_mypy(project)
    for number, line in enumerate(PROJECT.splitlines(), 1):
        _, _, expected = line.partition("  # ")
        assert (number in errors) == (expected == "refused"), line
        if "reveal_type" in line:
            assert re.match(rf"([a-z_]+\.)*{re.escape(expected)}", types[number]), line
