"""A cluster whose nodes live in network namespaces, between which packets can be dropped.

Each node has a namespace of its own, and all of them a router in one more namespace; the nodes and
this machine reach each other through it only. What the router drops is lost in silence, as behind a
firewall or a broken switch: neither side gets an error. Only root can do that. It takes ``ip`` of
the package ``iproute2`` alone; everything goes with the namespaces, and nothing of the machine's
own network is changed but for one interface and one route, which go as well.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import permutations
from pathlib import Path
from typing import Final

from tests.brokers import NotPossibleHere
from tests.chaos.cluster import Cluster, Node
from tests.set_up import SetUp

#: The addresses of the nodes; 198.18.0.0/15 is for tests of networks (RFC 2544).
NODE: Final = "198.18.{}.2"
ROUTER: Final = "198.18.{}.1"
ALL: Final = "198.18.0.0/15"

#: The number of this machine's own subnet.
MACHINE: Final = 0

#: The port of AMQP in each namespace.
AMQP_PORT: Final = 5672


def ip(*arguments: str, namespace: str | None = None) -> None:
    """Run ``ip``, in a namespace if one is given."""
    inside = ["-n", namespace] if namespace else []
    subprocess.run(["ip", *inside, *arguments], check=True, capture_output=True, text=True)


class Network(SetUp):
    """A router, and one subnet for each node.

    Args:
        count: How many nodes.

    Raises:
        NotPossibleHere: The user is not root, or ``ip`` is missing.
    """

    def __init__(self, count: int) -> None:
        if os.geteuid() != 0:
            raise NotPossibleHere("only root can make network namespaces: run this as root")
        if shutil.which("ip") is None:
            raise NotPossibleHere("ip is missing: apt-get install iproute2")
        self._name = f"rd{os.getpid()}"
        self._count = count

    def _set_up(self, stack: ExitStack) -> None:
        stack.callback(self._remove)
        self._make()

    def namespace(self, number: int) -> str:
        """Return the name of a node's namespace; nodes are counted from 1."""
        return f"{self._name}-{number}"

    @staticmethod
    def address(number: int) -> str:
        """Return the address of a node, or of this machine."""
        return NODE.format(number)

    @contextmanager
    def cut(self, pairs: Iterable[tuple[int, int]]) -> Iterator[None]:
        """Drop every packet from the first to the second of each pair, until the block ends."""
        rules = [
            (*("from", NODE.format(source), "to", NODE.format(target)), "blackhole")
            for source, target in pairs
        ]
        try:
            for rule in rules:
                ip("rule", "add", *rule, namespace=self._router)
            yield
        finally:
            for rule in rules:
                with suppress(subprocess.CalledProcessError):
                    ip("rule", "del", *rule, namespace=self._router)

    @property
    def _router(self) -> str:
        return f"{self._name}-router"

    def _make(self) -> None:
        _remove_what_a_killed_run_has_left()
        ip("netns", "add", self._router)
        forwarding = "echo 1 > /proc/sys/net/ipv4/ip_forward"
        ip("netns", "exec", self._router, "sh", "-c", forwarding)
        ip("link", "set", "lo", "up", namespace=self._router)
        self._connect(MACHINE, None)
        for number in range(1, self._count + 1):
            ip("netns", "add", self.namespace(number))
            ip("link", "set", "lo", "up", namespace=self.namespace(number))
            self._connect(number, self.namespace(number))

    def _connect(self, number: int, namespace: str | None) -> None:
        here, there = f"{self._name}-{number}", f"to{number}"
        ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", self._router)
        if namespace is not None:
            ip("link", "set", here, "netns", namespace)
        ip("addr", "add", f"{NODE.format(number)}/24", "dev", here, namespace=namespace)
        ip("addr", "add", f"{ROUTER.format(number)}/24", "dev", there, namespace=self._router)
        ip("link", "set", there, "up", namespace=self._router)
        ip("link", "set", here, "up", namespace=namespace)
        ip("route", "add", ALL, "via", ROUTER.format(number), namespace=namespace)

    def _remove(self) -> None:
        for number in range(1, self._count + 1):
            _try("netns", "del", self.namespace(number))
        # This machine's end of the wire goes with the router's, and its route with that.
        _try("link", "del", f"{self._name}-{MACHINE}")
        _try("netns", "del", self._router)


