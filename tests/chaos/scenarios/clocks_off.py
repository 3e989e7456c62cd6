"""A clock is wrong: the producer's, the worker's, or that of one node or all."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import ClassVar, Final

from tests.chaos.clocks import library, off_by
from tests.chaos.cluster import Cluster, Node
from tests.chaos.producing import Stream
from tests.chaos.scenario import SOUND, Scenario, choice
from tests.chaos.stage import Stage

#: Seconds.
HOUR: Final = 3600
MINUTE: Final = 60

#: Whose clock has to be off in which direction so that tasks are late by the difference.
LATE: Final = {("producer", "ahead"), ("worker", "behind"), ("one-node", "ahead")}

#: The default of ``rabbitdelay_early_tolerance``, in seconds.
TOLERATED: Final = 1.0


class CrookedCluster(Cluster):
    """A cluster in which some nodes have a wrong clock.

    Args:
        version: The version of RabbitMQ.
        count: How many nodes.
        wrong: The numbers of the nodes whose clock is wrong, from 0.
        seconds: How far it is ahead; a negative number if it is behind.
    """

    def __init__(self, version: str, count: int, wrong: Sequence[int], seconds: int) -> None:
        self._wrong = wrong
        self._seconds = seconds
        super().__init__(version, count)

    def _node(
        self, number: int, root: Path | None, settings: Sequence[str], first: Node | None
    ) -> Node:
        node = super()._node(number, root, settings, first)
        if number in self._wrong:
            # The node sees its folder, but perhaps not this machine's libraries.
            shutil.copy(library(), node.folder)
            node.further |= off_by(self._seconds, f"{node.home}/{library().name}")
        return node


@dataclass(frozen=True, kw_only=True)
class ClocksOff(Scenario):
    """The clock of a producer, a worker, all nodes or one node of three is off by an hour.

    If the worker's clock is behind the producer's, each task is late by the difference, once.

    ``one-node``: the node is also killed and started again, so that queues change their leader
    from a clock to another. A message that entered a queue by a clock that is ahead is late by the
    difference. By a clock that is behind, it leaves early, and the worker puts it back, unless that
    is by less than ``rabbitdelay_early_tolerance``.

    The cases take a minute where tasks are late by the difference, and an hour elsewhere.
    """

    name: ClassVar[str] = "clock-off"
    nodes: ClassVar[int] = 3
    limits: ClassVar[dict[str, float]] = {SOUND: 2.0}
    patience: ClassVar[float] = 120.0

    tasks: int = 300
    minutes: float = 0.5
    whose: str = choice("producer", "worker", "broker", "one-node", help="whose clock it is")
    off: str = choice("ahead", "behind", help="in which direction")
    seconds: int = choice(HOUR, MINUTE, help="by how many seconds", varied=False)

    def cluster(self, version: str) -> Cluster:
        wrong = {"broker": (0, 1, 2), "one-node": (self._victim,)}.get(self.whose, ())
        return CrookedCluster(version, self.nodes, wrong, self._seconds)

    def allowed_late(self) -> Mapping[str, float]:
        if self.whose == "one-node":
            return {}  # a node is killed
        late = self.seconds if (self.whose, self.off) in LATE else 0
        return {group: limit + late for group, limit in self.limits.items()}

    def allowed_early(self) -> float:
        return TOLERATED if self.whose == "one-node" else 0.0

    @property
    def _seconds(self) -> int:
        return self.seconds if self.off == "ahead" else -self.seconds

    @property
    def _victim(self) -> int:
        # The others join the node that has the earliest start, by its own clock.
        return 1 if self.off == "ahead" else 0

    def play(self, stage: Stage) -> None:
        crooked = off_by(self._seconds)
        stage.worker(SOUND, environment=crooked if self.whose == "worker" else None)
        seconds = self.minutes * 60
        stage.send(
            Stream(SOUND, SOUND, self.tasks, seconds, (5.0, 30.0)),
            environment=crooked if self.whose == "producer" else None,
        )
        if self.whose == "one-node":
            stage.pause(seconds / 2)
            with stage.trouble("node with a wrong clock killed"):
                victim = stage.cluster.nodes[self._victim]
                victim.kill()
                stage.pause(5)
                victim.start()
                stage.wait_for_cluster()

    @classmethod
    def cases(cls) -> list[Scenario]:
        """Return everybody's clock, ahead and behind."""
        pairs = product(("producer", "worker", "broker", "one-node"), ("ahead", "behind"))
        return [
            cls(whose=each, off=off, seconds=MINUTE if (each, off) in LATE else HOUR)
            for each, off in pairs
        ]
