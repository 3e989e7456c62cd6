"""What a type checker knows of a user's project."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.project_copy import REPOSITORY

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

#: This project, with ``py.typed`` and with the stubs of celery-types beside it.
ENVIRONMENT = {**os.environ, "MYPYPATH": str(REPOSITORY)}


def test_a_type_checker_knows_the_options(tmp_path: Path) -> None:
    assert Path(REPOSITORY, "celery_rabbitdelay/py.typed").exists()
    (tmp_path / "shop.py").write_text(PROJECT)
    output = _strict_mypy(tmp_path, "shop.py")
    said = re.findall(r"^shop\.py:(\d+): (error|note): (.*)$", output, re.M)
    errors = {int(number) for number, kind, _ in said if kind == "error"}
    types = {int(number): text for number, _, text in said if text.startswith("Revealed type")}
    for number, line in enumerate(PROJECT.splitlines(), 1):
        _, _, expected = line.partition("  # ")
        assert (number in errors) == (expected == "refused"), line
        if "reveal_type" in line:
            assert re.search(rf'"([a-z_]+\.)*{re.escape(expected)}', types[number]), line


def test_the_page_on_typing_shows_what_mypy_says(tmp_path: Path) -> None:
    page = Path(REPOSITORY, "docs/how-to/typing.md").read_text()
    files = re.findall(r"^```python\n(# (\w+\.py)\n.*?)^```", page, re.M | re.S)
    for code, name in files:
        (tmp_path / name).write_text(code)
    output = _strict_mypy(tmp_path, *(name for _, name in files))
    shown = re.findall(r"^(?:mistakes\.py:|Found ).*$", page, re.M)
    assert len(shown) > 1
    assert shown == [line for line in output.splitlines() if ": note: " not in line]


def _strict_mypy(folder: Path, *files: str) -> str:
    """Return what mypy says of files that have errors."""
    command = (sys.executable, "-m", "mypy", "--strict", "--no-incremental", *files)
    result = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1, result.stdout + result.stderr
    return result.stdout
