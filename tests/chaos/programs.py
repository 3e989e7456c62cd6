"""The programs that run as processes: producers, and workers of Celery."""

import os
import pickle
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tests.celery_process import CeleryProcess
from tests.chaos.application import OWN_QUEUE, Part


class ChaosProcess(CeleryProcess):
    """A process of a scenario.

    Args:
        part: What it has to know.
        stream: What it sends, if it is a producer: a :class:`Stream`, or what has a ``send``.
        environment: Further environment variables, for a clock that is wrong.

    Attributes:
        further: These variables; a change counts when the process begins again.
    """

    module = "tests.chaos.application"
    variable = "CHAOS"

    def __init__(
        self,
        part: Part,
        stream: Any = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__({"pickled": pickle.dumps((part, stream)).hex()})
        self.further = dict(environment or {})

    def begin(self) -> None:
        """Start the process, unless it runs, and do not wait."""
        if not self.running:
            self._process = self._spawn(self._command())

    def end(self) -> None:
        """End the process in order; its folder stays."""
        self._end(signal.SIGTERM, os.kill)  # as systemd does; Celery ends its pool

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), **self.further}


class Producer(ChaosProcess):
    """Sends a stream, then ends."""

    @property
    def failed(self) -> bool:
        """Whether its program has raised: the scenario is wrong, not what it plays with."""
        return self._process is not None and (self._process.poll() or 0) > 0

    def _command(self) -> list[str]:
        return [sys.executable, "-c", f"from {self.module} import produce; produce()"]


class Worker(ChaosProcess):
    """``celery worker`` for a queue, or several with commas in between, with further options."""

    def __init__(
        self, part: Part, queue: str, options: Sequence[str], environment: Mapping[str, str] | None
    ) -> None:
        own = {OWN_QUEUE: queue.rpartition(",")[2]}
        super().__init__(part, None, {**own, **(environment or {})})
        self.queues, self._options = queue, options

    def last_words(self) -> str:
        """Return the last error in its log, without numbers."""
        errors = re.findall(r"^[\w.]+: .*", self.log, re.MULTILINE)
        return re.sub(r"\d+", "#", (errors or [""])[-1])[:150]

    def _ready(self) -> bool:
        return " ready." in self.log

    def _command(self) -> list[str]:
        name = f"chaos-{self.port}@localhost"
        return [*self.celery(f"worker -c 1 -l INFO -n {name} -Q {self.queues}"), *self._options]
