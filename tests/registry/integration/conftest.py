"""Registries of a test's own, beside what the kernel's tests use."""

from collections.abc import Iterator
from typing import Any

import pytest

from celery_rabbitdelay.registry import index as index_module
from celery_rabbitdelay.registry.index import Index
from celery_rabbitdelay.registry.registry import Registry
from tests.kernel.integration.conftest import *  # noqa: F403 - its fixtures
from tests.registry.integration import registering


@pytest.fixture(scope="session", params=["single", "cluster"])
def redis_setup(request: pytest.FixtureRequest) -> Iterator[registering.RedisSetup]:
    """A server of its own, and a cluster, where a script sees one slot; tests leave it alone.

    Behind Sentinel, the same client asks one server; see test_registry_trouble.py.
    """
    with registering.KINDS[request.param]() as setup:
        yield setup


@pytest.fixture
def registry(redis_setup: registering.RedisSetup, prefix: str) -> Iterator[Registry]:
    """A registry of this test's own; at the end, all that it has written must expire."""
    store = redis_setup.connect()
    yield Registry(store, prefix, registering.KEEP_MS, registering.MARGIN_MS)
    registering.assert_all_expire(redis_setup, prefix)
    store.close()


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Read four tasks at a time; return the list of how many each page had."""
    sizes: list[int] = []
    real = Index._page

    def page(index: Index, *arguments: Any) -> list[tuple[int, str]]:
        found = real(index, *arguments)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(index_module, "PAGE", 4)
    monkeypatch.setattr(Index, "_page", page)
    return sizes
