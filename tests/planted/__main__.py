# ruff: noqa: T201  # a program at the terminal prints
"""Plant each fault in a copy of the project, and run the tests that have to notice.

``python -m tests.planted [ROOM ...]`` prints the faults that no test notices, and fails then.
"""

import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tests.planted.faults import Fault, faults
from tests.project_copy import FAILED, PASSED, project_copy, run_tests

#: Seconds after which a test has failed.
TIMEOUT: Final = 120


def what_tests_say(fault: Fault) -> str | None:
    """Return why a fault counts as overlooked; None if a test notices it."""
    with project_copy() as folder:
        Path(folder, "celery_rabbitdelay", fault.file).write_text(fault.planted())
        run = run_tests(folder, f"--timeout={TIMEOUT}", *shlex.split(fault.tests))
    if run.code == FAILED:
        return None
    return "all passed" if run.code == PASSED else run.printed[-2000:]


def main(rooms: Sequence[str]) -> int:
    """Plant the faults of these rooms, two at a time; return how many are overlooked."""
    planted, overlooked = faults(*rooms), 0
    with ThreadPoolExecutor(2) as threads:
        for fault, why in zip(planted, threads.map(what_tests_say, planted), strict=True):
            if why is not None:
                overlooked += 1
                print(
                    f"overlooked: {fault.file}: {fault.breaks} ({fault.tests}): {why}", flush=True
                )
    print(f"{len(planted) - overlooked} of {len(planted)} faults noticed")
    return overlooked


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
