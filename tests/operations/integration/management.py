"""Virtual hosts of tests' own, and the changes that operators make by the management API.

A test module that uses the fixtures imports them and names them in its ``__all__``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit
from uuid import uuid4

import httpx
import pytest
from kombu import Connection, Queue

from celery_rabbitdelay import Celery
from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.exceptions import ManagementUnavailable
from celery_rabbitdelay.operations.management import ManagementAPI
from celery_rabbitdelay.operations.verify import Verification, verify_broker
from celery_rabbitdelay.publishing.declaration import declare_destination
from celery_rabbitdelay.schedules.addition import SchedulesAddition
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.kernel.integration.conftest import SHORT

QUORUM = {"x-queue-type": "quorum"}


AnyPlace = TypeVar("AnyPlace", bound="Place")


class Place:
    """A virtual host with small levels and a destination, which an operator may damage.

    Args:
        node: A node with its management API.
    """

    def __init__(self, node: RabbitMQServer) -> None:
        self.node = node
        self.name = f"verify-{uuid4().hex[:8]}"
        self.url = urlsplit(node.url)._replace(path=f"/{self.name}").geturl()
        self.settings = Settings(prefix="shop", layout=SHORT)
        self.topology = self.settings.topology
        self.orders = Queue("orders", queue_arguments=QUORUM)
        self.destinations = [self.orders]
        self.connection = Connection(self.url)
        self.management_url = node.management_url
        self.api = ManagementAPI(self.management_url)
        self.redis_url = ""
        #: Further settings of the application.
        self.app_settings: dict[str, Any] = {}
        #: Those whose schedules are looked at; None if a test does not look at any.
        self.delays: Any = None
        self.is_blocked: Callable[[], bool] = lambda: False
        self._apps: list[Any] = []

    def app(self, prefix: str = "") -> Any:
        """An application whose levels and queues these are, which is closed with this place."""
        app = Celery("proj", broker=self.url, set_as_current=False)
        app.conf.update(
            rabbitdelay_prefix=prefix or self.settings.prefix,
            rabbitdelay_layout=SHORT,
            rabbitdelay_declare=self.settings.declare,
            rabbitdelay_modules=self.settings.modules,
            task_queues=self.destinations,
            task_default_queue=self.orders.name,
            **self.app_settings,
        )
        self._apps.append(app)
        return app

    def close(self) -> None:
        """Close the connections of all applications, and the own one."""
        for app in self._apps:
            app.close()
        self.connection.release()

    def declare(self) -> None:
        """Declare levels and destination."""
        declare_destination(self.connection, self.topology, self.orders)

    def put(self, *path: str, **value: Any) -> None:
        """Put something under a path of the management API."""
        self._ask("PUT", path, value)

    def delete(self, *path: str) -> None:
        """Delete what is under a path of the management API."""
        self._ask("DELETE", path, None)

    def _ask(self, method: str, path: tuple[str, ...], value: Any) -> None:
        url = "/".join([self.api.url, "api", *(quote(word, safe="") for word in path)])
        answer = httpx.request(method, url, json=value, auth=("guest", "guest"), timeout=60)
        assert answer.is_success, answer.text

    def policy(self, pattern: str, **keys: Any) -> None:
        """Set a policy for queues; ``message_ttl=5`` stands for ``message-ttl``."""
        definition = {key.replace("_", "-"): value for key, value in keys.items()}
        settings = {"pattern": pattern, "apply-to": "queues", "definition": definition}
        self.put("policies", self.name, f"policy-{uuid4().hex[:4]}", **settings)

    def verify(self) -> Verification:
        """Look for faults."""
        with self.connection.clone() as connection:
            rows = SchedulesAddition(self.delays).problems() if self.delays else ()
            given = (self.settings, self.destinations, self.api, self.is_blocked(), rows)
            return verify_broker(connection, *given)

    def verify_until(self, codes: set[str]) -> Verification:
        """Look for faults until they are these, as far as the broker reports them late."""
        reports: list[Verification] = []

        def is_found() -> bool:
            reports.append(self.verify())
            return codes_of(reports[-1]) == codes

        try:
            wait_for(is_found, f"{codes}")
        except TimeoutError as error:
            raise AssertionError(f"not {codes}: {reports[-1]}") from error
        return reports[-1]


@contextmanager
def created(place: AnyPlace) -> Iterator[AnyPlace]:
    """The virtual host with nothing in it, deleted at the end."""
    place.put("vhosts", place.name)
    place.put("permissions", place.name, "guest", configure=".*", write=".*", read=".*")
    try:
        yield place
    finally:
        place.close()
        place.delete("vhosts", place.name)


@contextmanager
def place_on(node: RabbitMQServer) -> Iterator[Place]:
    """A virtual host of its own with the levels, deleted at the end."""
    with created(Place(node)) as place:
        place.declare()
        yield place


@pytest.fixture(scope="module")
def node(session_rabbitmq: RabbitMQServer) -> RabbitMQServer:
    """The node of the run, with its management API: for tests that change virtual hosts alone."""
    wait_until_managed(session_rabbitmq)
    return session_rabbitmq


@pytest.fixture
def place(node: RabbitMQServer) -> Iterator[Place]:
    """Sound levels and a destination in a virtual host of this test's own."""
    with place_on(node) as place:
        yield place


def codes_of(report: Verification) -> set[str]:
    """Return the codes of all findings."""
    return {finding.code for finding in report.findings}


def wait_until_managed(node: RabbitMQServer) -> None:
    """Wait until the management API answers; it starts behind the listener of AMQP."""
    tls = getattr(node, "ssl", False)
    api = ManagementAPI(node.management_url, tls if isinstance(tls, dict) else {})

    def answers() -> bool:
        try:
            return bool(api.get("overview"))
        except ManagementUnavailable as error:
            # Where nothing listens yet, and where the plugin has not started as a whole.
            if error.status in (None, 500):
                return False
            raise

    wait_for(answers, "the management API")
