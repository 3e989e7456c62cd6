"""Producers, workers and consumers as processes."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar, Final

from tests.celery_process import CeleryProcess
from tests.chaos.application import Part
from tests.chaos.producing import Stream

#: The last line of a traceback.
ERROR: Final = re.compile(r"[\w.]+: ")

#: Numbers differ each time: of ports, of processes, of channels.
NUMBER: Final = re.compile(r"\d+")

#: Characters of a process's last words.
LONGEST: Final = 150


class ChaosProcess(CeleryProcess):
    """A process of a scenario.

    Args:
        part: What it has to know.
        settings: Further values for its program.
        environment: Further environment variables, for a clock that is wrong.
    """

    module = "tests.chaos.application"
    variable = "CHAOS"

    #: What the ledger calls it if it ends by itself.
    kind: ClassVar[str]

    def __init__(
        self,
        part: Part,
        settings: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__({})
        ready = self.folder / "ready"
        self._settings = {"part": asdict(replace(part, ready=str(ready))), **(settings or {})}
        self._further = dict(environment or {})
        self._ready_file = ready
        self._log_before = 0

    def begin(self) -> None:
        """Start the process and do not wait."""
        assert not self.running, "the process runs already"
        self._ready_file.unlink(missing_ok=True)
        self._log_before = len(self.log)
        self._process = self._spawn(self._command())

    def start(self) -> None:
        """Start the process and wait until it does its work."""
        self._ready_file.unlink(missing_ok=True)
        super().start()

    def last_words(self) -> str:
        """Return the last error of its last run, or else its last line, without numbers."""
        lines = [line for line in self.log[self._log_before :].splitlines() if line.strip()]
        errors = [line for line in lines if ERROR.match(line)]
        return NUMBER.sub("#", (errors or lines or [""])[-1])[:LONGEST]

    def end(self, signum: signal.Signals = signal.SIGTERM) -> None:
        """End the process; its folder stays."""
        self._end(signum)

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), **self._further}

    def _ready(self) -> bool:
        return self._ready_file.exists()


class Producer(ChaosProcess):
    """Sends a stream, then ends.

    Args:
        part: What it has to know.
        stream: What it sends.
        environment: Further environment variables.
    """

    kind = "producer"

    def __init__(
        self, part: Part, stream: Stream, environment: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(part, {"stream": asdict(stream)}, environment)
        self.stream = stream

    @property
    def failed(self) -> bool:
        """Whether its program has raised: the scenario is wrong, not what it plays with."""
        return self._process is not None and (self._process.poll() or 0) > 0

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "tests.chaos.producing"]


class Worker(ChaosProcess):
    """``celery worker`` for some queues.

    Args:
        part: What it has to know.
        queues: The names of the queues that it consumes from.
        options: Further options of ``celery worker``.
        environment: Further environment variables.
    """

    kind = "worker"

    def __init__(
        self,
        part: Part,
        queues: Sequence[str],
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(replace(part, place=queues[0]), environment=environment)
        self._queues = queues
        self._options = options

    def _command(self) -> list[str]:
        name = f"chaos-{self.port}@localhost"
        command = f"worker -c 1 -l WARNING -n {name} -Q {','.join(self._queues)}"
        return [*self.celery(command), *self._options]


class Consumer(ChaosProcess):
    """A kombu consumer of one queue.

    Args:
        part: What it has to know.
        queue: The name of the queue.
    """

    kind = "consumer"

    def __init__(self, part: Part, queue: str) -> None:
        super().__init__(replace(part, place=queue))

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "tests.chaos.consuming"]
