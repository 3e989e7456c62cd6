"""Connections that are slow, that are dead without anybody being told, or that are TLS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from tests.chaos.certificates import TlsCluster
from tests.chaos.cluster import Cluster
from tests.chaos.proxy import ProxiedCluster
from tests.chaos.scenario import choice
from tests.chaos.scenarios.node_crash import NodeCrash, Streaming
from tests.chaos.stage import Stage

#: Seconds that a slow connection holds each piece of data back.
SLOW: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class Connections(Streaming):
    """Connections become slow (0.5 s each way), or are all half-open at a moment, twice."""

    name: ClassVar[str] = "connections"
    nodes: ClassVar[int] = 1

    tasks: int = 2000
    how: str = choice("half-open", "slow", help="what becomes of them")

    def cluster(self, version: str) -> Cluster:
        return ProxiedCluster(version, self.nodes)

    def disturb(self, stage: Stage, seconds: float) -> None:
        assert isinstance(stage.cluster, ProxiedCluster)
        for _ in range(2):
            stage.pause(seconds / 5)
            with stage.trouble(f"connections {self.how}"):
                for proxy in stage.cluster.proxies:
                    if self.how == "slow":
                        proxy.delay = SLOW
                    else:
                        proxy.forget()
                stage.pause(seconds / 5)
                for proxy in stage.cluster.proxies:
                    proxy.delay = 0.0


@dataclass(frozen=True, kw_only=True)
class Tls(NodeCrash):
    """Each node of three is killed in turn, and everything is over TLS."""

    name: ClassVar[str] = "tls"

    tasks: int = 4000

    def cluster(self, version: str) -> Cluster:
        return TlsCluster(version, self.nodes)
