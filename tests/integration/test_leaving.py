"""``docs/how-to/leave.md``, played: its commands are run as printed, with a task of each kind.

The tasks note in Redis what ran, and whether this package was loaded in the worker that ran it.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import pytest
from celery import chain, chord, group

from celery_rabbitdelay.testing import RabbitMQServer, RedisServer, Server, wait_for
from tests.documentation.page import blocks
from tests.integration import trouble

REPOSITORY: Final = Path(__file__).resolve().parents[2]
PAGE: Final = REPOSITORY / "docs" / "how-to" / "leave.md"

#: Seconds until most tasks are due; they are all sent, and decided about, before that.
DELAY: Final = 25

#: The application, with the package and after it was removed.
SHOP: Final = """
import json, os, sys
from kombu import Exchange, Queue

is_plain = "PLAIN" in os.environ
if is_plain:
    from celery import Celery
else:
    from celery_rabbitdelay import Celery

app = Celery("shop", set_as_current=False)
app.conf.update(broker_url=os.environ["BROKER"], result_backend=os.environ["REDIS"])
quorum = {"x-queue-type": "quorum"}
app.conf.task_queues = [
    Queue("celery", Exchange("celery"), "celery", queue_arguments=quorum),
    Queue("news", Exchange("news", type="fanout"), queue_arguments=quorum),
]
if is_plain:
    app.conf.task_queues += [
        Queue("native", Exchange("native", type="topic"), "native", queue_arguments=quorum),
        Queue("direct", Exchange("direct"), "direct"),
    ]
else:
    app.conf.update(
        rabbitdelay_layout=[("seconds", 40, 1), ("ms", 10, 0.1)],
        rabbitdelay_registry_url=os.environ["REDIS"],
        rabbitdelay_registry_options={"socket_timeout": 10},
    )


def note(task, what):
    worker = "ours" if "celery_rabbitdelay" in sys.modules else "plain"
    key = task.request.delivery_info["routing_key"]
    app.backend.client.rpush("ran", json.dumps([what, worker, key]))


@app.task(bind=True, name="shop.remind", shared=False)
def remind(self, what):
    note(self, what)


@app.task(bind=True, name="shop.ship", shared=False)
def ship(self, what):
    note(self, what)
"""

#: A worker of plain Celery; its command line would load this package's commands.
PLAIN_WORKER: Final = (
    "import shop; "
    "shop.app.Worker(pool='solo', loglevel='INFO', hostname='plain@localhost', queues={!r}).start()"
)


class Worker(Server):
    """A worker, by its command line; in the folder of the application."""

    package = "celery"

    def __init__(self, shop: Shop, command: list[str], **variables: str) -> None:
        super().__init__()
        self._line, self._variables = command, {**shop.environment, **variables}

    def _command(self) -> list[str]:
        return self._line

    def _environment(self) -> dict[str, str]:
        return self._variables

    def _ready(self) -> bool:
        return " ready." in self.log


class Shop:
    """The application in a folder and a virtual host of its own, and what the page does there."""

    def __init__(self, folder: Path, broker: str, redis: RedisServer) -> None:
        self.folder = folder
        (folder / "shop.py").write_text(SHOP)
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{REPOSITORY}:{folder}",
            "BROKER": broker,
            "REDIS": redis.url,
            "C_FORCE_ROOT": "1",
        }
        self.app, self.plain_app = self._app(), self._app(PLAIN="1")
        self.redis: Any = self.plain_app.backend.client

    def _app(self, **variables: str) -> Any:
        """Return the application as its module makes it."""
        names: dict[str, Any] = {"__name__": "shop"}
        given = {name: self.environment[name] for name in ("BROKER", "REDIS")}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**given, **variables}.items():
                patch.setenv(name, value)
            exec(SHOP, names)
        return names["app"]

    def run(self, command: str, shown: list[str]) -> str:
        """Run a command of the page; it has to end with 0, and to print the lines shown."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
        assert set(shown) <= set(done.stdout.splitlines()), f"$ {command}\n{done.stdout}"
        return done.stdout

    def plain_worker(self, queues: str) -> Worker:
        """Make a worker of plain Celery."""
        command = [sys.executable, "-c", PLAIN_WORKER.format(queues)]
        return Worker(self, command, PLAIN="1")

    def send(self, what: str, queue: str, **options: Any) -> None:
        """Send a task with plain Celery."""
        self.plain_app.tasks["shop.remind"].apply_async((what,), queue=queue, **options)

    def ran(self) -> list[list[str]]:
        """Return what ran: the argument, by whose worker, with which routing key."""
        return [json.loads(each) for each in self.redis.lrange("ran", 0, -1)]

    def is_empty(self) -> bool:
        """Return whether nothing waits in the levels and the modules' queues."""
        told = self.run("celery -A shop rabbitdelay status", [])
        counts = re.findall(r"^  (\S+) +([\d,]+) waiting", told, re.MULTILINE)
        assert {"seconds.x1", "meditation", "undeliverable"} <= set(dict(counts)), told
        return all(count == "0" for _, count in counts)


