# ruff: noqa: T201  # a program at the terminal prints
"""Break each pure file in random places, and see whether the unit tests notice.

``python -m tests.mutation`` breaks each file of ``levels/``, each file of ``modules/`` that opens
no connection, and a few others in twenty places, one at a time, in a copy of the project, and runs
the unit tests there. It prints a table and the mutants that survived, and fails if the tests
noticed fewer than nine of ten in a file. ``--files`` takes some files only, ``--seed`` other
places, ``--places`` another number of them.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Final, NamedTuple

from tests.mutation.operators import Mutant, mutants, unbroken

REPOSITORY: Final = Path(__file__).resolve().parents[2]

#: The files that are pure: they are tested without a broker.
ROOMS: Final = ("levels", "modules")

#: Pure files of other rooms.
ELSEWHERE: Final = ("operations/undeliverable/redriving.py", "publishing/message.py")

#: Files of these rooms that talk to a broker, or run threads. ``modules/probe.py`` does so as well,
#: but leaves the thread to ``modules/service.py``, and its unit tests give it a mock for a channel.
NOT_PURE: Final = frozenset({"modules/consumer.py", "modules/deliveries.py", "modules/service.py"})

#: How many mutants of a file are tried.
PLACES: Final = 20

#: The part of them that the tests have to notice.
WANTED: Final = 0.9

#: Seconds after which tests of a mutant have to be over, at least; and how many times as long as
#: without a mutant they may take. A mutant that does not end counts as noticed, and is shown.
MIN_TIMEOUT: Final = 60.0
SLOWER: Final = 5

#: Seconds after which the tests without a mutant have to be over.
UNBROKEN_TIMEOUT: Final = 3600.0

#: What pytest returns if all tests passed, and if there were no tests.
PASSED: Final = (0, 5)

#: How pytest is run, unbroken and with a mutant.
PYTEST: Final = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider")
PYTEST_OF_A_MUTANT: Final = (*PYTEST, "--hypothesis-profile=mutation")

#: The documentation and the upstream libraries have nothing to say about a mutant.
IGNORED: Final = ("--ignore-glob=*test_doc*", "--ignore-glob=*test_upstream*")


class Result(NamedTuple):
    """What became of a mutant.

    Attributes:
        mutant: The mutant.
        noticed_by: The test that failed first, or why there is none; None if all passed.
    """

    mutant: Mutant
    noticed_by: str | None


class Copy(NamedTuple):
    """A copy of the project, in which one mutant at a time is tested.

    Attributes:
        folder: Where it is.
        timeout: Seconds that the tests may take.
    """

    folder: Path
    timeout: float


def main() -> int:
    """Run everything; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--files", nargs="*", help="such as levels/layout.py; all by default")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--places", type=int, default=PLACES)
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--verbose", action="store_true", help="say which test noticed a mutant")
    given = parser.parse_args()
    files = given.files or pure_files()
    chosen = {file: _choose(file, given.places, given.seed) for file in files}
    with tempfile.TemporaryDirectory(prefix="rabbitdelay-mutation-") as folder:
        first = _copy(REPOSITORY, Path(folder, "0"))
        started = time.monotonic()
        failed = _failure(Copy(first, UNBROKEN_TIMEOUT), ["tests/unit"], write_bytecode=True)
        if failed:
            print(f"the tests fail already without a mutant: {failed}", file=sys.stderr)
            return 2
        timeout = _timeout_since(started)
        # Those of one file are over sooner: so is a mutant that does not end.
        of_own = {}
        for file in files:
            started = time.monotonic()
            _failure(Copy(first, timeout), [_own_tests(file)])
            of_own[file] = _timeout_since(started)
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(given.jobs):
            here = first if number == 0 else _copy(first, Path(folder, str(number)))
            copies.put(Copy(here, timeout))
        with ThreadPoolExecutor(given.jobs) as pool:
            running = {
                file: [
                    pool.submit(_result, copies, file, mutant, of_own[file])
                    for mutant in chosen[file]
                ]
                for file in files
            }
            results = {}
            try:
                for file in files:
                    results[file] = [future.result() for future in running[file]]
                    _print_row(file, results[file], given.verbose)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
    for file in files:
        for mutant, noticed_by in results[file]:
            if noticed_by is None:
                print(f"survived: {file}:{mutant.line} {mutant.what}")
    return 0 if all(map(_is_enough, results.values())) else 1


