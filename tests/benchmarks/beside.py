# ruff: noqa: T201  # a program at the terminal prints
"""A benchmark of the version before and of this one, in turns, on one machine."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Final

from tests.former_version import REPOSITORY, extract

#: A line of a benchmark: a label; behind two blanks, or from the first digit on, figures.
LINE: Final = re.compile(r"\s*(?P<label>\S.*?)(?=\s{2,}|\s\d)(?P<figures>.*)")


def lines_of(folder: Path, name: str, options: list[str]) -> list[str]:
    """Run a version's own benchmark; return the lines that it prints."""
    has_table = (folder / "tests/benchmarks/__main__.py").exists()
    named = ["tests.benchmarks", name] if has_table else [f"tests.benchmarks.{name}"]
    done = subprocess.run(
        [sys.executable, "-m", *named, *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,  # its status may say whether it has met its goals
    )
    return done.stdout.splitlines()


def beside(
    *,
    name: str = "modules",
    turns: int = 3,
    signing: bool = False,
    former: str = "",
    options: str = "",
) -> None:
    """A benchmark of the version before, from the git history, and of this one in turns.

    Lines with the same label are printed below each other. ``--signing`` adds this version with a
    key. ``--former`` is a folder with another version, ``--options`` are those of the benchmark.
    """
    with ExitStack() as stack:
        before = Path(former or stack.enter_context(tempfile.TemporaryDirectory()))
        if not former:
            extract(before)
        given = shlex.split(options)
        contestants = {"before": (before, given), "today": (REPOSITORY, given)}
        if signing:
            contestants["today, signing"] = (REPOSITORY, [*given, "--signing"])
        seen: dict[tuple[str, int], list[str]] = defaultdict(list)
        for turn, (contestant, (folder, own)) in product(range(turns), contestants.items()):
            print(f"turn {turn + 1}: {contestant}", file=sys.stderr, flush=True)
            times: Counter[str] = Counter()
            for match in filter(None, map(LINE.fullmatch, lines_of(folder, name, own))):
                times[match["label"]] += 1
                figures = f"{contestant:15} {match['figures'].strip()}"
                seen[match["label"], times[match["label"]]].append(figures)
    for (label, _), lines in seen.items():
        print(label, *sorted(lines, key=lambda line: line[:15]), sep="\n  ")
