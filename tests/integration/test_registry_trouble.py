"""The registry while Redis is away or refuses, on several servers, and during a fail-over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.registry.connection import Store, connect
from celery_rabbitdelay.registry.decision import Outcome, Verdict
from celery_rabbitdelay.registry.index import Filter
from celery_rabbitdelay.registry.jobs import JobState
from celery_rabbitdelay.registry.registry import Registry
from celery_rabbitdelay.testing import RedisServer, wait_for
from celery_rabbitdelay.testing.servers import free_port
from tests.integration.registering import (
    KEEP_MS,
    MARGIN_MS,
    MINUTE_MS,
    TIMEOUT,
    keyed,
    now_ms,
    sent,
    tracked,
    verdict,
)
from tests.redis_servers import ConfiguredRedis, RedisCluster, SentinelSetup

#: Seconds until a frozen server is given up.
SHORT = 0.2

#: Seconds that Redis may take to answer where it waits for copies.
COPYING = {"socket_timeout": 3.0}

#: A word that no error may contain.
PASSWORD = "opensesame"

CALLS: dict[str, Callable[[Registry], object]] = {
    "decide": lambda registry: verdict(registry, sent()),
    "register": lambda registry: registry.register([tracked(), tracked("other", key="order")]),
    "cancel": lambda registry: registry.cancel(["task"]),
    "waiting_under": lambda registry: registry.waiting_under("order"),
    "postpone": lambda registry: registry.postpone("task", now_ms() + MINUTE_MS),
    "ask": lambda registry: registry.ask([("task", "order")]),
    "open": lambda registry: registry.jobs.open("job", MINUTE_MS),
    "join": lambda registry: registry.jobs.join("job", now_ms()),
    "end": lambda registry: registry.jobs.end("job", JobState.ABORTED),
    "state": lambda registry: registry.jobs.state("job"),
    "pending": lambda registry: list(registry.index.pending(Filter())),
    "count": lambda registry: registry.index.count(Filter()),
    "complete_since": lambda registry: registry.index.complete_since(),
}


@contextmanager
def registry_in(
    url: str, timeout: float = TIMEOUT, master_name: str = SentinelSetup.master_name
) -> Iterator[Registry]:
    """A registry whose connections are closed at the end."""
    options = {"master_name": master_name} if url.startswith("sentinel") else {}
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


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    """A cluster of this module's own."""
    with RedisCluster() as servers:
        yield servers


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


def test_a_cluster_is_used_again_when_its_server_comes_back(cluster: RedisCluster) -> None:
    ids = [f"task-{number}" for number in range(100)]
    with registry_in(cluster.url) as registry:
        registry.cancel(ids)
        cluster.nodes[1].kill()
        unavailable(lambda: registry.cancel(ids))
        cluster.nodes[1].start()
        cluster.wait_until_whole()
        wait_for(lambda: works(lambda: registry.cancel(ids)), "a call of all servers")
        assert {verdict(registry, sent(each)) for each in ids} == {Verdict.CANCELLED}


def test_a_slot_that_moves_to_another_server_takes_its_tasks_along(cluster: RedisCluster) -> None:
    task_id, copies = "moved", []
    with registry_in(cluster.url) as registry:
        copies.append(tracked(task_id))
        registry.register(copies)
        key = registry.names.of("task", task_id)
        slot = cluster.nodes[0].ask("cluster", "keyslot", key)
        names = [node.ask("cluster", "myid") for node in cluster.nodes]
        slots = [node.ask("--scan", "--pattern", key) for node in cluster.nodes]
        source = next(at for at, found in enumerate(slots) if found)
        target = (source + 1) % 3
        cluster.nodes[target].ask("cluster", "setslot", slot, "importing", names[source])
        cluster.nodes[source].ask("cluster", "setslot", slot, "migrating", names[target])
        in_slot = cluster.nodes[source].ask("cluster", "getkeysinslot", slot, "1000").split("\n")
        address = ("127.0.0.1", str(cluster.nodes[target].port), "", "0", "5000", "KEYS")
        cluster.nodes[source].ask("migrate", *address, *in_slot)
        for node in (cluster.nodes[target], cluster.nodes[source], *cluster.nodes):
            node.ask("cluster", "setslot", slot, "node", names[target])
        assert cluster.nodes[target].ask("--scan", "--pattern", key) == key
        wait_for(lambda: works(lambda: registry.cancel(["any"])), "a call of the cluster")
        assert registry.cancel([task_id]) == [Outcome.DONE]


