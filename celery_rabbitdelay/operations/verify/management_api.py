"""RabbitMQ's management HTTP API, read only.

It needs the plugin ``rabbitmq_management`` and a user with the tag ``management`` or more:
https://www.rabbitmq.com/docs/management#permissions
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import SplitResult, quote, unquote, urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, ProxyHandler, Request, build_opener

from kombu import Connection
from kombu.transport.pyamqp import SSLTransport

from celery_rabbitdelay.exceptions import InvalidManagementURL, ManagementUnavailable
from celery_rabbitdelay.publishing.shown_url import without_password

#: Seconds that each step of a request may take.
TIMEOUT: Final = 10.0

#: The plugin's default ports, without and with TLS.
PORTS: Final = {"http": 15672, "https": 15671}

#: The keys of ``broker_use_ssl`` that the API needs too.
TLS_FILES: Final = ("ca_certs", "certfile", "keyfile")

#: For an API without a certificate of the application's own authority.
NO_FILES: Final[Mapping[str, Any]] = MappingProxyType({})


class ManagementAPI:
    """Reads from the management HTTP API.

    Args:
        url: ``http://user:password@host:15672``; ``https`` for TLS. A path is a ``path_prefix`` of
            the plugin.
        tls: The files for TLS, by the keys of ``broker_use_ssl``: ``ca_certs``, the certificates of
            authorities (the system's by default), ``certfile`` and ``keyfile``, the client's own.

    Attributes:
        url: The URL without user and password.

    Raises:
        InvalidManagementURL: It is not such a URL.
    """

    def __init__(self, url: str, tls: Mapping[str, Any] = NO_FILES) -> None:
        parts = _parts(url)
        if parts is None:
            raise InvalidManagementURL(without_password(url))
        host = parts.hostname or ""
        shown = f"[{host}]" if ":" in host else host
        port = parts.port or PORTS[parts.scheme]
        self.url = f"{parts.scheme}://{shown}:{port}{parts.path.rstrip('/')}"
        user = f"{unquote(parts.username or 'guest')}:{unquote(parts.password or 'guest')}"
        self._authorization = f"Basic {base64.b64encode(user.encode()).decode()}"
        files = {name: tls[name] for name in TLS_FILES if tls.get(name)}
        try:
            context = ssl.create_default_context(cafile=files.get("ca_certs"))
            if "certfile" in files:
                context.load_cert_chain(files["certfile"], files.get("keyfile"))
        except OSError as wrong:
            reason = f"cannot read {', '.join(map(str, files.values()))}: {wrong}"
            raise ManagementUnavailable(self.url, reason) from wrong
        # Not through a proxy: AMQP reaches the broker without one. Not after a redirection: it
        # would take the password to another host.
        self._opener = build_opener(ProxyHandler({}), _NoRedirection, HTTPSHandler(context=context))

    def get(self, *path: str, accept: int | None = None, **query: str) -> Any:
        """Return what the API says under a path.

        Args:
            *path: The words of the path behind ``/api``; they are quoted.
            accept: A status of HTTP that is an answer as well, and not an error.
            **query: The query.

        Raises:
            ManagementUnavailable: It does not answer, or not with JSON, or refuses.
        """
        address = "/".join([f"{self.url}/api", *(quote(word, safe="") for word in path)])
        if query:
            address += "?" + "&".join(f"{name}={quote(value)}" for name, value in query.items())
        request = Request(address, headers={"Authorization": self._authorization})  # noqa: S310 - http or https
        try:
            with self._opener.open(request, timeout=TIMEOUT) as answer:
                return json.load(answer)
        except HTTPError as refused:
            with refused:
                if refused.code == accept:
                    return json.load(refused)
                reason = f"{'/'.join(path)}: {refused.code} {refused.reason}"
            raise ManagementUnavailable(self.url, reason, refused.code) from refused
        except URLError as error:
            raise ManagementUnavailable(self.url, str(error.reason)) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ManagementUnavailable(self.url, str(error) or repr(error)) from error


class _NoRedirection(HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **options: Any) -> None:
        return None


def management_api_of(connection: Connection) -> ManagementAPI:
    """Return the API at the broker's host and the plugin's default port, with AMQP's user."""
    is_tls = connection.ssl or isinstance(connection.transport, SSLTransport)
    scheme = "https" if is_tls else "http"
    host = connection.hostname or "localhost"
    host = f"[{host}]" if ":" in host else host
    user, password = connection.userid or "guest", connection.password or "guest"
    return ManagementAPI(
        f"{scheme}://{quote(user, '')}:{quote(password, '')}@{host}", tls_files_of(connection)
    )


def tls_files_of(connection: Connection) -> Mapping[str, Any]:
    """Return the TLS files that the application gives for its broker."""
    return connection.ssl if isinstance(connection.ssl, dict) else NO_FILES


def _parts(url: str) -> SplitResult | None:
    """Return the parts of a URL; None if it is malformed, or may be."""
    with suppress(ValueError):
        parts = urlsplit(url)
        # If "/", "?" or "#" stands in a password, its rest is taken for one of these.
        rest = f"{parts.path}{parts.query}{parts.fragment}"
        if parts.scheme in PORTS and parts.hostname and parts.port != 0 and "@" not in rest:
            return parts
    return None
