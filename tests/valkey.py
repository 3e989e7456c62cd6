# ruff: noqa: T201  # a program at the terminal prints
"""Run the tests of the registry against Valkey in place of Redis.

``python -m tests.valkey`` installs ``valkey-server`` in the Debian system that the tests of
RabbitMQ 4.0 use (see :mod:`tests.brokers`; only root may do that), and puts programs named
``redis-server`` and ``redis-cli`` in front of the search path, which start Valkey's: one server, a
cluster and Sentinel. Further arguments go to pytest.
"""

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.brokers import BROKERS, REPOSITORY, NotPossibleHere, system_with

#: The Debian suite that has Valkey 8.
SUITE: Final = "trixie"

#: The test files that are run; most of them on one server and a cluster, some behind Sentinel.
TESTS: Final = sorted(
    str(path) for path in REPOSITORY.glob("tests/registry/integration/test_registry*.py")
)

#: Starts a program of the Debian system with that system's libraries.
WRAPPER: Final = """#!/bin/sh
exec {root}/lib64/ld-linux-x86-64.so.2 --library-path {root}/usr/lib/x86_64-linux-gnu \\
  {root}/usr/bin/valkey-{program} "$@"
"""


def main(arguments: Sequence[str]) -> int:
    """Run the tests; return pytest's exit status."""
    try:
        root = system_with_valkey()
    except NotPossibleHere as reason:
        print(f"tests.valkey: {reason}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        for program in ("server", "cli"):
            wrapper = Path(folder, f"redis-{program}")
            wrapper.write_text(WRAPPER.format(root=root, program=program))
            wrapper.chmod(0o755)
        environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        print(subprocess.check_output(["redis-server", "--version"], env=environment, text=True))
        at_a_time = ("--numprocesses=2", "--dist=loadfile")
        command = [sys.executable, "-m", "pytest", *at_a_time, *TESTS, *arguments]
        return subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode


def system_with_valkey() -> Path:
    """Return the folder of a Debian system with Valkey."""
    if os.geteuid() != 0 or platform.machine() != "x86_64":
        raise NotPossibleHere("takes root, and an x86-64 machine")
    (broker,) = (each for each in BROKERS if each.suite == SUITE)
    root = system_with(broker)
    if not Path(root, "usr/bin/valkey-server").exists():
        for step in ("update", "install -y --no-install-recommends valkey-server"):
            subprocess.run(["chroot", str(root), "apt-get", *step.split()], check=True)
    return root


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
