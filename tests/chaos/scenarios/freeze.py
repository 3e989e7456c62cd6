"""A node stops for a while, by a signal, by an order or by an alarm; none is killed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from tests.chaos.cluster import Node
from tests.chaos.scenario import choice
from tests.chaos.scenarios.node_crash import Streaming
from tests.chaos.stage import Stage

#: Seconds that a node is frozen, longer than the heartbeat of Raft and shorter than that of AMQP.
FROZEN: Final = 12.0


@dataclass(frozen=True, kw_only=True)
class Freeze(Streaming):
    """One node of three is frozen (SIGSTOP) for 12 s, twice."""

    name: ClassVar[str] = "freeze"

    def disturb(self, stage: Stage, seconds: float) -> None:
        for node in stage.cluster.nodes[1:]:
            stage.pause(seconds / 4)
            with stage.trouble("node frozen"):
                node.suspend()
                stage.pause(FROZEN)
                node.resume()
        stage.wait_for_cluster()


@dataclass(frozen=True, kw_only=True)
class RollingRestart(Streaming):
    """Each node of three is stopped in order and started again, one after the other."""

    name: ClassVar[str] = "rolling-restart"

    def disturb(self, stage: Stage, seconds: float) -> None:
        for number, node in enumerate(stage.cluster.nodes):
            stage.pause(seconds / 6)
            with stage.trouble(f"node {number} restarted"):
                node.shut_down()
                node.start()
                stage.wait_for_cluster()


#: What raises each alarm and what ends it; and the seconds in between.
ALARMS: Final = {
    "memory": (("set_vm_memory_high_watermark", "absolute", "1"), 40.0),
    "disk": (("set_disk_free_limit", "100TB"), 20.0),
}
NORMAL: Final = {
    "memory": ("set_vm_memory_high_watermark", "0.4"),
    "disk": ("set_disk_free_limit", "50MB"),
}


@dataclass(frozen=True, kw_only=True)
class Alarm(Streaming):
    """An alarm of memory (40 s) or of disk (20 s) blocks every connection that publishes."""

    name: ClassVar[str] = "alarm"

    tasks: int = 4000
    of: str = choice("memory", "disk", help="what is short")

    def disturb(self, stage: Stage, seconds: float) -> None:
        node: Node = stage.cluster.nodes[0]
        command, lasts = ALARMS[self.of]
        stage.pause(seconds / 3)
        with stage.trouble(f"alarm: {self.of}"):
            node.ctl(*command)
            stage.pause(lasts)
            node.ctl(*NORMAL[self.of])
