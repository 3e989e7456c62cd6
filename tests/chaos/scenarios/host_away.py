"""The only node that has a task queue is killed before its tasks are due, and comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from tests.chaos.application import TaskQueue
from tests.chaos.producing import Stream
from tests.chaos.scenario import SOUND, Scenario, choice
from tests.chaos.stage import Stage

AWAY: Final = "away"

#: The node that is killed: not the first, which the others have joined.
HOST: Final = 1

ARGUMENTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "classic": {"x-queue-type": "classic"},
    # A quorum queue whose only member is there: its quorum is lost, that of the levels is not.
    "single": {"x-queue-type": "quorum", "x-quorum-initial-group-size": 1},
}

SOUND_TASKS: Final = 20

#: Seconds until the tasks are due; the node is killed long before.
DELAY: Final = 20.0

#: Seconds that the node is away.
FOR: Final = 50.0


@dataclass(frozen=True, kw_only=True)
class HostAway(Scenario):
    """The only node of a task queue is killed before its tasks are due, and back after 50 s.

    ``away`` are the tasks for it, ``sound`` those that are due at the same time for another queue.
    """

    name: ClassVar[str] = "host-away"
    nodes: ClassVar[int] = 3
    limits: ClassVar[Mapping[str, float]] = {SOUND: 2.0}
    settings: ClassVar[Mapping[str, Any]] = {"rabbitdelay_may_refuse": [AWAY]}

    tasks: int = 80
    kind: str = choice(*ARGUMENTS, help="the queue: classic, or quorum with a single member")

    def queues(self) -> Sequence[TaskQueue]:
        return [TaskQueue(SOUND), TaskQueue(AWAY, ARGUMENTS[self.kind])]

    def play(self, stage: Stage) -> None:
        cluster = stage.cluster
        host = cluster.nodes[HOST]
        away = next(queue for queue in stage.queues if queue.name == AWAY)
        cluster.declare(away.entity(), host)
        assert cluster.leader(AWAY) is host
        stage.worker(SOUND)
        # The sound ones stand behind the others in the queue of the same digit.
        stage.send(Stream(AWAY, AWAY, self.tasks, delays=(DELAY, DELAY)), wait=True)
        stage.send(Stream(SOUND, SOUND, SOUND_TASKS, delays=(DELAY, DELAY)), wait=True)
        with stage.trouble("host away"):
            host.kill()
            stage.pause(FOR)
            host.start()
            stage.wait_for_cluster()
        stage.worker(AWAY)
