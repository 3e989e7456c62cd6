"""Celery's setting for TLS, which ``RABBITDELAY_TLS`` turns on."""

from __future__ import annotations

from typing import Any

import pytest

from celery_rabbitdelay.testing import Certificates


@pytest.fixture(scope="session")
def broker_use_ssl(broker_certificates: Certificates | None) -> dict[str, Any] | bool:
    """Celery's setting for all applications of the tests; False without TLS."""
    return False if broker_certificates is None else broker_certificates.for_amqp()
