"""Certificates for the servers of tests and for their clients, which check each other's."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

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
