"""``docs/how-to/leave.md``, played: its commands are run as printed, with a task of each kind.

The tasks note in Redis what ran.
"""

import gc
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from celery import chain
from kombu import Exchange, Queue
from redis import Redis

from celery_rabbitdelay.testing import RabbitMQServer, RedisServer, wait_for
from tests.celery_process import REPOSITORY
from tests.documentation.page import blocks
from tests.documentation.run import CommandServer, commands
from tests.kernel.integration.trouble import virtual_host

#: Seconds until most tasks are due, and those that the levels can express.
DELAY, CAPACITY = 5, 20

#: The same where all tasks have to wait until a program is through.
LONG_DELAY, LONG_CAPACITY = 60, 200

#: The application, with the package and after it was removed.
SHOP: Final = """
import os
from kombu import Exchange, Queue

if "PLAIN" in os.environ:
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
if "PLAIN" not in os.environ:
    app.conf.update(
        rabbitdelay_layout=[("seconds", int(os.environ["CAPACITY"]), 1), ("ms", 10, 0.1)],
        rabbitdelay_registry_url=os.environ["REGISTRY"],
        rabbitdelay_registry_options={"socket_timeout": 10},
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

    def __init__(self, folder: Path, broker: str, redis: RedisServer, capacity: int) -> None:
        self.folder = folder
        (folder / "shop.py").write_text(SHOP)
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{REPOSITORY}:{folder}",
            "BROKER": broker,
            "REDIS": redis.url,
            "REGISTRY": redis.url.rpartition("/")[0] + "/1",
            "CAPACITY": f"{capacity}",
            "C_FORCE_ROOT": "1",
        }
        names: dict[str, Any] = {"__name__": "shop"}
        with pytest.MonkeyPatch.context() as patch:
            for name in ("BROKER", "REDIS", "REGISTRY", "CAPACITY"):
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

    def status(self) -> str:
        """Return what the command prints; it ends with 1 while nobody serves the modules."""
        return self.run("celery -A shop rabbitdelay status || [ $? = 1 ]")

    def waiting(self) -> dict[str, int]:
        """Return how many messages wait in the levels and the modules' queues, where some do."""
        told = self.status()
        counts = dict(re.findall(r"^  (\S+) +([\d,]+) waiting", told, re.MULTILINE))
        assert {"seconds.x1", "meditation", "undeliverable"} <= set(counts), told
        return {name: int(count) for name, count in counts.items() if count != "0"}

    def is_empty(self) -> bool:
        """Return whether nothing waits."""
        return not self.waiting()


@pytest.fixture
def shop(
    request: pytest.FixtureRequest,
    session_rabbitmq: RabbitMQServer,
    redis: RedisServer,
    tmp_path: Path,
) -> Iterator[Shop]:
    with virtual_host(session_rabbitmq, f"leaving-{uuid4().hex[:8]}") as url:
        made = Shop(tmp_path, url, redis, getattr(request, "param", CAPACITY))
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
        send((name,), key="Ada's order 7")
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


#: What plain workers on the same queues run of this, by the table of the page; and with a worker of
#: the modules beside them, besides.
PLAIN_RUN: Final = [
    *("plain", "older", "newer", "cancelled", "once", "once", "committed", "aborted", "open"),
    *("paused", "postponed", "nightly", "link", "next link"),
]
MODULES_RUN: Final = ["urgent", "news", "meditated", *ROWS]


class Page:
    """The page's code in its order."""

    def __init__(self) -> None:
        found = blocks(REPOSITORY / "docs/how-to/leave.md")
        self.files = {
            name[1]: block.code
            for block in found
            if (name := re.match(r"# (\w+\.py)\n", block.code))
        }
        [self.with_registry] = [each.code for each in found if "known = " in each.code]
        self.commands = [each for block in found for each in commands(block.code)]

    def worker_of_modules(self) -> str:
        """Return the command of the worker that runs no task."""
        [(command, _)] = [each for each in self.commands if "no-tasks" in each[0]]
        return command


def test_plain_workers_run_what_the_page_says_and_leave_the_rest_behind(shop: Shop) -> None:
    shop.run("celery -A shop rabbitdelay declare --queues")
    send_each_kind(shop.app)
    with shop.worker(PLAIN_WORKER):
        assert shop.wait_for(*PLAIN_RUN) == Counter(PLAIN_RUN)
        # An envelope and two tasks, and a task and the note of the job that was committed.
        wait_for(
            lambda: shop.waiting() == {"distribution": 3, "check-in": 2}, "the rest", interval=1
        )
        assert "cannot answer: it runs without celery_rabbitdelay" in shop.status()
        with shop.worker(Page().worker_of_modules()):
            everything = [*PLAIN_RUN, *MODULES_RUN]
            assert shop.wait_for(*everything) == Counter(everything)
            wait_for(shop.is_empty, "empty levels", interval=1)


