"""Certificates for servers and clients that use TLS."""

import ssl
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import trustme

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
        """
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
