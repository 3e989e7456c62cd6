"""A worker's part in the registry: decisions on arrival, the return of what was paused, inspection.

Importing this module registers Celery's commands ``scheduled`` and ``query_task`` anew: they also
show the tracked tasks that wait. No worker holds these, so each worker with a registry answers for
all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from threading import Event, Thread
from typing import Any, Final, Protocol

import amqp
import celery
from celery.utils.log import get_logger
from celery.worker import control
from celery.worker.control import inspect_command
from celery.worker.worker import WorkController
from kombu.asynchronous.hub import Hub
from kombu.utils.functional import maybe_list

from celery_rabbitdelay.app.delays import DelayingCelery, Delays
from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.levels.headers import QUEUE, ROUTING_KEY
from celery_rabbitdelay.levels.routing_key import (
    DISTRIBUTION,
    decode_destination,
    encode_destination,
)
from celery_rabbitdelay.levels.warning_limit import WarningLimit
from celery_rabbitdelay.publishing.declaration import opened_channel
from celery_rabbitdelay.publishing.kombu_internals import connect, find_queues
from celery_rabbitdelay.publishing.message import headers_of
from celery_rabbitdelay.publishing.wire import Wire, read_unreadable_properties
from celery_rabbitdelay.registry.application import registry_of
from celery_rabbitdelay.registry.decisions import Decisions
from celery_rabbitdelay.registry.index import Filter, Index, Pending
from celery_rabbitdelay.registry.pauses import paused_since
from celery_rabbitdelay.registry.record import Said
from celery_rabbitdelay.worker.bootsteps import Modules, RestoreTasks
from celery_rabbitdelay.worker.celery_internals import RabbitMQStep
from celery_rabbitdelay.worker.restore import RestoringStrategies

logger = get_logger(__name__)

#: Seconds between two looks at what is paused.
EVERY: Final = 1.0

#: Seconds for which a worker goes on after a resume: another one may not know of it yet.
AFTERWARDS: Final = 10.0

#: Seconds that a stopping worker waits for the thread.
STOP_TIMEOUT: Final = 10.0

#: How many tasks that wait are shown, the next ones.
MAX_SHOWN: Final = 100

#: The priority that Celery shows for tasks that a worker holds for their eta.
PRIORITY: Final = 6

_celerys: Final[Any] = control


class _Consumer(Protocol):
    """The consumer of a worker, after the kernel's own bootstep."""

    app: DelayingCelery
    strategies: RestoringStrategies


class DecideOnArrival(RabbitMQStep):
    """Asks the registry about each delayed task that is due; see :class:`.Decisions`."""

    requires = (RestoreTasks,)

    _decisions: Decisions | None = None

    def start(self, consumer: _Consumer) -> None:
        """Begin to ask about the tasks of a new connection."""
        strategies = consumer.strategies
        if consumer.app.rabbitdelay.setting("registry_url") and strategies.early_tasks is not None:
            self._decisions = strategies.decisions = Decisions(consumer, strategies.early_tasks)
            self._decisions.start()

    def register_with_event_loop(self, consumer: _Consumer, hub: Hub) -> None:
        """Let the event loop run what the thread needs from the worker's own thread."""
        if self._decisions is not None:
            self._decisions.register(hub)

    def stop(self, consumer: _Consumer) -> None:
        """Ask nothing more about tasks of the connection that is lost or closed."""
        decisions, self._decisions = self._decisions, None
        if decisions is not None:
            consumer.strategies.decisions = None
            decisions.stop()


