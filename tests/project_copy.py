"""A copy of the project in which something may be broken, and what the tests say there."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

REPOSITORY: Final = Path(__file__).resolve().parents[1]

#: What the tests need of the project.
NEEDED: Final = ("celery_rabbitdelay", "pyspark_rabbitdelay", "tests", "example_project", "docs")

#: What pytest returns if all tests passed, if one failed, and if there were none.
PASSED, FAILED, NO_TESTS = 0, 1, 5


class Run(NamedTuple):
    """What pytest has returned, None after a time-out; and what it printed."""

    code: int | None
    printed: str

    @property
    def failed(self) -> str:
        """The test that failed first, or why there is none."""
        if self.code is None:
            return "a time-out"
        named = re.search(r"^(?:FAILED|ERROR) (\S+)", self.printed, re.MULTILINE)
        return named[1] if named else f"the exit code {self.code} of pytest"


@contextmanager
def project_copy() -> Iterator[Path]:
    """Copy the project into a folder that goes with the block."""
    with tempfile.TemporaryDirectory(prefix="rabbitdelay-copy-") as folder:
        ignored = shutil.ignore_patterns("__pycache__", "_build")
        for name in NEEDED:
            shutil.copytree(REPOSITORY / name, Path(folder, name), ignore=ignored)
        for path in [REPOSITORY / "pyproject.toml", *REPOSITORY.glob("*.md")]:
            shutil.copy(path, folder)
        yield Path(folder)


def run_tests(
    folder: Path,
    *arguments: str,
    timeout: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> Run:
    """Run pytest in a copy until a test fails.

    Args:
        folder: The copy.
        *arguments: Further ones of pytest.
        timeout: Seconds after which it is ended, with all that it has started.
        environment: Further variables.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    # Two versions of a file that are as long and written in one second would share their bytecode.
    own = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile("w+") as output:
        # A session of its own, so that nothing that a test started is left after a time-out.
        run = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **own, **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = run.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
        output.seek(0)
        return Run(code, output.read())
