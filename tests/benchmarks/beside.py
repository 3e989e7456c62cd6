# ruff: noqa: T201  # a program at the terminal prints
"""A benchmark of the version before and of this one, in turns, on one machine.

``python -m tests.benchmarks.beside modules`` runs ``python -m tests.benchmarks.modules`` of both
versions in turns, and prints lines with the same label below each other. Options after the name are
passed to the benchmark. The version before comes from the git history, and its benchmark with it;
``--former FOLDER`` names a folder that holds another one.

With ``--signing`` there is a third contestant: this version with a key.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.former_version import REPOSITORY, FormerVersionMissing, extract

#: A line of a benchmark: a label; behind two blanks, or from the first digit on, figures.
LINE: Final = re.compile(r"\s*(?P<label>\S.*?)(?=\s{2,}|\s\d)(?P<figures>.*)")

#: Characters that a contestant's name is given.
NAME_WIDTH: Final = 15


class Contestant(NamedTuple):
    """A version with its options."""

    name: str
    folder: Path
    options: tuple[str, ...] = ()

    def run(self, benchmark: str, options: list[str]) -> list[str]:
        """Run a benchmark; return the lines that it prints."""
        command = [sys.executable, "-m", f"tests.benchmarks.{benchmark}", *options, *self.options]
        environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(self.folder)}
        # Its status says whether it has met its targets, in this one turn.
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        return done.stdout.splitlines()


def main() -> None:
    """Run all contestants in turns, and print what they say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=3, help="of each contestant (3)")
    parser.add_argument("--signing", action="store_true", help="also this version with a key")
    parser.add_argument("--former", type=Path, help="a folder with the other version")
    parser.add_argument("benchmark", help="its name: modules, for example")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the benchmark")
    given = parser.parse_args()
    with ExitStack() as stack:
        former = given.former
        if former is None:
            former = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            try:
                extract(former)
            except FormerVersionMissing as missing:
                parser.error(str(missing))
        contestants = [Contestant("before", former), Contestant("today", REPOSITORY)]
        if given.signing:
            contestants.append(Contestant("today, signing", REPOSITORY, ("--signing",)))
        seen: dict[tuple[str, int], list[str]] = {}
        for turn in range(given.turns):
            for contestant in contestants:
                print(f"turn {turn + 1}: {contestant.name}", file=sys.stderr, flush=True)
                note(seen, contestant.name, contestant.run(given.benchmark, given.options))
    for (label, _), figures in seen.items():
        print(label, *sorted(figures, key=lambda line: line[:NAME_WIDTH]), sep="\n  ")


def note(seen: dict[tuple[str, int], list[str]], name: str, lines: list[str]) -> None:
    """Put the lines of a run below their counterparts: those with the same label, in order."""
    times: dict[str, int] = {}
    for line in lines:
        match = LINE.fullmatch(line)
        if match is not None:
            label = match["label"]
            times[label] = times.get(label, 0) + 1
            seen.setdefault((label, times[label]), []).append(
                f"{name:{NAME_WIDTH}} {match['figures'].strip()}"
            )


if __name__ == "__main__":
    main()
