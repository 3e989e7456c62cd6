# ruff: noqa: T201  # a program at the terminal prints
"""Break each line of the scripts in Redis once; their tests have to notice.

``python -m tests.mutation.scripts`` copies the package and the tests, breaks one line of one script
at a time (leaves it out, or turns its condition around), and runs the tests of the registry, or of
schedules, on one Redis until one fails. Names of scripts as arguments choose some of them.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from tests.project_copy import PASSED, REPOSITORY, Run, project_copy, run_tests

PACKAGE: Final = Path("celery_rabbitdelay")

#: The packages that have scripts, and the tests that have to notice, the fastest ones first.
TESTS: Final = {
    "registry": [
        f"tests/registry/integration/test_registry{each}.py"
        for each in ("", "_jobs", "_index", "_pauses", "_rule")
    ],
    "schedules": ["tests/schedules/integration/test_schedule_sequences.py"],
}

#: What can be left out: a line that is a statement of its own.
STATEMENT: Final = re.compile(
    r"^\s*(redis\.call\(.*\)|table\.insert\(.*\)|(\w+\()(.*)\)|[\w.\[\]]+(, \w+)* = .*)$"
)

#: What can be turned around.
CONDITION: Final = re.compile(r"^(\s*)(if|elseif) (.*) then$")
RETURNED: Final = re.compile(r"^(\s*)return (.+)$")


class Mutant(NamedTuple):
    """A script with one broken line.

    Attributes:
        script: Its path in the package.
        number: The number of the line, from 1.
        line: The line as it was.
        text: The whole script, broken.
    """

    script: Path
    number: int
    line: str
    text: str


def mutants(script: Path) -> Iterator[Mutant]:
    """Yield what a script is broken into."""
    lines = (REPOSITORY / PACKAGE / script).read_text().split("\n")
    for at, line in enumerate(lines):
        broken = None
        if condition := CONDITION.match(line):
            broken = f"{condition[1]}{condition[2]} not ({condition[3]}) then"
        elif STATEMENT.match(line) and not line.strip().startswith("local"):
            broken = ""
        elif (returned := RETURNED.match(line)) and at + 1 < len(lines):
            broken = f"{returned[1]}return nil"
        if broken is not None:
            yield Mutant(script, at + 1, line, "\n".join([*lines[:at], broken, *lines[at + 1 :]]))


def run_tests_of(script: Path, text: str) -> Run:
    """Run the tests of a script in a copy where it has this text."""
    with project_copy() as folder:
        Path(folder, PACKAGE, script).write_text(text)
        how = {"RABBITDELAY_SEQUENCES": "300", "RABBITDELAY_SEED": "1"}
        return run_tests(folder, "-k", "single", *TESTS[script.parts[0]], environment=how)


def main(chosen: Sequence[str]) -> int:
    """Break all scripts, or the chosen ones; return how many mutants nobody noticed.

    Raises:
        RuntimeError: Tests fail without a mutant, so they would notice everything.
    """
    scripts = [
        path.relative_to(REPOSITORY / PACKAGE)
        for room in TESTS
        for path in sorted((REPOSITORY / PACKAGE / room).glob("lua/*.lua"))
        if not chosen or path.stem in chosen
    ]
    broken = [mutant for script in scripts for mutant in mutants(script)]
    for script in {script.parts[0]: script for script in scripts}.values():
        unbroken = run_tests_of(script, (REPOSITORY / PACKAGE / script).read_text())
        if unbroken.code != PASSED:
            raise RuntimeError(f"tests fail without a mutant: {unbroken.failed}")
    survivors = 0
    with ThreadPoolExecutor(2) as threads:
        runs = threads.map(lambda mutant: run_tests_of(mutant.script, mutant.text), broken)
        for mutant, run in zip(broken, runs, strict=True):
            if run.code == PASSED:
                survivors += 1
                where = f"{mutant.script}:{mutant.number}"
                print(f"nobody noticed: {where}: {mutant.line.strip()}", flush=True)
    print(f"{len(broken) - survivors} of {len(broken)} mutants noticed")
    return survivors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
