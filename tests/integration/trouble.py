"""A broker in trouble, and a virtual host of one test's own, as context managers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from celery_rabbitdelay.testing import RabbitMQServer


@contextmanager
def suspended(broker: RabbitMQServer) -> Iterator[None]:
    """The broker is silent until the block ends."""
    broker.suspend()
    with resumed(broker):
        yield


@contextmanager
def resumed(broker: RabbitMQServer) -> Iterator[None]:
    """The broker, which may be suspended in the block, goes on when it ends."""
    try:
        yield
    finally:
        broker.resume()


@contextmanager
def alarm(broker: RabbitMQServer) -> Iterator[None]:
    """A memory alarm: the broker takes no messages, and blocks who publishes."""
    broker.ctl("set_vm_memory_high_watermark", "absolute", "1MB")
    try:
        yield
    finally:
        broker.ctl("set_vm_memory_high_watermark", "0.4")


@contextmanager
def user(broker: RabbitMQServer, name: str, configure: str) -> Iterator[str]:
    """The URL of a user who may configure what matches a pattern, and use everything."""
    broker.ctl("add_user", name, "secret")
    broker.ctl("set_permissions", name, configure, ".*", ".*")
    yield broker.url.replace("guest:guest@", f"{name}:secret@")
    broker.ctl("delete_user", name)


@contextmanager
def virtual_host(broker: RabbitMQServer, name: str) -> Iterator[str]:
    """The URL of an empty virtual host, which is deleted at the end."""
    broker.ctl("add_vhost", name)
    broker.ctl("set_permissions", "-p", name, "guest", ".*", ".*", ".*")
    yield f"{broker.url.removesuffix('/')}{name}"
    broker.ctl("delete_vhost", name)
