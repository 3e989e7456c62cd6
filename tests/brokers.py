# ruff: noqa: T201  # a program at the terminal prints
"""Run the integration and acceptance tests against every RabbitMQ that we support.

``python -m tests.brokers`` makes one small Debian system for each version, once, and keeps it in a
cache folder; the nodes of the tests are then started inside it. Only root may do that, because it
takes ``debootstrap`` and ``chroot``. ``--only 4.3`` takes one version.

The cache is ``$RABBITDELAY_BROKER_CACHE``, by default ``~/.cache/celery_rabbitdelay/brokers``. It
can be deleted at any time; to get a suite's newer RabbitMQ, delete the folder of that suite.
"""

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from celery_rabbitdelay.testing import ServerNotStarted
from tests import CACHE
from tests.rabbitmq_node import RabbitMQNode

REPOSITORY: Final = Path(__file__).resolve().parent.parent

#: What is run against every version.
TESTS: Final = ("tests", "-k", "integration or acceptance")

#: ``procps`` brings ``ps``, which RabbitMQ's scripts call and the smallest Debian lacks.
PACKAGES: Final = ("rabbitmq-server", "procps")


class Broker(NamedTuple):
    """A version of RabbitMQ and the Debian suite that brings it."""

    version: str
    suite: str


#: The oldest version that we support, the first of the 4 series, and the newest.
BROKERS: Final = (Broker("3.10", "bookworm"), Broker("4.0", "trixie"), Broker("4.3", "sid"))


class NotPossibleHere(RuntimeError):
    """The machine or the user cannot do what is asked for; the message says what is missing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests against the chosen versions; return 0 if all have passed on each."""
    parser = argparse.ArgumentParser(prog="python -m tests.brokers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    versions = [broker.version for broker in BROKERS]
    parser.add_argument("--only", action="append", choices=versions, help="one version; or more")
    only = parser.parse_args(arguments).only or versions
    codes = {broker.version: _run(broker) for broker in BROKERS if broker.version in only}
    print(*(f"RabbitMQ {each}: {code or 'ok'}" for each, code in codes.items()), sep="\n")
    return int(any(codes.values()))


def _require_root() -> None:
    if os.geteuid() != 0:
        raise NotPossibleHere(
            "only root can make and enter the Debian systems (debootstrap, chroot): run this as "
            "root, or start a RabbitMQ yourself and set RABBITDELAY_BROKER_URL for pytest"
        )


def _require_debootstrap() -> None:
    if shutil.which("debootstrap") is not None:
        return
    if shutil.which("apt-get") is None:
        raise NotPossibleHere("debootstrap is missing, and there is no apt-get to install it with")
    _call("apt-get", "update")
    _call("apt-get", "install", "--yes", "debootstrap")


def _run(broker: Broker) -> int | str:
    """Run the tests on a version; return pytest's exit code, or why they cannot be run."""
    try:
        root = system_with(broker)
        with RabbitMQNode(root) as server:
            print(f"RabbitMQ {server.ctl('version').strip()} in {root}", flush=True)
    except (NotPossibleHere, ServerNotStarted, OSError) as error:
        return str(error)
    environment = {**os.environ, "RABBITDELAY_BROKER_ROOT": str(root)}
    # A server that runs already would be taken instead of the version under test.
    environment.pop("RABBITDELAY_BROKER_URL", None)
    at_a_time = ("--numprocesses=4", "--dist=loadfile")
    command = [sys.executable, "-m", "pytest", *at_a_time, *TESTS]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode


def system_with(broker: Broker) -> Path:
    """Return the folder of a Debian system with this RabbitMQ; make it if there is none yet."""
    folder = cache_folder() / broker.suite
    with _only_one(folder.with_suffix(".lock")):
        if not folder.is_dir():
            _require_root()
            _require_debootstrap()
            _make_system(broker.suite, folder)
    return folder


def cache_folder() -> Path:
    """Return the folder that keeps the Debian systems."""
    given = os.environ.get("RABBITDELAY_BROKER_CACHE")
    if given:
        return Path(given).resolve()
    return (CACHE / "brokers").resolve()


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Let a second run wait here until the first has made the system."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make_system(suite: str, folder: Path) -> None:
    # Made under another name and renamed at the end, so that what an interrupted run leaves behind
    # is never taken for a whole system.
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        # Namespaces of its own: if this program ends, however it does, so does all that debootstrap
        # has started and mounted, and the folder can be removed safely.
        _call(
            *("setpriv", "--pdeathsig", "KILL"),
            *("unshare", "--mount", "--pid", "--fork", "--kill-child"),
            *("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}"),
            *(suite, str(unfinished)),
        )
        shutil.copyfile("/etc/hosts", unfinished / "etc" / "hosts")
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    unfinished.rename(folder)
    print(f"{folder}: rabbitmq-server {packaged_version(folder)}", flush=True)


def packaged_version(folder: Path) -> str:
    """Return the version of the Debian package rabbitmq-server in the system in ``folder``."""
    query = subprocess.run(
        [
            *("dpkg-query", f"--admindir={folder / 'var/lib/dpkg'}"),
            *("--show", "--showformat=${Version}", "rabbitmq-server"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return query.stdout


def _call(*command: str) -> None:
    print("+", *command, flush=True)
    try:
        subprocess.run(command, check=True)
    except subprocess.CalledProcessError as error:
        raise NotPossibleHere(f"{' '.join(command)} ended with code {error.returncode}") from error


if __name__ == "__main__":
    sys.exit(main())
