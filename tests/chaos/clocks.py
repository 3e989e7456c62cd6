"""Wrong clocks: a process whose time of day is off, by the library faketime.

The monotonic clock stays true, so that the ledger's instants do as well.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from tests.brokers import NotPossibleHere

__all__ = ["library", "off_by"]

PACKAGE: Final = "libfaketime"


def off_by(offset: str, preloaded: Path | str | None = None) -> dict[str, str]:
    """Return the environment variables of a process whose clock is off.

    Args:
        offset: How much, as faketime takes it: ``+1h`` or ``-1h``.
        preloaded: The library as the process sees it; the machine's own by default.
    """
    return {
        "LD_PRELOAD": str(preloaded or library()),
        "FAKETIME": offset,
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


def library() -> Path:
    """Return the file of the library; it is installed if it is missing.

    Raises:
        NotPossibleHere: It cannot be installed.
    """
    found = _installed()
    if found is None:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise NotPossibleHere(f"{PACKAGE} is missing: as root, apt-get install {PACKAGE}")
        subprocess.run(["apt-get", "install", "--yes", PACKAGE], check=True)
        found = _installed()
    if found is None:
        raise NotPossibleHere(f"{PACKAGE} is installed, but its library is not where Debian has it")
    return found


def _installed() -> Path | None:
    return next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)
