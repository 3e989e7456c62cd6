"""A Celery worker, and Celery's beat, as processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from celery_rabbitdelay.testing.servers import Server

REPOSITORY = Path(__file__).resolve().parents[2]


def _celery(command: str) -> list[str]:
    return [sys.executable, *f"-m celery -A tests.integration.shop {command}".split()]


def _environment(configuration: dict[str, Any]) -> dict[str, str]:
    coverage = {key: value for key, value in os.environ.items() if key.startswith("COV")}
    return {
        **coverage,
        "PYTHONPATH": str(REPOSITORY),
        "SHOP": json.dumps(configuration),
        "C_FORCE_ROOT": "1",
    }


def run_celery(
    configuration: dict[str, Any],
    command: str,
    given: str | None = None,
    errors: int = subprocess.PIPE,
) -> subprocess.CompletedProcess[str]:
    """Run a command of ``celery`` for that application to its end.

    Args:
        configuration: What :func:`tests.integration.shop.make_app` takes.
        command: The command.
        given: Its standard input.
        errors: Where its standard error goes.
    """
    return subprocess.run(
        _celery(command),
        env={**os.environ, **_environment(configuration)},
        input=given,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        check=False,
    )


def start_celery(
    configuration: dict[str, Any], command: str, **streams: Any
) -> subprocess.Popen[str]:
    """Start a command of ``celery`` for that application.

    Args:
        configuration: What :func:`tests.integration.shop.make_app` takes.
        command: The command.
        **streams: Its ``stdin``, ``stdout`` and ``stderr``.
    """
    environment = {**os.environ, **_environment(configuration)}
    return subprocess.Popen(_celery(command), env=environment, text=True, **streams)


class ShopProcess(Server):
    """A process of the application that :mod:`tests.integration.shop` makes.

    Args:
        configuration: What :func:`tests.integration.shop.make_app` takes.
    """

    package = "celery"

    def __init__(self, configuration: dict[str, Any]) -> None:
        super().__init__()
        self._configuration = configuration

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), **_environment(self._configuration)}


class Beat(ShopProcess):
    """``celery -A tests.integration.shop beat``."""

    def _command(self) -> list[str]:
        return _celery(f"beat -l INFO -s {self.folder}/schedule")

    def _ready(self) -> bool:
        return "beat: Starting" in self.log


class Worker(ShopProcess):
    """``celery -A tests.integration.shop worker``.

    Args:
        configuration: What :func:`tests.integration.shop.make_app` takes.
        queues: The names of the queues to consume from, all of the application's by default.
        options: Further options of ``celery worker``.
    """

    def __init__(
        self, configuration: dict[str, Any], queues: list[str] | None = None, *options: str
    ) -> None:
        super().__init__(configuration)
        self._options = [*options, *(["-Q", ",".join(queues)] if queues else [])]
        self._log_before = 0

    @property
    def name(self) -> str:
        """The worker's node name."""
        return f"shop-{self.port}@localhost"

    def start(self) -> None:
        """Start the worker and wait until it takes tasks."""
        self._log_before = len(self.log)
        super().start()

    def _command(self) -> list[str]:
        return [*_celery(f"worker -c 1 -l INFO -n {self.name}"), *self._options]

    def _ready(self) -> bool:
        return " ready." in self.log[self._log_before :]
