"""The application of :mod:`tests.kernel.integration.shop`, for tests that travel in time; and
fixtures.

A test module that uses the fixtures imports them and names them in its ``__all__``.
"""

from typing import Any

import pytest

from celery_rabbitdelay.testing.session import Worker
from tests.kernel.integration.modules import MODULES
from tests.kernel.integration.shop import make_app

app = make_app(
    {
        "prefix": "travelling-shop",
        "broker_url": "amqp://",
        "result_backend": "redis://",
        "rabbitdelay_registry_url": "redis://",
        "rabbitdelay_modules": MODULES,
        "rabbitdelay_signing_key": "travelling" * 4,
        "task_acks_late": True,
    }
)


@pytest.fixture(scope="session")
def rabbitdelay_celery_app() -> Any:
    return app


@pytest.fixture
def shop(rabbitdelay_app: Any) -> Any:
    return rabbitdelay_app


@pytest.fixture
def worker(rabbitdelay_worker: Worker) -> Worker:
    return rabbitdelay_worker
