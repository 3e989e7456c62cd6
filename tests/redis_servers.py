"""Private Redis set-ups of several servers: a cluster of three masters, and Sentinel."""

import subprocess
from collections.abc import Sequence
from contextlib import ExitStack

from celery_rabbitdelay.testing import RedisServer, wait_for
from celery_rabbitdelay.testing.servers import free_port
from tests.set_up import SetUp

#: How many hash slots a cluster has.
SLOTS = 16384


class ConfiguredRedis(RedisServer):
    """A Redis server with further options.

    Args:
        options: Pairs of words, as on the command line of ``redis-server``.
        password: What clients must say first; empty if nothing.

    Attributes:
        options: These words; a change counts from the next start on.
    """

    def __init__(self, *options: str, password: str = "") -> None:
        super().__init__()
        self.options = options
        self._password = password

    @property
    def url(self) -> str:
        """``redis://`` URL of database 0, with the password."""
        return f"redis://:{self._password}@127.0.0.1:{self.port}/0"

    def _command(self) -> list[str]:
        password = ["--requirepass", self._password] if self._password else []
        return [*super()._command(), *password, *self.options]

    def _ready(self) -> bool:
        return self.ask("ping") == "PONG"

    def ask(self, *command: str) -> str:
        """Run ``redis-cli`` against this server; return what it printed."""
        password = {"REDISCLI_AUTH": self._password} if self._password else {}
        return subprocess.run(
            ["redis-cli", "-p", str(self.port), *command],
            env={**self._environment(), **password},
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()


class ClusterNode(ConfiguredRedis):
    """A node of Redis Cluster; its bus has a free port of its own."""

    def __init__(self) -> None:
        super().__init__(
            *("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"),
            *("--cluster-port", str(free_port()), "--cluster-node-timeout", "60000"),
        )


class RedisCluster(SetUp):
    """Three masters that share the hash slots.

    Attributes:
        nodes: The servers.
    """

    def __init__(self) -> None:
        self.nodes = [ClusterNode() for _ in range(3)]

    @property
    def url(self) -> str:
        """The URL that the registry takes."""
        return f"redis+cluster://127.0.0.1:{self.nodes[0].port}"

    def _set_up(self, stack: ExitStack) -> None:
        for node in self.nodes:
            stack.enter_context(node)
        addresses = [f"127.0.0.1:{node.port}" for node in self.nodes]
        self.nodes[0].ask("--cluster", "create", *addresses, "--cluster-yes")
        self.wait_until_whole()

    def wait_until_whole(self) -> None:
        """Wait until each node knows who has each slot."""
        wait_for(lambda: all(map(_is_whole, self.nodes)), "a cluster with all its slots")


class Sentinel(ConfiguredRedis):
    """A sentinel, which watches a master and replaces it.

    Args:
        master: The server that is the master at first.
        down_after_ms: Milliseconds of silence after which it takes a master for dead.
    """

    def __init__(self, master: RedisServer, down_after_ms: int) -> None:
        super().__init__()
        # Sentinel writes what it finds out into its own configuration.
        self._configuration = self.folder / "sentinel.conf"
        lines = (
            f"port {self.port}",
            "bind 127.0.0.1",
            f"sentinel monitor {SentinelSetup.master_name} 127.0.0.1 {master.port} 2",
            f"sentinel down-after-milliseconds {SentinelSetup.master_name} {down_after_ms}",
            f"sentinel failover-timeout {SentinelSetup.master_name} 5000",
        )
        self._configuration.write_text("\n".join(lines) + "\n")

    def _command(self) -> list[str]:
        return ["redis-server", str(self._configuration), "--sentinel"]


class SentinelSetup(SetUp):
    """A master, its replica, and three sentinels, of which two must agree.

    Args:
        down_after_ms: Milliseconds of silence after which a sentinel takes a master for dead.
        options: Further options of both servers.

    Attributes:
        master: The server that is the master at first.
        replica: The server that copies it.
        sentinels: The sentinels.
    """

    master_name = "rabbitdelay-test"

    def __init__(self, down_after_ms: int = 60_000, options: Sequence[str] = ()) -> None:
        self._down_after_ms = down_after_ms
        self.master = ConfiguredRedis("--repl-diskless-sync-delay", "0", *options)
        self.replica = ConfiguredRedis("--replicaof", f"127.0.0.1 {self.master.port}", *options)
        self.sentinels: list[Sentinel] = []

    @property
    def url(self) -> str:
        """The URL that the registry takes."""
        return ";".join(f"sentinel://127.0.0.1:{each.port}/0" for each in self.sentinels)

    def _set_up(self, stack: ExitStack) -> None:
        stack.enter_context(self.master)
        stack.enter_context(self.replica)
        self.wait_until_copied()
        for _ in range(3):
            sentinel = Sentinel(self.master, self._down_after_ms)
            self.sentinels.append(stack.enter_context(sentinel))
        wait_for(
            lambda: all(
                _says(each, "num-other-sentinels", "2") and _says(each, "num-slaves", "1")
                for each in self.sentinels
            ),
            "sentinels that know each other and the replica",
        )

    def wait_until_copied(self) -> None:
        """Wait until the replica has all that the master has."""
        wait_for(
            lambda: "master_link_status:up" in self.replica.ask("info", "replication"),
            "a replica with a link to its master",
        )
        written = _offset(self.master, "master_repl_offset")
        wait_for(
            lambda: _offset(self.replica, "slave_repl_offset") >= written, "a replica up to date"
        )


def _is_whole(node: ConfiguredRedis) -> bool:
    known = node.ask("cluster", "info").split()
    return "cluster_state:ok" in known and f"cluster_slots_ok:{SLOTS}" in known


def _says(sentinel: Sentinel, field: str, value: str) -> bool:
    words = sentinel.ask("sentinel", "master", SentinelSetup.master_name).split()
    return dict(zip(words[::2], words[1::2], strict=False)).get(field) == value


def _offset(server: ConfiguredRedis, field: str) -> int:
    lines = server.ask("info", "replication").split()

    words = (line.partition(":") for line in lines)
    return next((int(value) for name, _, value in words if name == field), 0)
