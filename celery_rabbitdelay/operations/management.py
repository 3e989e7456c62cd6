"""RabbitMQ's management HTTP API.

The API needs the plugin ``rabbitmq_management`` and a user with the tag ``monitoring``. On RabbitMQ
3.10, only users with the tag ``administrator`` see the feature flags:
https://www.rabbitmq.com/docs/management#permissions
"""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from types import MappingProxyType
from typing import Any, Final, TypeAlias
from urllib.parse import SplitResult, quote, unquote, urlencode, urlsplit

import click
from kombu import Connection
from kombu.transport.pyamqp import SSLTransport

from celery_rabbitdelay.exceptions import InvalidManagementURL, ManagementUnavailable
from celery_rabbitdelay.levels.shown_url import without_password

#: Seconds that each step of a request may take.
TIMEOUT: Final = 10.0

#: The plugin's default ports, without and with TLS.
PORTS: Final = {"http": 15672, "https": 15671}

NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})

#: A JSON object of the API; see https://www.rabbitmq.com/docs/http-api-reference
Json: TypeAlias = Mapping[str, Any]


management_option: Final = click.option(
    "--management",
    metavar="URL",
    envvar="RABBITDELAY_MANAGEMENT_URL",
    help="The management API, http://user:password@host:15672. By default, the broker's host and "
    "user with port 15672, or 15671 for TLS.",
)


class ManagementAPI:
    """A client of the management HTTP API.

    Args:
        url: ``http://user:password@host:15672``; ``https`` for TLS. A path is a ``path_prefix`` of
            the plugin.
        tls: The files for TLS, with the keys of ``broker_use_ssl``: ``ca_certs``, the certificates
            of authorities (the system's by default), ``certfile`` and ``keyfile``, the client's.

    Attributes:
        url: The URL without user and password.

    Raises:
        InvalidManagementURL: The URL is invalid.
    """

    def __init__(self, url: str, tls: Mapping[str, str] = NOTHING) -> None:
        parts = parts_of_url(url)
        if parts is None:
            raise InvalidManagementURL(without_password(url))
        host = parts.hostname or ""
        shown = f"[{host}]" if ":" in host else host
        port = parts.port or PORTS[parts.scheme]
        self.url = f"{parts.scheme}://{shown}:{port}{parts.path.rstrip('/')}"
        user = f"{unquote(parts.username or 'guest')}:{unquote(parts.password or 'guest')}"
        self._authorization = f"Basic {base64.b64encode(user.encode()).decode()}"
        authorities, certificate, key = map(tls.get, ("ca_certs", "certfile", "keyfile"))
        try:
            context = ssl.create_default_context(cafile=authorities or None)
            if certificate:
                context.load_cert_chain(certificate, key or None)
        except OSError as wrong:
            files = ", ".join(str(file) for file in (authorities, certificate, key) if file)
            raise ManagementUnavailable(self.url, f"cannot read {files}: {wrong}") from wrong
        # Do not use a proxy, because AMQP reaches the broker without a proxy.
        self._connect: Callable[[], HTTPConnection]
        if parts.scheme == "https":
            self._connect = partial(HTTPSConnection, host, port, timeout=TIMEOUT, context=context)
        else:
            self._connect = partial(HTTPConnection, host, port, timeout=TIMEOUT)
        self._path = parts.path.rstrip("/")

    def get(self, *path: str, **query: str) -> Any:
        """Return the API's answer for a path.

        Args:
            *path: The parts of the path after ``/api``, which this method quotes.
            **query: The query.

        Raises:
            ManagementUnavailable: The API does not answer, refuses the request, or does not return
                JSON.
        """
        with self._asked(path, urlencode(query)) as answer:
            return json.load(answer)

    def change(self, method: str, *path: str, **values: object) -> None:
        """Create or delete an entity.

        Args:
            method: PUT or DELETE.
            *path: As for :meth:`get`.
            **values: The entity's properties.

        Raises:
            ManagementUnavailable: The API does not answer, or refuses the request.
        """
        with self._asked(path, method=method, body=json.dumps(values).encode()):
            pass

    @contextmanager
    def _asked(
        self, path: Sequence[str], query: str = "", method: str = "GET", body: bytes | None = None
    ) -> Iterator[HTTPResponse]:
        address = "/".join([f"{self._path}/api", *(quote(word, safe="") for word in path)])
        headers = {"Authorization": self._authorization, "Content-Type": "application/json"}
        try:
            with closing(self._connect()) as connection:
                connection.request(method, f"{address}?{query}", body, headers)
                answer = connection.getresponse()
                # A redirection is not followed: it would take the password to another host.
                if answer.status >= HTTPStatus.MULTIPLE_CHOICES:
                    reason = f"{'/'.join(path)}: {answer.status} {answer.reason}"
                    raise ManagementUnavailable(self.url, reason, answer.status)
                yield answer
        except (OSError, HTTPException, ValueError) as error:
            raise ManagementUnavailable(self.url, str(error) or repr(error)) from error


def management_api(connection: Connection, url: str | None = None) -> ManagementAPI:
    """Return the API at a URL, or at the broker's host and the default port with the AMQP user.

    Args:
        connection: A connection to the broker. If the broker has several hosts, the connection must
            be open, because its current host is used.
        url: The URL.

    Raises:
        InvalidManagementURL: The URL is invalid.
    """
    if url is None:
        is_tls = connection.ssl or isinstance(connection.transport, SSLTransport)
        host = connection.hostname or "localhost"
        host = f"[{host}]" if ":" in host else host
        user, password = connection.userid or "guest", connection.password or "guest"
        scheme = "https" if is_tls else "http"
        url = f"{scheme}://{quote(user, '')}:{quote(password, '')}@{host}"
    return ManagementAPI(url, connection.ssl if isinstance(connection.ssl, dict) else NOTHING)


def parts_of_url(url: str) -> SplitResult | None:
    """Return the parts of a URL; None if it is malformed or ambiguous."""
    with suppress(ValueError):
        parts = urlsplit(url)
        # If a password has "/", "?" or "#", the text after it ends up in one of these parts.
        rest = f"{parts.path}{parts.query}{parts.fragment}"
        if (
            parts.scheme in PORTS
            and not parts.query
            and parts.hostname
            and parts.port != 0
            and "@" not in rest
        ):
            return parts
    return None
