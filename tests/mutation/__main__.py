# ruff: noqa: T201  # a program at the terminal prints
"""Break each pure file in random places, and see whether the unit tests notice.

``python -m tests.mutation`` breaks each file of ``levels/``, and each file of ``modules/`` that
opens no connection, in twenty places, one at a time, in a copy of the project, and runs the unit
tests there. It prints a table and the mutants that survived, and fails if the tests noticed fewer
than nine of ten in a file. ``--files`` takes some files only, ``--seed`` other places.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Final, NamedTuple

from tests.mutation.operators import Mutant, mutants

REPOSITORY: Final = Path(__file__).resolve().parents[2]

#: The files that are pure: they are tested without a broker.
ROOMS: Final = ("levels", "modules")

#: Files of these rooms that talk to a broker, or run threads.
NOT_PURE: Final = frozenset({"modules/consumer.py", "modules/service.py"})

#: How many mutants of a file are tried.
PLACES: Final = 20

#: The part of them that the tests have to notice.
WANTED: Final = 0.9

#: Seconds after which a mutant that does not end counts as noticed.
TIMEOUT: Final = 300.0


class Survivor(NamedTuple):
    """A mutant that the tests did not notice."""

    file: str
    mutant: Mutant


def main() -> int:
    """Run everything; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--files", nargs="*", help="such as levels/layout.py; all by default")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--places", type=int, default=PLACES)
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    given = parser.parse_args()
    files = given.files or pure_files()
    with tempfile.TemporaryDirectory(prefix="rabbitdelay-mutation-") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(given.jobs):
            copies.put(_copy(Path(folder, str(number))))
        if _fails(Path(folder, "0"), ["tests/unit"]):
            print("the unit tests fail already; nothing was broken yet", file=sys.stderr)
            return 2
        survivors: list[Survivor] = []
        tried: dict[str, int] = {}
        with ThreadPoolExecutor(given.jobs) as pool:
            for file in files:
                chosen = _choose(file, given.places, given.seed)
                tried[file] = len(chosen)
                noticed = pool.map(
                    lambda mutant, file=file: _is_noticed(copies, file, mutant), chosen
                )
                survived = [each for each, seen in zip(chosen, noticed, strict=True) if not seen]
                survivors += [Survivor(file, mutant) for mutant in survived]
                print(
                    f"{file:32} {len(chosen) - len(survived):3} of {len(chosen):3} noticed",
                    flush=True,
                )
    for file, mutant in survivors:
        print(f"survived: {file}:{mutant.line} {mutant.what}")
    return _exit_code(tried, survivors)


def pure_files() -> list[str]:
    """Return the files that are broken, as paths below the package."""
    package = REPOSITORY / "celery_rabbitdelay"
    paths = [path.relative_to(package) for room in ROOMS for path in (package / room).glob("*.py")]
    names = sorted(str(path) for path in paths if path.name != "__init__.py")
    return [name for name in names if name not in NOT_PURE]


def _choose(file: str, places: int, seed: int) -> list[Mutant]:
    source = (REPOSITORY / "celery_rabbitdelay" / file).read_text()
    every = mutants(source)
    return random.Random(f"{seed}/{file}").sample(every, min(places, len(every)))


def _copy(folder: Path) -> Path:
    leave_out = shutil.ignore_patterns("__pycache__", ".*", "_build")
    shutil.copytree(REPOSITORY, folder, ignore=leave_out)
    return folder


def _is_noticed(copies: SimpleQueue[Path], file: str, mutant: Mutant) -> bool:
    copy = copies.get()
    target = copy / "celery_rabbitdelay" / file
    original = target.read_text()
    try:
        target.write_text(mutant.source)
        # First the file's own tests, which notice most; then all.
        own = copy / "tests" / "unit" / f"test_{target.stem}.py"
        return (own.exists() and _fails(copy, [str(own)])) or _fails(copy, ["tests/unit"])
    finally:
        target.write_text(original)
        copies.put(copy)


def _fails(copy: Path, tests: Sequence[str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    # The documentation and the upstream libraries have nothing to say about a mutant.
    command += ["--ignore-glob=*test_doc*", "--ignore-glob=*test_upstream*"]
    try:
        run = subprocess.run(command, cwd=copy, capture_output=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return True
    return run.returncode != 0


def _exit_code(tried: dict[str, int], survivors: Sequence[Survivor]) -> int:
    wanted = True
    for file, number in tried.items():
        survived = sum(survivor.file == file for survivor in survivors)
        wanted = wanted and survived <= number * (1 - WANTED) + 1e-9
    return 0 if wanted else 1


if __name__ == "__main__":
    sys.exit(main())
