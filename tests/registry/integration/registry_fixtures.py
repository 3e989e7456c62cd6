"""A registry on a Redis cluster, and one worker for all tests of a module.

A test module imports what it needs, and names it in its ``__all__``.
"""

from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.kernel.integration.conftest import small_configuration
from tests.kernel.integration.shop import make_app
from tests.kernel.integration.worker import Worker
from tests.registry.integration.registering import KINDS, TIMEOUT, RedisSetup

#: Seconds; long enough for a test to cancel a task before it is due.
DELAY: Final = 10.0


@pytest.fixture(scope="module")
def redis_setup() -> Iterator[RedisSetup]:
    """A cluster, which takes the least."""
    with KINDS["cluster"]() as setup:
        yield setup


@pytest.fixture(scope="module")
def module_settings(
    redis_setup: RedisSetup, module_broker_url: str, redis_url: str
) -> dict[str, Any]:
    """A configuration with a registry, whose queues one worker serves for all tests."""
    return {
        **small_configuration(module_broker_url, redis_url),
        "rabbitdelay_registry_url": redis_setup.url,
        "rabbitdelay_registry_options": {"socket_timeout": TIMEOUT, **redis_setup.options},
    }


@pytest.fixture(scope="module")
def module_worker(module_settings: dict[str, Any]) -> Iterator[Worker]:
    """The one worker."""
    with Worker(module_settings) as worker:
        yield worker


@pytest.fixture
def shop(module_worker: Worker, module_settings: dict[str, Any]) -> Iterator[Any]:
    """The application whose queues that worker serves."""
    app = make_app(module_settings)
    yield app
    app.close()
