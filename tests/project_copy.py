"""A copy of the project in which something may be broken, and what the tests say there."""

from __future__ import annotations

import os
import shutil
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

#: What pytest returns if all tests passed, and if one failed.
PASSED, FAILED = 0, 1


class Run(NamedTuple):
    """What pytest has returned and printed."""

    code: int
    printed: str


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


def run_tests(folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> Run:
    """Run pytest in a copy until a test fails.

    Args:
        folder: The copy.
        *arguments: Further ones of pytest.
        environment: Further variables.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    # Two versions of a file that are as long and written in one second would share their bytecode.
    own = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    # A file and no pipe, which a program that a test has left would keep open.
    with tempfile.TemporaryFile("w+") as output:
        run = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **own, **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
        output.seek(0)
        return Run(run.returncode, output.read())
