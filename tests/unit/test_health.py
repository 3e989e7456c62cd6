"""What ``/healthz`` and ``/readyz`` answer, and why a worker is not ready."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.worker import health


@pytest.mark.parametrize(
    ("consuming", "is_blocked", "registry", "answer"),
    [
        ("", False, None, "ok\n"),
        ("not connected to the broker", True, None, "not connected to the broker\n"),
        ("", True, None, "RabbitMQ blocks publishers"),
        ("", False, RegistryUnavailable("Redis is\naway"), "the registry cannot be used: "),
    ],
)
def test_a_worker_is_alive_as_long_as_it_answers_and_ready_if_it_takes_and_sends_tasks(
    monkeypatch: pytest.MonkeyPatch,
    consuming: str,
    is_blocked: bool,
    registry: Exception | None,
    answer: str,
) -> None:
    monkeypatch.setattr(health, "why_not_consuming", lambda worker: consuming)
    worker = mock.Mock()
    worker.app.rabbitdelay.is_blocked.return_value = is_blocked
    worker.app.rabbitdelay.registry.store.commands.side_effect = registry
    application = health.with_health(lambda *_: [b"metrics"], worker)

    def ask(path: str) -> tuple[str, str | None]:
        started: Any = mock.Mock()
        (body,) = application({"PATH_INFO": path}, started)
        return body.decode(), started.call_args and started.call_args.args[0]

    said, status = ask("/readyz")
    assert said.startswith(answer)
    assert said.count("\n") == 1
    assert status == ("200 OK" if answer == "ok\n" else "503 Service Unavailable")
    assert ask("/healthz") == ("ok\n", "200 OK")
    assert ask("/metrics") == ("metrics", None)
