# ruff: noqa: T201  # a program at the terminal prints
"""Fuzz the borders, guided by the coverage of the package's own code (atheris, libFuzzer).

``python -m tests.fuzz --seconds 600`` shares the time among the targets, one after the other, each
in a process of its own. An input that breaks one is written to ``tests/fuzz/found``, where the
ordinary test takes it from then on. The exit status is 1 if there is one.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

try:
    import atheris
except ImportError as missing:
    sys.exit(f"python -m tests.fuzz needs atheris, on Linux and x86_64: {missing}")

with atheris.instrument_imports(include=["celery_rabbitdelay", "amqp", "json"]):
    from tests.fuzz.targets import SEEDS, TARGETS

FOUND: Final = Path(__file__).parent / "found"

#: The largest input, in bytes, and the seconds and mebibytes that one may take.
LIMITS: Final = ("-max_len=8192", "-timeout=20", "-rss_limit_mb=1024")


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz each target; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seconds", type=int, default=600, help="for all targets together (600)")
    parser.add_argument("--target", choices=TARGETS, action="append", help="this one only")
    parser.add_argument("--fuzz", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.fuzz:
        (target,) = options.target
        atheris.Setup([sys.argv[0], *options.fuzz], TARGETS[target])
        atheris.Fuzz()
    targets = options.target or list(TARGETS)
    broken = [name for name in targets if not _fuzz(name, options.seconds // len(targets))]
    print(f"broken: {', '.join(broken)}" if broken else "nothing is broken")
    return 1 if broken else 0


def _fuzz(name: str, seconds: int) -> bool:
    """Fuzz a target in a process of its own; return whether nothing has broken it."""
    FOUND.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(SEEDS):
            Path(corpus, f"seed-{number}").write_bytes(seed)
        command = [sys.executable, "-m", "tests.fuzz", "--target", name, "--fuzz", corpus, *LIMITS]
        command += [f"-max_total_time={seconds}", f"-artifact_prefix={FOUND}/{name}-"]
        run = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    lines = (run.stdout + run.stderr).splitlines()
    print(f"{name}:", *lines[-40 if run.returncode else -1 :], sep="\n  ", flush=True)
    return run.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
