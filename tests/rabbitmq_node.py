"""RabbitMQ nodes of other versions and of clusters, and a Redis that takes TLS only."""

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from celery_rabbitdelay.testing import RabbitMQServer, RedisServer, ServerNotStarted
from tests.certificates import Certificates


class RabbitMQNode(RabbitMQServer):
    """A RabbitMQ node, maybe of another Debian system, and maybe one of a cluster.

    Args:
        root: A folder with a whole Debian system (made by debootstrap) whose RabbitMQ is to be run
            instead of the machine's own; the node is then started inside it with ``chroot``,
            which only root may do.
        settings: Lines for the node's ``rabbitmq.conf``.
        cluster_with: A node that runs already, whose cluster this one joins at its first start. It
            shares that node's port mapper and cookie: stop it before that one.
        management: As for the server.
        plugins: Further plugins, by name.
        certificates: The node takes connections over TLS only, and from clients that show a
            certificate of the authority. Clients connect with :attr:`ssl`.
    """

    def __init__(
        self,
        root: Path | None = None,
        settings: Sequence[str] = (),
        cluster_with: RabbitMQServer | None = None,
        management: bool = False,
        plugins: Sequence[str] = (),
        certificates: Certificates | None = None,
    ) -> None:
        if cluster_with is not None:
            settings = (
                *settings,
                "cluster_formation.peer_discovery_backend = classic_config",
                f"cluster_formation.classic_config.nodes.1 = {cluster_with.node}",
            )
        super().__init__(settings, management)
        self.certificates = certificates
        self.root = root
        self.cluster_with = cluster_with
        self.plugins += plugins
        if cluster_with is not None:
            self._mapper_port = cluster_with._mapper_port
        if root is not None:
            shutil.rmtree(self.folder)
            self.folder = Path(tempfile.mkdtemp(prefix="rabbitdelay-", dir=root / "tmp"))

    def start(self) -> None:
        """Start the node, with the cookie of its cluster; once more if it hangs.

        Seen on 4.3.6: the node waits for ever when others of its cluster connect again meanwhile.
        """
        if self.cluster_with is not None:
            self.folder.mkdir(exist_ok=True)
            cookie = self.folder / ".erlang.cookie"
            if not cookie.exists():
                shutil.copy(self.cluster_with.folder / cookie.name, cookie)
        try:
            super().start()
        except ServerNotStarted:
            if not self.running:
                raise
            self.kill()
            super().start()

    def _start_mapper(self) -> None:
        if self.cluster_with is None:
            super()._start_mapper()

    @property
    def url(self) -> str:
        """``amqp://`` URL of the virtual host ``/``; ``amqps://`` with certificates."""
        return super().url if self.certificates is None else super().url.replace("amqp:", "amqps:")

    @property
    def management_url(self) -> str:
        """URL of the management HTTP API, with user and password."""
        plain = super().management_url
        return plain if self.certificates is None else plain.replace("http:", "https:")

    @property
    def ssl(self) -> dict[str, Any] | bool:
        """Celery's ``broker_use_ssl``, and kombu's ``ssl``; False without certificates."""
        return False if self.certificates is None else self.certificates.for_amqp()

    def _configuration(self) -> list[str]:
        lines = super()._configuration()
        if self.certificates is None:
            return lines
        for file in self.certificates:  # copies: the node may not see the files where they are
            shutil.copy(file, self.folder)
        lines = [line.replace(".tcp.", ".ssl.", 1) for line in lines]
        sections = ["ssl_options"] + ["management.ssl"] * ("rabbitmq_management" in self.plugins)
        for section in sections:
            lines += [
                f"{section}.cacertfile = {self._home / self.certificates.authority.name}",
                f"{section}.certfile = {self._home / self.certificates.server.name}",
                f"{section}.keyfile = {self._home / self.certificates.server_key.name}",
                f"{section}.verify = verify_peer",
                f"{section}.fail_if_no_peer_cert = true",
            ]
        return ["listeners.tcp = none", *lines]

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
    def _home(self) -> Path:
        """The folder as the node sees it."""
        return self.folder if self.root is None else "/" / self.folder.relative_to(self.root)

    def _environment(self) -> dict[str, str]:
        folder, home = str(self.folder), str(self._home)
        return {name: text.replace(folder, home) for name, text in super()._environment().items()}

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        return super()._spawn(self._inside(command))

    def _run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return super()._run(self._inside(command), **options)


class TLSRedis(RedisServer):
    """A Redis server that takes TLS only, and only from clients with a certificate.

    Args:
        certificates: The certificates of both sides.
    """

    def __init__(self, certificates: Certificates) -> None:
        super().__init__()
        self.certificates = certificates

    @property
    def url(self) -> str:
        """``rediss://`` URL of database 0."""
        return super().url.replace("redis://", "rediss://")

    @property
    def ssl(self) -> dict[str, Any]:
        """Further arguments of redis-py's client: ``rabbitdelay_registry_options``."""
        return {
            "ssl_ca_certs": str(self.certificates.authority),
            "ssl_certfile": str(self.certificates.client),
            "ssl_keyfile": str(self.certificates.client_key),
            "ssl_cert_reqs": "required",
        }

    def _command(self) -> list[str]:
        return [
            *super()._command(),
            *("--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "yes"),
            *("--tls-ca-cert-file", str(self.certificates.authority)),
            *("--tls-cert-file", str(self.certificates.server)),
            *("--tls-key-file", str(self.certificates.server_key)),
        ]