def test_a_fail_over_behind_sentinels_keeps_what_the_replica_has() -> None:
    with ExitStack() as stack:
        servers = stack.enter_context(SentinelSetup(down_after_ms=5000))
        registry = stack.enter_context(registry_in(servers.url))
        other: Store = connect(
            servers.url, {"socket_timeout": TIMEOUT, "master_name": servers.master_name}
        )
        stack.callback(other.close)
        cancelled, waits = tracked("cancelled"), keyed(registry, "waits", "order")
        registry.register([cancelled, waits])
        registry.cancel(["cancelled"])
        servers.wait_until_copied()
        servers.master.kill()
        unavailable(lambda: registry.cancel(["another"]))
        wait_for(lambda: works(lambda: registry.cancel(["another"])), "a new master")
        assert verdict(registry, cancelled) is Verdict.CANCELLED
        assert registry.waiting_under("order") == ["waits"]
        assert registry.cancel(["waits"]) == [Outcome.DONE]
        # A process that connects only now, and runs several scripts at once.
        late = Registry(other, "test", KEEP_MS, MARGIN_MS)
        assert late.register([keyed(late, "new", "order")]) == ["waiting"]


def test_a_decision_counts_once_it_has_its_copies() -> None:
    with SentinelSetup() as servers:
        options = {"master_name": servers.master_name}
        plain = connect(servers.url, {**options, "socket_timeout": TIMEOUT})
        safe = connect(servers.url, {**options, **COPYING}, 1)
        registry = Registry(safe, "test", KEEP_MS, MARGIN_MS)
        assert registry.cancel(["copied"]) == [Outcome.NOTED]
        registry.jobs.open("job", MINUTE_MS)
        servers.replica.suspend()
        for decide in (
            lambda: registry.cancel(["not copied"]),
            lambda: registry.jobs.end("job", JobState.COMMITTED),
        ):
            with pytest.raises(RegistryUnavailable, match="0 of 1 copies") as raised:
                decide()
            assert raised.value.may_have_arrived
        servers.replica.resume()
        # It has taken effect all the same.
        other = Registry(plain, "test", KEEP_MS, MARGIN_MS)
        assert verdict(other, sent("not copied")) is Verdict.CANCELLED
        assert other.jobs.state("job") is JobState.COMMITTED
        safe.close()
        plain.close()


@pytest.mark.parametrize("writes", ["yes", "no"])
def test_the_append_only_file_is_a_copy_where_redis_can_say_so(writes: str) -> None:
    with ConfiguredRedis("--appendonly", writes, "--appendfsync", "always") as server:
        knows = server.ask("command", "info", "waitaof") != ""
        registry = Registry(connect(server.url, COPYING, 1), "test", KEEP_MS, MARGIN_MS)
        if knows and writes == "yes":
            assert registry.cancel(["task"]) == [Outcome.NOTED]
        else:
            assert "0 of 1 copies" in unavailable(lambda: registry.cancel(["task"]))
        registry.store.close()


def test_a_decision_in_a_cluster_waits_for_copies_too(cluster: RedisCluster) -> None:
    registry = Registry(connect(cluster.url, COPYING, 1), "test", KEEP_MS, MARGIN_MS)
    assert "0 of 1 copies" in unavailable(lambda: registry.cancel(["a", "b", "c"]))
    registry.store.close()
