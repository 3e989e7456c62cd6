"""A Prometheus of our own, which scrapes what a test names, and promtool."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from celery_rabbitdelay.testing import Server
from celery_rabbitdelay.testing.servers import PATIENCE
from tests import CACHE


def program(name: str) -> str:
    """Return the path of ``prometheus`` or ``promtool``; ``set_up.sh`` unpacks them."""
    unpacked = CACHE / "prometheus" / "usr" / "bin" / name
    return str(unpacked) if unpacked.exists() else shutil.which(name) or name


def promtool(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run promtool in a folder."""
    return subprocess.run(
        [program("promtool"), *arguments], cwd=folder, capture_output=True, text=True, check=False
    )


class PrometheusServer(Server):
    """Prometheus.

    Args:
        ports: The ports of this machine that it scrapes, every three seconds.
        rules: A file of alert rules that it evaluates.
    """

    package = "prometheus"

    def __init__(self, ports: list[int], rules: Path | None = None) -> None:
        super().__init__()
        self._configuration = {
            # A scrape may take no longer than the interval.
            "global": {"scrape_interval": "3s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)] if rules else [],
            "scrape_configs": [
                {
                    "job_name": "celery",
                    "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}],
                }
            ],
        }

    @property
    def url(self) -> str:
        """Where its API is."""
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, **parameters: str) -> Any:
        """Return what its API answers."""
        with urlopen(
            f"{self.url}/api/v1/{path}?{urlencode(parameters)}", timeout=PATIENCE
        ) as answer:
            return json.load(answer)["data"]

    def value(self, query: str) -> float:
        """Return the value of a query that has one result; -1 if it has none."""
        result = self.ask("query", query=query)["result"]
        return float(result[0]["value"][1]) if result else -1.0

    def _command(self) -> list[str]:
        # JSON is YAML.
        file = self.folder / "prometheus.yml"
        file.write_text(json.dumps(self._configuration))
        return [
            program("prometheus"),
            f"--config.file={file}",
            f"--storage.tsdb.path={self.folder}/data",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--log.level=warn",
        ]

    def _ready(self) -> bool:
        try:
            with urlopen(f"{self.url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False
