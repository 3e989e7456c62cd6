"""A worker, a producer, or a program in the middle of ``send_many`` is killed."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import ClassVar, Final

from tests.chaos.producing import Stream, Way
from tests.chaos.scenario import SOUND, Scenario, choice
from tests.chaos.stage import Stage

#: How often a worker is killed.
KILLS: Final = 5

#: Seconds; the shortest and the longest delay.
DELAYS: Final = (0.5, 20.0)


@dataclass(frozen=True, kw_only=True)
class ProcessesKilled(Scenario):
    """A worker is killed five times, or a producer once in the middle of its stream.

    ``distribution``: the worker is killed while it takes tasks out of envelopes.
    """

    name: ClassVar[str] = "process-killed"

    tasks: int = 6000
    minutes: float = 1.0
    victim: str = choice(
        *("worker", "distribution", "producer", "send-many", "envelopes"), help="who is killed"
    )

    def play(self, stage: Stage) -> None:
        seconds = self.minutes * 60
        worker = stage.worker(SOUND)
        stage.worker(SOUND)
        in_envelopes = self.victim in ("distribution", "envelopes")
        way: Way = "rows" if in_envelopes or self.victim == "send-many" else "task"
        stream = Stream("tasks", SOUND, self.tasks, seconds, DELAYS, way, envelopes=in_envelopes)
        victim = stage.send(stream)
        if self.victim in ("worker", "distribution"):
            for _ in range(KILLS):
                stage.pause(seconds / (KILLS + 1))
                with stage.trouble("worker killed"):
                    stage.kill(worker)
        else:
            stage.pause(seconds / 2)
            with stage.trouble(f"{self.victim} killed"):
                victim.end(signal.SIGKILL)
            stage.send(Stream("after", SOUND, 100, delays=DELAYS), wait=True)
