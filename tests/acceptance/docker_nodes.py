"""pytest-celery's worker as a container of an image that has this repository's package installed.

Broker and result backend are pytest-celery's own containers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import celery
import pytest
from pytest_celery import (
    DEFAULT_WORKER_CONTAINER_TIMEOUT,
    DEFAULT_WORKER_VOLUME,
    CeleryWorkerContainer,
)
from pytest_docker_tools import build, container, fxtr

from tests.acceptance.worker_container import AcceptanceWorkerContainer

REPOSITORY: Final = Path(__file__).resolve().parents[2]


@pytest.fixture
def default_worker_container_cls() -> type[CeleryWorkerContainer]:
    """The class of the worker's wrapper."""
    return AcceptanceWorkerContainer


@pytest.fixture(scope="session")
def default_worker_container_session_cls() -> type[CeleryWorkerContainer]:
    """The class of the worker's wrapper, where pytest-celery asks for it once."""
    return AcceptanceWorkerContainer


# The whole repository is the build's context, since the package is installed from its source.
acceptance_worker_image = build(
    path=str(REPOSITORY),
    dockerfile="tests/acceptance/Dockerfile",
    tag="celery-rabbitdelay/acceptance-worker",
    buildargs={"CELERY_VERSION": celery.__version__},
)

default_worker_container = container(
    image="{acceptance_worker_image.id}",
    ports=fxtr("default_worker_ports"),
    environment=fxtr("default_worker_env"),
    network="{default_pytest_celery_network.name}",
    volumes={"{default_worker_volume.name}": DEFAULT_WORKER_VOLUME},
    wrapper_class=AcceptanceWorkerContainer,
    timeout=DEFAULT_WORKER_CONTAINER_TIMEOUT,
    command=fxtr("default_worker_command"),
)
