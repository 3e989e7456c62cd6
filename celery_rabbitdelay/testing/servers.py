"""Private RabbitMQ and Redis servers, started as processes on free ports and always stopped again.

Each server lives in a temporary folder of its own and never touches an installed service: neither
its port, its data, its cookie nor its Erlang port mapper. Use it as a context manager::

    with RabbitMQServer() as broker, RedisServer() as redis:
        app.conf.update(broker_url=broker.url, result_backend=redis.url)

A server can also be killed, started again on the same port and data, suspended and resumed, which
is how a test shows that nothing is lost. No docker is needed.

On Linux, a server ends with the thread that started it, however that ends: start one from a thread
that lives as long as it is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, ClassVar, Final, Self

__all__ = ["RabbitMQServer", "RedisServer", "Server", "ServerNotStarted", "wait_for"]

#: Seconds that a server may take to start. A RabbitMQ node takes 5 to 15 on a small machine.
START_TIMEOUT: Final = 90.0

#: Seconds that a server may take to stop by itself before it is killed.
STOP_TIMEOUT: Final = 20.0

_PR_SET_PDEATHSIG: Final = 1


class ServerNotStarted(RuntimeError):
    """The server's program is missing, ended early or did not answer in time."""


def wait_for(
    condition: Callable[[], object], what: str, timeout: float = 30.0, interval: float = 0.02
) -> None:
    """Wait until ``condition()`` is true.

    Args:
        condition: Asked again and again; an exception that it raises goes to the caller.
        what: What is waited for, for the error.
        timeout: Seconds until the wait is given up.
        interval: Seconds between two questions.

    Raises:
        TimeoutError: The condition was not true within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout:g} s")
        time.sleep(interval)


def free_port() -> int:
    """Return a TCP port of the loopback interface that nothing listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Server:
    """A server process of our own: its folder, its port, its log.

    Attributes:
        folder: The temporary folder that holds all the server's files.
        port: The TCP port that the server listens on; it stays the same over restarts.
    """

    #: The Debian package that brings the program.
    package: ClassVar[str]

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rabbitdelay-"))
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The URL that Celery and kombu take."""
        raise NotImplementedError

    @property
    def pid(self) -> int:
        """The server's process id."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """Everything that the server has printed so far, over all its starts."""
        path = self._log_path
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def _log_path(self) -> Path:
        return self.folder / "server.log"

    def start(self) -> None:
        """Start the server and wait until it answers; data of an earlier run is kept.

        Raises:
            ServerNotStarted: The program is missing, ended, or did not answer in time.
        """
        assert not self.running, "the server runs already"
        self.folder.mkdir(exist_ok=True)
        command = self._command()
        if shutil.which(command[0]) is None:
            raise ServerNotStarted(
                f"{command[0]} is not installed: on Debian and Ubuntu, "
                f"apt-get install {self.package}"
            )
        with self._log_path.open("ab") as log:
            self._process = self._spawn(command, self._environment(), log)
        try:
            wait_for(self._answers, f"start of {self.package}", START_TIMEOUT, interval=0.1)
        except TimeoutError as timeout:
            raise ServerNotStarted(f"{timeout}\n{self.log[-2000:]}") from timeout

    def _answers(self) -> bool:
        if not self.running:
            raise ServerNotStarted(f"{self.package} ended at once:\n{self.log[-2000:]}")
        return self._ready()

    def stop(self) -> None:
        """Stop the server, by force if need be, and remove its folder."""
        self._end(signal.SIGTERM)
        shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self) -> None:
        """Kill the server without warning (SIGKILL); its data stays for the next :meth:`start`."""
        self._end(signal.SIGKILL)

    def suspend(self) -> None:
        """Freeze the server (SIGSTOP): its sockets stay open, but nothing answers any more."""
        os.killpg(self.pid, signal.SIGSTOP)
        if sys.platform == "linux":
            # The signal only asks: on a busy machine, a broker may confirm a message or two more.
            state = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
            wait_for(lambda: os.waitid(os.P_PID, self.pid, state), f"{self.package}, frozen")

    def resume(self) -> None:
        """Let a suspended server go on (SIGCONT)."""
        os.killpg(self.pid, signal.SIGCONT)

    def _end(self, signum: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGCONT)
                os.killpg(process.pid, signum)
            try:
                process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _spawn(
        self, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        # A session of its own: a Ctrl-C at the terminal reaches the parent alone, which then stops
        # the server in order, and a signal to the group reaches the server's helpers too.
        return subprocess.Popen(
            command,
            env=dict(environment),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
            "LANG": "C.UTF-8",
            # What a killed process leaves behind goes with the folder.
            "TMPDIR": str(self.folder),
        }

    def _ready(self) -> bool:
        raise NotImplementedError


class RedisServer(Server):
    """A Redis server that keeps nothing on disk."""

    package = "redis-server"

    @property
    def url(self) -> str:
        """``redis://`` URL of database 0."""
        return f"redis://127.0.0.1:{self.port}/0"

    def _command(self) -> list[str]:
        return [
            *("redis-server", "--port", str(self.port), "--bind", "127.0.0.1"),
            *("--dir", str(self.folder), "--save", "", "--appendonly", "no"),
        ]

    def _ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as client:
                client.sendall(b"PING\r\n")
                return client.recv(16).startswith(b"+PONG")
        except OSError:
            return False


class RabbitMQServer(Server):
    """A RabbitMQ node with its own Erlang port mapper, cookie and data.

    Args:
        root: A folder with a whole Debian system (made by debootstrap) whose RabbitMQ is to be run
            instead of the machine's own; the node is then started inside it with ``chroot``,
            which only root may do.
        settings: Lines for the node's ``rabbitmq.conf``.
        cluster_with: A node that runs already, whose cluster this one joins at its first start. It
            shares that node's port mapper and cookie: stop it before that one.
        management: Whether the node serves the HTTP API and the pages of ``rabbitmq_management``,
            at :attr:`management_url`.
    """

    package = "rabbitmq-server"

    #: Debian's start script; the one in /usr/sbin insists on running as the user rabbitmq.
    program: ClassVar[str] = "/usr/lib/rabbitmq/bin/rabbitmq-server"

    def __init__(
        self,
        root: Path | None = None,
        settings: Sequence[str] = (),
        cluster_with: RabbitMQServer | None = None,
        management: bool = False,
    ) -> None:
        super().__init__()
        self.root = root
        self.settings = settings
        self.cluster_with = cluster_with
        self.management = management
        self._management_port = free_port()
        self._mapper_port: int = cluster_with._mapper_port if cluster_with else free_port()
        self._distribution_port = free_port()
        self._mapper: subprocess.Popen[bytes] | None = None
        if root is not None:
            shutil.rmtree(self.folder)
            self.folder = Path(tempfile.mkdtemp(prefix="rabbitdelay-", dir=root / "tmp"))

    @property
    def url(self) -> str:
        """``amqp://`` URL of the virtual host ``/``."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    @property
    def management_url(self) -> str:
        """URL of the management HTTP API, with user and password."""
        return f"http://guest:guest@127.0.0.1:{self._management_port}"

    @property
    def node(self) -> str:
        """The name by which the nodes of a cluster know this one."""
        return f"rabbitdelay{self.port}@localhost"

    def start(self) -> None:
        """Start the port mapper, then the node, and wait until it takes AMQP connections."""
        self.folder.mkdir(exist_ok=True)
        self._write_configuration()
        if self.cluster_with is None:
            self._start_mapper()
        super().start()

    def stop(self) -> None:
        """Stop the node, then its port mapper, and remove the folder."""
        super().stop()
        if self._mapper is not None:
            self._mapper.kill()
            self._mapper.wait()
            self._mapper = None

    def _start_mapper(self) -> None:
        # Without one of its own, the node would start a port mapper that outlives it.
        if self._mapper is not None and self._mapper.poll() is None:
            return
        command = self._inside(["epmd", "-port", str(self._mapper_port), "-address", "127.0.0.1"])
        if shutil.which(command[0]) is None:
            raise ServerNotStarted(
                "epmd is not installed: on Debian and Ubuntu, apt-get install rabbitmq-server"
            )
        with self._log_path.open("ab") as log:
            self._mapper = self._spawn(command, self._environment(), log)
        try:
            wait_for(self._mapper_listens, "start of the Erlang port mapper", START_TIMEOUT)
        except TimeoutError as timeout:
            raise ServerNotStarted(f"{timeout}\n{self.log[-2000:]}") from timeout

    def _mapper_listens(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._mapper_port), timeout=1.0):
                return True
        except OSError:
            return False

    def _write_configuration(self) -> None:
        lines = [
            f"listeners.tcp.1 = 127.0.0.1:{self.port}",
            "log.console = true",
            "log.console.level = info",
            "loopback_users = none",
            "disk_free_limit.absolute = 50MB",
            *self.settings,
        ]
        if self.management:
            lines += [
                "management.tcp.ip = 127.0.0.1",
                f"management.tcp.port = {self._management_port}",
            ]
        if self.cluster_with is not None:
            lines += [
                "cluster_formation.peer_discovery_backend = classic_config",
                f"cluster_formation.classic_config.nodes.1 = {self.cluster_with.node}",
            ]
            cookie = self.folder / ".erlang.cookie"
            if not cookie.exists():
                shutil.copy(self.cluster_with.folder / cookie.name, cookie)
        (self.folder / "rabbitmq.conf").write_text("\n".join(lines) + "\n")
        plugins = "rabbitmq_management" if self.management else ""
        (self.folder / "enabled_plugins").write_text(f"[{plugins}].\n")

    def _command(self) -> list[str]:
        return self._inside([self.program])

    def _inside(self, command: list[str]) -> list[str]:
        """Wrap a command so that it runs inside ``root``, in a mount namespace of its own."""
        if self.root is None:
            return command
        script = (
            'root=$1; shift; mount -t proc proc "$root/proc" && mount --rbind /dev "$root/dev"'
            ' && exec chroot "$root" "$@"'
        )
        return ["unshare", "--mount", "sh", "-ec", script, "sh", str(self.root), *command]

    @property
    def _home(self) -> str:
        """The folder as the node sees it."""
        if self.root is None:
            return str(self.folder)
        return "/" + str(self.folder.relative_to(self.root))

    def _environment(self) -> dict[str, str]:
        home = self._home
        return {
            **super()._environment(),
            "HOME": home,
            "TMPDIR": home,
            "ERL_EPMD_PORT": str(self._mapper_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_MNESIA_BASE": f"{home}/data",
            "RABBITMQ_LOG_BASE": f"{home}/log",
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_PID_FILE": f"{home}/pid",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{home}/enabled_plugins",
            "RABBITMQ_CONFIG_FILE": f"{home}/rabbitmq.conf",
            # The start script then becomes the node instead of waiting for it, so that the node
            # itself is what ends with its parent.
            "RUNNING_UNDER_SYSTEMD": "true",
            # Idle schedulers that spin would take processor time from the tests.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+sbwt none +sbwtdcpu none +sbwtdio none",
        }

    def _ready(self) -> bool:
        # The node answers a wrong protocol header with its own and closes: it takes connections.
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as client:
                client.sendall(b"AMQP\x00\x00\x09\x01")
                return client.recv(1) != b""
        except OSError:
            return False

    def ctl(self, *arguments: str) -> str:
        """Run ``rabbitmqctl`` against this node and return what it printed.

        Raises:
            subprocess.CalledProcessError: The command failed.
        """
        command = self._inside(["/usr/lib/rabbitmq/bin/rabbitmqctl", "--silent", *arguments])
        return subprocess.run(
            command, env=self._environment(), capture_output=True, text=True, check=True
        ).stdout
