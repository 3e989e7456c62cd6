"""Private Redis and RabbitMQ servers for tests, which use free ports and are always stopped.

A server has its own temporary folder, and never touches the port, data, cookie or Erlang port
mapper of an installed service. Use it as a context manager::

    with RabbitMQServer() as broker, RedisServer() as redis:
        app.conf.update(broker_url=broker.url, result_backend=redis.url)

A test can kill a server, start it again on the same port and data, suspend it and resume it, to
show that nothing is lost. No docker is needed.

On Linux, a server always ends with the thread that started it: use a thread that lives as long as
the server is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, Self

#: Seconds until a wait times out: enough for a busy machine.
PATIENCE: Final = 300.0

#: Seconds that a server may take to start. A RabbitMQ node takes 5 to 15 seconds on a small
#: machine.
START_TIMEOUT: Final = 180.0

#: Seconds that a server may take to stop by itself before it is killed.
STOP_TIMEOUT: Final = 20.0

_PR_SET_PDEATHSIG: Final = 1


class ServerNotStarted(RuntimeError):
    """The server's program is missing, ended early or did not answer in time."""


def wait_for(
    condition: Callable[[], object], what: str, timeout: float = PATIENCE, interval: float = 0.02
) -> None:
    """Wait until ``condition()`` is true.

    Args:
        condition: Called repeatedly; its exceptions go to the caller.
        what: The name of the condition, for the error.
        timeout: Seconds until the wait times out.
        interval: Seconds between two calls; more if a call takes much processor time.

    Raises:
        TimeoutError: The condition was not true within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        spent = time.thread_time()
        if condition():
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"timed out after {timeout:g} s, waiting for {what}")
        # An expensive condition would take processor time from the server that it checks.
        time.sleep(max(interval, 4 * (time.thread_time() - spent)))


#: The ports of private servers: below the ports of outgoing connections (Linux:
#: ``net.ipv4.ip_local_port_range``), and above the ports of well-known services.
PORTS: Final = range(10_000, 32_768)

#: Sockets that reserve the last free ports, so that this function gives them to no other process.
#: These sockets do not listen, and SO_REUSEADDR lets the server bind the same port; see socket(7).
_GIVEN: Final[deque[socket.socket]] = deque()
_MOST_GIVEN: Final = 64


def free_port() -> int:
    """Return a free TCP port of the loopback interface.

    The port is outside the range for outgoing connections: such a connection could take the port of
    a server that a test has killed.
    """
    while True:
        port = random.choice(PORTS)  # noqa: S311 - it is no secret
        given = socket.socket()
        try:
            given.bind(("127.0.0.1", port))
        except OSError:
            given.close()
            continue
        given.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _GIVEN.append(given)
        while len(_GIVEN) > _MOST_GIVEN:
            _GIVEN.popleft().close()
        return port


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Process:
    """A child process with a log.

    Args:
        folder: The folder of the process's log.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The id of the process."""
        assert self._process is not None, "the process was never started"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """The output of all runs of the process."""
        path = self._log_path
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def _log_path(self) -> Path:
        return self.folder / "process.log"

    def _begin(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        with self._log_path.open("ab") as log:
            # The process gets its own session: a Ctrl-C at the terminal reaches only the parent,
            # which then stops the process in order, and a signal to the group also reaches the
            # process's helpers.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
                **options,
            )

    def _end(self, signum: signal.Signals, send: Callable[[int, int], None] = os.killpg) -> None:
        """End the process by a signal to its group, or by ``send``; kill it if that takes long."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
            send(process.pid, signum)
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Server(Process):
    """A server process with its folder, port and log.

    Attributes:
        folder: The temporary folder of the server's files.
        port: The TCP port that the server listens on; it survives restarts.
    """

    #: The Debian package of the program.
    package: ClassVar[str]

    #: The address that the server listens on.
    _host = "127.0.0.1"

    def __init__(self) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="rabbitdelay-")))
        self.port: int = free_port()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The URL that Celery and kombu take."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the server and wait until it answers; keep the data of an earlier run.

        Raises:
            ServerNotStarted: The program is missing, ended, or did not answer in time.
        """
        assert not self.running, "the server runs already"
        self.folder.mkdir(exist_ok=True)
        self._process = self._spawn(self._command())
        self._wait_for_start(self._answers, self.package)

    def _wait_for_start(self, answers: Callable[[], object], what: str) -> None:
        try:
            wait_for(answers, f"the start of {what}", START_TIMEOUT, interval=0.1)
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
        """Kill the server abruptly (SIGKILL); its data stays for the next :meth:`start`."""
        self._end(signal.SIGKILL)

    def suspend(self) -> None:
        """Freeze the server (SIGSTOP): its sockets stay open, but it does not answer."""
        os.killpg(self.pid, signal.SIGSTOP)
        if sys.platform == "linux":
            # The signal takes effect a little later: a broker may still confirm a message or two.
            state = Path(f"/proc/{self.pid}/stat")
            wait_for(lambda: ") T " in state.read_text(), f"{self.package} to freeze")

    def resume(self) -> None:
        """Let a suspended server continue (SIGCONT)."""
        os.killpg(self.pid, signal.SIGCONT)

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        if shutil.which(command[0]) is None:
            raise ServerNotStarted(
                f"{command[0]} is not installed: on Debian and Ubuntu, "
                f"apt-get install {self.package}"
            )
        return self._begin(command, env=self._environment(), cwd=self.folder)

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
            "LANG": "C.UTF-8",
            # Temporary files of a killed process are deleted with the folder.
            "TMPDIR": str(self.folder),
        }

    def _ready(self) -> bool:
        return self._is_listening(self.port)

    def _is_listening(self, port: int) -> bool:
        address = (self._host, port)
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=1.0):
            return True
        return False


