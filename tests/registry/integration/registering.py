"""What tests of the registry share: kinds of Redis, messages that are sent, and their arrival."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from redis import Redis
from redis import RedisCluster as ClusterClient

from celery_rabbitdelay.registry.connection import connect
from celery_rabbitdelay.registry.decision import Arrival, Registration, Verdict, new_copy
from celery_rabbitdelay.registry.registry import Registry
from celery_rabbitdelay.registry.store import Store
from celery_rabbitdelay.testing import RedisServer
from tests.redis_servers import RedisCluster

#: Milliseconds that a decision outlives its task, and that the name of a job does.
KEEP_MS: Final = 86_400_000
MARGIN_MS: Final = 3_600_000

#: Seconds that Redis may take to answer: these tests measure no speed.
TIMEOUT: Final = 20.0

MINUTE_MS: Final = 60_000

#: How the tests' own clients read keys: any text may be in them.
TEXT: Final[Any] = {"decode_responses": True, "encoding_errors": "surrogatepass"}


class RedisSetup(NamedTuple):
    """A Redis of any kind.

    Attributes:
        url: The URL that the registry takes.
        options: The options beside it.
        client: A client of the test's own.
    """

    url: str
    options: Mapping[str, Any]
    client: Any

    def connect(self) -> Store:
        """Return a store with connections of its own."""
        return connect(self.url, {"socket_timeout": TIMEOUT, **self.options})


@contextmanager
def single() -> Iterator[RedisSetup]:
    """One server."""
    with RedisServer() as server, Redis.from_url(server.url, **TEXT) as client:
        yield RedisSetup(server.url, {}, client)


@contextmanager
def cluster() -> Iterator[RedisSetup]:
    """Three masters."""
    with RedisCluster() as servers:
        client: Any = ClusterClient(host="127.0.0.1", port=servers.nodes[0].port, **TEXT)
        with client:
            yield RedisSetup(servers.url, {}, client)


KINDS: Final = {"single": single, "cluster": cluster}


def now_ms() -> int:
    """Return milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def sent(task_id: str = "task", after_ms: int = MINUTE_MS, **more: Any) -> Registration:
    """Return a message that was sent, with a name of its own, and is due after so long."""
    return Registration(task_id, new_copy(), now_ms() + after_ms, **more)


def tracked(task_id: str = "task", after_ms: int = MINUTE_MS, **more: Any) -> Registration:
    """Return the same, of a task that is tracked."""
    return sent(task_id, after_ms, **{"name": "shop.remind", "message": "to send", **more})


def keyed(registry: Registry, task_id: str, key: str, **more: Any) -> Registration:
    """Return a tracked task that is sent under a key, and is newer than all before it."""
    (ticket,) = registry.ask([(task_id, key)])
    return tracked(task_id, key=key, ticket=ticket, **more)


def arrival(message: Registration, **more: Any) -> Arrival:
    """Return the arrival of a message."""
    return Arrival(
        message.task_id,
        message.due_ms,
        message.attempt,
        message.copy,
        message.ticket,
        message.key,
        message.job,
    )._replace(**more)


def verdict(registry: Registry, arrived: Registration | Arrival) -> Verdict:
    """Return what becomes of one arrival."""
    if isinstance(arrived, Registration):
        arrived = arrival(arrived)
    (decision,) = registry.decide([arrived])
    assert decision.verdict is not Verdict.UNREADABLE, decision.why
    return decision.verdict


def keys(setup: RedisSetup, prefix: str) -> list[str]:
    """Return all keys under a prefix, of all servers."""
    return list(setup.client.scan_iter(match=f"{prefix}:*", count=1000))


def expiry_ms(setup: RedisSetup, key: str) -> int:
    """Return when a key expires, in milliseconds since 1970; negative if never."""
    found: int = setup.client.pexpiretime(key)
    return found


def assert_all_expire(setup: RedisSetup, prefix: str) -> None:
    """Raise unless each key under a prefix expires; but since when the index is complete stays."""
    kept = {key for key in keys(setup, prefix) if setup.client.pttl(key) == -1}
    assert kept <= {f"{prefix}:{{0}}:complete-since"}
