"""Tests, and the programs that measure and break what is tested."""

import os
from pathlib import Path
from typing import Final

#: What is made or downloaded once: whole systems with a broker, Prometheus, Flower.
CACHE: Final = Path(
    os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "celery_rabbitdelay"
)
