"""Serves a worker's metrics and health, and observes the worker's own instruments."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from celery import signals
from celery.concurrency.prefork import TaskPool
from celery.utils.log import get_logger
from celery.worker.components import Pool

from celery_rabbitdelay.app.seams import additions_of
from celery_rabbitdelay.exceptions import InvalidSetting
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.metrics import instruments
from celery_rabbitdelay.metrics.collector import ChildCounts, Metrics, Sample
from celery_rabbitdelay.metrics.probe import ProbeService
from celery_rabbitdelay.metrics.reading import Broker, Readings
from celery_rabbitdelay.metrics.settings import MetricsSettings
from celery_rabbitdelay.modules.service import ModuleService, Service
from celery_rabbitdelay.publishing.declaration import Backlog, backlog_of, module_queues
from celery_rabbitdelay.publishing.publish_loop import BLOCKED
from celery_rabbitdelay.worker.celery_internals import RabbitMQStep, Worker

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

logger = get_logger(__name__)

_PORT: Final = "rabbitdelay_metrics_port"

#: The default address of the interface that serves metrics.
_HOST: Final = "127.0.0.1"

#: Seconds for which an answer of the broker is cached, and the longest time for which it is shown.
FRESH: Final = 5.0
STALE: Final = timedelta(seconds=60)

#: Seconds that a scrape waits for a new answer.
PATIENCE: Final = 1.0

#: Seconds for an answer of the broker.
TIMEOUT: Final = 10.0


class ServeMetrics(RabbitMQStep):
    """Serves the metrics of a worker and of its pool's processes on a port.

    Args:
        worker: The worker.
        rabbitdelay_metrics_port: The port from the command line; None to use the setting.
        **options: The worker's other options.
    """

    requires = (Pool,)

    def __init__(
        self, worker: Worker, rabbitdelay_metrics_port: str | None = None, **options: object
    ) -> None:
        self._given = rabbitdelay_metrics_port
        self._port: int | str | None = None
        self._children: ChildCounts | None = None
        self._at_end = ExitStack()
        super().__init__(worker, **options)

    def create(self, worker: Worker) -> None:
        """Prepare to count in the pool's processes, before they are forked.

        Raises:
            InvalidSetting: The port is invalid, or the package ``prometheus-client`` is missing;
                the worker ends.
        """
        delays = worker.app.rabbitdelay
        self._port = delays.settings_of(MetricsSettings).metrics_port
        if self._given is not None:
            self._port = MetricsSettings.checked(_PORT, self._given or None)
        if self._port is None:
            return
        try:
            metrics: Metrics = delays.metrics
        except ImportError as missing:
            takes = "takes the package prometheus-client: pip install 'celery-rabbitdelay[metrics]'"
            raise InvalidSetting(_PORT, self._port, takes) from missing
        if issubclass(worker.pool_cls, TaskPool):
            self._children = metrics.children = ChildCounts(metrics.count)

    def start(self, worker: Worker) -> None:
        """Serve the metrics and the health.

        Raises:
            InvalidSetting: The worker cannot listen on the port; it ends.
        """
        delays = worker.app.rabbitdelay
        if self._port is None:
            return
        signals.worker_shutdown.connect(self._close, sender=worker)
        broker = Broker(worker.app.connection_for_write(), TIMEOUT)
        self._at_end.callback(broker.close)
        look = partial(broker.ask, partial(backlog_of, topology=delays.topology))
        metrics: Metrics = delays.metrics
        metrics.observe(partial(observed, worker, Readings(look, FRESH, PATIENCE)))
        self._at_end.callback(metrics.observe)
        if self._children is not None:
            self._children.start()
            self._at_end.callback(self._children.stop)
        if getattr(worker, "pool_start_method", "fork") == "spawn":
            logger.warning(
                "rabbitdelay metrics: cannot count in the pool: worker_pool_start_method is 'spawn'"
            )
        self._serve(worker, self._port)

    def _serve(self, worker: Worker, address: int | str) -> None:
        from prometheus_client import CollectorRegistry, start_http_server  # an extra

        registry = CollectorRegistry()
        registry.register(worker.app.rabbitdelay.metrics)
        host, _, port = str(address).rpartition(":")
        host = host or _HOST
        try:
            server, _ = start_http_server(int(port), host.strip("[]"), registry)
        except OSError as refused:
            takes = f"cannot be listened on at {host}: {refused}"
            raise InvalidSetting(_PORT, address, takes) from refused
        served: Any = server.get_app()
        server.set_app(with_health(served, worker))
        self._at_end.callback(server.server_close)
        self._at_end.callback(server.shutdown)
        # A process of the pool that outlives a killed worker would keep the port in use.
        os.register_at_fork(after_in_child=server.socket.close)
        logger.info("rabbitdelay metrics: serving http://%s:%s/metrics.", host, port)

    def _close(self, **signal: object) -> None:
        # ``stop`` would be too early, because the pool may still be finishing long tasks.
        signals.worker_shutdown.disconnect(self._close, sender=signal["sender"])
        self._at_end.close()


def observed(worker: Worker, backlogs: Readings[Backlog]) -> Iterator[Sample]:
    """Yield the present values of a worker's instruments that are not recorded as events.

    Args:
        worker: The worker.
        backlogs: Asks the broker for the depths of the queues.
    """
    services: list[Service] = worker.rabbitdelay_services
    for service in tuple(services):
        if isinstance(service, ModuleService):
            queue, statistics = service.module.queue.name, service.module.statistics
            yield instruments.MODULE_RECEIVED, (queue,), statistics.received
            yield instruments.MODULE_PUBLISHED, (queue,), statistics.published
            yield instruments.MODULE_REDELIVERED, (queue,), statistics.redelivered
            yield instruments.UNDELIVERABLE, (queue,), statistics.undeliverable
        elif isinstance(service, ProbeService):
            for level, late in dict(service.late).items():
                yield instruments.PROBE_LATE, (level,), late
            for level, missing in dict(service.missing).items():
                yield instruments.PROBE_MISSING, (level,), missing
    delays = worker.app.rabbitdelay
    backlog, taken, _ = backlogs.latest()
    if backlog is not None and taken is not None and wall_clock.now() - taken <= STALE:
        queues = module_queues(delays.topology)
        for name, counts in backlog.others.items():
            yield instruments.BACKLOG, (queues[name].name,), counts.messages
        for level, messages in backlog.levels.items():
            yield instruments.PENDING, (level,), messages
        yield instruments.MISSING_QUEUES, (), len(backlog.missing)
    for instrument, look_up in list(delays.recorder.gauges.items()):
        yield instrument, (), look_up()


def with_health(metrics: WSGIApplication, worker: Worker) -> WSGIApplication:
    """Return a WSGI application that also answers ``/healthz`` and ``/readyz``.

    ``/healthz`` returns 200 as long as the process answers. ``/readyz`` returns 200 if the worker
    takes and sends tasks, otherwise 503 with the reason in one line.

    Args:
        metrics: The WSGI application that serves all other paths.
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


def why_not_consuming(worker: Worker) -> str:
    """Return why a worker consumes no tasks; empty if it consumes. Any thread may call this."""
    consumer = getattr(worker, "consumer", None)
    connection = getattr(consumer, "connection", None)
    if connection is None or not connection.connected:
        return "not connected to the broker"
    tasks = getattr(consumer, "task_consumer", None)
    if tasks is None or not any(map(tasks.consuming_from, tasks.queues)):
        return "consuming from no queue"
    return ""


def why_not_ready(worker: Worker) -> str:
    """Return why a worker cannot take or send tasks, or ask the registry; empty if it is ready."""
    delays = worker.app.rabbitdelay
    reason = why_not_consuming(worker) or (BLOCKED if delays.is_blocked() else "")
    asked = delays.part(additions_of) if delays.available else ()
    return reason or next(filter(None, (each.why_not_ready() for each in asked)), "")
