"""A broker in trouble, and a virtual host of one test's own, as context managers."""

from collections.abc import Iterator
from contextlib import contextmanager
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
