"""Spark programs that are killed, with all their processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from celery_rabbitdelay.testing import wait_for
from tests.integration.spark import QUICK_JAVA, REPOSITORY
from tests.integration.worker import ShopProcess

#: Seconds that a program may take to start Spark, on a machine that does much else.
STARTED: Final = 300.0


def start(
    module: str, *arguments: str, settings: dict[str, Any], folder: Path, **variables: str
) -> subprocess.Popen[bytes]:
    """Start a module of the tests as a process with a group of its own.

    Args:
        module: Its name.
        *arguments: What it is given.
        settings: Those of the application.
        folder: Where its temporary files go; what it prints is in ``program.log``.
        **variables: Further environment variables.
    """
    environment = {**os.environ, **QUICK_JAVA, **ShopProcess.environment(settings), **variables}
    with (folder / "program.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=REPOSITORY,
            env={**environment, "TMPDIR": str(folder)},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def kill_when(
    program: subprocess.Popen[bytes], condition: Callable[[], bool], what: str, log: Path
) -> None:
    """Wait for a condition, then kill the program, its Java process and their processes."""

    def ready() -> bool:
        assert program.poll() is None, log.read_text()[-3000:]
        return condition()

    try:
        wait_for(ready, what, STARTED)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
