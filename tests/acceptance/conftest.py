"""pytest-celery's ``celery_setup`` with RabbitMQ, Redis and a worker that has our Celery class.

``RABBITDELAY_NODES`` chooses what the nodes are made of: ``process`` (processes of this machine)
or ``docker`` (containers). Unset, it is Docker where an engine answers and processes elsewhere; set
to ``docker`` where none answers, it is an error, so that a CI job cannot switch unnoticed.

The processes are private servers, which the tests kill; ``RABBITDELAY_BROKER_ROOT`` names the
system whose RabbitMQ is run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any, ClassVar, Final

import docker  # type: ignore[import-untyped]
import pytest
from docker.errors import DockerException  # type: ignore[import-untyped]
from pytest_celery import CeleryTestBackend, CeleryTestBroker, CeleryTestSetup, CeleryTestWorker

from celery_rabbitdelay import Celery
from celery_rabbitdelay.testing import Certificates
from tests.acceptance.journal import Journal
from tests.acceptance.names import PREFIX, QUEUE

NODES: Final = ("process", "docker")

#: Seconds within which a Docker engine has to answer.
DOCKER_TIMEOUT: Final = 5


def chosen_nodes() -> str:
    """Return what the nodes are made of: one of :data:`NODES`.

    Raises:
        pytest.UsageError: The value is none of them, or there is no Docker engine to go with it.
    """
    chosen = os.environ.get("RABBITDELAY_NODES") or None
    if chosen not in (None, *NODES):
        raise pytest.UsageError(
            f"RABBITDELAY_NODES is {chosen!r}; it has to be one of {', '.join(NODES)}"
        )
    if os.environ.get("RABBITDELAY_TLS"):
        if chosen == "docker":
            raise pytest.UsageError("RABBITDELAY_TLS is for a private RabbitMQ that is a process")
        return "process"
    if chosen == "process":
        return chosen
    try:
        with closing(docker.from_env(timeout=DOCKER_TIMEOUT)) as engine:
            engine.ping()
    except DockerException as error:
        if chosen == "docker":
            raise pytest.UsageError(
                f"RABBITDELAY_NODES is 'docker', but no Docker engine answers: {error}"
            ) from error
        return "process"
    return "docker"


# The fixtures that differ between the two; pytest finds them because they are names in this file.
if chosen_nodes() == "docker":
    from tests.acceptance.docker_nodes import *  # noqa: F403
else:
    from tests.acceptance.process_nodes import *  # noqa: F403


@pytest.fixture(scope="session", autouse=True)
def broker_use_ssl(broker_certificates: Certificates | None) -> Iterator[dict[str, Any] | bool]:
    """Celery's setting for all applications of the tests; False without TLS."""
    given = False if broker_certificates is None else broker_certificates.for_amqp()
    AcceptanceSetup.broker_use_ssl = given
    yield given
    AcceptanceSetup.broker_use_ssl = False


class AcceptanceSetup(CeleryTestSetup):  # type: ignore[misc]  # pytest-celery has no types
    """A setup whose app is of our class and whose tasks survive their worker."""

    #: Celery's setting; False without TLS.
    broker_use_ssl: ClassVar[dict[str, Any] | bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # To write the worker's configuration down, pytest-celery makes an app of Celery's own
        # class, which is the current one from then on.
        self.app.set_current()

    @classmethod
    def create_setup_app(
        cls, celery_setup_config: dict[str, Any], celery_setup_app_name: str
    ) -> Celery:
        """Return the app of the tests; the worker's gets the same configuration."""
        app = Celery(celery_setup_app_name)
        app.config_from_object(celery_setup_config)
        cls.update_app_config(app)
        return app

    @classmethod
    def update_app_config(cls, app: Celery) -> None:
        """Set what a user would set for tasks that must not be lost."""
        app.conf.update(task_default_queue=QUEUE, task_acks_late=True, rabbitdelay_prefix=PREFIX)
        if cls.broker_use_ssl:
            app.conf.broker_use_ssl = cls.broker_use_ssl

    def teardown(self) -> None:
        """Close the app's connections."""
        self.app.close()


@pytest.fixture
def celery_setup_cls() -> type[CeleryTestSetup]:
    """Our setup class instead of pytest-celery's."""
    return AcceptanceSetup


# pytest-celery runs every test with each combination of brokers and backends. We have one.
@pytest.fixture
def celery_broker(celery_rabbitmq_broker: CeleryTestBroker) -> CeleryTestBroker:
    """RabbitMQ, and no other broker."""
    return celery_rabbitmq_broker


@pytest.fixture
def celery_backend(celery_redis_backend: CeleryTestBackend) -> CeleryTestBackend:
    """Redis, and no other result backend."""
    return celery_redis_backend


@pytest.fixture
def celery_worker(celery_setup_worker: CeleryTestWorker) -> CeleryTestWorker:
    """One worker."""
    return celery_setup_worker


@pytest.fixture
def journal(celery_setup: CeleryTestSetup) -> Journal:
    """Where the tasks of this test write down that they started."""
    return Journal(celery_setup)
