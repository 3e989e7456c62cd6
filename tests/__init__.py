"""Tests, and the programs that measure and break what is tested."""

import os
from pathlib import Path
from typing import Final

#: The folder for what is downloaded or built only once: Debian systems, Prometheus, Flower.
CACHE: Final = Path(
    os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "celery_rabbitdelay"
)
