"""The version before and this one on the same levels: ``python -m tests.upgrade.beside``.

A worker and a producer of each version run on one prefix of a broker of their own. Both producers
send tasks of every kind: straight, by distribution, in envelopes, above the capacity, and as
clients of check-in. Every task has to run, none of them early; those that run twice are counted.

The version before comes from the git history. Where that is missing, as in a shallow clone or an
unpacked archive, the program says so and ends with the status 2; ``--former FOLDER`` names a folder
that holds the package of that version instead. The exit status is 1 where a task is lost or early.

This file is copied beside each version, where it is the application ``beside`` and its producer
``python -m beside FIRST NUMBER``; so only the report imports more of this repository.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import kombu
import redis

import celery_rabbitdelay
from celery_rabbitdelay import Celery
from celery_rabbitdelay.testing import RedisServer, wait_for
from celery_rabbitdelay.testing.servers import Server

#: Levels up to 19.9 s; and seconds that tasks wait, and that those wait which meditate.
LEVELS: Final = [("seconds", 20, 1), ("ms", 10, 0.1)]
DELAYS: Final = (6.0, 19.0)
MEDITATING: Final = (21.0, 35.0)

PREFIX: Final = "beside"
QUEUE: Final = f"{PREFIX}-tasks"
NOTES_KEY: Final = f"{PREFIX}-notes"

#: Seconds until all tasks have run.
PATIENCE: Final = 600.0


def make_app(broker: str, notes: Any) -> Any:
    """Create the application, of whichever version is imported."""
    app = Celery(PREFIX, broker=broker)
    app.conf.update(
        task_default_queue=QUEUE,
        task_queues=[kombu.Queue(QUEUE, queue_arguments={"x-queue-type": "quorum"})],
        task_ignore_result=True,
        worker_prefetch_multiplier=50,
        rabbitdelay_prefix=PREFIX,
        rabbitdelay_layout=LEVELS,
    )

    @app.task(name="note", bind=True)
    def note(self: Any, number: int) -> None:
        """Note when the task runs, when it was due, and in which version it runs."""
        due_ms = self.request.headers["rabbitdelay-due"]
        notes.rpush(NOTES_KEY, json.dumps([number, time.time(), due_ms, os.environ["BESIDE_NAME"]]))

    return app


def produce(app: Any, numbers: range) -> None:
    """Send tasks in every way."""
    send, rows, checkin = app.tasks["note"].apply_async, [], f"{PREFIX}.checkin"
    with app.connection_for_write() as connection:
        for number in numbers:
            way, delay = number % 10, random.uniform(*DELAYS)
            if way < 3:
                send((number,), delay=delay)
            elif way == 3:
                # Above 4, only distribution restores it.
                send((number,), delay=delay, priority=9)
            elif way == 4:
                send((number,), delay=random.uniform(*MEDITATING))
            elif way == 5:
                # As a client that knows nothing of the package.
                message = app.amqp.as_task_v2(str(uuid4()), "note", (number,))
                headers = {**message.headers, "x-delay": random.randint(1000, 15_000)}
                connection.Producer().publish(
                    *(message.body, QUEUE, 2),
                    exchange=checkin,
                    headers=headers,
                    serializer="json",
                    **message.properties,
                )
            else:
                rows.append({"args": (number,), "delay": delay})
        app.rabbitdelay.send_many("note", rows, tolerance=0.5)
        # The broker answers after it has routed what came before.
        connection.default_channel.queue_declare(QUEUE, passive=True)


class Version(Server):
    """A version of the package in a folder of its own, and its worker.

    Args:
        name: What it is called in the report.
        code: The folder that its package is in.
        environment: The servers.
    """

    package = "celery"

    def __init__(self, name: str, code: Path, environment: dict[str, str]) -> None:
        super().__init__()
        self.name = name
        self._own = {**environment, "BESIDE_NAME": name, "BESIDE_CODE": str(code)}
        self._own["C_FORCE_ROOT"] = "1"

    def send(self, first: int, number: int) -> subprocess.Popen[bytes]:
        """Start the producer; the worker runs already."""
        command = [sys.executable, "-m", "beside", str(first), str(number)]
        return subprocess.Popen(command, env=self._environment(), cwd=self.folder)

    def _command(self) -> list[str]:
        (self.folder / "beside.py").write_text(Path(__file__).read_text())
        # Without the current folder in the path, which has this version.
        celery = [sys.executable, "-P", "-m", "celery", "--workdir", str(self.folder)]
        node = f"-c 1 -l INFO -n {self.name}-{self.port}@localhost"
        return [*celery, "-A", "beside", "worker", *node.split()]

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join([self._own["BESIDE_CODE"], str(self.folder)])
        return {**super()._environment(), **self._own, "PYTHONPATH": path}

    def _ready(self) -> bool:
        return " ready." in self.log


def main() -> None:
    """Run both versions and report."""
    from tests.former_version import REPOSITORY, FormerVersionMissing, extract
    from tests.private_broker import private_broker

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tasks", type=int, default=20_000, help="of both producers together")
    parser.add_argument("--former", type=Path, help="a folder with the package of another version")
    options = parser.parse_args()
    with ExitStack() as stack:
        former = options.former or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if options.former is None:
            try:
                extract(former, "celery_rabbitdelay")
            except FormerVersionMissing as missing:
                parser.error(str(missing))
        broker = stack.enter_context(private_broker())
        redis_server = stack.enter_context(RedisServer())
        servers = {"BESIDE_BROKER": broker.url, "BESIDE_REDIS": redis_server.url}
        versions = [Version("before", former, servers), Version("today", REPOSITORY, servers)]
        for version in versions:
            stack.enter_context(version)
        half = options.tasks // 2
        producers = [each.send(number * half, half) for number, each in enumerate(versions)]
        statuses = [producer.wait() for producer in producers]
        if any(statuses):
            sys.exit("A producer has failed.")
        sys.exit(report(redis.Redis.from_url(redis_server.url), half))


def report(notes: Any, half: int) -> int:
    """Print the figures, once all tasks have run or time is up; return the exit status."""

    def runs() -> list[list[Any]]:
        return [json.loads(each) for each in notes.lrange(NOTES_KEY, 0, -1)]

    try:
        all_ran = "all tasks"
        wait_for(lambda: len({run[0] for run in runs()}) == 2 * half, all_ran, PATIENCE, 1.0)
        # A copy may come behind its original.
        time.sleep(3)
    except TimeoutError as time_is_up:
        sys.stderr.write(f"{time_is_up}\n")
    found = runs()
    ran = Counter(run[0] for run in found)
    lost, late = 2 * half - len(ran), sorted(at - due_ms / 1000 for _, at, due_ms, _ in found)
    early = sum(each < -0.001 for each in late)
    lines = [f"{2 * half} tasks: {lost} lost, {early} early, {len(found) - len(ran)} ran twice"]
    if late:
        lines.append(f"late: {late[len(late) // 2]:.2f} s in the middle, {late[-1]:.2f} s at most")
    table = Counter(("before" if run[0] < half else "today", run[3]) for run in found)
    for (sent_by, ran_in), number in sorted(table.items()):
        lines.append(f"sent by {sent_by:8} ran in {ran_in:8} {number:7,}")
    sys.stdout.write("\n".join([*lines, ""]))
    return 1 if lost or early else 0


if "BESIDE_CODE" in os.environ:
    if Path(celery_rabbitdelay.__file__).parents[1] != Path(os.environ["BESIDE_CODE"]):
        raise ImportError(f"this is another version: {celery_rabbitdelay.__file__}")
    redis_client: Any = redis.Redis.from_url(os.environ["BESIDE_REDIS"])
    app = make_app(os.environ["BESIDE_BROKER"], redis_client)
    if __name__ == "__main__":
        produce(app, range(int(sys.argv[1]), int(sys.argv[1]) + int(sys.argv[2])))
elif __name__ == "__main__":
    main()
