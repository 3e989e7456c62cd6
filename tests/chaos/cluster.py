"""The brokers of a scenario: one node or a cluster, of any version that we support."""

import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Final

from celery_rabbitdelay.testing import wait_for
from tests.brokers import BROKERS, packaged_version, system_with
from tests.chaos.preloads import PRELOAD, library, off_by
from tests.private_broker import QUIET
from tests.rabbitmq_node import RabbitMQNode
from tests.set_up import SetUp

#: The name of the file in a node's folder that makes its disk slow.
SLOW: Final = "slow"

#: How many nodes that node sees which sees the fewest, itself apart.
FEWEST_SEEN: Final = (
    "{Seen, []} = rpc:multicall([node() | nodes()], erlang, nodes, []), "
    "lists:min([length(Nodes) || Nodes <- Seen])."
)


def root_of(version: str) -> Path | None:
    """Return the system whose RabbitMQ is of this version; None for this machine's own.

    Raises:
        NotPossibleHere: There is none and none can be made.
    """
    with suppress(subprocess.CalledProcessError):  # none is installed
        if packaged_version(Path("/")).startswith(version):
            return None
    return system_with(next(each for each in BROKERS if each.version == version))


class Node(RabbitMQNode):
    """A node of a cluster.

    Attributes:
        further: Further variables of its environment; a change counts when the node starts again.
        arguments: Further arguments of Erlang.
        while_waiting: Called while the node starts, for what has to go on meanwhile.
    """

    further: Mapping[str, str] = MappingProxyType({})
    arguments = ""
    while_waiting: Callable[[], object] = staticmethod(lambda: None)

    def _answers(self) -> bool:
        self.while_waiting()
        return super()._answers()

    def end(self) -> None:
        """End the node in order; its data stay."""
        self._end(signal.SIGTERM)

    @contextmanager
    def with_slow_disk(self) -> Iterator[None]:
        """Slow down the node's disk until the block ends; the node preloads the library."""
        (self.folder / SLOW).touch()
        try:
            yield
        finally:
            (self.folder / SLOW).unlink(missing_ok=True)

    def _environment(self) -> dict[str, str]:
        environment = super()._environment()
        environment["RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS"] += f" {self.arguments}"
        further = dict(self.further)
        if PRELOAD in further:
            # The node sees its folder, but perhaps not this machine's libraries.
            copied = self.folder / library().name
            if not copied.exists():  # a process may have it mapped
                shutil.copy(library(), copied)
            further[PRELOAD] = f"{self._home}/{copied.name}"
            further["SLOW_DISK"] = f"{self._home}/{SLOW}"
        return {**environment, **further}


class Cluster(SetUp):
    """Nodes of one cluster, started and stopped together.

    Args:
        version: The version of RabbitMQ, for example "4.3".
        count: How many nodes.
        clocks: By the number of a node, the seconds that its clock is ahead.

    Attributes:
        nodes: The nodes.
    """

    def __init__(
        self, version: str, count: int = 1, clocks: Mapping[int, int] | None = None
    ) -> None:
        self._root = root_of(version)
        self.nodes: list[Node] = []
        for number in range(count):
            self.nodes.append(self._node(number, self.nodes[0] if number else None))
        for number, seconds in (clocks or {}).items():
            self.nodes[number].further = off_by(seconds)

    def _node(self, number: int, first: Node | None) -> Node:
        return Node(self._root, QUIET, first)

    def _set_up(self, stack: ExitStack) -> None:
        for node in self.nodes:
            stack.callback(node.stop)
        for node in self.nodes:
            node.start()
        wait_for(self.is_together, "the whole cluster", 60, interval=1.0)

    def url(self, first: int = 0) -> str:
        """Return all nodes as kombu takes them, beginning with one of them."""
        return ";".join(node.url for node in (*self.nodes[first:], *self.nodes[:first]))

    @property
    def running(self) -> Node:
        """The first node that runs."""
        return next(node for node in self.nodes if node.running)

    def is_together(self) -> bool:
        """Return whether all nodes run and each sees all others."""
        with suppress(subprocess.CalledProcessError):
            seen = int(self.running.ctl("eval", FEWEST_SEEN))
            return all(node.running for node in self.nodes) and seen == len(self.nodes) - 1
        return False
