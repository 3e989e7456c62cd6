"""Private servers, started as processes on free ports and always stopped again: the common part.

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
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, Self

#: The names of the machine that the server's certificate is for.
HOSTS: Final = ("localhost", "127.0.0.1", "::1")


class Certificates(NamedTuple):
    """Files in PEM format: an authority, and what it has issued to a server and to its clients.

    Attributes:
        authority: The authority's certificate; both sides trust it.
        server: The server's certificate, for this machine.
        server_key: Its private key.
        client: The clients' certificate.
        client_key: Its private key.
    """

    authority: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path

    @classmethod
    def make(cls, folder: Path, user: str = "guest") -> Self:
        """Make an authority and its certificates; this takes some milliseconds.

        Args:
            folder: Where the files go. Their keys are not encrypted.
            user: The common name of the clients' certificate, from which RabbitMQ takes the user
                with its plugin ``rabbitmq_auth_mechanism_ssl``.

        Raises:
            ModuleNotFoundError: The package ``trustme`` is not installed.
        """
        import trustme  # only here: nothing else needs it

        made = cls(*(folder / f"{name.replace('_', '-')}.pem" for name in cls._fields))
        authority = trustme.CA()
        server = authority.issue_cert(*HOSTS)
        client = authority.issue_cert(HOSTS[0], common_name=user)
        authority.cert_pem.write_to_path(made.authority)
        for leaf, certificate, key in (
            (server, made.server, made.server_key),
            (client, made.client, made.client_key),
        ):
            leaf.cert_chain_pems[0].write_to_path(certificate)
            leaf.private_key_pem.write_to_path(key)
        return made

    def for_amqp(self) -> dict[str, Any]:
        """Return Celery's ``broker_use_ssl``, and what kombu's ``Connection`` takes as ``ssl``."""
        return {
            "ca_certs": str(self.authority),
            "certfile": str(self.client),
            "keyfile": str(self.client_key),
            # A plain number, so that the settings can be written as JSON.
            "cert_reqs": int(ssl.CERT_REQUIRED),
            "server_hostname": HOSTS[0],
        }

    def for_redis(self) -> dict[str, Any]:
        """Return the arguments of redis-py's client: ``rabbitdelay_registry_options``."""
        return {
            "ssl_ca_certs": str(self.authority),
            "ssl_certfile": str(self.client),
            "ssl_keyfile": str(self.client_key),
            "ssl_cert_reqs": "required",
        }

    def client_context(self) -> ssl.SSLContext:
        """Return what a client's socket is wrapped with."""
        context = ssl.create_default_context(cafile=self.authority)
        context.load_cert_chain(self.client, self.client_key)
        return context


#: Seconds until a wait is given up. This only bounds a failure: a busy machine gets enough time.
PATIENCE: Final = 300.0

#: Seconds that a server may take to start. A RabbitMQ node takes 5 to 15 on a small machine.
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
        condition: Asked again and again; an exception that it raises goes to the caller.
        what: What is waited for, for the error.
        timeout: Seconds until the wait is given up.
        interval: Seconds between two questions; more where a question costs much.

    Raises:
        TimeoutError: The condition was not true within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        spent = time.thread_time()
        if condition():
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout:g} s")
        # A question that costs much would keep the processor from the thing that it asks about.
        time.sleep(max(interval, 4 * (time.thread_time() - spent)))


#: The ports of private servers: below those of outgoing connections (Linux:
#: ``net.ipv4.ip_local_port_range``), and above those that well-known services have.
PORTS: Final = range(10_000, 32_768)

#: Sockets that have the ports which were given out last, so that no other process gets them here.
#: They do not listen, and SO_REUSEADDR lets a server have its port as well; see socket(7).
_GIVEN: Final[deque[socket.socket]] = deque()
_MOST_GIVEN: Final = 64


