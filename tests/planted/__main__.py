# ruff: noqa: T201  # a program at the terminal prints
"""Plant each fault in a copy of the project, and run the tests that have to notice.

``python -m tests.planted [ROOM ...]`` prints the faults that no test notices, and fails then.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tests.planted.faults import REPOSITORY, Fault, faults

#: Seconds after which a test has failed.
TIMEOUT: Final = 120

#: What pytest returns if a test has failed.
FAILED: Final = 1

#: What the tests need of the project.
NEEDED: Final = ("celery_rabbitdelay", "pyspark_rabbitdelay", "tests", "example_project", "docs")


def what_tests_say(fault: Fault) -> str | None:
    """Return why a fault counts as overlooked; None if a test notices it."""
    with tempfile.TemporaryDirectory(prefix="rabbitdelay-planted-") as folder:
        for name in NEEDED:
            ignored = shutil.ignore_patterns("__pycache__", "_build")
            shutil.copytree(REPOSITORY / name, Path(folder, name), ignore=ignored)
        for path in [REPOSITORY / "pyproject.toml", *REPOSITORY.glob("*.md")]:
            shutil.copy(path, folder)
        Path(folder, "celery_rabbitdelay", fault.file).write_text(fault.planted())
        pytest = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--timeout={TIMEOUT}"]
        run = subprocess.run(
            [sys.executable, *pytest, *shlex.split(fault.tests)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder},
            capture_output=True,
            text=True,
            check=False,
        )
    if run.returncode == FAILED:
        return None
    return run.stdout[-2000:] if run.returncode else "all passed"


def main(rooms: Sequence[str]) -> int:
    """Plant the faults of these rooms, two at a time; return how many are overlooked."""
    planted, overlooked = faults(*rooms), 0
    with ThreadPoolExecutor(2) as threads:
        for fault, why in zip(planted, threads.map(what_tests_say, planted), strict=True):
            if why is not None:
                overlooked += 1
                print(f"overlooked: {fault.file}: {fault.breaks} ({fault.tests}): {why}")
    print(f"{len(planted) - overlooked} of {len(planted)} faults noticed")
    return overlooked


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
