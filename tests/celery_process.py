"""Programs of ``celery`` as processes, for an application that reads its settings as JSON."""

import json
import os
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, ClassVar, Final

from celery_rabbitdelay.testing import Server
from tests import celery_commands

REPOSITORY: Final = Path(__file__).resolve().parents[1]


class CeleryProcess(Server):
    """A program of ``celery``.

    Args:
        settings: What the application reads.
    """

    package = "celery"

    #: The module that makes the application, and the environment variable that it reads.
    module: ClassVar[str]
    variable: ClassVar[str]

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self._settings = settings

    @classmethod
    def celery(cls, command: str) -> list[str]:
        """Return the command line of a program."""
        return [sys.executable, *f"-m celery -A {cls.module} {command}".split()]

    @classmethod
    def run(
        cls, settings: dict[str, Any], command: str, given: str = "", **variables: str
    ) -> CompletedProcess[str]:
        """Run a command of ``celery`` to its end.

        Args:
            settings: What the application reads.
            command: The command.
            given: Its standard input.
            **variables: Further variables of its environment.
        """
        environment = {**os.environ, **cls.environment(settings), **variables}
        return celery_commands.run(["-A", cls.module, *command.split()], environment, given)

    @classmethod
    def run_module(
        cls, module: str, settings: dict[str, Any], *arguments: str, given: str = "", **more: str
    ) -> CompletedProcess[str]:
        """Run another module to its end, with the environment of :meth:`run`."""
        environment = {**os.environ, **cls.environment(settings), **more}
        return celery_commands.run([*arguments], environment, given, module)

    @classmethod
    def environment(cls, settings: dict[str, Any]) -> dict[str, str]:
        """Return what the application finds in its environment."""
        return {
            **{key: value for key, value in os.environ.items() if key.startswith("COV")},
            "PYTHONPATH": str(REPOSITORY),
            cls.variable: json.dumps(settings),
            "C_FORCE_ROOT": "1",
        }

    @property
    def peak_bytes(self) -> int:
        """The most memory that its main process has had (``VmHWM`` of proc(5))."""
        status = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        (line,) = (line for line in status if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), **self.environment(self._settings)}