@pytest.mark.parametrize("shop", [LONG_CAPACITY], indirect=True)
def test_what_waits_is_moved_to_native_delayed_delivery_and_is_not_early(shop: Shop) -> None:
    page = Page()
    task = page.files["plain_shop.py"]
    noting = "app.backend.client.rpush('ran', f'{order} {time.time()} {self.request.retries}')"
    task = task.replace('print(f"please pay order {order}")', noting)
    task = task.replace(
        'name="shop.remind")\ndef remind(', 'name="shop.remind", bind=True)\ndef remind(self, '
    )
    backend = "import os, time\napp.conf.result_backend = os.environ['REDIS']\n"
    (shop.folder / "plain_shop.py").write_text(task.replace("\n\n\n@app", f"\n{backend}\n@app"))
    (shop.folder / "empty_levels.py").write_text(page.files["empty_levels.py"])
    shop.environment["CELERY_BROKER_URL"] = shop.environment["BROKER"]
    shop.run("celery -A shop rabbitdelay declare --queues")
    remind, delay = shop.app.tasks["shop.remind"], LONG_DELAY - 0.5
    worker = "import plain_shop; plain_shop.app.Worker(pool='solo', loglevel='INFO').start()"
    with shop.worker(f'python -c "{worker}"') as native:
        wait_for(lambda: " ready." in native.log, "the worker", interval=0.2)
        began, moved = time.time(), [str(number) for number in range(20)]
        for each in moved:
            remind.apply_async((each,), delay=delay, retries=int(each) % 3)
        stay = [
            remind.apply_async(("urgent",), delay=delay, priority=7),
            remind.apply_async(("news",), delay=delay, queue="news"),
            chain(remind.si("link"), remind.si("next link")).apply_async(countdown=delay),
        ]
        rows = [{"args": (name,), "delay": delay} for name in ROWS]
        assert shop.app.rabbitdelay.send_many(remind, rows, tolerance=5).envelopes == 1
        [(command, shown)] = [each for each in page.commands if each[0].startswith("python")]
        assert "20 tasks moved" in shop.run(command, *shown)
        assert sum(shop.waiting().values()) == len(stay) + 1
        redis: Any = shop.app.backend.client
        wait_for(lambda: redis.llen("ran") == len(moved), "the tasks", interval=0.2)
        ran = [each.decode().split() for each in redis.lrange("ran", 0, -1)]
    assert {name: int(retries) for name, _, retries in ran} == {
        each: int(each) % 3 for each in moved
    }
    # Native delayed delivery cuts a delay down to whole seconds, and the worker waits for the rest.
    assert min(float(at) for _, at, _ in ran) >= began + delay


@pytest.mark.parametrize("shop", [LONG_CAPACITY], indirect=True)
def test_with_a_registry_nothing_that_was_cancelled_is_moved(shop: Shop) -> None:
    page = Page()
    before = "            args, kwargs, embedded = "
    program = page.files["empty_levels.py"]
    assert program.count(before) == 1
    program = program.replace(before, page.with_registry + before)
    # For plain countdown, without these lines.
    for setting in ("queue_type", "exchange_type"):
        program, left_out = re.subn(rf"    task_default_{setting}=.*\n", "", program)
        assert left_out == 1
    (shop.folder / "empty_levels.py").write_text(program)
    shop.run("celery -A shop rabbitdelay declare --queues")
    delays, remind = shop.app.rabbitdelay, shop.app.tasks["shop.remind"]
    with shop.app.connection_for_write() as connection:
        Queue("orders", Exchange("orders"), "orders")(connection.default_channel).declare()
    send = partial(remind.apply_async, delay=LONG_DELAY)
    expected = {send(("plain",)).id, send(("tracked",), track=True).id}
    delays.cancel(send(("cancelled",), track=True))
    send(("older",), key="order:7")
    expected.add(send(("newer",), key="order:7").id)
    for name in ("committed", "aborted"):
        delays.open_job(name, expires=45)
        send((name,), job=name)
    delays.commit_job("committed")
    delays.abort_job("aborted")
    begin = datetime.now(UTC) + timedelta(seconds=LONG_DELAY)
    delays.schedules.put("nightly", remind, timedelta(days=1), ("nightly",), start=begin)
    delays.schedules.delete("nightly")
    [(command, _)] = [each for each in page.commands if each[0].startswith("python")]
    shop.run(command, f"{len(expected)} tasks moved")
    # Two tasks and the note of the job that was committed, and an occurrence.
    assert sum(shop.waiting().values()) == 4
    with shop.app.connection_for_write() as connection:
        queue, found = Queue("orders")(connection.default_channel), set[str]()
        while message := queue.get(no_ack=True):
            assert message.headers["eta"]  # plain workers hold it until then
            found.add(message.headers["id"])
    assert found == expected


def _keys(shop: Shop) -> list[str]:
    """Return the keys of the registry."""
    with Redis.from_url(shop.environment["REGISTRY"], decode_responses=True) as client:
        return list(client.scan_iter("*"))


def test_the_page_s_commands_lose_nothing_and_run_nothing_that_was_cancelled(shop: Shop) -> None:
    shop.run("celery -A shop rabbitdelay declare --queues")
    send_each_kind(shop.app)
    ours: CommandServer | None = None
    for command, shown in Page().commands:
        if "no-tasks" in command or command.startswith("python"):
            continue  # the other tests
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
        if command.startswith("redis-cli"):
            assert len(kept := _keys(shop)) > 5
            assert any("Ada's order 7" in key for key in kept)
            port = urlsplit(shop.environment["REGISTRY"]).port
            command = command.replace("redis-cli", f"redis-cli -p {port}")
        shop.run(command, *shown)
    assert _keys(shop) == []
    assert json.loads((shop.folder / "schedules.json").read_text())["schedules"]
    # On the old queues, plain workers find nothing that should not run.
    last = ["last on celery", "last on news"]
    with shop.worker(PLAIN_WORKER):
        for each in last:
            shop.app.send_task("shop.remind", (each,), queue=each.rpartition(" ")[2])
        assert shop.wait_for(*last) == Counter([*RUN, *last])
