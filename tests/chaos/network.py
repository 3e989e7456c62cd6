"""A cluster whose nodes live in network namespaces, between which packets can be dropped.

Each node has a namespace of its own, and all of them a router in one more namespace; the nodes and
this machine reach each other through it only. What the router drops is lost in silence, as behind a
firewall or a broken switch: neither side gets an error. Only root can do that. It takes ``ip`` of
the package ``iproute2`` alone; everything goes with the namespaces, and nothing of the machine's
own network is changed but for one interface and one route, which go as well.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from celery_rabbitdelay.testing import RabbitMQServer
from tests.brokers import NotPossibleHere
from tests.chaos.cluster import Cluster, Node
from tests.private_broker import QUIET

#: The addresses of the nodes; 198.18.0.0/15 is for tests of networks (RFC 2544).
NODE: Final = "198.18.{}.2"
ROUTER: Final = "198.18.{}.1"

#: The number of this machine's own subnet; nodes are counted from 1.
MACHINE: Final = 0

#: Between which nodes of three packets are dropped. ``halves``: the clients reach all nodes.
#: ``node``: one node is cut off from the others and from the clients. ``ring``: each node reaches
#: its neighbors only; the last and the first do not reach each other.
CUTS: Final = {
    "halves": [(1, 2), (1, 3)],
    "node": [(1, MACHINE), (1, 2), (1, 3)],
    "ring": [(1, 3)],
}

#: The port of AMQP in each namespace.
AMQP_PORT: Final = 5672


def ip(arguments: str, inside: str | None = None, *, must: bool = True) -> None:
    """Run ``ip``, in a namespace if one is given."""
    where = ["-n", inside] if inside else []
    subprocess.run(["ip", *where, *arguments.split()], check=must, capture_output=True)


class NetworkedNode(Node):
    """A node with an address, in a namespace of its own."""

    def __init__(self, address: str, namespace: str, root: Any, first: Any) -> None:
        self._host, self._namespace = address, namespace
        listener = f"listeners.tcp.2 = {address}:{AMQP_PORT}"
        super().__init__(root, (*QUIET, listener), first)

    @property
    def url(self) -> str:
        """``amqp://`` URL of the virtual host ``/``, for processes of this machine."""
        return f"amqp://guest:guest@{self._host}:{AMQP_PORT}//"

    @property
    def node(self) -> str:
        """The name by which the nodes of the cluster know this one."""
        return f"rabbitdelay@{self._host}"

    def _start_mapper(self) -> None:
        RabbitMQServer._start_mapper(self)  # each has one of its own

    def _ready(self) -> bool:
        return self._is_listening(AMQP_PORT)

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

    Raises:
        NotPossibleHere: The user is not root, or ``ip`` is missing.
    """

    def __init__(self, version: str, count: int) -> None:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise NotPossibleHere("network namespaces take root, and the package iproute2")
        self._name, self._count = f"rd{os.getpid()}", count
        self._router = f"{self._name}-router"
        super().__init__(version, count)

    def _node(self, number: int, first: Node | None) -> Node:
        address, namespace = NODE.format(number + 1), f"{self._name}-{number + 1}"
        return NetworkedNode(address, namespace, self._root, first)

    def _set_up(self, stack: ExitStack) -> None:
        listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
        for name, process in re.findall(r"^(rd(\d+)-\S+)", listed.stdout, re.MULTILINE):
            if not Path("/proc", process).exists():  # a killed run has left it
                ip(f"netns del {name}", must=False)
        stack.callback(self._remove)
        ip(f"netns add {self._router}")
        ip(f"netns exec {self._router} sysctl -qw net.ipv4.ip_forward=1")
        for number in range(MACHINE, self._count + 1):
            self._connect(number)
        super()._set_up(stack)

    def _connect(self, number: int) -> None:
        """Connect a node's namespace, or this machine, with the router."""
        here, there, router = f"{self._name}-{number}", f"to{number}", self._router
        namespace = None if number == MACHINE else here
        ip(f"link add {here} type veth peer name {there} netns {router}")
        if namespace is not None:
            ip(f"netns add {namespace}")
            ip("link set lo up", namespace)
            ip(f"link set {here} netns {namespace}")
        ip(f"addr add {NODE.format(number)}/24 dev {here}", namespace)
        ip(f"addr add {ROUTER.format(number)}/24 dev {there}", router)
        ip(f"link set {there} up", router)
        ip(f"link set {here} up", namespace)
        ip(f"route add 198.18.0.0/15 via {ROUTER.format(number)}", namespace)

    def _remove(self) -> None:
        for number in range(1, self._count + 1):
            ip(f"netns del {self._name}-{number}", must=False)
        # This machine's end of the wire goes with the router's, and its route with that.
        ip(f"link del {self._name}-{MACHINE}", must=False)
        ip(f"netns del {self._router}", must=False)

    @contextmanager
    def cut(self, pairs: Iterable[tuple[int, int]], one_way: bool = False) -> Iterator[None]:
        """Drop every packet between the two of each pair, or from the first one to the second."""
        both = [each for pair in pairs for each in (pair, pair[::-1])[: 2 - one_way]]
        rules = [f"from {NODE.format(a)} to {NODE.format(b)} blackhole" for a, b in both]
        try:
            for rule in rules:
                ip(f"rule add {rule}", self._router)
            yield
        finally:
            for rule in rules:
                ip(f"rule del {rule}", self._router, must=False)

    @contextmanager
    def slow(self, number: int, rate: str) -> Iterator[None]:
        """Let few packets to a node, until the block ends; ``tbf``, which most kernels have."""
        tc, device = f"netns exec {self._router} tc qdisc", f"dev to{number} root"
        ip(f"{tc} add {device} tbf rate {rate} burst 16kb latency 500ms")
        try:
            yield
        finally:
            ip(f"{tc} del {device}", must=False)

    @contextmanager
    def half_open(self) -> Iterator[None]:
        """All present connections of clients are dead for good, and neither side is told."""
        here = NODE.format(MACHINE)
        command = ["ss", "-Htn", "src", here]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for port in re.findall(rf"{re.escape(here)}:(\d+)", listed):
            for side in ("sport", "dport"):
                ip(f"rule add ipproto tcp {side} {port} blackhole", self._router)
        yield
