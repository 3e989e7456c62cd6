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
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Final, NamedTuple

from tests.mutation.operators import Mutant, mutants, unbroken
from tests.project_copy import NO_TESTS, PASSED, REPOSITORY, project_copy, run_tests

PACKAGE: Final = Path("celery_rabbitdelay")

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
    files, survived, is_enough = given.files or pure_files(), [], True
    with ExitStack() as stack, ThreadPoolExecutor(given.jobs) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for _ in range(given.jobs):
            copies.put(stack.enter_context(_copy()))
        first = copies.get()
        started = time.monotonic()
        failed = _failure(first, UNBROKEN_TIMEOUT, "tests/unit")
        if failed:
            print(f"the tests fail already without a mutant: {failed}", file=sys.stderr)
            return 2
        timeout = _timeout_since(started)
        copies.put(first)
        running = {
            file: [
                pool.submit(_result, copies, file, mutant, timeout)
                for mutant in _choose(file, given.places, given.seed)
            ]
            for file in files
        }
        try:
            for file in files:
                results = [future.result() for future in running[file]]
                _print_row(file, results, given.verbose)
                own = [each.mutant for each in results if each.noticed_by is None]
                is_enough &= len(own) <= len(results) * (1 - WANTED) + 1e-9
                survived += [f"survived: {file}:{each.line} {each.what}" for each in own]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    print(*survived, sep="\n")
    return 0 if is_enough else 1


def pure_files() -> list[str]:
    """Return the files that are broken, as paths below the package."""
    package = REPOSITORY / PACKAGE
    paths = [path.relative_to(package) for room in ROOMS for path in (package / room).glob("*.py")]
    names = sorted(str(path) for path in paths if path.name != "__init__.py")
    return [*(name for name in names if name not in NOT_PURE), *ELSEWHERE]


def _choose(file: str, places: int, seed: int) -> list[Mutant]:
    source = (REPOSITORY / PACKAGE / file).read_text()
    every = mutants(source)
    return random.Random(f"{seed}/{file}").sample(every, min(places, len(every)))


@contextmanager
def _copy() -> Iterator[Path]:
    """Copy the project, with its pure files laid out like their mutants."""
    with project_copy() as folder:
        for file in pure_files():
            path = folder / PACKAGE / file
            path.write_text(unbroken(path.read_text()))
        yield folder


def _timeout_since(started: float) -> float:
    return max(MIN_TIMEOUT, SLOWER * (time.monotonic() - started))


def _result(copies: SimpleQueue[Path], file: str, mutant: Mutant, timeout: float) -> Result:
    folder = copies.get()
    target = folder / PACKAGE / file
    original = target.read_text()
    try:
        target.write_text(mutant.source)
        # First the file's own tests, which notice most; then all others.
        own, noticed_by = f"tests/unit/test_{Path(file).stem}.py", None
        if (folder / own).exists():
            noticed_by = _failure(folder, timeout, own)
        others = "tests/unit", f"--ignore={own}"
        return Result(mutant, noticed_by or _failure(folder, timeout, *others))
    finally:
        target.write_text(original)
        copies.put(folder)


def _failure(folder: Path, timeout: float, *tests: str) -> str | None:
    """Return which test fails first; None if all pass."""
    profile = "--hypothesis-profile=mutation"
    run = run_tests(folder, profile, *tests, *IGNORED, timeout=timeout)
    return None if run.code in (PASSED, NO_TESTS) else run.failed


def _print_row(file: str, results: Sequence[Result], verbose: bool) -> None:
    noticed = sum(result.noticed_by is not None for result in results)
    print(f"{file:32} {noticed:3} of {len(results):3} noticed", flush=True)
    for mutant, noticed_by in results:
        if noticed_by and (verbose or "tests/" not in noticed_by):
            print(f"    {mutant.line}: {mutant.what}: {noticed_by}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
