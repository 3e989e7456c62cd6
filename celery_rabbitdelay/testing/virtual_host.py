"""A virtual host of a test run's own, on a RabbitMQ that runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit, urlunsplit
from uuid import uuid4

from celery_rabbitdelay.exceptions import ManagementUnavailable
from celery_rabbitdelay.publishing.management import ManagementAPI
from celery_rabbitdelay.testing.servers import ServerNotStarted


@contextmanager
def own_virtual_host(broker_url: str, management_url: str = "") -> Iterator[str]:
    """Make a virtual host with the management API, and delete it with all that is in it.

    Args:
        broker_url: The broker; its user gets all permissions there.
        management_url: The management API, with a user that is an administrator; empty for port
            15672 of the broker's host, and its user.

    Yields:
        The URL of the virtual host.

    Raises:
        InvalidManagementURL: ``management_url`` is not the URL of one.
        ServerNotStarted: The management API does not answer, or refuses.
    """
    broker, name = urlsplit(broker_url), f"test-{uuid4().hex[:8]}"
    user, password = broker.username or "guest", broker.password or "guest"
    url = management_url or f"http://{user}:{password}@{broker.hostname}:15672"
    api, everything = ManagementAPI(url), dict.fromkeys(("configure", "write", "read"), ".*")
    try:
        api.change("PUT", "vhosts", name)
        api.change("PUT", "permissions", name, unquote(user), **everything)
    except ManagementUnavailable as error:
        raise ServerNotStarted(
            "the management API does not make a virtual host for the tests; name another one "
            f"with --rabbitdelay-management: {error}"
        ) from error
    try:
        yield urlunsplit(broker._replace(path=f"/{name}"))
    finally:
        api.change("DELETE", "vhosts", name)
