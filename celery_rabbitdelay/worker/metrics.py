"""The bootstep by which a worker serves its metrics to Prometheus, and tells OpenTelemetry more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final
from weakref import WeakSet

from celery import bootsteps, signals
from celery.concurrency.prefork import TaskPool
from celery.utils.log import get_logger
from celery.worker.components import Pool

from celery_rabbitdelay.app.instruments import (
    BACKLOG,
    BREAKER_OPEN,
    MISSING_QUEUES,
    MODULE_PUBLISHED,
    MODULE_RECEIVED,
    MODULE_REDELIVERED,
    PENDING,
    UNDELIVERABLE,
    Sample,
)
from celery_rabbitdelay.app.metrics import Metrics, opentelemetry_is_set_up
from celery_rabbitdelay.app.settings import checked
from celery_rabbitdelay.exceptions import InvalidSetting
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.service import ModuleService
from celery_rabbitdelay.worker.backlog_reader import BacklogReader

logger = get_logger(__name__)

_PORT: Final = "rabbitdelay_metrics_port"

#: The address on which they are served unless the setting names another.
_HOST: Final = "127.0.0.1"


class ServeMetrics(bootsteps.StartStopStep):
    """Serves the metrics of a worker, with those of its pool's processes, on a port.

    Without a port, it does something only where OpenTelemetry's SDK is set up: it adds what the
    worker alone can tell, of the modules and of the levels.

    Args:
        worker: The worker.
        rabbitdelay_metrics_port: What the command line says; None for what the settings say.
        **options: The worker's other options.
    """

    requires = (Pool,)

    def __init__(
        self, worker: Any, rabbitdelay_metrics_port: str | None = None, **options: Any
    ) -> None:
        self._given = rabbitdelay_metrics_port
        self._port: int | str | None = None
        self._server: Any = None
        self._reader: BacklogReader | None = None
        super().__init__(worker, **options)

    def include_if(self, worker: Any) -> bool:
        """Leave the step out where the broker is not RabbitMQ."""
        return bool(worker.app.rabbitdelay.available)

    def create(self, worker: Any) -> None:
        """Prepare for the processes of the pool, none of which is forked yet.

        Raises:
            InvalidSetting: There is no such port, or the package ``prometheus-client`` is missing;
                the worker ends.
        """
        self._port = worker.app.rabbitdelay.settings.metrics_port
        if self._given is not None:
            self._port = checked(_PORT, self._given or None)
        if self._port is not None:
            try:
                import prometheus_client  # noqa: F401 - an extra
            except ImportError as missing:
                takes = "takes the package: pip install 'celery-rabbitdelay[metrics]'"
                raise InvalidSetting(_PORT, self._port, takes) from missing
            metrics: Metrics = worker.app.rabbitdelay.metrics
            if issubclass(worker.pool_cls, TaskPool):
                metrics.prepare_for_children()

    def start(self, worker: Any) -> None:
        """Begin to serve.

        Raises:
            InvalidSetting: The port cannot be listened on; the worker ends.
        """
        delays = worker.app.rabbitdelay
        if self._port is None and not opentelemetry_is_set_up():
            return
        metrics: Metrics = delays.metrics
        signals.worker_shutdown.connect(self._close, sender=worker)
        metrics.hear_children()
        self._reader = BacklogReader(worker.app.connection_for_write(), delays.topology)
        metrics.observe(Observations(worker, delays.topology, self._reader))
        if self._port is not None:
            if getattr(worker, "pool_start_method", "fork") == "spawn":
                logger.warning(
                    "worker_pool_start_method is 'spawn': the metrics do not count what the "
                    "processes of the pool send."
                )
            self._serve(metrics, self._port)

    def _serve(self, metrics: Metrics, address: int | str) -> None:
        from prometheus_client import CollectorRegistry, start_http_server  # an extra

        registry = CollectorRegistry()
        registry.register(metrics)
        host, _, port = str(address).rpartition(":")
        host = host or _HOST
        try:
            self._server, _ = start_http_server(int(port), host.strip("[]"), registry)
        except OSError as refused:
            takes = f"cannot be listened on at {host}: {refused}"
            raise InvalidSetting(_PORT, address, takes) from refused
        _servers.add(self._server)
        logger.info("Metrics are served at http://%s:%s/metrics.", host, port)

    def stop(self, worker: Any) -> None:
        """Go on serving: the processes of the pool may still finish their tasks for long."""

    def _close(self, **signal: Any) -> None:
        """Celery calls this when everything else has stopped."""
        metrics: Metrics = signal["sender"].app.rabbitdelay.metrics
        signals.worker_shutdown.disconnect(self._close, sender=signal["sender"])
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        metrics.forget_sources()
        metrics.leave_children()
        if self._reader is not None:
            self._reader.stop()


class Observations:
    """Looks up what a worker knows at the moment, and does not record as it happens.

    Args:
        worker: The worker.
        topology: The topology that its modules belong to.
        reader: Asks the broker.
    """

    def __init__(self, worker: Any, topology: Topology, reader: BacklogReader) -> None:
        self._worker = worker
        self._topology = topology
        self._reader = reader
        self._services: dict[str, ModuleService] = {}

    def __call__(self) -> Iterator[Sample]:
        """Yield the present values."""
        backlog: dict[str, float] = {}
        # A worker that stops gives its modules up before everything else.
        for service in filter(
            lambda each: each.has_queue, tuple(self._worker.rabbitdelay_services)
        ):
            self._services[service.module.queue.name] = service
        for queue, service in self._services.items():
            statistics = service.statistics
            backlog[queue] = statistics.backlog
            yield Sample(MODULE_RECEIVED, (queue,), statistics.received)
            yield Sample(MODULE_PUBLISHED, (queue,), statistics.published)
            yield Sample(MODULE_REDELIVERED, (queue,), statistics.redelivered)
            yield Sample(UNDELIVERABLE, (queue,), statistics.undeliverable)
        found = self._reader.read()
        if found is not None:
            names = self._topology.module_queues
            for name, counts in found.others.items():
                queue = getattr(names, name.replace("-", "")).name
                backlog[queue] = counts.messages
            for level, messages in found.levels.items():
                yield Sample(PENDING, (level,), messages)
            yield Sample(MISSING_QUEUES, (), len(found.missing))
        for queue, ready in backlog.items():
            yield Sample(BACKLOG, (queue,), ready)
        if self._worker.app.rabbitdelay.has_registry:
            yield Sample(BREAKER_OPEN, (), self._is_breaker_open())

    def _is_breaker_open(self) -> bool:
        strategies = getattr(getattr(self._worker, "consumer", None), "strategies", None)
        decisions = getattr(strategies, "decisions", None)
        return decisions is not None and bool(decisions.is_breaker_open)


_servers: WeakSet[Any] = WeakSet()


def _close_listeners() -> None:
    # A process of the pool that outlives a killed worker would keep its port occupied.
    for server in _servers:
        with suppress(OSError):
            server.socket.close()


os.register_at_fork(after_in_child=_close_listeners)
