"""The bootsteps of a worker: declare the levels, restore delayed tasks, and serve the modules."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from operator import attrgetter
from threading import Lock
from typing import Final

from amqp.exceptions import AccessRefused, NotFound
from celery.worker.components import Pool
from celery.worker.consumer.delayed_delivery import DelayedDelivery
from celery.worker.consumer.tasks import Tasks
from kombu import Connection, Message
from kombu.common import Broadcast

from celery_rabbitdelay.app import additions, destinations, instruments, seams
from celery_rabbitdelay.app.delays import DelayingCelery
from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.levels.delay import milliseconds
from celery_rabbitdelay.levels.topology import CHECK_IN, DISTRIBUTE
from celery_rabbitdelay.modules.checkin import CheckIn
from celery_rabbitdelay.modules.deliveries import Module
from celery_rabbitdelay.modules.distribution import Distribution
from celery_rabbitdelay.modules.forwarding import EarlyMessages
from celery_rabbitdelay.modules.service import ModuleService, Service
from celery_rabbitdelay.publishing.declaration import (
    bind_destination,
    declare_destination,
    is_complete,
)
from celery_rabbitdelay.publishing.kombu_internals import connect
from celery_rabbitdelay.publishing.refusals import permissions_named
from celery_rabbitdelay.worker import celery_internals
from celery_rabbitdelay.worker.celery_internals import Consumer, Hub, RabbitMQStep, Worker
from celery_rabbitdelay.worker.celery_requests import CeleryRequests, guard_consumer, guard_pool
from celery_rabbitdelay.worker.early_tasks import EarlyTasks
from celery_rabbitdelay.worker.restore import Origins, RestoringStrategies

logger = logging.getLogger(__name__)


class WorkerDeclaration:
    """Declares the levels, and a worker's queues with their bindings.

    The worker's consumer and its modules have separate connections. The first of these connections
    declares everything for all of them. After a lost connection, the broker may have lost its
    state: the next connection looks for missing levels, and declares the levels only if some are
    missing. After a restart of the broker, all workers connect at once, and checking takes a tenth
    of the time of declaring.

    Args:
        app: The worker's application.
    """

    def __init__(self, app: DelayingCelery) -> None:
        self._app = app
        self._lock = Lock()
        self._has_declared = False
        #: The brokers where everything is declared: with a fail-over list, connections may reach
        #: different brokers.
        self._brokers: set[str] = set()

    def declare(self, connection: Connection) -> None:
        """Declare everything once after the start, and after each lost connection.

        With ``rabbitdelay_declare = "never"``, check that the levels exist.

        Args:
            connection: An open connection.

        Raises:
            LayoutConflict: Another layout is declared under the prefix.
            PermissionMissing: The broker's user may not declare a queue or an exchange.
            TopologyIncomplete: Levels are missing, and the settings forbid declaring them.
        """
        with self._lock, permissions_named():
            broker = connection.as_uri()
            if broker in self._brokers:
                return
            delays = self._app.rabbitdelay
            is_declared = self._has_declared and delays.settings.declare == "auto"
            if not (is_declared and is_complete(connection, delays.topology)):
                delays.declare(connection)
            self._has_declared = True
            if delays.settings.declare == "auto":
                for queue in self._app.amqp.queues.consume_from.values():
                    if not (queue.exclusive or isinstance(queue, Broadcast)):
                        declare_destination(connection, delays.topology, queue)
            self._brokers.add(broker)
            logger.info(
                "Delay levels %r (%s) are in place.",
                delays.topology.prefix,
                delays.topology.identity.fingerprint,
            )

    def bind_own_queues(self, connection: Connection) -> None:
        """Bind the worker's own queues to the levels: exclusive queues, and queues for broadcasts.

        Only the connection that has declared an exclusive queue can bind it. A queue for broadcasts
        needs the binding because early tasks return to it from the levels, or from the distribution
        of another application.

        Args:
            connection: The connection that has declared the queues.
        """
        delays = self._app.rabbitdelay
        if delays.settings.declare != "auto":
            return
        for queue in self._app.amqp.queues.consume_from.values():
            is_broadcast = isinstance(queue, Broadcast)
            if not (queue.exclusive or is_broadcast):
                continue
            try:
                bind_destination(connection, delays.topology, queue.name)
            except (NotFound, AccessRefused) as error:
                # A broadcast reaches its queue through an exchange, and needs the binding only if
                # its task is early.
                if isinstance(error, AccessRefused) and not is_broadcast:
                    raise
                logger.warning(
                    "rabbitdelay worker: cannot bind the queue %r to the delay levels, so it gets "
                    "no delayed tasks: %s",
                    queue.name,
                    error,
                )

    def connection_lost(self) -> None:
        """Make the next connection look for missing levels, and declare them."""
        with self._lock:
            self._brokers.clear()


class DelayLevels(RabbitMQStep):
    """Declares the levels and binds the worker's queues, on every connection of its consumer."""

    requires = (Tasks, DelayedDelivery)

    def include(self, consumer: Consumer) -> bool:
        """Replace Celery's ``DelayedDelivery`` step."""
        included: bool = super().include(consumer)
        if included:
            # Celery's own step would declare its native delayed delivery.
            consumer.steps[:] = [
                step for step in consumer.steps if not isinstance(step, DelayedDelivery)
            ]
        return included

    def start(self, consumer: Consumer) -> None:
        """Declare missing levels and queues; Celery calls this on every new connection.

        Every error ends the worker.

        Raises:
            InvalidSetting: A ``rabbitdelay_*`` setting is invalid.
            LayoutConflict: Another layout is declared under the prefix.
            PermissionMissing: The broker's user may not declare a queue or an exchange.
            TopologyIncomplete: Levels are missing, and the settings forbid declaring them.
        """
        declaration: WorkerDeclaration = consumer.controller.rabbitdelay_declaration
        with consumer.app.connection_for_write() as connection:
            connect(connection)
            declaration.declare(connection)
        declaration.bind_own_queues(consumer.connection)

    def stop(self, consumer: Consumer) -> None:
        """Record a lost connection; Celery also calls this when the worker ends."""
        consumer.controller.rabbitdelay_declaration.connection_lost()


