"""Connections that are slow, that are dead without anybody being told, or that are TLS."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from celery_rabbitdelay.testing import Certificates
from tests.chaos.cluster import Cluster, Node
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


class TlsCluster(Cluster):
    """A cluster that is reached over TLS only; nodes and clients check each other."""

    def __init__(self, version: str, count: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="rabbitdelay-tls-"))
        self._certificates = Certificates.make(self._folder)
        super().__init__(version, count)

    def _set_up(self, stack: ExitStack) -> None:
        stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
        super()._set_up(stack)

    def _node(
        self, number: int, root: Path | None, settings: Sequence[str], first: Node | None
    ) -> Node:
        return Node(root, settings, first, self._certificates)


@dataclass(frozen=True, kw_only=True)
class Tls(NodeCrash):
    """Each node of three is killed in turn, and everything is over TLS."""

    name: ClassVar[str] = "tls"

    tasks: int = 4000

    def cluster(self, version: str) -> Cluster:
        return TlsCluster(version, self.nodes)
