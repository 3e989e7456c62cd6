"""A Celery worker, and Celery's beat, as processes of their own."""

import os
import subprocess
from pathlib import Path
from typing import Any

import httpx

from tests.celery_commands import Program
from tests.celery_process import CeleryProcess
from tests.json_schemas import checked


class ShopProcess(CeleryProcess):
    """A process of the application that :mod:`tests.kernel.integration.shop` makes.

    Args:
        settings: What :func:`tests.kernel.integration.shop.make_app` takes.
    """

    module = "tests.kernel.integration.shop"
    variable = "SHOP"


def run_celery(
    configuration: dict[str, Any], command: str, given: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command of ``celery`` for that application to its end, with that standard input."""
    return ShopProcess.run(configuration, command, given)


def run_command(
    configuration: dict[str, Any], command: str, given: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command of ``celery rabbitdelay``."""
    return run_celery(configuration, f"rabbitdelay {command}", given)


def answer(
    configuration: dict[str, Any],
    command: str,
    schema: str,
    status: int = 0,
    given: str = "",
) -> dict[str, Any]:
    """Run a command of ``celery rabbitdelay`` with ``--json`` and return what it prints.

    Args:
        configuration: What :func:`tests.kernel.integration.shop.make_app` takes.
        command: The command.
        schema: The schema that its answer has to have.
        status: The exit status that it has to end with.
        given: Its standard input.
    """
    told = run_command(configuration, f"{command} --json", given)
    assert told.returncode == status, told.stderr
    return checked(schema, told.stdout)


def start_celery(
    configuration: dict[str, Any], command: str, **streams: Any
) -> subprocess.Popen[str]:
    """Start a command of ``celery`` for that application.

    Args:
        configuration: What :func:`tests.kernel.integration.shop.make_app` takes.
        command: The command.
        **streams: Its ``stdin``, ``stdout`` and ``stderr``.
    """
    environment = {**os.environ, **ShopProcess.environment(configuration)}
    return subprocess.Popen(ShopProcess.celery(command), env=environment, text=True, **streams)


def answers(url: str) -> bool:
    """Return whether a server has this page."""
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


class Beat(ShopProcess):
    """``celery -A tests.kernel.integration.shop beat``."""

    def _command(self) -> list[str]:
        return self.celery(f"beat -l INFO -s {self.folder}/schedule")

    def _ready(self) -> bool:
        return "beat: Starting" in self.log


class Worker(ShopProcess):
    """``celery -A tests.kernel.integration.shop worker``.

    Args:
        configuration: What :func:`tests.kernel.integration.shop.make_app` takes.
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
        # Mingling waits a second for other workers; none of the tests' has any to learn from.
        alone = "--without-mingle --without-gossip"
        return [*self.celery(f"worker -c 1 -l INFO -n {self.name} {alone}"), *self._options]

    def _spawn(self, command: list[str]) -> Any:
        if {"gevent", "eventlet"} & {each.removeprefix("--pool=") for each in command}:
            # They change the standard library before anything else is imported.
            return super()._spawn(command)
        _python, _m, _celery, *arguments = command
        null, log = Path(os.devnull), self._log_path
        files = {"stdin": null, "stdout": log, "stderr": log}
        return Program(arguments, self._environment(), files, self.folder)

    def _ready(self) -> bool:
        return " ready." in self.log[self._log_before :]
