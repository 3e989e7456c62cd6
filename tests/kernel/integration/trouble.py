"""A broker in trouble, and a virtual host of one test's own, as context managers."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from urllib.parse import urlsplit

from celery_rabbitdelay.testing import RabbitMQServer
from celery_rabbitdelay.testing.servers import Server
from tests import node_control


@contextmanager
def suspended(server: Server) -> Iterator[None]:
    """A server, or a worker, is silent until the block ends."""
    server.suspend()
    with resumed(server):
        yield


@contextmanager
def resumed(server: Server) -> Iterator[None]:
    """A server, which may be suspended in the block, goes on when it ends."""
    try:
        yield
    finally:
        server.resume()


@contextmanager
def alarm(broker: RabbitMQServer) -> Iterator[None]:
    """A memory alarm: the broker takes no messages, and blocks who publishes."""
    node_control.set_memory_limit(broker, "{absolute, 1000000}")
    try:
        yield
    finally:
        node_control.set_memory_limit(broker, "0.4")


@contextmanager
def user(
    broker: RabbitMQServer, name: str, configure: str, write: str = ".*", read: str = ".*"
) -> Iterator[str]:
    """The URL of a user who has these permissions in the virtual host ``/``."""
    node_control.add_user(broker, name, configure, write, read, "secret")
    yield broker.url.replace("guest:guest@", f"{name}:secret@")
    node_control.delete_user(broker, name)


@contextmanager
def virtual_host(broker: RabbitMQServer, name: str) -> Iterator[str]:
    """The URL of an empty virtual host, which is deleted at the end."""
    node_control.add_virtual_host(broker, name)
    yield urlsplit(broker.url)._replace(path=f"/{name}").geturl()
    node_control.delete_virtual_host(broker, name)


class Relay:
    """Passes the bytes between clients and a broker on, until it drops them silently.

    Attributes:
        port: Where clients connect.
    """

    def __init__(self, broker_port: int) -> None:
        self._broker_port = broker_port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._passing: set[socket.socket] = set()
        Thread(target=self._accept, daemon=True).start()

    def drop(self) -> None:
        """Pass nothing more on for the present connections; neither side is told."""
        self._passing.clear()

    def close(self) -> None:
        """End all connections."""
        for each in (self._listening, *self._sockets):
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                broker = socket.create_connection(("127.0.0.1", self._broker_port))
                self._sockets += [client, broker]
                self._passing |= {client, broker}
                for ends in ((client, broker), (broker, client)):
                    Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                if source in self._passing:
                    target.sendall(data)
            if source in self._passing:
                target.shutdown(socket.SHUT_WR)