class Named(NamedTuple):
    """An existing server.

    Attributes:
        url: The URL of the server.
    """

    url: str


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


class RabbitMQServer(Server):
    """A RabbitMQ node with its own Erlang port mapper, cookie and data.

    Args:
        settings: Lines for the node's ``rabbitmq.conf``.
        management: Whether the node serves the HTTP API and the pages of ``rabbitmq_management``,
            at :attr:`management_url`.
    """

    package = "rabbitmq-server"
    #: Debian's start script; the script in /usr/sbin insists on running as the user rabbitmq.
    program: ClassVar[str] = "/usr/lib/rabbitmq/bin/rabbitmq-server"

    def __init__(self, settings: Sequence[str] = (), management: bool = False) -> None:
        super().__init__()
        self.settings = settings
        self.plugins: list[str] = ["rabbitmq_management"] if management else []
        self._management_port = free_port()
        self._mapper_port = free_port()
        self._distribution_port = free_port()
        self._mapper: subprocess.Popen[bytes] | None = None

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
        """The name by which other nodes of a cluster know this node."""
        return f"rabbitdelay{self.port}@localhost"

    def start(self) -> None:
        """Start the port mapper, then the node, and wait until it takes AMQP connections."""
        self.folder.mkdir(exist_ok=True)
        self._write_configuration()
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
        # Without its own port mapper, the node would start a port mapper that outlives it.
        if self._mapper is not None and self._mapper.poll() is None:
            return
        command = ["epmd", "-port", str(self._mapper_port), "-address", "127.0.0.1"]
        self._mapper = self._spawn(command)
        self._wait_for_start(
            lambda: self._is_listening(self._mapper_port), "the Erlang port mapper"
        )

    def _write_configuration(self) -> None:
        text = "\n".join(self._configuration())
        (self.folder / "rabbitmq.conf").write_text(f"{text}\n")
        (self.folder / "enabled_plugins").write_text(f"[{','.join(self.plugins)}].\n")

    def _configuration(self) -> list[str]:
        """Return the lines of ``rabbitmq.conf``."""
        lines = [
            f"listeners.tcp.1 = 127.0.0.1:{self.port}",
            "log.console = true",
            "log.console.level = info",
            "loopback_users = none",
            "disk_free_limit.absolute = 50MB",
            *self.settings,
        ]
        if "rabbitmq_management" in self.plugins:
            lines += [
                "management.tcp.ip = 127.0.0.1",
                f"management.tcp.port = {self._management_port}",
            ]
        return lines

    def _command(self) -> list[str]:
        return [self.program]

    def _environment(self) -> dict[str, str]:
        home = str(self.folder)
        return {
            **super()._environment(),
            "HOME": home,
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
            # itself ends with its parent.
            "RUNNING_UNDER_SYSTEMD": "true",
            # Spinning idle schedulers would take processor time from the tests.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+sbwt none +sbwtdcpu none +sbwtdio none",
        }

    def ctl(self, *arguments: str) -> str:
        """Run ``rabbitmqctl`` for this node and return its output.

        Raises:
            subprocess.CalledProcessError: The command failed; a note has its output.
        """
        command = ["/usr/lib/rabbitmq/bin/rabbitmqctl", "--silent", *arguments]
        try:
            return self._run(command, check=True).stdout
        except subprocess.CalledProcessError as failed:
            failed.add_note(failed.stderr)
            raise

    def _run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program of RabbitMQ to its end."""
        return subprocess.run(
            command, env=self._environment(), capture_output=True, text=True, **options
        )
