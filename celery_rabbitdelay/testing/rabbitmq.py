"""A private RabbitMQ node."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from celery_rabbitdelay.testing import servers


class RabbitMQServer(servers.Server):
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
        plugins: Further plugins, by name.
        certificates: The node takes connections over TLS only, and from clients that show a
            certificate of the authority. Clients connect with :attr:`ssl`.
    """

    package = "rabbitmq-server"
    #: AMQP's header, and the type of the frame that says "connection.start".
    greeting = b"AMQP\x00\x00\x09\x01", b"\x01"

    #: Debian's start script; the one in /usr/sbin insists on running as the user rabbitmq.
    program: ClassVar[str] = "/usr/lib/rabbitmq/bin/rabbitmq-server"

    def __init__(
        self,
        root: Path | None = None,
        settings: Sequence[str] = (),
        cluster_with: RabbitMQServer | None = None,
        management: bool = False,
        plugins: Sequence[str] = (),
        certificates: servers.Certificates | None = None,
    ) -> None:
        super().__init__(certificates)
        self.root = root
        self.settings = settings
        self.cluster_with = cluster_with
        self.management = management
        self.plugins = plugins
        self._management_port = servers.free_port()
        self._mapper_port: int = cluster_with._mapper_port if cluster_with else servers.free_port()
        self._distribution_port = servers.free_port()
        self._mapper: subprocess.Popen[bytes] | None = None
        if root is not None:
            shutil.rmtree(self.folder)
            self.folder = Path(tempfile.mkdtemp(prefix="rabbitdelay-", dir=root / "tmp"))

    @property
    def url(self) -> str:
        """``amqp://`` URL of the virtual host ``/``; ``amqps://`` with certificates."""
        scheme = "amqp" if self.certificates is None else "amqps"
        return f"{scheme}://guest:guest@127.0.0.1:{self.port}//"

    @property
    def ssl(self) -> dict[str, Any] | bool:
        """Celery's ``broker_use_ssl``, and kombu's ``ssl``; False without certificates."""
        return False if self.certificates is None else self.certificates.for_amqp()

    @property
    def management_url(self) -> str:
        """URL of the management HTTP API, with user and password."""
        scheme = "http" if self.certificates is None else "https"
        return f"{scheme}://guest:guest@127.0.0.1:{self._management_port}"

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
        command = ["epmd", "-port", str(self._mapper_port), "-address", "127.0.0.1"]
        self._mapper = self._spawn(self._inside(command))
        self._wait_for_start(self._mapper_listens, "the Erlang port mapper")

    def _mapper_listens(self) -> bool:
        address = ("127.0.0.1", self._mapper_port)
        with suppress(OSError), socket.create_connection(address, timeout=1.0):
            return True
        return False

    def _write_configuration(self) -> None:
        listener = "tcp" if self.certificates is None else "ssl"
        lines = [
            f"listeners.{listener}.1 = 127.0.0.1:{self.port}",
            "log.console = true",
            "log.console.level = info",
            "loopback_users = none",
            "disk_free_limit.absolute = 50MB",
            *self.settings,
        ]
        if self.certificates is not None:
            lines += ["listeners.tcp = none", *self._tls_lines("ssl_options", self.certificates)]
        if self.management:
            lines += [
                f"management.{listener}.ip = 127.0.0.1",
                f"management.{listener}.port = {self._management_port}",
            ]
            if self.certificates is not None:
                lines += self._tls_lines("management.ssl", self.certificates)
        if self.cluster_with is not None:
            lines += [
                "cluster_formation.peer_discovery_backend = classic_config",
                f"cluster_formation.classic_config.nodes.1 = {self.cluster_with.node}",
            ]
            cookie = self.folder / ".erlang.cookie"
            if not cookie.exists():
                shutil.copy(self.cluster_with.folder / cookie.name, cookie)
        (self.folder / "rabbitmq.conf").write_text("\n".join(lines) + "\n")
        plugins = [*(["rabbitmq_management"] if self.management else []), *self.plugins]
        (self.folder / "enabled_plugins").write_text(f"[{','.join(plugins)}].\n")

    def _tls_lines(self, section: str, certificates: servers.Certificates) -> list[str]:
        """Return the lines for a listener that lets in nobody without a certificate.

        The node may not see the files where they are, so it gets copies.
        """
        files = {
            "cacertfile": certificates.authority,
            "certfile": certificates.server,
            "keyfile": certificates.server_key,
        }
        for file in files.values():
            shutil.copy(file, self.folder / file.name)
        return [
            *(f"{section}.{key} = {self._home}/{file.name}" for key, file in files.items()),
            f"{section}.verify = verify_peer",
            f"{section}.fail_if_no_peer_cert = true",
        ]

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

    def ctl(self, *arguments: str) -> str:
        """Run ``rabbitmqctl`` against this node and return what it printed.

        Raises:
            subprocess.CalledProcessError: The command failed; a note says what it printed.
        """
        command = self._inside(["/usr/lib/rabbitmq/bin/rabbitmqctl", "--silent", *arguments])
        try:
            return subprocess.run(
                command, env=self._environment(), capture_output=True, text=True, check=True
            ).stdout
        except subprocess.CalledProcessError as failed:
            failed.add_note(failed.stderr)
            raise
