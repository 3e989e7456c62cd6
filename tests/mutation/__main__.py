# ruff: noqa: T201  # a program at the terminal prints
"""Break each pure file in random places, and see whether the unit tests notice.

``python -m tests.mutation`` breaks each file of ``levels/``, each file of ``modules/`` that opens
no connection, and a few others in twenty places, one at a time, in a copy of the project, and runs
the unit tests there. It prints a table and the mutants that survived, and fails if the tests
noticed fewer than nine of ten in a file. ``--files`` takes some files only, ``--seed`` other
places, ``--places`` another number of them.
"""

import argparse
import random
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from tests.mutation.operators import Mutant, mutants, unbroken
from tests.project_copy import NO_TESTS, PASSED, REPOSITORY, project_copy, run_tests

PACKAGE: Final = Path("celery_rabbitdelay")

#: The files that are pure: they are tested without a broker.
ROOMS: Final = ("levels", "modules")

#: Pure files of other rooms.
ELSEWHERE: Final = ("operations/redriving.py", "publishing/message.py")

#: Files of these rooms that talk to a broker, or run threads.
NOT_PURE: Final = frozenset({"modules/deliveries.py", "modules/service.py"})

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

#: These have nothing to say about a mutant; planted faults look for the text that it rewrites.
IGNORED: Final = tuple(f"--ignore-glob=*test_{name}*" for name in ("doc", "planted", "upstream"))


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
    started = time.monotonic()
    sources = {file: unbroken((REPOSITORY / PACKAGE / file).read_text()) for file in pure_files()}
    if failed := _failure(sources, UNBROKEN_TIMEOUT, *unit_tests()):
        print(f"the tests fail already without a mutant: {failed}", file=sys.stderr)
        return 2
    timeout = max(MIN_TIMEOUT, SLOWER * (time.monotonic() - started))
    is_enough = True
    with ThreadPoolExecutor(given.jobs) as pool:
        for file in given.files or pure_files():
            every = mutants((REPOSITORY / PACKAGE / file).read_text())
            some = random.Random(f"{given.seed}/{file}").sample(
                every, min(given.places, len(every))
            )
            results = list(pool.map(partial(_noticed_by, file, timeout), some))
            noticed = sum(each is not None for each in results)
            print(f"{file:32} {noticed:3} of {len(some):3} noticed", flush=True)
            for mutant, noticed_by in zip(some, results, strict=True):
                if noticed_by is None or given.verbose or "tests/" not in noticed_by:
                    print(
                        f"    {mutant.line}: {mutant.what}: {noticed_by or 'SURVIVED'}", flush=True
                    )
            is_enough &= noticed >= len(some) * WANTED - 1e-9
    return 0 if is_enough else 1


def pure_files() -> list[str]:
    """Return the files that are broken, as paths below the package."""
    package = REPOSITORY / PACKAGE
    paths = [path.relative_to(package) for room in ROOMS for path in (package / room).glob("*.py")]
    names = sorted(str(path) for path in paths if path.name != "__init__.py")
    return [*(name for name in names if name not in NOT_PURE), *ELSEWHERE]


def unit_tests(name: str = "") -> list[str]:
    """Return the folders of unit tests, or the files of a name in them."""
    return [str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob(f"tests/*/unit{name}")]


def _noticed_by(file: str, timeout: float, mutant: Mutant) -> str | None:
    """Return the test that fails first, or why there is none; None if all pass."""
    # First the file's own tests, which notice most; then all others.
    own, noticed_by = unit_tests(f"/test_{Path(file).stem}.py"), None
    if own:
        noticed_by = _failure({file: mutant.source}, timeout, *own)
    others = *unit_tests(), *(f"--ignore={each}" for each in own)
    return noticed_by or _failure({file: mutant.source}, timeout, *others)


def _failure(sources: Mapping[str, str], timeout: float, *tests: str) -> str | None:
    """Return which test fails first where files have other sources; None if all pass."""
    with project_copy() as folder:
        for file, source in sources.items():
            (folder / PACKAGE / file).write_text(source)
        profile = "--hypothesis-profile=mutation"
        run = run_tests(folder, profile, *tests, *IGNORED, timeout=timeout)
    return None if run.code in (PASSED, NO_TESTS) else run.failed


if __name__ == "__main__":
    sys.exit(main())
