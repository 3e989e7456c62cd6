"""A cluster that is reached over TLS only, with a certificate of its own."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from celery_rabbitdelay.testing.servers import free_port
from tests.chaos.cluster import Cluster, Node

CERTIFICATE: Final = "certificate.pem"
KEY: Final = "key.pem"


class TlsNode(Node):
    """A node that takes AMQP over TLS."""

    def __init__(
        self, root: Path | None, settings: Sequence[str], cluster_with: Node | None, folder: Path
    ) -> None:
        super().__init__(root, settings, cluster_with)
        self._tls_port = free_port()
        for name in (CERTIFICATE, KEY):
            shutil.copy(folder / name, self.folder / name)
        self.settings = (
            *settings,
            f"listeners.ssl.1 = 127.0.0.1:{self._tls_port}",
            f"ssl_options.cacertfile = {self.home}/{CERTIFICATE}",
            f"ssl_options.certfile = {self.home}/{CERTIFICATE}",
            f"ssl_options.keyfile = {self.home}/{KEY}",
        )

    @property
    def url(self) -> str:
        """``amqps://`` URL of the virtual host ``/``."""
        return f"amqps://guest:guest@127.0.0.1:{self._tls_port}//"


class TlsCluster(Cluster):
    """A cluster whose nodes share a certificate, which clients check."""

    def __init__(self, version: str, count: int = 1, settings: Sequence[str] = ()) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="rabbitdelay-tls-"))
        make_certificate(self._folder)
        super().__init__(version, count, settings)

    def _set_up(self, stack: ExitStack) -> None:
        stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
        super()._set_up(stack)

    def ssl(self) -> dict[str, Any]:
        """Return ``broker_use_ssl``."""
        certificate = str(self._folder / CERTIFICATE)
        return {"ca_certs": certificate, "cert_reqs": int(ssl.CERT_REQUIRED)}

    def _node(
        self, number: int, root: Path | None, settings: Sequence[str], first: Node | None
    ) -> Node:
        return TlsNode(root, settings, first, self._folder)


def make_certificate(folder: Path) -> None:
    """Write a certificate for this machine, signed by itself, and its key."""
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-keyout", str(folder / KEY), "-out", str(folder / CERTIFICATE)),
        ],
        check=True,
        capture_output=True,
    )
