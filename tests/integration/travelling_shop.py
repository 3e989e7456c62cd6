"""The application of :mod:`tests.integration.shop`, for tests that travel in time."""

from __future__ import annotations

from tests.integration.modules import MODULES
from tests.integration.shop import make_app

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
