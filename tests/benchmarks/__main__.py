# ruff: noqa: T201  # a program at the terminal prints
"""Measure this package beside its peers: ``python -m tests.benchmarks NAME [OPTIONS]``.

``list`` names the benchmarks, ``NAME --help`` the options of one. Each starts private servers, and
measures its contestants in turn, round by round: a figure of one machine says little, its ratio to
a peer's in the same run more.
"""

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, Final

from tests.benchmarks import beside, journeys, levels, sending, waiting, web, web_request, workers

CASES: Final[dict[str, Callable[..., None]]] = {
    "sends": sending.sends,
    "levels": levels.levels,
    "spark": sending.spark,
    "lateness": levels.lateness,
    "modules": workers.modules,
    "registry": workers.registry,
    "schedules": workers.schedules,
    "waiting": waiting.waiting,
    "web": web.web,
    "web-request": web_request.web_request,
    "journeys": journeys.journeys,
    "beside": beside.beside,
}


def options(run: Callable[..., None], name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the parameters of a benchmark: each is an option, whose type its default has."""
    parser = argparse.ArgumentParser(f"python -m tests.benchmarks {name}", description=run.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for option, parameter in inspect.signature(run).parameters.items():
        default, flag = parameter.default, f"--{option.replace('_', '-')}"
        given: dict[str, Any] = {"type": type(default)}
        if isinstance(default, bool):
            given = {"action": "store_true"}
        elif isinstance(default, tuple):
            given = {"type": type(default[0]), "nargs": "+"}
        parser.add_argument(flag, default=default, help=f"({default})", **given)
    return vars(parser.parse_args(arguments))


def main(arguments: Sequence[str]) -> None:
    """Run the benchmarks that are named before the first option, with the options behind them."""
    names = list(takewhile(CASES.__contains__, arguments))
    if not names:
        for name, run in CASES.items():
            print(f"{name:12} {(run.__doc__ or '').partition(chr(10))[0]}")
        sys.exit(arguments != ["list"])
    for name in names:
        CASES[name](**options(CASES[name], name, arguments[len(names) :]))


if __name__ == "__main__":
    main(sys.argv[1:])
