"""Wrong clocks: a process whose time of day is off, by a small library that it preloads.

The monotonic clock stays true, so that the ledger's instants do as well. The library is
``wrong_clock.c``, and not faketime, which also changes how long a process sleeps: under 0.9.10,
Python's ``time.sleep`` fails with EINVAL.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from tests.brokers import NotPossibleHere

SOURCE: Final = Path(__file__).with_name("wrong_clock.c")
BUILT: Final = SOURCE.parents[2] / "build" / "chaos" / "wrong_clock.so"


def off_by(seconds: int, preloaded: Path | str | None = None) -> dict[str, str]:
    """Return the environment variables of a process whose clock is off.

    Args:
        seconds: How far it is ahead; a negative number if it is behind.
        preloaded: The library as the process sees it; the machine's own by default.
    """
    return {"LD_PRELOAD": str(preloaded or library()), "WRONG_CLOCK": str(seconds)}


def library() -> Path:
    """Return the file of the library; it is built if it is missing or old.

    Raises:
        NotPossibleHere: There is no compiler, and none can be installed.
    """
    if not BUILT.exists() or BUILT.stat().st_mtime < SOURCE.stat().st_mtime:
        if shutil.which("gcc") is None:
            install = ["apt-get", "install", "--yes", "gcc", "libc6-dev"]
            if os.geteuid() != 0 or shutil.which("apt-get") is None:
                raise NotPossibleHere(f"gcc is missing: as root, {' '.join(install)}")
            subprocess.run(install, check=True)
        BUILT.parent.mkdir(parents=True, exist_ok=True)
        command = ["gcc", "-shared", "-fPIC", "-O2", "-o", str(BUILT), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True)
    return BUILT
