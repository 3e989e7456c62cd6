# ruff: noqa: T201  # a program at the terminal prints
"""The version before and this one on the same levels: ``python -m tests.upgrade.beside``.

A worker and a producer of each version run on one prefix of a broker of their own. Both producers
send tasks of every kind: straight, by distribution, in envelopes, above the capacity, and as
clients of check-in. Every task has to run, none of them early; those that run twice are counted.

The version before comes from the git history. Where that is missing, as in a shallow clone or an
unpacked archive, the program says so and ends with the status 2; ``--former FOLDER`` names a folder
that holds the package of that version instead.

The exit status is 1 where a task is lost or early.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import redis
from kombu import Connection

from celery_rabbitdelay.levels.layout import custom
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.testing import RedisServer, wait_for
from celery_rabbitdelay.testing.servers import Server
from tests.former_version import REPOSITORY, FormerVersionMissing, extract
from tests.private_broker import private_broker

#: As :mod:`tests.upgrade.beside_shop` has them, which needs a broker to be imported.
PREFIX: Final = "beside"
LEVELS: Final = [("seconds", 20, 1), ("ms", 10, 0.1)]
NOTES_KEY: Final = f"{PREFIX}-notes"

#: Seconds until all tasks have run.
PATIENCE: Final = 600.0

#: The exit status where something is wrong.
FAILED: Final = 1


class Version(Server):
    """A version of the package in a folder of its own, and its worker.

    Args:
        name: What it is called in the report.
        package: The folder that its package is in.
        folder: Where the application of the test is put beside it.
        environment: The servers.
    """

    package = "celery"

    def __init__(self, name: str, package: Path, folder: Path, environment: dict[str, str]) -> None:
        super().__init__()
        self.name = name
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / "tests/upgrade/beside_shop.py", folder)
        self._folder = folder
        self._own = {
            **environment,
            "PYTHONPATH": os.pathsep.join([str(package), str(folder)]),
            "BESIDE_NAME": name,
            "BESIDE_PACKAGE": str(package),
            "C_FORCE_ROOT": "1",
        }

    def send(self, first: int, number: int) -> subprocess.Popen[bytes]:
        """Start the producer."""
        command = [sys.executable, "-m", "beside_shop", str(first), str(number)]
        return subprocess.Popen(command, env={**os.environ, **self._own}, cwd=self._folder)

    def _command(self) -> list[str]:
        node = f"{self.name}-{self.port}@localhost"
        return [
            # Without the current folder in the path, which has this version.
            *(sys.executable, "-P", "-m", "celery", "--workdir", str(self._folder)),
            *("-A", "beside_shop", "worker"),
            *("-c", "1", "-l", "INFO", "-n", node),
        ]

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), **self._own}

    def _ready(self) -> bool:
        return " ready." in self.log


def main() -> None:
    """Run both versions and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tasks", type=int, default=20_000, help="of both producers together")
    parser.add_argument("--former", type=Path, help="a folder with the package of another version")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        former = options.former or folder / "former"
        if options.former is None:
            try:
                extract(former, "celery_rabbitdelay")
            except FormerVersionMissing as missing:
                parser.error(str(missing))
        broker = stack.enter_context(private_broker())
        redis_server = stack.enter_context(RedisServer())
        servers = {"BESIDE_BROKER": broker.url, "BESIDE_REDIS": redis_server.url}
        versions = [
            Version("before", former, folder / "app-before", servers),
            Version("today", REPOSITORY, folder / "app-today", servers),
        ]
        for version in versions:
            stack.enter_context(version)
        each = options.tasks // 2
        producers = [version.send(number * each, each) for number, version in enumerate(versions)]
        if sum(producer.wait() != 0 for producer in producers):
            print("A producer has failed.", file=sys.stderr)
            raise SystemExit(FAILED)
        notes: Any = redis.Redis.from_url(redis_server.url)
        runs = _runs(notes, 2 * each)
        status = _report(runs, 2 * each)
        with Connection(broker.url) as connection:
            status |= _report_left(connection)
    raise SystemExit(status)


def _runs(notes: Any, number: int) -> list[list[Any]]:
    """Return the runs, once all tasks have run or time is up."""

    def found() -> list[list[Any]]:
        return [json.loads(each) for each in notes.lrange(NOTES_KEY, 0, -1)]

    def all_ran() -> bool:
        return notes.llen(NOTES_KEY) >= number and len({run[0] for run in found()}) >= number

    try:
        wait_for(all_ran, "all tasks", PATIENCE, interval=1.0)
        # A copy may come behind its original.
        time.sleep(3)
    except TimeoutError as late:
        print(late, file=sys.stderr)
    return found()


def _report(runs: list[list[Any]], number: int) -> int:
    """Print the figures; return the exit status."""
    ran = Counter(run[0] for run in runs)
    lost = number - len(ran)
    late = sorted(at - due_ms / 1000 for _, at, due_ms, _ in runs)
    early = sum(each < -0.001 for each in late)
    print(f"{number} tasks: {lost} lost, {early} early, {ran.total() - len(ran)} ran twice")
    if late:
        middle, last = late[len(late) // 2], late[-1]
        print(f"late: {middle:.2f} s in the middle, {last:.2f} s at most; earliest {late[0]:.3f} s")
    table = Counter(("before" if run[0] < number // 2 else "today", run[3]) for run in runs)
    for (sent_by, ran_in), count in sorted(table.items()):
        print(f"sent by {sent_by:8} ran in {ran_in:8} {count:7,}")
    return FAILED if lost or early else 0


def _report_left(connection: Connection) -> int:
    """Print what is left in the levels; return the exit status."""
    topology = Topology(PREFIX, custom(LEVELS))
    left = {
        name: counts.messages
        for name, counts in queue_counts(connection, topology.queues).items()
        if counts is not None and counts.messages
    }
    print(f"left in the levels: {left or 'nothing'}")
    return FAILED if left else 0


if __name__ == "__main__":
    main()
