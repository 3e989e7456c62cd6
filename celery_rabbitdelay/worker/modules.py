"""The bootstep by which a worker serves the modules around the levels, and their status."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final

from celery import bootsteps
from celery.worker.components import Pool
from celery.worker.control import inspect_command

from celery_rabbitdelay.checkin import CheckIn
from celery_rabbitdelay.distribution import distribute
from celery_rabbitdelay.settings import checked_modules
from celery_rabbitdelay.worker.courier import Courier
from celery_rabbitdelay.worker.session import Module
from celery_rabbitdelay.worker.step import prepare

__all__ = ["Modules"]

#: How many messages a module takes from its queue before they are done. Distribution fewer: one of
#: its messages may be an envelope.
PREFETCH: Final = {"check-in": 1000, "distribution": 300}

#: Seconds after which both sides take a silent connection for lost.
HEARTBEAT: Final = 60


class Modules(bootsteps.StartStopStep):
    """Serves check-in and distribution, each in a thread and on a connection of its own.

    They start after the pool, so that no process of the pool is forked out of them, and go on
    when the worker's own consumer connects anew.

    Args:
        worker: The worker.
        rabbitdelay_modules: What the command line says; None for what the settings say.
        **options: The worker's other options.
    """

    requires = (Pool,)

    def __init__(self, worker: Any, rabbitdelay_modules: str | None = None, **options: Any) -> None:
        self._given = rabbitdelay_modules
        self._couriers: list[Courier] = []
        worker.rabbitdelay_couriers = self._couriers
        super().__init__(worker, **options)

    def include_if(self, worker: Any) -> bool:
        """Leave the step out where the broker is not RabbitMQ."""
        return bool(worker.app.rabbitdelay.available)

    def start(self, worker: Any) -> None:
        """Start the modules.

        Raises:
            InvalidSetting: There is no such module; the worker ends.
        """
        settings = worker.app.rabbitdelay.settings
        modules = settings.modules if self._given is None else checked_modules(self._given)
        self._couriers += [_courier(worker.app, name) for name in modules]
        for courier in self._couriers:
            courier.start()

    def stop(self, worker: Any) -> None:
        """Finish what the modules have begun, and end them."""
        for courier in self._couriers:
            courier.stopping.set()
        while self._couriers:
            self._couriers.pop().stop()


def _courier(app: Any, name: str) -> Courier:
    settings = app.rabbitdelay.settings
    topology = settings.topology
    if name == "check-in":
        queue = topology.checkin
        receive = CheckIn(topology, _Allowed(app, settings.checkin_allowed)).receive
    else:
        queue, receive = topology.distribution, distribute
    module = Module(
        name,
        topology,
        queue,
        receive,
        prefetch=min(PREFETCH[name], settings.window),
        window=settings.window,
        timeout=settings.confirm_timeout,
    )
    connection = app.connection_for_write(heartbeat=HEARTBEAT)
    return Courier(module, connection, partial(prepare, app))


class _Allowed:
    """Which destinations check-in may reach.

    Args:
        app: The application.
        patterns: The names of queues and exchanges; None for those that the application knows.
    """

    def __init__(self, app: Any, patterns: Sequence[str] | None) -> None:
        self._app = app
        self._patterns = patterns

    def __call__(self, exchange: str, routing_key: str) -> bool:
        name = exchange or routing_key
        if self._patterns is not None:
            return any(fnmatchcase(name, pattern) for pattern in self._patterns)
        queues = self._app.amqp.queues
        if not exchange:
            return dict.__contains__(queues, name)
        sources = [
            source
            for queue in queues.values()
            for source in (queue.exchange, *(binding.exchange for binding in queue.bindings))
        ]
        return any(source is not None and source.name == name for source in sources)


@inspect_command(name="rabbitdelay_status")
def rabbitdelay_status(state: Any, **options: Any) -> dict[str, dict[str, float]]:
    """Rates and backlog of the modules around the delay levels."""
    couriers: list[Courier] = getattr(state.consumer.controller, "rabbitdelay_couriers", [])
    return {courier.module.name: courier.tally.status() for courier in couriers}
