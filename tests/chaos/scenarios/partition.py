"""Packets between nodes are dropped, for a while. Needs root, for network namespaces."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import permutations
from typing import ClassVar

from tests.chaos.cluster import Cluster
from tests.chaos.network import NetworkedCluster
from tests.chaos.scenario import Scenario, choice
from tests.chaos.scenarios.node_crash import Streaming
from tests.chaos.stage import Stage


@dataclass(frozen=True, kw_only=True)
class Partition(Streaming):
    """Packets are dropped between halves of a cluster, around one node, or across a ring (root).

    ``halves``: the clients reach all nodes. ``node``: one node is cut off from the others and from
    the clients. ``ring``: each node reaches its two neighbors only; of three, the last and the
    first do not reach each other.
    """

    name: ClassVar[str] = "partition"

    tasks: int = 8000
    shape: str = choice("halves", "node", "ring", help="between which nodes")
    seconds: int = choice(10, 30, help="for how long, twice")
    size: int = choice(3, 5, help="how many nodes")

    def cluster(self, version: str) -> Cluster:
        return NetworkedCluster(version, self.size)

    def disturb(self, stage: Stage, seconds: float) -> None:
        assert isinstance(stage.cluster, NetworkedCluster)
        for _ in range(2):
            stage.pause(seconds / 4)
            with stage.trouble(f"partition: {self.shape}"), self._cut(stage.cluster):
                stage.pause(self.seconds)
        stage.wait_for_cluster()

    def _cut(self, cluster: NetworkedCluster) -> AbstractContextManager[None]:
        nodes = range(1, self.size + 1)
        if self.shape == "halves":
            middle = self.size // 2
            return cluster.parted(nodes[:middle], nodes[middle:])
        if self.shape == "node":
            return cluster.parted(nodes[:1], nodes[1:], clients=1)
        return cluster.network.cut(
            (one, other)
            for one, other in permutations(nodes, 2)
            if not self._are_neighbors(one, other)
        )

    def _are_neighbors(self, one: int, other: int) -> bool:
        apart = abs(one - other)
        return apart == 1 or (self.size > 3 and apart == self.size - 1)

    @classmethod
    def cases(cls) -> list[Scenario]:
        """Return each shape, the longer time, and five nodes in halves and in a ring."""
        halves, node, ring = (cls(shape=shape) for shape in ("halves", "node", "ring"))
        longer, larger = replace(halves, seconds=30), replace(halves, size=5)
        return [halves, node, ring, longer, larger, replace(ring, size=5)]
