"""The page in a real browser: what a person reads and clicks, and what it does on the servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from kombu import Connection

from celery_rabbitdelay.testing import wait_for
from tests.chromium import ELSEWHERE, PHONE, WIDE, Tab
from tests.integration.conftest import delete_what_it_declared, small_configuration
from tests.integration.notes import Notes
from tests.integration.page import (
    HOUR,
    HOURS,
    OPERATOR,
    REFUSED,
    UNKNOWN,
    VIEWER,
    ServedPage,
    chromium,
    open_tab,
    sign_in,
    signed_in,
    with_users,
)
from tests.integration.shop import PATIENCE, make_app
from tests.integration.worker import Worker

__all__ = ["chromium", "open_tab"]


@pytest.fixture(scope="module")
def served(module_broker_url: str, redis_url: str) -> Iterator[Any]:
    """An application, with its worker and its page, for the tests of this module."""
    configuration = {
        **small_configuration(module_broker_url, redis_url, f"test-{uuid4().hex[:8]}"),
        "rabbitdelay_layout": HOURS,
        "rabbitdelay_registry_url": redis_url,
        "rabbitdelay_track": "all",
        **with_users(shows_arguments=True),
    }
    app = make_app(configuration)
    with Worker(configuration), ServedPage(configuration) as page:
        app.page = page  # type: ignore[attr-defined]
        yield app
    delete_what_it_declared(app)
    app.close()


@pytest.fixture
def operator(served: Any, open_tab: Callable[..., Tab]) -> Iterator[Tab]:
    """An operator's tab, which has nothing to complain of at the end of a test."""
    tab = signed_in(open_tab, served.page)
    yield tab
    assert tab.complaints() == []


@pytest.fixture
def notes(served: Any) -> Iterator[Notes]:
    """The notes of a test's tasks."""
    notes = Notes(served)
    yield notes
    notes.forget()


@pytest.fixture
def job(served: Any) -> str:
    """The name of a test's own job."""
    return f"import-{uuid4().hex[:8]}"


def send(served: Any, number: int = 1, hours: float = 2, **options: Any) -> list[str]:
    """Send tasks that wait; return their ids."""
    return [
        str(served.tasks["look"].apply_async(delay=hours * HOUR, **options).id)
        for _ in range(number)
    ]


def send_job(served: Any, job: str, number: int, hours: float = 2, **options: Any) -> list[str]:
    """Send a job's tasks."""
    with served.rabbitdelay.job(job, expires=HOUR):
        return send(served, number, hours, job=job, **options)


def state_of(served: Any, task_id: str) -> str:
    """Return what the registry knows of a task."""
    found = served.rabbitdelay.task(task_id)
    return "unknown" if found is None else str(found.state)


def test_one_signs_in_reads_and_signs_out(served: Any, open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(served.page, "nobody")
    tab.go("/waiting?job=none")
    assert "Waiting" not in tab.text
    sign_in(tab, password="wrong")
    tab.see("Name or password is wrong.")
    assert tab.value("Name") == ""
    sign_in(tab)
    tab.see("No tracked task matches")
    assert tab.path == "/waiting?job=none", "where one wanted to go"
    tab.follow("Now")
    tab.see("The clock of what waits", f"{OPERATOR}, operator")
    tab.press("Sign out")
    tab.see("Password")
    tab.go("/waiting")
    tab.see("Password")
    assert tab.complaints(UNKNOWN) == []
