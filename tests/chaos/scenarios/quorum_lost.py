"""Two nodes of three are killed or frozen: no queue has a quorum until they are back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from tests.chaos.scenario import choice
from tests.chaos.scenarios.node_crash import Streaming
from tests.chaos.stage import Stage

#: Seconds that the nodes are away: longer than the ``confirm_timeout`` of 30 s.
FOR: Final = 40.0


@dataclass(frozen=True, kw_only=True)
class QuorumLost(Streaming):
    """Two nodes of three are killed, or frozen, for 40 s: nothing has a quorum."""

    name: ClassVar[str] = "quorum-lost"

    tasks: int = 4000
    by: str = choice("kill", "freeze", help="what happens to the nodes")

    def disturb(self, stage: Stage, seconds: float) -> None:
        victims = stage.cluster.nodes[1:]
        stage.pause(seconds / 4)
        with stage.trouble(f"two nodes: {self.by}"):
            for node in victims:
                node.kill() if self.by == "kill" else node.suspend()
            stage.pause(FOR)
            for node in victims:
                node.start() if self.by == "kill" else node.resume()
            stage.wait_for_cluster()
