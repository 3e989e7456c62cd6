"""A TCP proxy that forgets its connections without closing them."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread

from tests.chaos.cluster import Cluster


class Proxy(ThreadingTCPServer):
    """Passes connections on to a port of this machine.

    Attributes:
        generation: Connections of an earlier one are forgotten: what is written to them is lost,
            and neither side is told.
    """

    daemon_threads = True

    def __init__(self, target: int) -> None:
        super().__init__(("127.0.0.1", 0), Passing)
        self.target, self.generation = target, 0
        Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """``amqp://`` URL of the broker behind it."""
        return f"amqp://guest:guest@127.0.0.1:{self.server_address[1]}//"


class Passing(BaseRequestHandler):
    """A connection that is passed on."""

    server: Proxy

    def handle(self) -> None:
        """Pass on what comes from either side, until one closes the connection."""
        self._born = self.server.generation
        with (
            suppress(OSError),
            socket.create_connection(("127.0.0.1", self.server.target)) as there,
        ):
            back = Thread(target=self._pump, args=(there, self.request), daemon=True)
            back.start()
            self._pump(self.request, there)
            back.join()

    def _pump(self, source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(16_384):
                if self._born == self.server.generation:
                    to.sendall(piece)
        if self._born == self.server.generation:
            with suppress(OSError):
                to.shutdown(socket.SHUT_RDWR)


class ProxiedCluster(Cluster):
    """A cluster that producers and workers reach through a proxy in front of each node."""

    def _set_up(self, stack: ExitStack) -> None:
        super()._set_up(stack)
        self.proxies = [Proxy(node.port) for node in self.nodes]
        for proxy in self.proxies:
            stack.callback(proxy.server_close)
            stack.callback(proxy.shutdown)

    def url(self, first: int = 0) -> str:
        """Return the proxies of all nodes as kombu takes them."""
        return ";".join(each.url for each in (*self.proxies[first:], *self.proxies[:first]))
