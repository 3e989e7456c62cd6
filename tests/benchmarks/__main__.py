# ruff: noqa: T201  # a program at the terminal prints
"""Measure this package beside its peers: ``python -m tests.benchmarks NAME [OPTIONS]``.

``list`` names the benchmarks, ``NAME --help`` the options of one. Each starts private servers, and
measures its contestants in turn, round by round: a figure of one machine says little, its ratio to
a peer's in the same run more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Final

from tests.benchmarks import (
    beside,
    journeys,
    levels,
    options,
    sending,
    web,
    web_request,
    workers,
)

CASES: Final[dict[str, Callable[..., None]]] = {
    "sends": sending.sends,
    "levels": levels.levels,
    "spark": sending.spark,
    "lateness": levels.lateness,
    "modules": workers.modules,
    "registry": workers.registry,
    "schedules": workers.schedules,
    "web": web.web,
    "web-request": web_request.web_request,
    "journeys": journeys.journeys,
    "beside": beside.beside,
}


def main(arguments: Sequence[str]) -> None:
    """Run the benchmarks that are named before the first option, with the options behind them."""
    names = [each for each in arguments if each in CASES]
    if not names or set(arguments[: len(names)]) != set(names):
        print(*(f"{name:12} {options.first_line(run)}" for name, run in CASES.items()), sep="\n")
        sys.exit(arguments != ["list"])
    for name in names:
        program = f"python -m tests.benchmarks {name}"
        CASES[name](**options.read(CASES[name], program, arguments[len(names) :]))


if __name__ == "__main__":
    main(sys.argv[1:])
