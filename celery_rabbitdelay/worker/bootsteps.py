"""The bootsteps of a worker: the declarations, restoring delayed tasks, and the modules."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
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
from celery_rabbitdelay.worker import status  # noqa: F401 - its import registers control commands
from celery_rabbitdelay.worker.celery_internals import (
    Consumer,
    Hub,
    RabbitMQStep,
    Worker,
    bound_bodies,
)
from celery_rabbitdelay.worker.celery_requests import CeleryRequests, guard_consumer, guard_pool
from celery_rabbitdelay.worker.early_tasks import EarlyTasks
from celery_rabbitdelay.worker.restore import Origins, RestoringStrategies

logger = logging.getLogger(__name__)


class WorkerDeclaration:
    """Declares what a worker needs: the levels, and its queues with their bindings.

    The worker's consumer and its modules have a connection each. The first one that connects
    declares for all of them. When one of them is lost, the broker may have lost its state: the next
    one that connects looks for what is missing, and declares the levels only then. After a restart
    of the broker all workers connect at once, and to look takes a tenth of the time.

    Args:
        app: The worker's application.
    """

    def __init__(self, app: DelayingCelery) -> None:
        self._app = app
        self._lock = Lock()
        self._has_declared = False
        #: The brokers where everything is declared. With a fail-over list, connections may reach
        #: different brokers.
        self._brokers: set[str] = set()

    def declare(self, connection: Connection) -> None:
        """Declare everything, unless that was done since the last loss of a connection.

        With ``rabbitdelay_declare = "never"``, check that the levels are there.

        Args:
            connection: A connection that is open.

        Raises:
            LayoutConflict: Another layout is declared under the prefix.
            PermissionMissing: The broker's user may not declare it.
            TopologyIncomplete: Something is missing, and the settings forbid to declare it.
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
        """Bind the queues that nobody else has: exclusive ones, and those for broadcasts.

        Only the connection that has declared an exclusive queue can bind it. To the queue for
        a broadcast, its worker returns a task that was early; if the distribution of another
        application does it, only by the binding.

        Args:
            connection: The connection that has declared them.
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
                # The tasks of a broadcast come by its exchange, and most of them are on time.
                if isinstance(error, AccessRefused) and not is_broadcast:
                    raise
                text = (
                    "No delayed task reaches the queue %r, which cannot be bound to the levels: %s"
                )
                logger.warning(text, queue.name, error)

    def connection_lost(self) -> None:
        """Look for what is missing on the next connection, and declare it."""
        with self._lock:
            self._brokers.clear()


class DelayLevels(RabbitMQStep):
    """Declares the levels and binds the worker's queues, on every connection of its consumer."""

    requires = (Tasks, DelayedDelivery)

    def include(self, consumer: Consumer) -> bool:
        """Replace Celery's ``DelayedDelivery`` step."""
        included: bool = super().include(consumer)
        if included:
            # It would declare Celery's native delayed delivery.
            consumer.steps[:] = [
                step for step in consumer.steps if not isinstance(step, DelayedDelivery)
            ]
        return included

    def start(self, consumer: Consumer) -> None:
        """Declare what is missing; Celery calls this on every new connection.

        Raises:
            InvalidSetting: A ``rabbitdelay_*`` setting is wrong; the worker ends.
            LayoutConflict: Another layout is declared under the prefix; the worker ends.
            PermissionMissing: The broker's user may not declare it; the worker ends.
            TopologyIncomplete: Something is missing, and the settings forbid to declare it; the
                worker ends.
        """
        declaration: WorkerDeclaration = consumer.controller.rabbitdelay_declaration
        with consumer.app.connection_for_write() as connection:
            connect(connection)
            declaration.declare(connection)
        declaration.bind_own_queues(consumer.connection)

    def stop(self, consumer: Consumer) -> None:
        """Celery calls this when the consumer's connection is lost, and when the worker ends."""
        consumer.controller.rabbitdelay_declaration.connection_lost()


class RestoreTasks(RabbitMQStep):
    """Restores each delayed task on its arrival, and says whether and when it runs.

    Tasks that arrive before they are due go back into the levels; see :class:`EarlyTasks`. About
    the others an addition is asked whose bootstep has set ``consumer.strategies.decisions``.
    """

    requires = (DelayLevels,)

    def create(self, consumer: Consumer) -> None:
        """Let what Celery raises about a message of ours concern this message alone."""
        guard_consumer(consumer, partial(_refuse, consumer))

    def start(self, consumer: Consumer) -> None:
        """Wrap the execution strategies, and begin to take early tasks of the new connection."""
        if not isinstance(consumer.strategies, RestoringStrategies):
            takeover = consumer.app.rabbitdelay.settings.takeover
            consumer.strategies = RestoringStrategies(consumer, takeover, Origins(consumer))
        # Without takeover too: a task may leave the levels before it is due.
        strategies = consumer.strategies
        strategies.early_tasks = EarlyTasks(consumer)
        strategies.early_tasks.start()
        bound_bodies(consumer, strategies.early_tasks.refuse_unopened)

    def register_with_event_loop(self, consumer: Consumer, hub: Hub) -> None:
        """Let the event loop run what the thread needs from the worker's own thread."""
        consumer.strategies.early_tasks.register(hub)

    def stop(self, consumer: Consumer) -> None:
        """Take no more tasks of the connection that is lost or closed."""
        strategies = consumer.strategies
        if not isinstance(strategies, RestoringStrategies):
            return
        early_tasks, strategies.early_tasks = strategies.early_tasks, None
        if early_tasks is not None:
            early_tasks.stop()


def _refuse(consumer: Consumer, message: Message, error: Exception) -> None:
    early_tasks: EarlyTasks | None = consumer.strategies.early_tasks
    # Between two connections there is nothing to acknowledge: RabbitMQ redelivers it.
    if early_tasks is not None:
        early_tasks.refuse_unrunnable(message, error)


#: The prefetch count of each module; distribution's is lower, as a message may be an envelope.
PREFETCH: Final = {CHECK_IN: 1000, DISTRIBUTE: 300}

#: Seconds after which both sides take a silent connection for lost.
HEARTBEAT: Final = 60


class Modules(RabbitMQStep):
    """Serves the modules and what additions bring, each in a thread, on a connection of its own.

    They start after the pool, so that pool processes do not inherit their threads and sockets, and
    keep running when the worker's own consumer reconnects.

    Args:
        worker: The worker.
        rabbitdelay_modules: What the command line says; None for what the settings say.
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
        """Find out which modules are served.

        Raises:
            InvalidSetting: There is no such module; the worker ends.
            AdditionMissing: The addition that brings it is not installed; the worker ends.
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
        """Finish what the modules have begun, and end them."""
        for service in self._services:
            service.stopping.set()
        for service in self._services:
            service.stop()


def service_maker(name: str) -> Callable[..., Service]:
    """Return what makes the service of a name; it takes what :func:`module_service` takes."""
    if name not in additions.services:
        return partial(module_service, name=name)
    make: Callable[..., Service] = additions.load(additions.services[name])
    return make


def module_service(app: DelayingCelery, declaration: WorkerDeclaration, name: str) -> ModuleService:
    """Return the service of a module.

    Args:
        app: The worker's application.
        declaration: Declares what the worker needs.
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
    connection = app.connection_for_write(heartbeat=HEARTBEAT)
    return ModuleService(connection, declaration.declare, declaration.connection_lost, module)
