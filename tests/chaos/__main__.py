# ruff: noqa: T201  # a program at the terminal prints
"""Play scenarios of trouble against private brokers, and say what was lost, early, twice or late.

``python -m tests.chaos list`` names the scenarios and their cases. ``all`` plays each of them with
each of its cases, which takes hours. ``soak`` plays all faults together: a seed draws them, and
draws them again. The exit status is 1 if one of them is not good.
"""

import argparse
import signal
import sys
import traceback
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Final

from tests.brokers import BROKERS, NotPossibleHere
from tests.chaos.scenarios import SCENARIOS, Play

#: The options of the soak that are numbers.
SOAK: Final = ("seed", "nodes", "workers", "producers", "schedules", "spark")

VERSIONS: Final = [broker.version for broker in BROKERS]


def main(arguments: Sequence[str] | None = None) -> int:
    """Play what the arguments say; return the exit status."""
    # So that an end by a signal tidies up as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("scenario", choices=["list", "all", *SCENARIOS])
    parser.add_argument("case", nargs="?", help="of the scenario; the first one by default")
    parser.add_argument("--broker", action="append", choices=VERSIONS, help="the version (4.3)")
    parser.add_argument("--tasks", type=int, help="of those that come in any number")
    parser.add_argument("--minutes", type=float, help="for which they are sent; of the soak, all")
    soak = parser.add_argument_group("of the soak")
    for name in SOAK:
        soak.add_argument(f"--{name}", type=int, default=getattr(Play, name), help="%(default)s")
    soak.add_argument("--keep", type=Path, help="the folder for the notes")
    given = parser.parse_args(arguments)
    if given.scenario == "list":
        for name, scenario in SCENARIOS.items():
            print(f"{name:18} {scenario.what.splitlines()[0]} {', '.join(scenario.cases)}")
        return 0
    every = [*SCENARIOS] if given.scenario == "all" else [given.scenario]
    plays = []
    for version, name in product(given.broker or VERSIONS[-1:], every):
        _, _, tasks, minutes, cases = SCENARIOS[name]
        if given.case not in (None, *cases):
            sys.exit(f"{name} has the cases {', '.join(cases)}")
        for case in cases if given.scenario == "all" else [given.case or cases[0]]:
            tasks, minutes = given.tasks or tasks, given.minutes or minutes
            of_soak = {each: getattr(given, each) for each in (*SOAK, "keep")}
            plays.append(_play(Play(version, name, case, tasks, minutes, **of_soak)))
            print(plays[-1][0], flush=True)
    print("", *(text for text, _ in plays), sep="\n")
    return int(not all(is_good for _, is_good in plays))


def _play(play: Play) -> tuple[str, bool]:
    """Play one scenario; return its verdict in words, and whether it is good."""
    print(f"\n{play.title} on RabbitMQ {play.version}", flush=True)
    try:
        SCENARIOS[play.name].play(play)
    except NotPossibleHere as reason:
        return f"{play.title}: {reason}", False
    except Exception:  # noqa: BLE001  # the others are played all the same
        traceback.print_exc()
        return f"{play.title}: it could not be played to its end", False
    assert play.stage is not None
    return f"{play.title}: {play.stage.text()}", not play.stage.verdict.complaints


if __name__ == "__main__":
    sys.exit(main())
