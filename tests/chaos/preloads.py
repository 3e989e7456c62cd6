"""Processes whose clock is off or whose disk is slow, by a small library that they preload.

The monotonic clock stays true, so that the ledger's instants do as well. The library is
``preloaded.c``, and not faketime, which also changes how long a process sleeps: under 0.9.10,
Python's ``time.sleep`` fails with EINVAL.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from tests.brokers import NotPossibleHere

SOURCE: Final = Path(__file__).with_name("preloaded.c")
PRELOAD: Final = "LD_PRELOAD"
BUILT: Final = SOURCE.parents[2] / "build" / "chaos" / "preloaded.so"


def off_by(seconds: int) -> dict[str, str]:
    """Return the environment variables of a process whose clock is ahead, or behind if negative."""
    return {PRELOAD: str(library()), "WRONG_CLOCK": str(seconds)}


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
