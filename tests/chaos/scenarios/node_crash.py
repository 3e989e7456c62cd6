"""Each node of a cluster is killed in turn, while tasks come due all along."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from tests.chaos.application import TaskQueue
from tests.chaos.producing import Stream
from tests.chaos.scenario import SOUND, Scenario, choice
from tests.chaos.stage import Stage

MESSAGES: Final = "messages"

#: Seconds; the shortest and the longest delay of a task.
DELAYS: Final = (0.5, 30.0)


@dataclass(frozen=True, kw_only=True)
class Streaming(Scenario):
    """Tasks are sent and come due all along, while :meth:`disturb` makes trouble.

    ``tasks`` are those of Celery, ``messages`` those of kombu, a tenth.
    """

    nodes: ClassVar[int] = 3

    tasks: int = 12_000
    minutes: float = 2.0
    workers: str = choice(
        "default", "quiet", help="quiet: workers without remote control and events", varied=False
    )
    way: Literal["task", "rows", "envelopes"] = choice(
        *("task", "rows", "envelopes"),
        help="rows: by send_many, for hundreds of thousands of tasks; envelopes: many in a message",
        varied=False,
    )

    def queues(self) -> Sequence[TaskQueue]:
        return [TaskQueue(SOUND), TaskQueue(MESSAGES)]

    def play(self, stage: Stage) -> None:
        nodes = len(stage.cluster.nodes)
        options = []
        if self.workers == "quiet":
            stage.settings["worker_enable_remote_control"] = False
            options = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        for number in range(2):
            stage.worker(SOUND, first_node=number % nodes, options=options)
        stage.consumer(MESSAGES)
        seconds = self.minutes * 60
        messages = self.tasks // 10
        halves = (self.tasks - messages + 1) // 2, (self.tasks - messages) // 2
        for number, count in enumerate(halves):
            stream = Stream(
                *("tasks", SOUND, count, seconds, DELAYS),
                way="task" if self.way == "task" else "rows",
                envelopes=self.way == "envelopes",
            )
            stage.send(stream, first_node=number % nodes)
        stage.send(Stream("messages", MESSAGES, messages, seconds, DELAYS, "kombu"))
        self.disturb(stage, seconds)

    @abstractmethod
    def disturb(self, stage: Stage, seconds: float) -> None:
        """Make trouble for about as long as the tasks are sent."""


@dataclass(frozen=True, kw_only=True)
class NodeCrash(Streaming):
    """Each node of three is killed with SIGKILL in turn, and started again."""

    name: ClassVar[str] = "node-crash"

    def disturb(self, stage: Stage, seconds: float) -> None:
        nodes = stage.cluster.nodes
        each = seconds / (len(nodes) + 1)
        stage.pause(each / 2)
        for number, node in enumerate(nodes):
            with stage.trouble(f"node {number} killed"):
                node.kill()
                stage.pause(each / 2)
                node.start()
                stage.wait_for_cluster()
            stage.pause(each / 2)
