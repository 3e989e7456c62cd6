"""The brokers of a scenario: one node or a cluster, of any version that we support."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from kombu import Connection, Queue

from celery_rabbitdelay.testing import Certificates, RabbitMQServer, wait_for
from tests.brokers import BROKERS, packaged_version, system_with
from tests.private_broker import QUIET
from tests.set_up import SetUp

#: Seconds that the nodes have to join at their first start.
TO_JOIN: Final = 60.0

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
    try:
        if packaged_version(Path("/")).startswith(version):
            return None
    except subprocess.CalledProcessError:
        pass  # none is installed
    (broker,) = (each for each in BROKERS if each.version == version)
    return system_with(broker)


class Node(RabbitMQServer):
    """A node of a cluster.

    Args:
        root: As :class:`RabbitMQServer` takes it.
        settings: Lines for ``rabbitmq.conf``.
        cluster_with: The node whose cluster this one joins.
        certificates: As :class:`RabbitMQServer` takes it.

    Attributes:
        further: Further environment variables.
        while_waiting: Called while the node starts, for what has to go on meanwhile.
    """

    def __init__(
        self,
        root: Path | None = None,
        settings: Sequence[str] = (),
        cluster_with: RabbitMQServer | None = None,
        certificates: Certificates | None = None,
    ) -> None:
        super().__init__(root, settings, cluster_with, certificates=certificates)
        self.further: dict[str, str] = {}
        self.while_waiting: Callable[[], object] = lambda: None

    @property
    def home(self) -> str:
        """The node's folder as the node sees it."""
        return self._home

    def shut_down(self) -> None:
        """End the node in order; its data stays for the next start."""
        self._end(signal.SIGTERM)

    def _answers(self) -> bool:
        self.while_waiting()
        return super()._answers()

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), **self.further}


class Cluster(SetUp):
    """Nodes of one cluster, started and stopped together.

    Args:
        version: The version of RabbitMQ, for example "4.3".
        count: How many nodes.
        settings: Lines for each node's ``rabbitmq.conf``.

    Attributes:
        nodes: The nodes.
    """

    def __init__(self, version: str, count: int = 1, settings: Sequence[str] = ()) -> None:
        self.version = version
        root = root_of(version)
        every = (*QUIET, *settings)
        first = self._node(0, root, every, None)
        self.nodes = [first, *(self._node(at, root, every, first) for at in range(1, count))]

    def _node(
        self, number: int, root: Path | None, settings: Sequence[str], first: Node | None
    ) -> Node:
        return Node(root, settings, first)

    def _set_up(self, stack: ExitStack) -> None:
        for node in self.nodes:
            stack.callback(node.stop)
        for node in self.nodes:
            node.start()
        wait_for(self.is_together, "the whole cluster", TO_JOIN, interval=1.0)

    @property
    def reported(self) -> str:
        """The version that the first node reports."""
        return self.nodes[0].ctl("version").strip()

    def url(self, first: int = 0) -> str:
        """Return all nodes as kombu takes them, beginning with one of them."""
        return ";".join(node.url for node in (*self.nodes[first:], *self.nodes[:first]))

    def ssl(self) -> dict[str, Any] | bool:
        """Return ``broker_use_ssl``; False without TLS."""
        return self.nodes[0].ssl

    def connection(self, node: Node | None = None) -> Connection:
        """Return a connection to a node, by default to the first that runs."""
        return Connection((node or self.running).url, ssl=self.ssl())

    @property
    def running(self) -> Node:
        """The first node that runs."""
        return next(node for node in self.nodes if node.running)

    def declare(self, queue: Queue, node: Node | None = None) -> None:
        """Declare a queue by a connection to a node, so that its leader is there."""
        with self.connection(node) as connection:
            queue(connection.default_channel).declare()

    def leader(self, queue: str) -> Node:
        """Return the node that leads a quorum queue, or holds a classic one."""
        column = "leader" if self._is_quorum(queue) else "pid"
        for line in self.running.ctl("list_queues", "name", column).splitlines():
            name, _, where = line.partition("\t")
            if name == queue:
                return next(node for node in self.nodes if node.node in where)
        raise LookupError(queue)

    def _is_quorum(self, queue: str) -> bool:
        lines = self.running.ctl("list_queues", "name", "type").splitlines()
        return f"{queue}\tquorum" in lines

    def is_together(self) -> bool:
        """Return whether all nodes run and each sees all others."""
        if not all(node.running for node in self.nodes):
            return False
        with suppress(subprocess.CalledProcessError):
            return int(self.running.ctl("eval", FEWEST_SEEN)) == len(self.nodes) - 1
        return False
