"""Processes of this machine that pytest-celery takes for containers.

pytest-celery talks to its nodes through wrappers (``RabbitMQContainer`` and so on) around what
docker-py calls a container. :class:`ServerAsContainer` stands in for that: it has the shape of
docker-py's object over a process of our own. The wrappers at the end say where the process's
address differs from a container's; restarts and configuration stay pytest-celery's own.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import Any, Final

from kombu import Connection
from pytest_celery import RabbitMQContainer, RedisContainer
from pytest_docker_tools.exceptions import ContainerFailed
from pytest_docker_tools.wrappers import Container

from celery_rabbitdelay.testing import Server, wait_for
from tests.acceptance.worker_container import AcceptanceWorkerContainer

#: Docker lets a container's host name be the first twelve characters of its id.
HOST_NAME_LENGTH: Final = 12

#: What Celery prints when a worker takes tasks; the same prompt that pytest-celery waits for.
WORKER_IS_READY: Final = "ready."


def container_id(origin: object) -> str:
    """Return an id like Docker's for what is unique about a server, such as its folder."""
    return hashlib.sha256(str(origin).encode()).hexdigest()


def host_name(id_: str) -> str:
    """Return the host name that Docker would give the container with this id."""
    return id_[:HOST_NAME_LENGTH]


class ServerAsContainer:
    """docker-py's container, over a server process.

    Args:
        server: A server that has been started. Whoever made it also stops it.
        kind: What the server is, for the container's name.
        port: The port that the server would have inside a container, as Docker writes it
            (``5672/tcp``); None for a process that listens on none.
        environment: The environment variables that a container would show.
        log_from: How much of the server's log belongs to earlier tests, in characters.
    """

    def __init__(
        self,
        server: Server,
        kind: str,
        port: str | None = None,
        environment: Mapping[str, str] | None = None,
        log_from: int = 0,
    ) -> None:
        self.server = server
        self._log_from = log_from
        self.id = container_id(server.folder)
        self.name = f"{kind}-{host_name(self.id)}"
        ports = {port: server.port} if port else {}
        self.attrs = _attributes(self.id, ports, environment or {})

    @property
    def url(self) -> str:
        """The URL that Celery and kombu take."""
        return self.server.url

    @property
    def status(self) -> str:
        """``running`` or ``exited``, as Docker calls it."""
        return "running" if self.server.running else "exited"

    def reload(self) -> None:
        """Do nothing: a process is always looked at afresh."""

    def kill(self, signal: str | int | None = None) -> None:
        """Send a signal, by default SIGKILL, and wait for the end only if it is that one.

        As in a container, SIGKILL ends every process in it, while any other signal reaches the
        first one only: a worker's children would die of a SIGTERM in the middle of their tasks.
        """
        signum = _signal_number(signal)
        if signum == Signals.SIGKILL:
            self.server.kill()
        else:
            os.kill(self.server.pid, signum)

    def restart(self, timeout: float = 10) -> None:
        """End the process if it runs, by force after ``timeout`` seconds, and start it again."""
        if self.server.running:
            self.kill("SIGTERM")
            try:
                wait_for(lambda: not self.server.running, f"end of {self.name}", timeout)
            except TimeoutError:
                self.server.kill()
        self.server.start()

    def remove(self, force: bool = False) -> None:
        """Stop the server and remove its files; ``force`` does not let it finish what it does."""
        if force:
            self.server.kill()
        self.server.stop()

    def logs(self) -> bytes:
        """Return what the process has printed in this test, over all its starts."""
        return self.server.log[self._log_from :].encode()


def _attributes(
    id_: str, ports: Mapping[str, int], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return the part of ``docker inspect`` that pytest-celery and pytest-docker-tools read."""
    return {
        "Config": {
            "Hostname": host_name(id_),
            "Env": [f"{name}={value}" for name, value in environment.items()],
            "Labels": {},
        },
        "HostConfig": {"PortBindings": {}},
        "NetworkSettings": {
            "Networks": {},
            "Ports": {
                inner: [{"HostIp": "127.0.0.1", "HostPort": str(outer)}]
                for inner, outer in ports.items()
            },
        },
    }


def _signal_number(given: str | int | None) -> Signals:
    if given is None:
        return Signals.SIGKILL
    if isinstance(given, int):
        return Signals(given)
    return Signals[given if given.startswith("SIG") else f"SIG{given}"]


def _path_with_own_programs() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


class WorkerProcess(Server):
    """``celery worker`` as a process, in a folder with what a container's volume would hold.

    Args:
        command: The command line. ``%h`` in it is not this machine's name, but the one that a
            container would have, because that is where pytest-celery looks for the worker.
        environment: What a container would get as its environment.
        content: The files of the volume: their paths and what is in them.
        paths: Folders to import from, besides the worker's own.
    """

    package = "celery"

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        content: Mapping[str, bytes],
        paths: Sequence[Path],
    ) -> None:
        super().__init__()
        name = host_name(container_id(self.folder))
        self._arguments = [argument.replace("%h", name) for argument in command]
        self._given_environment = environment
        self._paths = [self.folder, *paths]
        self._log_before = 0
        for relative, source in content.items():
            path = self.folder / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(source)

    def start(self) -> None:
        """Start the worker and wait until it takes tasks."""
        self._log_before = len(self.log)
        super().start()

    def _command(self) -> list[str]:
        program, *arguments = self._arguments
        return [str(Path(sys.executable).parent / program), *arguments]

    def _environment(self) -> dict[str, str]:
        return {
            **super()._environment(),
            **self._given_environment,
            "PATH": _path_with_own_programs(),
            "PYTHONPATH": os.pathsep.join(map(str, self._paths)),
        }

    def _ready(self) -> bool:
        return WORKER_IS_READY in self.log[self._log_before :]


class ProcessContainer(Container):  # type: ignore[misc]  # pytest-docker-tools has no types
    """The wrapper's lowest layer, for a process: alive is enough, and ports need no mapping.

    It belongs below ``CeleryTestContainer`` in the order of base classes, so that what
    pytest-celery adds (waiting for the prompt, for one) still comes on top.
    """

    def ready(self) -> bool:
        """Return True; a process is only shown to the tests once it answers.

        Raises:
            ContainerFailed: The process has ended.
        """
        if self.status == "exited":
            raise ContainerFailed(self, f"{self.name} has ended:\n{self.logs()[-2000:]}")
        return True

    def get_addr(self, port: str) -> tuple[str, int]:
        """Return host and port under which the server is reached, inside and outside alike."""
        return "127.0.0.1", self.ports[port][0]


class ServerProcess:
    """A server that workers and tests reach by the same URL.

    It answers before a test gets it, and its prompt may be in an earlier test's log.
    """

    ready_prompt = None
    _container: Any

    @property
    def url(self) -> str:
        """The URL for workers."""
        return str(self._container.url)

    host_url = url


class RabbitMQProcess(ServerProcess, RabbitMQContainer, ProcessContainer):  # type: ignore[misc]
    """A RabbitMQ node that is a process."""

    @property
    def client(self) -> Connection:
        """A connection to the node; the one of the base class forgets the port's URL."""
        server = getattr(self._container, "server", None)
        return Connection(self.url, ssl=getattr(server, "ssl", False))


class RedisProcess(ServerProcess, RedisContainer, ProcessContainer):  # type: ignore[misc]
    """A Redis server that is a process."""


class WorkerProcessContainer(AcceptanceWorkerContainer, ProcessContainer):
    """A Celery worker that is a process."""