def free_port() -> int:
    """Return a TCP port of the loopback interface that nothing uses at the moment.

    Not one that the kernel gives to outgoing connections: while a server is down that a test has
    killed, such a connection could take its port.
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
    """A process of our own, which writes a log.

    Args:
        folder: Where its log is.
    """

    #: The name of the log in the folder.
    _log_name: ClassVar[str] = "server.log"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Its process id.

        Raises:
            RuntimeError: It was never started.
        """
        if self._process is None:
            raise RuntimeError("the process was never started")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """Everything that it has printed so far, over all its starts."""
        path = self._log_path
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def _log_path(self) -> Path:
        return self.folder / self._log_name

    def _begin(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        with self._log_path.open("ab") as log:
            # A session of its own: a Ctrl-C at the terminal reaches the parent alone, which then
            # stops the process in order, and a signal to the group reaches its helpers too.
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
        """End it with a signal to its group, or as ``send`` does; by force if that takes long."""
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
    """A server process of our own: its folder, its port, its log.

    Args:
        certificates: The server takes connections over TLS only, and from clients that show a
            certificate of the authority. None: it takes them without TLS.

    Attributes:
        folder: The temporary folder that holds all the server's files.
        port: The TCP port that the server listens on; it stays the same over restarts.
    """

    #: The Debian package that brings the program.
    package: ClassVar[str]

    #: The first bytes that a client sends, and the first byte of the server's answer.
    greeting: ClassVar[tuple[bytes, bytes]]

    def __init__(self, certificates: Certificates | None = None) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="rabbitdelay-")))
        self.certificates = certificates
        self.port = free_port()

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
        """Start the server and wait until it answers; data of an earlier run is kept.

        Raises:
            ServerNotStarted: The program is missing, ended, or did not answer in time.
        """
        assert not self.running, "the server runs already"
        self.folder.mkdir(exist_ok=True)
        self._process = self._spawn(self._command())
        self._wait_for_start(self._answers, self.package)

    def _wait_for_start(self, answers: Callable[[], object], what: str) -> None:
        try:
            wait_for(answers, f"start of {what}", START_TIMEOUT, interval=0.1)
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
            state = Path(f"/proc/{self.pid}/stat")
            wait_for(lambda: ") T " in state.read_text(), f"{self.package}, frozen")

    def resume(self) -> None:
        """Let a suspended server go on (SIGCONT)."""
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
            # What a killed process leaves behind goes with the folder.
            "TMPDIR": str(self.folder),
        }

    def _ready(self) -> bool:
        greeting, answer = self.greeting
        with contextlib.suppress(OSError), self._open_socket() as client:
            client.sendall(greeting)
            return client.recv(1) == answer
        return False

    def _open_socket(self) -> socket.socket:
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=1.0)
        if self.certificates is None:
            return plain
        with plain:  # an SSLSocket takes over what it is given
            context = self.certificates.client_context()
            return context.wrap_socket(plain, server_hostname=HOSTS[0])


class RedisServer(Server):
    """A Redis server that keeps nothing on disk.

    Args:
        certificates: The server takes connections over TLS only, and from clients that show a
            certificate of the authority. Clients connect with :attr:`ssl`.
    """

    package = "redis-server"
    greeting = b"PING\r\n", b"+"

    @property
    def url(self) -> str:
        """``redis://`` URL of database 0; ``rediss://`` with certificates."""
        scheme = "redis" if self.certificates is None else "rediss"
        return f"{scheme}://127.0.0.1:{self.port}/0"

    @property
    def ssl(self) -> dict[str, Any] | None:
        """Further arguments of redis-py's client; None without certificates."""
        return None if self.certificates is None else self.certificates.for_redis()

    def _command(self) -> list[str]:
        certificates, port = self.certificates, str(self.port)
        listen = ["--port", port]
        if certificates is not None:
            listen = [
                *("--port", "0", "--tls-port", port, "--tls-auth-clients", "yes"),
                *("--tls-ca-cert-file", str(certificates.authority)),
                *("--tls-cert-file", str(certificates.server)),
                *("--tls-key-file", str(certificates.server_key)),
            ]
        return [
            *("redis-server", *listen, "--bind", "127.0.0.1"),
            *("--dir", str(self.folder), "--save", "", "--appendonly", "no"),
        ]
