"""A destination is full and refuses; the tasks beside it must not notice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from tests.chaos.application import TaskQueue
from tests.chaos.producing import Stream
from tests.chaos.scenario import SOUND, Scenario, choice
from tests.chaos.stage import Stage

FULL: Final = "full"
FANOUT: Final = "both"

#: How many messages the queue takes.
BOUND: Final = 5

#: Tasks for the sound queue that are sent together with those for the full one, and as many later.
SOUND_TASKS: Final = 20

#: Seconds; all are the same, so that all tasks wait in the queue of one digit.
DELAY: Final = 10.0

#: Seconds until the second sound ones are sent, and from then until there is room.
UNTIL_LATER: Final = 75.0
UNTIL_ROOM: Final = 25.0


@dataclass(frozen=True, kw_only=True)
class FullDestination(Scenario):
    """A queue is full and refuses the tasks that are due for it; room is made 100 s later.

    ``full`` are the tasks for it, ``sound`` those that are due at the same time for another queue,
    ``later`` those for the other queue that are sent 75 s later. Through a fanout exchange, each
    task of ``full`` goes to both queues.
    """

    name: ClassVar[str] = "full-destination"
    limits: ClassVar[Mapping[str, float]] = {SOUND: 2.0, "later": 2.0}

    tasks: int = 60
    bound: str = choice("argument", "policy", help="what bounds the queue")
    kind: str = choice("quorum", "classic", help="the type of the full queue")
    exchange: str = choice("direct", "fanout", help="the exchange that the tasks are sent to")

    def queues(self) -> Sequence[TaskQueue]:
        arguments: dict[str, Any] = {"x-queue-type": self.kind}
        if self.bound == "argument":
            arguments |= {"x-max-length": BOUND, "x-overflow": "reject-publish"}
        fanout = FANOUT if self.exchange == "fanout" else None
        return [TaskQueue(SOUND, fanout=fanout), TaskQueue(FULL, arguments, fanout)]

    def play(self, stage: Stage) -> None:
        if self.bound == "policy":
            bound = f'{{"max-length": {BOUND}, "overflow": "reject-publish"}}'
            stage.cluster.running.ctl(
                *("set_policy", "bound", f"^{FULL}$", bound, "--apply-to", "queues")
            )
        stage.worker(SOUND)
        stage.send(Stream("filling", FULL, BOUND, delays=(0.5, 0.5)), wait=True)
        stage.wait(lambda: stage.count(FULL) >= BOUND, "a full queue", 60)
        fanout = (FANOUT, (SOUND, FULL)) if self.exchange == "fanout" else None
        with stage.trouble("full queue"):
            # The sound ones stand behind the others in the queue of the same digit.
            stage.send(
                Stream(FULL, FULL, self.tasks, delays=(DELAY, DELAY), fanout=fanout), wait=True
            )
            stage.send(Stream(SOUND, SOUND, SOUND_TASKS, delays=(DELAY, DELAY)), wait=True)
            stage.pause(UNTIL_LATER)
            stage.send(Stream("later", SOUND, SOUND_TASKS, delays=(DELAY, DELAY)), wait=True)
            stage.pause(UNTIL_ROOM)
        stage.worker(FULL)