class ReturnPaused(RabbitMQStep):
    """Returns tasks to their queues that were paused and are not any more, in a thread.

    After a resume it takes all messages out of the queue of paused tasks, and rejects those that
    are not paused any more: so RabbitMQ passes them on, as if their time in the queue was over. The
    others are requeued at the end, when the channel is closed; or when the worker dies.
    """

    requires = (Modules,)

    _thread: Thread | None = None

    def start(self, worker: WorkController) -> None:
        """Begin to look for what was paused and is not any more."""
        self._delays: Delays = worker.app.rabbitdelay
        if self._delays.setting("registry_url"):
            self._stopping = Event()
            self._failures = WarningLimit(logger, "Attempts to return what was paused")
            self._thread = Thread(target=self._run, name="rabbitdelay-resumes", daemon=True)
            self._thread.start()

    def stop(self, worker: WorkController) -> None:
        """Return nothing more, and end the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopping.set()
            thread.join(STOP_TIMEOUT)

    def _run(self) -> None:
        before: Mapping[str, int] | None = None
        until = 0.0
        while not self._stopping.wait(EVERY):
            try:
                paused: Mapping[str, int] = registry_of(self._delays).pauses.known()
                # At first: the last pause may have ended while no worker was there.
                if not paused if before is None else before.keys() - paused.keys():
                    until = time.monotonic() + AFTERWARDS
                before = paused
                if time.monotonic() < until:
                    self._return_all()
            except RegistryUnavailable:
                continue  # what was paused stays paused
            except Exception as error:  # noqa: BLE001 - the thread has to live on
                if self._failures.allows(repr(error)):
                    logger.warning("What was paused returns later: %r", error)

    def _return_all(self) -> None:
        """Look at each message that is in the queue, and return what is not paused any more."""
        settings, returned = self._delays.settings, 0
        queue = self._delays.topology.module_queues.paused.name
        with self._delays.app.connection_for_write(heartbeat=0) as connection:
            connect(connection)
            # Bodies do not matter: no message is published anew.
            read_unreadable_properties(connection, settings.max_message_bytes)
            in_time = Wire(connection).answers_within(settings.confirm_timeout)
            with in_time, opened_channel(connection) as channel:
                (found,) = find_queues(channel, [queue])
                for _ in range(found[0] if found else 0):
                    message = None if self._stopping.is_set() else channel.basic_get(queue)
                    if message is None:
                        break
                    if not self._is_paused(message):
                        tag = message.delivery_info["delivery_tag"]
                        channel.basic_reject(tag, requeue=False)
                        returned += 1
        if returned:
            logger.info("Tasks that were paused return to their queues: %d", returned)

    def _is_paused(self, message: amqp.Message) -> bool:
        """Return whether a message is, or may be, of a task that is paused."""
        paused, headers = registry_of(self._delays).pauses.known(), headers_of(message)
        task, word = headers.get("task"), message.delivery_info["routing_key"].split(".")[-1]
        if not isinstance(task, str):  # Celery's message protocol 1
            return bool(paused)
        queue = headers.get(QUEUE)
        if word == encode_destination(DISTRIBUTION):
            queue = queue or headers.get(ROUTING_KEY)  # of the default exchange
        else:
            queue = decode_destination(word) or queue
        return bool(paused_since(paused, task, str(queue)))


class _State(Protocol):
    """What a control command gets of its worker."""

    app: celery.Celery
    hostname: str


@inspect_command(name="scheduled", alias="dump_schedule")
def scheduled(state: _State, **options: object) -> list[Mapping[str, object]]:
    """List of currently scheduled ETA/countdown tasks, and of tracked tasks that wait next."""
    waiting = _waiting(state, "scheduled", lambda index: islice(index.pending(Filter()), MAX_SHOWN))
    shown = [{"eta": each["eta"], "priority": PRIORITY, "request": each} for each in waiting]
    return [*_celerys.scheduled(state, **options), *shown]


@inspect_command(name="query_task", variadic="ids", signature="[id1 [id2 [... [idN]]]]")
def query_task(state: _State, ids: Sequence[str], **options: object) -> dict[str, object]:
    """Query for task information by id, also of tracked tasks that wait."""
    found: dict[str, object] = _celerys.query_task(state, ids, **options)
    missing = [task_id for task_id in maybe_list(ids) or () if task_id not in found]
    waiting = _waiting(state, "query_task", lambda index: index.tasks(missing)) if missing else []
    return {**found, **{str(each["id"]): ("scheduled", each) for each in waiting}}


def _waiting(
    state: _State, command: str, look_up: Callable[[Index], Iterable[Pending]]
) -> list[dict[str, object]]:
    """Return the requests of tracked tasks that wait, as Celery shows those that a worker holds.

    None without a registry, or while Redis does not answer.
    """
    delays: Delays | None = getattr(state.app, "rabbitdelay", None)
    if delays is None or not (delays.available and delays.setting("registry_url")):
        return []
    index = registry_of(delays).index
    try:
        tasks = list(look_up(index))
        messages = index.short_messages([each.task_id for each in tasks])
    except RegistryUnavailable as error:
        logger.warning("inspect %s: tasks in the levels are not shown: %s", command, error)
        return []
    return [
        _request(task, Said.by(message), state.hostname)
        for task, message in zip(tasks, messages, strict=True)
    ]


def _request(task: Pending, said: Said, hostname: str) -> dict[str, object]:
    """Return a task as Celery shows one that this worker holds."""
    return {
        "id": task.task_id,
        "name": said.shadow or task.task,
        "args": said.args,
        "kwargs": said.kwargs,
        "type": task.task,
        "hostname": hostname,
        "time_start": None,
        "acknowledged": False,
        "delivery_info": {
            "exchange": said.exchange,
            "routing_key": said.routing_key,
            "priority": said.priority,
            "redelivered": False,
        },
        "worker_pid": None,
        "eta": task.due.isoformat(),
        "key": task.key,
        "job": task.job,
    }
