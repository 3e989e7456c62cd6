"""``/healthz`` and ``/readyz``, which a worker answers beside its metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.publishing.publish_loop import BLOCKED
from celery_rabbitdelay.worker.celery_internals import why_not_consuming

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


def with_health(metrics: WSGIApplication, worker: Any) -> WSGIApplication:
    """Return a WSGI application that also answers ``/healthz`` and ``/readyz``.

    ``/healthz`` answers 200 as long as the process answers; ``/readyz`` if the worker takes and
    sends tasks as well, otherwise 503 with the reason in one line.

    Args:
        metrics: Answers every other path.
        worker: The worker.
    """

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO")
        if path not in ("/healthz", "/readyz"):
            return metrics(environ, start_response)
        reason = why_not_ready(worker) if path == "/readyz" else ""
        status = "503 Service Unavailable" if reason else "200 OK"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{reason or 'ok'}\n".encode()]

    return application


def why_not_ready(worker: Any) -> str:
    """Return why a worker takes or sends no tasks, or cannot ask the registry; empty if it can."""
    delays = worker.app.rabbitdelay
    reason = why_not_consuming(worker) or (BLOCKED if delays.is_blocked() else "")
    if reason or not delays.has_registry:
        return reason
    registry = delays.registry
    try:
        registry.store.commands(lambda pipe: pipe.exists(registry.names.only("complete-since")))
    except RegistryUnavailable as error:
        return " ".join(str(error).split())
    return ""
