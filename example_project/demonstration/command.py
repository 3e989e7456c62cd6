"""The command line of the demonstration: ``python -m example_project``."""

import argparse
import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from celery_rabbitdelay.testing import ServerNotStarted
from example_project.demonstration.histogram import draw
from example_project.demonstration.outcome import Outcome
from example_project.demonstration.progress import Progress
from example_project.demonstration.report import table
from example_project.demonstration.scenario import DemonstrationFailed, demonstrate

_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    """Run the demonstration.

    Returns:
        The exit code: 0 if every reminder was delivered once, and none of them early.
    """
    arguments = _arguments()
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        print("Spark needs Java 17: apt-get install openjdk-17-jre-headless", file=sys.stderr)
        return 2
    _stop_in_order()
    progress = Progress()
    try:
        outcome = demonstrate(progress)
    except (DemonstrationFailed, ServerNotStarted) as failure:
        progress.end()
        print(failure, file=sys.stderr)
        return 1
    progress.end()
    return _report(outcome, arguments.output)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m example_project",
        description="A record shop that reminds customers to review their order.",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("lateness.png"),
        help="the picture of how late the reminders were (default: %(default)s)",
    )
    arguments = parser.parse_args()
    folder = arguments.output.parent
    if not folder.is_dir():
        parser.error(f"--output {arguments.output}: there is no folder {folder}")
    return arguments


def _stop_in_order() -> None:
    """Leave the ``with`` blocks when a signal ends the process."""
    for signum in _STOP_SIGNALS:
        # A signal that is ignored from the start (nohup) stays ignored.
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _stop)


def _stop(signum: int, _frame: FrameType | None) -> NoReturn:
    # A second Ctrl-C would leave servers and processes behind.
    for ignored in _STOP_SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    raise SystemExit(128 + signum)


def _report(outcome: Outcome, output: Path) -> int:
    print(f"\n{table(outcome)}\n")
    if outcome.lateness:
        draw(outcome, output)
        print(f"How late the reminders were: {output}")
    failures = outcome.failures()
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0
