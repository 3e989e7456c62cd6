"""``docs/how-to/leave.md``, played: its commands are run as printed, with a task of each kind.

The tasks note in Redis what ran.
"""

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
from celery import chain

from celery_rabbitdelay.testing import RabbitMQServer, RedisServer, wait_for
from tests.celery_process import REPOSITORY
from tests.documentation.page import blocks
from tests.documentation.run import CommandServer, commands
from tests.kernel.integration.trouble import virtual_host

#: Seconds until most tasks are due, and those that the levels can express.
DELAY, CAPACITY = 5, 20

#: The application, with the package and after it was removed.
SHOP: Final = f"""
import os
from kombu import Exchange, Queue

if "PLAIN" in os.environ:
    from celery import Celery
else:
    from celery_rabbitdelay import Celery

app = Celery("shop", set_as_current=False)
app.conf.update(broker_url=os.environ["BROKER"], result_backend=os.environ["REDIS"])
quorum = {{"x-queue-type": "quorum"}}
app.conf.task_queues = [
    Queue("celery", Exchange("celery"), "celery", queue_arguments=quorum),
    Queue("news", Exchange("news", type="fanout"), queue_arguments=quorum),
]
if "PLAIN" not in os.environ:
    app.conf.update(
        rabbitdelay_layout=[("seconds", {CAPACITY}, 1), ("ms", 10, 0.1)],
        rabbitdelay_registry_url=os.environ["REDIS"],
        rabbitdelay_registry_options={{"socket_timeout": 10}},
    )


@app.task(name="shop.remind", shared=False)
def remind(what):
    app.backend.client.rpush("ran", what)


@app.task(name="shop.ship", shared=False)
def ship(what):
    app.backend.client.rpush("ran", what)
"""

#: A worker of plain Celery; its command line would load this package's commands.
PLAIN_WORKER: Final = (
    "env PLAIN=1 python -c \"import shop; shop.app.Worker(pool='solo', loglevel='INFO', "
    "hostname='plain@localhost', queues='celery,news').start()\""
)


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
        names: dict[str, Any] = {"__name__": "shop"}
        with pytest.MonkeyPatch.context() as patch:
            for name in ("BROKER", "REDIS"):
                patch.setenv(name, self.environment[name])
            exec(SHOP, names)
        self.app = names["app"]

    def run(self, command: str, *shown: str) -> str:
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
        assert {*shown} <= {*done.stdout.splitlines()}, f"$ {command}\n{done.stdout}"
        return done.stdout

    def worker(self, command: str) -> CommandServer:
        """Make a worker, by its command line."""
        return CommandServer(command, self.folder, self.environment)

    def wait_for(self, *expected: str) -> Counter[str]:
        """Wait until these have run; return how often each has."""
        redis: Any = self.app.backend.client

        def ran() -> Counter[str]:
            return Counter(each.decode() for each in redis.lrange("ran", 0, -1))

        wait_for(lambda: ran() >= Counter(expected), f"{expected}", interval=0.2)
        return ran()

    def is_empty(self) -> bool:
        """Return whether nothing waits in the levels and the modules' queues."""
        told = self.run("celery -A shop rabbitdelay status")
        counts = dict(re.findall(r"^  (\S+) +([\d,]+) waiting", told, re.MULTILINE))
        assert {"seconds.x1", "meditation", "undeliverable"} <= set(counts), told
        return set(counts.values()) == {"0"}


@pytest.fixture
def shop(session_rabbitmq: RabbitMQServer, redis: RedisServer, tmp_path: Path) -> Iterator[Shop]:
    with virtual_host(session_rabbitmq, f"leaving-{uuid4().hex[:8]}") as url:
        made = Shop(tmp_path, url, redis)
        yield made
        gc.collect()  # results give their channels up, while Redis is there
        made.app.close()


ROWS: Final = [f"row {number}" for number in range(4)]

#: What ``send_each_kind`` sends and a worker with the registry runs; and no more than that.
RUN: Final = [
    *("plain", "newer", "committed", "paused", "postponed", "meditated"),
    *("once", "urgent", "news", "link", "next link", *ROWS),
]


def send_each_kind(app: Any) -> None:
    """Send a task of each kind, and decide about those that the registry knows."""
    remind, delays = app.tasks["shop.remind"], app.rabbitdelay
    send = partial(remind.apply_async, delay=DELAY)
    send(("plain",))
    for name in ("older", "newer"):
        send((name,), key="order:7")
    delays.cancel(send(("cancelled",), track=True))
    for _ in range(2):
        send(("once",), task_id="once", once=True)
    jobs = {"committed": "import-2026-09", "aborted": "import-2026-10", "open": "import-2026-11"}
    for name, job in jobs.items():
        delays.open_job(job, expires=45)
        send((name,), job=job)
    delays.abort_job(jobs["aborted"])
    delays.commit_job(jobs["committed"])
    delays.pause(task="shop.ship")
    app.tasks["shop.ship"].apply_async(("paused",), delay=DELAY)
    delays.postpone(send(("postponed",), track=True), delay=DELAY + 5)
    send(("urgent",), priority=7)
    send(("news",), queue="news")
    rows = [{"args": (name,), "delay": DELAY - 0.5} for name in ROWS]
    assert delays.send_many(remind, rows, tolerance=5).envelopes == 1
    begin = datetime.now(UTC) + timedelta(seconds=DELAY)
    delays.schedules.put("nightly", remind, timedelta(days=1), ("nightly",), start=begin)
    send(("meditated",), delay=CAPACITY + 1)
    chain(remind.si("link").set(countdown=DELAY), remind.si("next link").set(delay=2)).apply_async()


def test_the_page_s_commands_lose_nothing_and_run_nothing_that_was_cancelled(shop: Shop) -> None:
    shop.run("celery -A shop rabbitdelay declare --queues")
    send_each_kind(shop.app)
    _modules_only, *page = (
        each
        for block in blocks(REPOSITORY / "docs/how-to/leave.md")
        for each in commands(block.code)
    )
    ours: CommandServer | None = None
    for command, shown in page:
        if " worker " in command:
            ours = shop.worker(command)
            ours.start()
            continue
        if command.endswith(" status"):
            assert ours is not None
            shop.wait_for(*RUN)
            wait_for(shop.is_empty, "empty levels", interval=1)
            ours.stop()
            assert shop.is_empty()
        shop.run(command, *shown)
    assert json.loads((shop.folder / "schedules.json").read_text())["schedules"]
    # On the old queues, plain workers find nothing that should not run.
    last = ["last on celery", "last on news"]
    with shop.worker(PLAIN_WORKER):
        for each in last:
            shop.app.send_task("shop.remind", (each,), queue=each.rpartition(" ")[2])
        assert shop.wait_for(*last) == Counter([*RUN, *last])