class RestoreTasks(RabbitMQStep):
    """Restores delayed tasks on their arrival, and decides whether and when they run.

    Tasks that arrive before they are due go back into the levels; see :class:`EarlyTasks`. Due
    tasks run, unless the bootstep of an addition has set ``consumer.strategies.decisions``: then
    the addition decides.
    """

    requires = (DelayLevels,)

    def create(self, consumer: Consumer) -> None:
        """Make the consumer refuse a delayed message if Celery raises an error about it."""
        guard_consumer(consumer, partial(_refuse, consumer))

    def start(self, consumer: Consumer) -> None:
        """Wrap the execution strategies, and start the thread for early tasks."""
        if not isinstance(consumer.strategies, RestoringStrategies):
            takeover = consumer.app.rabbitdelay.settings.takeover
            consumer.strategies = RestoringStrategies(consumer, takeover, Origins(consumer))
        # The thread is needed even without takeover: a task may leave the levels before it is due.
        strategies = consumer.strategies
        strategies.early_tasks = EarlyTasks(consumer)
        strategies.early_tasks.start()
        celery_internals.bound_bodies(consumer, strategies.early_tasks.refuse_unopened)

    def register_with_event_loop(self, consumer: Consumer, hub: Hub) -> None:
        """Let the event loop run the actions of the thread for early tasks."""
        consumer.strategies.early_tasks.register(hub)

    def stop(self, consumer: Consumer) -> None:
        """End the thread for early tasks of a lost or closed connection."""
        strategies = consumer.strategies
        if not isinstance(strategies, RestoringStrategies):
            return
        early_tasks, strategies.early_tasks = strategies.early_tasks, None
        if early_tasks is not None:
            early_tasks.stop()


def _refuse(consumer: Consumer, message: Message, error: Exception) -> None:
    early_tasks: EarlyTasks | None = consumer.strategies.early_tasks
    # Between two connections, RabbitMQ redelivers the unacknowledged message.
    if early_tasks is not None:
        early_tasks.refuse_unrunnable(message, error)


#: The prefetch counts of the modules; lower for distribution, whose messages may be envelopes.
PREFETCH: Final = {CHECK_IN: 1000, DISTRIBUTE: 300}

#: The heartbeat of the services' connections, in seconds. Both sides consider a connection lost
#: after two silent intervals, and the messages on it wait until then. RabbitMQ's documentation
#: recommends 5 to 20 (https://www.rabbitmq.com/docs/heartbeats#heartbeats-timeout).
HEARTBEAT: Final = 20

