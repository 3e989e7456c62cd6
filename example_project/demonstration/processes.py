"""The processes of a run besides the servers: the Celery worker and the Spark job."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

#: Seconds that a process may take to end by itself before it is killed.
STOP_TIMEOUT: Final = 20.0

#: The folder that holds this package: the processes import it, wherever they run.
_PROJECT: Final = Path(__file__).parents[2]


def worker(folder: Path, environment: Mapping[str, str]) -> ChildProcess:
    """Return the process of a Celery worker that runs the reminders."""
    shop = "example_project.demonstration.observed_shop"
    celery = ["celery", "-A", shop, "worker", "--loglevel", "WARNING", "--concurrency", "8"]
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    return ChildProcess("worker", [*celery, *quiet], folder, environment)


def spark_job(folder: Path, environment: Mapping[str, str]) -> ChildProcess:
    """Return the process of the Spark job that sends the reminders."""
    spark_environment = {
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        **environment,
    }
    job = "example_project.demonstration.observed_spark_job"
    return ChildProcess("spark-job", [job], folder, spark_environment)


class ChildProcess:
    """A Python process that runs a module, with a log of its own; ends with its context.

    Args:
        name: The name of its log and its folder.
        module: The module, as ``python -m`` takes it, and its arguments.
        folder: Where to put the log and the process's own folder.
        environment: Environment variables of the process, besides ours.
    """

    def __init__(
        self, name: str, module: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log_path = folder / f"{name}.log"
        self._module = module
        self._folder = folder / name
        self._environment = {
            **os.environ,
            **environment,
            "PYTHONPATH": _python_path(),
            # Files that a killed process leaves behind are removed with the folder.
            "TMPDIR": str(self._folder),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is None:
            self.stop()
        else:
            self.kill()

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the process runs."""
        assert self._process is not None, "the process was not started"
        return self._process.poll()

    def log_tail(self, lines: int = 25) -> str:
        """Return the last lines that the process has printed."""
        if not self.log_path.exists():
            return ""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def start(self) -> None:
        """Start the process, also again after a :meth:`kill`."""
        self._folder.mkdir(exist_ok=True)
        with self.log_path.open("ab") as log:
            # A process group of its own, so that Ctrl-C does not reach it, and a kill reaches its
            # child processes.
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self._module],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill the process and its child processes (SIGKILL)."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def stop(self) -> None:
        """Stop the process (SIGTERM), and kill it if it does not end in time."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT)
            self.kill()


def _python_path() -> str:
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(_PROJECT), *([inherited] if inherited else [])])
