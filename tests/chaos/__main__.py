# ruff: noqa: T201  # a program at the terminal prints
"""Play scenarios of trouble against private brokers, and say what was lost, early, twice or late.

``python -m tests.chaos list`` names the scenarios, ``python -m tests.chaos SCENARIO --help`` says
the options of one. ``python -m tests.chaos all`` plays each of them with each of its choices, which
takes hours; ``short`` plays three of them, which takes seven minutes. The exit status is 1 if one
of them is not good.
"""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import fields
from typing import Final

from tests.brokers import BROKERS, NotPossibleHere
from tests.chaos.scenario import Outcome, Scenario, play
from tests.chaos.scenarios import SCENARIOS, SHORT

VERSIONS: Final = [broker.version for broker in BROKERS]


def main(arguments: Sequence[str] | None = None) -> int:
    """Play what the arguments say; return the exit status."""
    # So that an end by a signal tidies up as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options, further = _parser().parse_known_args(arguments)
    versions = options.broker or VERSIONS[-1:]
    if options.scenario == "list":
        print(*(f"{name:20} {_first_line(each)}" for name, each in SCENARIOS.items()), sep="\n")
        return 0
    if options.scenario == "all":
        scenarios = [case for each in SCENARIOS.values() for case in each.cases()]
    elif options.scenario == "short":
        scenarios = list(SHORT)
    else:
        scenarios = [_scenario(SCENARIOS[options.scenario], further)]
    outcomes = [_play(each, version) for version in versions for each in scenarios]
    print("", Outcome.HEADER, *(each.row() for each in outcomes if each), sep="\n")
    return int(not all(each and not each.verdict.complaints for each in outcomes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument("scenario", choices=["list", "all", "short", *SCENARIOS])
    parser.add_argument(
        "--broker", action="append", choices=VERSIONS, help="the version of RabbitMQ (4.3)"
    )
    return parser


def _first_line(kind: type[Scenario]) -> str:
    return str(kind.__doc__).splitlines()[0]


def _scenario(kind: type[Scenario], arguments: Sequence[str]) -> Scenario:
    """Read a scenario's own options."""
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.chaos {kind.name} [--broker VERSION]",
        description=kind.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for each in fields(kind):
        choices = each.metadata.get("choices")
        parser.add_argument(
            f"--{each.name}",
            type=type(each.default),
            default=each.default,
            choices=choices,
            help=f"{each.metadata.get('help', '')} ({each.default})",
        )
    return kind(**vars(parser.parse_args(arguments)))


def _play(scenario: Scenario, version: str) -> Outcome | None:
    """Play one scenario; None if it could not be played to its end."""
    print(f"\n{scenario} on RabbitMQ {version}", flush=True)
    try:
        outcome = play(scenario, version)
    except NotPossibleHere as reason:
        print(f"{scenario}: {reason}", file=sys.stderr)
        return None
    except Exception:  # noqa: BLE001  # the others are played all the same
        traceback.print_exc()
        return None
    print(outcome.text(), flush=True)
    outcome.save()
    return outcome


if __name__ == "__main__":
    sys.exit(main())