#: The minimum heartbeat as a fraction of ``rabbitdelay_confirm_timeout``, because a module sends no
#: heartbeats while it waits for an answer.
SHARE: Final = 2 / 3


class Modules(RabbitMQStep):
    """Serves the modules and the services of additions, in threads with their own connections.

    The threads start after the pool, so that pool processes do not inherit them and their sockets.
    The threads keep running when the worker's own consumer reconnects.

    Args:
        worker: The worker.
        rabbitdelay_modules: The option of the command line; None to use the setting.
        **options: The worker's other options.
    """

    requires = (Pool,)

    def __init__(
        self, worker: Worker, rabbitdelay_modules: str | None = None, **options: object
    ) -> None:
        self._given = rabbitdelay_modules
        self._makers: list[Callable[..., Service]] = []
        self._services: list[Service] = []
        worker.rabbitdelay_services = self._services
        self._declaration = worker.rabbitdelay_declaration = WorkerDeclaration(worker.app)
        super().__init__(worker, **options)

    def create(self, worker: Worker) -> None:
        """Read the names of the modules to serve.

        Raises:
            InvalidSetting: The option names an unknown module; the worker ends.
            AdditionMissing: The module belongs to an addition that is not installed; the worker
                ends.
        """
        names: Sequence[str] = worker.app.rabbitdelay.settings.modules
        if self._given is not None:
            words = filter(None, map(str.strip, self._given.split(",")))
            names = Settings.checked("rabbitdelay_modules", tuple(words))
        self._makers = [*map(service_maker, names)]
        guard_pool(worker, lambda *given: _refuse(worker.consumer, *given))

    def start(self, worker: Worker) -> None:
        """Start the modules."""
        for make in self._makers:
            self._services.append(make(worker.app, self._declaration))
        for service in self._services:
            service.start()

    def stop(self, worker: Worker) -> None:
        """Let the modules finish their unacknowledged messages, then end the modules."""
        for service in self._services:
            service.stopping.set()
        for service in self._services:
            service.stop()


def service_maker(name: str) -> Callable[..., Service]:
    """Return the function that creates a service from the application and the declaration."""
    if name not in additions.services:
        return partial(module_service, name=name)
    make: Callable[..., Service] = additions.load(additions.services[name])
    return make


def module_service(app: DelayingCelery, declaration: WorkerDeclaration, name: str) -> ModuleService:
    """Return the service of a module.

    Args:
        app: The worker's application.
        declaration: Declares the levels and the worker's queues.
        name: The module's name.
    """
    settings = app.rabbitdelay.settings
    topology = settings.topology
    if name == CHECK_IN:
        queue = topology.module_queues.checkin
        check_in = CheckIn(
            topology,
            destinations.checkin_destinations(app).includes,
            settings.signing_keys,
            settings.checkin_trusted,
            CeleryRequests(app).check,
        )
        receive, admit = check_in.receive, check_in.admit
    else:
        queue = topology.module_queues.distribution
        on_early = partial(app.rabbitdelay.recorder.record, {instruments.EARLY: 1}, "", queue.name)
        early = EarlyMessages(topology, milliseconds(settings.early_tolerance), on_early=on_early)
        asked = filter(attrgetter("is_asked_by_distribution"), seams.additions_of(app.rabbitdelay))
        distribution = Distribution(
            topology,
            early.put_back,
            reach=destinations.distribution_reach(app),
            signing_keys=settings.signing_keys,
            is_signing_required=settings.signing_required,
            max_message_bytes=settings.max_message_bytes,
            asked=next(asked, None),
        )
        receive, admit = distribution.receive, None

    module = Module(
        name,
        topology,
        queue,
        receive,
        prefetch=min(PREFETCH[name], settings.max_unconfirmed),
        max_unconfirmed=settings.max_unconfirmed,
        timeout=settings.confirm_timeout,
        retry_for=settings.retry_for,
        signing_keys=settings.signing_keys,
        max_bytes=settings.max_message_bytes,
        admit=admit,
    )
    heartbeat = max(HEARTBEAT, ceil(settings.confirm_timeout * SHARE))
    connection = app.connection_for_write(heartbeat=heartbeat)
    return ModuleService(connection, declaration.declare, declaration.connection_lost, module)
