"""What tests publish with a publisher, one message or many, and how long that may take."""

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import amqp
from kombu import Connection, Queue

from celery_rabbitdelay.publishing.message import Content, Declaration, Publication
from celery_rabbitdelay.publishing.publish_loop import PublishPolicy
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.testing import wait_for
from tests.kernel.integration.arrivals import take

#: Seconds of patience where the broker is made to be silent.
TIMEOUT = 2.0

#: What a slow machine may add to a time limit; together they stay below the default limit of 30.
GRACE = 25.0


def publish(
    publisher: Publisher,
    queue_name: str,
    body: str = "x",
    exchange: str = "",
    *,
    declare: Declaration | None = None,
    redeclare: Declaration | None = None,
    **policy: Any,
) -> None:
    """Publish one message; without an exchange, straight to the queue."""
    message = amqp.Message(body, content_type="text/plain", content_encoding="utf-8")
    sent = Publication.of(message, lambda: (exchange, queue_name))
    publisher.publish(sent, PublishPolicy(**policy), declare=declare, redeclare=redeclare)


def posting(
    key: str, body: str | bytes = "x", exchange: str = "", **properties: Any
) -> Publication:
    """A message that is to be published with a key, and that is found again by its body."""
    data = body if isinstance(body, bytes) else body.encode()
    message = amqp.Message(data, content_encoding="binary", delivery_mode=2, **properties)
    return Publication(Content.of(message), lambda: (exchange, key), body)


def in_child(run: Callable[[], object]) -> Callable[[], int]:
    """Run a function in a child process; return what waits for its status: 1 if it raised."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run()
            status = 0
        finally:
            os._exit(status)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def work(seconds: float) -> None:
    """What the caller does meanwhile."""
    until = time.monotonic() + seconds
    wait_for(lambda: time.monotonic() > until, "the caller's own work")


def bodies(connection: Connection, queue: Queue, number: int) -> Counter[str]:
    """The bodies of so many messages, each with how often it came."""
    return Counter(bytes(arrival.body).decode() for arrival in take(connection, [queue], number))
