"""The registry while Redis is away or refuses, on several servers, and during a fail-over."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.registry.connection import connect
from celery_rabbitdelay.registry.decision import Outcome, Verdict
from celery_rabbitdelay.registry.index import Filter
from celery_rabbitdelay.registry.registry import Registry
from celery_rabbitdelay.testing import RedisServer, wait_for
from celery_rabbitdelay.testing.servers import free_port
from tests.redis_servers import ConfiguredRedis, RedisCluster, SentinelSetup
from tests.registry.integration.registering import (
    KEEP_MS,
    MARGIN_MS,
    MINUTE_MS,
    TIMEOUT,
    now_ms,
    sent,
    tracked,
    verdict,
)

#: A word that no error may contain.
PASSWORD = "opensesame"

CALLS: dict[str, Callable[[Registry], object]] = {
    "decide": lambda registry: verdict(registry, sent()),
    "register": lambda registry: registry.register([tracked(), tracked("other", key="order")]),
    "cancel": lambda registry: registry.cancel(["task"]),
    "postpone": lambda registry: registry.postpone("task", now_ms() + MINUTE_MS),
    "open": lambda registry: registry.jobs.open("job", MINUTE_MS),
    "pending": lambda registry: list(registry.index.pending(Filter())),
    "complete_since": lambda registry: registry.index.complete_since(),
}


@contextmanager
def registry_in(url: str, timeout: float = TIMEOUT) -> Iterator[Registry]:
    """A registry whose connections are closed at the end."""
    options = {"master_name": SentinelSetup.master_name} if url.startswith("sentinel") else {}
    store = connect(url, {"socket_timeout": timeout, **options})
    yield Registry(store, "test", KEEP_MS, MARGIN_MS)
    store.close()


def unavailable(call: Callable[[], object]) -> str:
    """Return what the error says that a call must raise."""
    with pytest.raises(RegistryUnavailable) as raised:
        call()
    error: BaseException | None = raised.value
    said = ""
    while error:
        said += f"{error!r} {error}"
        error = error.__cause__ or error.__context__
    return said


def works(call: Callable[[], object]) -> bool:
    """Return whether a call succeeds."""
    try:
        call()
    except RegistryUnavailable:
        return False
    return True


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "sentinel"])
def test_each_call_says_that_redis_is_not_there(scheme: str) -> None:
    with registry_in(f"{scheme}://:{PASSWORD}@127.0.0.1:{free_port()}") as registry:
        for name, call in CALLS.items():
            assert PASSWORD not in unavailable(lambda: call(registry)), name  # noqa: B023


def test_a_wrong_user_or_password_is_refused_and_the_password_is_not_told() -> None:
    with ConfiguredRedis(password="the right one") as server:
        with registry_in(server.url) as registry:
            assert registry.cancel(["task"]) == [Outcome.NOTED]
        for wrong in (f":{PASSWORD}", f"stranger:{PASSWORD}"):
            with registry_in(server.url.replace(":the right one", wrong)) as registry:
                said = unavailable(lambda: registry.cancel(["task"]))
                assert not any(each in said for each in (PASSWORD, "the right one"))


def test_a_server_that_comes_back_is_used_again_and_has_forgotten() -> None:
    with RedisServer() as server, registry_in(server.url) as registry:
        registry.cancel(["task"])
        server.kill()
        unavailable(lambda: registry.cancel(["task"]))
        server.start()
        assert verdict(registry, sent()) is Verdict.RUN
        # The scripts are gone as well.
        assert registry.register([sent("other", key="order")]) == ["waiting"]


def test_a_cluster_is_used_again_when_its_server_comes_back() -> None:
    ids = [f"task-{number}" for number in range(100)]
    with RedisCluster() as cluster, registry_in(cluster.url) as registry:
        registry.cancel(ids)
        cluster.nodes[1].kill()
        unavailable(lambda: registry.cancel(ids))
        cluster.nodes[1].start()
        cluster.wait_until_whole()
        wait_for(lambda: works(lambda: registry.cancel(ids)), "a call of all servers")
        assert {verdict(registry, sent(each)) for each in ids} == {Verdict.CANCELLED}


def test_an_error_reply_ends_the_connection_since_the_server_may_be_a_replica_now() -> None:
    with ConfiguredRedis() as server, registry_in(server.url) as registry:

        def connection() -> object:
            return registry.store.commands(lambda pipe: pipe.client_id())

        before = connection()
        assert connection() == before
        registry.store.commands(lambda pipe: pipe.replicaof("127.0.0.1", free_port()))
        assert "READONLY" in unavailable(lambda: registry.cancel(["task"])).upper()
        assert connection() != before
