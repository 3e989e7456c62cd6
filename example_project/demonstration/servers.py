"""RabbitMQ and Redis for one run: servers that the environment names, or private ones."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from kombu import Exchange, Queue
from redis.exceptions import RedisError

from celery_rabbitdelay.kombu import Topology, delete
from celery_rabbitdelay.testing import RabbitMQServer, RedisServer, ServerNotStarted
from example_project.demonstration.run import BROKER_URL, REDIS_URL, Run

#: The number of Redis keys that are deleted in one step.
_KEYS_AT_ONCE: Final = 1000


@contextmanager
def running_servers(name: str, mail_gateway_url: str) -> Iterator[Run]:
    """Provide the servers of a run as long as the ``with`` block lasts.

    Private servers are stopped at the end, and their folders removed. On a server that
    ``RABBITDELAY_BROKER_URL`` or ``RABBITDELAY_REDIS_URL`` names, only the run's own names are
    deleted.

    Args:
        name: The run's name.
        mail_gateway_url: The URL of the run's mail gateway.

    Raises:
        ServerNotStarted: A server could not be started, or does not answer.
    """
    with ExitStack() as servers:
        broker_url = os.environ.get(BROKER_URL)
        redis_url = os.environ.get(REDIS_URL)
        run = Run(
            name,
            broker_url or servers.enter_context(RabbitMQServer()).url,
            redis_url or servers.enter_context(RedisServer()).url,
            mail_gateway_url,
        )
        _check_that_they_answer(run)
        if broker_url:
            servers.callback(_clear_broker, run)
        if redis_url:
            servers.callback(_clear_redis, run)
        yield run


def count_in_levels(run: Run) -> int:
    """Return the number of messages in the delay queues.

    They are counted queue by queue, so a message that meanwhile moves to the next level may be
    counted twice, or not at all.
    """
    with run.connect_broker() as connection, connection.channel() as channel:
        return sum(_count_messages(queue(channel)) for queue in Topology(run.prefix).digit_queues)


def _count_messages(queue: Queue) -> int:
    # Any: kombu's stubs lack the type of the answer.
    declared: Any = queue.queue_declare(passive=True)
    return int(declared.message_count)


def _check_that_they_answer(run: Run) -> None:
    try:
        with run.connect_broker() as connection:
            connection.connect()
    except OSError as error:
        raise ServerNotStarted(f"RabbitMQ does not answer (see {BROKER_URL}): {error}") from error
    try:
        with run.connect_redis() as redis:
            redis.ping()
    except RedisError as error:
        raise ServerNotStarted(f"Redis does not answer (see {REDIS_URL}): {error}") from error


def _clear_broker(run: Run) -> None:
    with run.connect_broker() as connection:
        delete(connection, Topology(run.prefix), force=True)
        with connection.channel() as channel:
            # Celery declares an exchange of the queue's name.
            for entity in (Queue(run.queue), Exchange(run.queue)):
                entity(channel).delete()


def _clear_redis(run: Run) -> None:
    with run.connect_redis() as redis:
        keys = list(redis.scan_iter(match=f"{run.prefix}:*", count=_KEYS_AT_ONCE))
        for first in range(0, len(keys), _KEYS_AT_ONCE):
            redis.delete(*keys[first : first + _KEYS_AT_ONCE])