def _remove_what_a_killed_run_has_left() -> None:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
    for line in listed.stdout.splitlines():
        found = re.match(r"rd(\d+)-(\d+|router)\b", line)
        if found and not Path("/proc", found[1]).exists():
            _try("netns", "del", found[0])


def _try(*arguments: str) -> None:
    with suppress(subprocess.CalledProcessError):
        ip(*arguments)


class NetworkedNode(Node):
    """A node in a namespace of its own.

    Args:
        root: As :class:`RabbitMQServer` takes it.
        settings: Lines for ``rabbitmq.conf``.
        cluster_with: The node whose cluster this one joins.
        network: The network.
        number: Which of its namespaces, from 1.
    """

    def __init__(
        self,
        root: Path | None,
        settings: Sequence[str],
        cluster_with: Node | None,
        network: Network,
        number: int,
    ) -> None:
        self._address = network.address(number)
        listener = f"listeners.tcp.2 = {self._address}:{AMQP_PORT}"
        super().__init__(root, (*settings, listener), cluster_with)
        self._namespace = network.namespace(number)

    @property
    def url(self) -> str:
        """``amqp://`` URL of the virtual host ``/``, for processes of this machine."""
        return f"amqp://guest:guest@{self._address}:{AMQP_PORT}//"

    @property
    def node(self) -> str:
        """The name by which the nodes of the cluster know this one."""
        return f"rabbitdelay@{self._address}"

    def start(self) -> None:
        """Start this node's own port mapper, then the node."""
        self._start_mapper()
        super().start()

    def _mapper_listens(self) -> bool:
        address = (self._address, self._mapper_port)
        with suppress(OSError), socket.create_connection(address, timeout=1.0):
            return True
        return False

    def _ready(self) -> bool:
        # As for a node of this machine, at another address.
        address = (self._address, AMQP_PORT)
        with suppress(OSError), socket.create_connection(address, timeout=1.0) as client:
            client.sendall(b"AMQP\x00\x00\x09\x01")
            return client.recv(1) != b""
        return False

    def _inside(self, command: list[str]) -> list[str]:
        if "-address" in command:  # the port mapper: on all addresses of the namespace
            command = command[: command.index("-address")]
        return ["ip", "netns", "exec", self._namespace, *super()._inside(command)]

    def _environment(self) -> dict[str, str]:
        environment = {**super()._environment(), "RABBITMQ_USE_LONGNAME": "true"}
        del environment["ERL_EPMD_ADDRESS"]
        return environment


class NetworkedCluster(Cluster):
    """A cluster between whose nodes packets can be dropped.

    Args:
        version: The version of RabbitMQ.
        count: How many nodes.
        settings: Lines for each node's ``rabbitmq.conf``.
    """

    def __init__(self, version: str, count: int, settings: Sequence[str] = ()) -> None:
        self.network = Network(count)
        super().__init__(version, count, settings)

    def _set_up(self, stack: ExitStack) -> None:
        stack.enter_context(self.network)
        super()._set_up(stack)

    def _node(
        self, number: int, root: Path | None, settings: Sequence[str], first: Node | None
    ) -> Node:
        return NetworkedNode(root, settings, first, self.network, number + 1)

    @contextmanager
    def parted(self, *sides: Sequence[int], clients: int | None = None) -> Iterator[None]:
        """Drop every packet between nodes of different sides, until the block ends.

        Args:
            *sides: The numbers of the nodes on each side, from 1.
            clients: The number of the side on which the clients are; None if they reach all nodes.
        """
        placed = [list(side) for side in sides]
        if clients is not None:
            placed[clients].append(MACHINE)
        with self.network.cut(
            (one, other) for near, far in permutations(placed, 2) for one in near for other in far
        ):
            yield