def pure_files() -> list[str]:
    """Return the files that are broken, as paths below the package."""
    package = REPOSITORY / "celery_rabbitdelay"
    paths = [path.relative_to(package) for room in ROOMS for path in (package / room).glob("*.py")]
    names = sorted(str(path) for path in paths if path.name != "__init__.py")
    return [*(name for name in names if name not in NOT_PURE), *ELSEWHERE]


def _choose(file: str, places: int, seed: int) -> list[Mutant]:
    source = (REPOSITORY / "celery_rabbitdelay" / file).read_text()
    every = mutants(source)
    return random.Random(f"{seed}/{file}").sample(every, min(places, len(every)))


def _copy(origin: Path, folder: Path) -> Path:
    """Copy the project, with its pure files laid out like their mutants."""
    leave_out = shutil.ignore_patterns(".*", "_build")
    shutil.copytree(origin, folder, ignore=leave_out)
    if origin == REPOSITORY:
        for file in pure_files():
            path = folder / "celery_rabbitdelay" / file
            path.write_text(unbroken(path.read_text()))
    return folder


def _own_tests(file: str) -> str:
    return f"tests/unit/test_{Path(file).stem}.py"


def _timeout_since(started: float) -> float:
    return max(MIN_TIMEOUT, SLOWER * (time.monotonic() - started))


def _result(copies: SimpleQueue[Copy], file: str, mutant: Mutant, of_own: float) -> Result:
    copy = copies.get()
    target = copy.folder / "celery_rabbitdelay" / file
    original = target.read_text()
    try:
        target.write_text(mutant.source)
        # First the file's own tests, which notice most; then all others.
        own, noticed_by = _own_tests(file), None
        if (copy.folder / own).exists():
            noticed_by = _failure(copy._replace(timeout=of_own), [own])
        return Result(mutant, noticed_by or _failure(copy, ["tests/unit", f"--ignore={own}"]))
    finally:
        target.write_text(original)
        copies.put(copy)


def _failure(copy: Copy, tests: Sequence[str], *, write_bytecode: bool = False) -> str | None:
    """Return which test fails first; None if all pass."""
    # Two mutants that are equally long and written in one second would share their bytecode.
    command = [*(PYTEST if write_bytecode else PYTEST_OF_A_MUTANT), *tests, *IGNORED]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "" if write_bytecode else "1"}
    with tempfile.TemporaryFile("w+") as output:
        # A session of its own, so that nothing that a test started is left after a time-out.
        run = subprocess.Popen(
            command,
            cwd=copy.folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = run.wait(copy.timeout)
        except subprocess.TimeoutExpired:
            return f"a time-out of {copy.timeout:.0f} s"
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
        if code in PASSED:
            return None
        output.seek(0)
        named = re.search(r"^(?:FAILED|ERROR) (\S+)", output.read(), re.MULTILINE)
    return named[1] if named else f"the exit code {code} of pytest"


def _print_row(file: str, results: Sequence[Result], verbose: bool) -> None:
    noticed = sum(result.noticed_by is not None for result in results)
    print(f"{file:32} {noticed:3} of {len(results):3} noticed", flush=True)
    for mutant, noticed_by in results:
        if noticed_by and (verbose or "tests/" not in noticed_by):
            print(f"    {mutant.line}: {mutant.what}: {noticed_by}", flush=True)


def _is_enough(results: Sequence[Result]) -> bool:
    noticed = sum(result.noticed_by is not None for result in results)
    return noticed >= len(results) * WANTED - 1e-9


if __name__ == "__main__":
    sys.exit(main())
