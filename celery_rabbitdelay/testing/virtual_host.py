"""A virtual host of a test run's own, on a RabbitMQ that runs."""

from __future__ import annotations

from typing import Self
from urllib.parse import unquote, urlsplit, urlunsplit
from uuid import uuid4

from celery_rabbitdelay.exceptions import ManagementUnavailable
from celery_rabbitdelay.operations.verify.management import ManagementAPI
from celery_rabbitdelay.testing.servers import ServerNotStarted


class VirtualHost:
    """Makes a virtual host with the management API, and deletes it with all that is in it.

    Args:
        broker_url: The broker; its user gets all permissions there.
        management_url: The management API, with a user that is an administrator; empty for port
            15672 of the broker's host, and its user.

    Attributes:
        url: The URL of the virtual host.

    Raises:
        InvalidManagementURL: ``management_url`` is not the URL of one.
    """

    def __init__(self, broker_url: str, management_url: str = "") -> None:
        broker = urlsplit(broker_url)
        self._name = f"test-{uuid4().hex[:8]}"
        self._user = unquote(broker.username or "guest")
        self.url = urlunsplit(broker._replace(path=f"/{self._name}"))
        user = f"{broker.username or 'guest'}:{broker.password or 'guest'}"
        self._api = ManagementAPI(management_url or f"http://{user}@{broker.hostname}:15672")

    def __enter__(self) -> Self:
        """Make it.

        Raises:
            ServerNotStarted: The management API does not answer, or refuses.
        """
        try:
            self._api.change("PUT", "vhosts", self._name)
            everything = dict.fromkeys(("configure", "write", "read"), ".*")
            self._api.change("PUT", "permissions", self._name, self._user, **everything)
        except ManagementUnavailable as error:
            raise ServerNotStarted(
                "the management API does not make a virtual host for the tests; name another one "
                f"with --rabbitdelay-management: {error}"
            ) from error
        return self

    def __exit__(self, *exception: object) -> None:
        self._api.change("DELETE", "vhosts", self._name)
