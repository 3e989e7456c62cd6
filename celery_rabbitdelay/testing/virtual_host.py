"""A virtual host of a test run's own, on a RabbitMQ that runs."""

from __future__ import annotations

import base64
from typing import Self
from urllib.error import HTTPError
from urllib.parse import quote, unquote, urlsplit, urlunsplit
from urllib.request import Request, urlopen
from uuid import uuid4

from celery_rabbitdelay.levels.shown_url import without_password
from celery_rabbitdelay.testing.servers import ServerNotStarted


class VirtualHost:
    """Makes a virtual host with the management API, and deletes it with all that is in it.

    Args:
        broker_url: The broker; its user gets all permissions there.
        management_url: The management API, with a user that is an administrator; empty for port
            15672 of the broker's host, and its user.

    Attributes:
        url: The URL of the virtual host.
    """

    def __init__(self, broker_url: str, management_url: str = "") -> None:
        broker = urlsplit(broker_url)
        self._name = f"test-{uuid4().hex[:8]}"
        self._user = unquote(broker.username or "guest")
        self.url = urlunsplit(broker._replace(path=f"/{self._name}"))
        if not management_url:
            user = f"{broker.username or 'guest'}:{broker.password or 'guest'}"
            management_url = f"http://{user}@{broker.hostname}:15672"
        self._management = management_url

    def __enter__(self) -> Self:
        """Make it.

        Raises:
            ServerNotStarted: The management API does not answer, or refuses.
        """
        self._send("PUT", f"vhosts/{self._name}")
        everything = b'{"configure": ".*", "write": ".*", "read": ".*"}'
        self._send("PUT", f"permissions/{self._name}/{quote(self._user, safe='')}", everything)
        return self

    def __exit__(self, *exception: object) -> None:
        self._send("DELETE", f"vhosts/{self._name}")

    def _send(self, method: str, path: str, body: bytes = b"{}") -> None:
        parts = urlsplit(self._management)
        user = f"{unquote(parts.username or 'guest')}:{unquote(parts.password or 'guest')}"
        host = f"{parts.hostname}:{parts.port or 15672}"
        request = Request(  # noqa: S310 - what the user has named
            f"{parts.scheme}://{host}/api/{path}",
            body,
            {
                "Authorization": f"Basic {base64.b64encode(user.encode()).decode()}",
                "Content-Type": "application/json",
            },
            method=method,
        )
        try:
            urlopen(request, timeout=30).close()  # noqa: S310
        except (OSError, ValueError) as error:
            code = f" {error.code}" if isinstance(error, HTTPError) else ""
            shown = without_password(self._management)
            raise ServerNotStarted(
                f"the management API at {shown} does not make a virtual host for the tests: "
                f"{error}{code}; name another one with --rabbitdelay-management"
            ) from error