@pytest.fixture
def shop(session_rabbitmq: RabbitMQServer, redis: RedisServer, tmp_path: Path) -> Iterator[Shop]:
    with trouble.virtual_host(session_rabbitmq, f"leaving-{uuid4().hex[:8]}") as url:
        made = Shop(tmp_path, url, redis)
        yield made
        gc.collect()  # results give their channels up, while Redis is there
        made.app.close()
        made.plain_app.close()


def commands() -> list[tuple[str, list[str]]]:
    """Return the commands of the page, each with the lines that it is shown to print."""
    text = PAGE.read_text()
    sessions = re.findall(r"```console\n(.*?)```", re.sub(r"^ +", "", text, flags=re.M), re.S)
    assert len(sessions) == len(blocks(PAGE))
    parts = [part for each in sessions for part in re.split(r"^\$ ", each, flags=re.M)[1:]]
    return [(command, shown) for command, *shown in (part.splitlines() for part in parts)]


ROWS: Final = [f"row {number}" for number in range(4)]

#: A chain of three, and a chord of two and its body.
CANVAS: Final = ["link", "next link", "last link", "part", "other part", "sum"]
GROUP: Final = ["member", "other member"]

#: What ``send_each_kind`` sends and a worker with the registry runs; and no more than that.
RUN: Final = [
    *("plain", "newer", "committed", "paused", "postponed", "meditated"),
    *("once", "urgent", "news", *ROWS, *CANVAS, *GROUP),
]


def send_each_kind(app: Any) -> None:
    """Send a task of each kind, and decide about those that the registry knows."""
    remind, ship, delays = app.tasks["shop.remind"], app.tasks["shop.ship"], app.rabbitdelay
    send = partial(remind.apply_async, delay=DELAY)
    send(("plain",))
    for name in ("older", "newer"):
        send((name,), key="order:7")
    delays.cancel(send(("cancelled",), track=True))
    for _ in range(2):
        send(("once",), task_id="once", once=True)
    jobs = {"committed": "import-2026-09", "aborted": "import-2026-10", "open": "import-2026-11"}
    for name, job in jobs.items():
        delays.open_job(job, expires=60)
        send((name,), job=job)
    delays.abort_job(jobs["aborted"])
    delays.commit_job(jobs["committed"])
    delays.pause(task="shop.ship")
    ship.apply_async(("paused",), delay=DELAY)
    delays.postpone(send(("postponed",), track=True), delay=DELAY + 5)
    send(("urgent",), priority=7)
    send(("news",), queue="news")
    rows = [{"args": (name,), "delay": DELAY - 0.5} for name in ROWS]
    assert delays.send_many(remind, rows, tolerance=5).envelopes == 1
    begin = datetime.now(UTC) + timedelta(seconds=DELAY)
    delays.schedules.put("nightly", remind, timedelta(days=1), ("nightly",), start=begin)
    remind.apply_async(("meditated",), delay=41)  # the capacity is 39.9 s
    link, first, second, *members = (remind.si(name) for name in CANVAS)
    link.set(countdown=DELAY)
    chain(link, first.set(delay=2), second.set(countdown=2), app=app).apply_async()
    *header, body = (each.set(delay=DELAY) for each in members)
    chord(header, body.set(delay=2), app=app).apply_async()
    group([remind.si(name) for name in GROUP], app=app).apply_async(countdown=DELAY)


def wait_for_runs(shop: Shop, expected: list[str]) -> Counter[str]:
    """Wait until these have run; return how often each has."""

    def ran() -> Counter[str]:
        return Counter(name for name, _worker, _key in shop.ran())

    wait_for(lambda: ran() >= Counter(expected), f"{expected}", 240, 0.2)
    return ran()


def test_the_page_s_commands_lose_nothing_and_run_nothing_that_was_cancelled(shop: Shop) -> None:
    (_modules_only, *page) = commands()
    shop.run("celery -A shop rabbitdelay declare --queues", [])
    send_each_kind(shop.app)

    ours: Worker | None = None
    with shop.plain_worker("native,direct"):
        for command, shown in page:
            if " worker " in command:
                ours = Worker(shop, ["bash", "-c", f"exec {command} --loglevel=INFO"])
                ours.start()
                continue
            if command.endswith(" status"):
                wait_for_runs(shop, RUN)
                wait_for(shop.is_empty, "empty levels", 240, 1)
                assert ours is not None
                ours.stop()
                assert shop.is_empty()
            shop.run(command, shown)
        assert json.loads((shop.folder / "schedules.json").read_text())["schedules"]

        # What delays tasks afterwards, and the options that plain Celery ignores.
        shop.send("native", "native", countdown=2)
        shop.send("held", "direct", countdown=2)
        shop.send("ignored", "native", delay=3600, key="order:7")
        wait_for_runs(shop, ["native", "held", "ignored"])
    by_plain = {name: key for name, worker, key in shop.ran() if worker == "plain"}
    assert by_plain == {
        "native": "0." * 26 + "1.0.native",
        "held": "direct",
        "ignored": "native",
    }

    # On the old queues, plain workers find nothing that should not run.
    last = ["last on celery", "last on news"]
    with shop.plain_worker("celery,news"):
        for each in last:
            shop.send(each, each.rpartition(" ")[2])
        assert wait_for_runs(shop, last) == Counter([*RUN, *by_plain, *last])
