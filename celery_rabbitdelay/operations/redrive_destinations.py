"""Where an application lets undeliverable messages go, whatever their headers say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, Final

from amqp.exceptions import ResourceLocked
from kombu import Connection, Queue

from celery_rabbitdelay.app.application import Celery
from celery_rabbitdelay.exceptions import InvalidDelay, InvalidDestination
from celery_rabbitdelay.levels.delay import Delay, milliseconds
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.allowed import AllowedDestinations
from celery_rabbitdelay.modules.redriving import MAX_ATTEMPTS, Redriving
from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.publishing.destination import may_refuse
from celery_rabbitdelay.publishing.message import MAX_SHORTSTR_BYTES

__all__ = ["NEVER", "check_exists", "redrive_destinations", "redriving_for"]

#: Names of queues and exchanges that never get a message: those of the broker, those by which
#: workers are controlled, and those of events.
NEVER: Final = ("amq.*", "*.pidbox", "celeryev", "celeryev.*")

#: Names of the same kind that an application may have for a queue of its own.
NEVER_UNLESS_OWN: Final = "reply.*"


def redriving_for(
    app: Celery,
    *,
    delay: Delay | None = None,
    to: str | None = None,
    allow: Iterable[str] = (),
    max_attempts: int = MAX_ATTEMPTS,
) -> Redriving:
    """Return what decides how the undeliverable messages of an application are redriven.

    Args:
        app: The application.
        delay: Seconds, or a timedelta, that each message waits at least. None: not longer than
            until it is due.
        to: The queue that gets all messages instead of their own.
        allow: Names of further queues and exchanges that messages may go to; ``*`` and ``?`` stand
            for any characters and for one.
        max_attempts: How often a message may be redriven, this time included.

    Raises:
        InvalidDestination: Nothing is published to the queue ``to``.
        InvalidDelay: The delay is negative or has no meaning.
        DelayTooLong: It is above the layout's capacity, and workers do not serve check-in.
    """
    settings = app.rabbitdelay.settings
    topology: Topology = settings.topology
    delay_ms = None if delay is None else milliseconds(delay)
    if delay_ms is not None and delay_ms < 0:
        raise InvalidDelay(delay, "must not be negative")
    if delay_ms is not None and "check-in" not in settings.modules:
        topology.layout.check_capacity(delay_ms)
    queues = _queues(app)
    allowed = redrive_destinations(app, allow)
    if to is not None:
        _check_name(to, allowed)
    return Redriving(
        topology,
        allowed,
        modules=settings.modules,
        refuses=cache(
            lambda name: may_refuse(queues.get(name) or Queue(name), settings.may_refuse)
        ),
        delay_ms=delay_ms,
        to=to,
        max_attempts=max_attempts,
        bounds=settings.bounds,
    )


def redrive_destinations(app: Celery, allow: Iterable[str] = ()) -> AllowedDestinations:
    """Return where undeliverable messages may go.

    These are the queues of ``task_queues``, ``task_routes`` and the tasks, with their exchanges,
    and what ``rabbitdelay_checkin_allowed`` names. Never the queues and exchanges of the levels, of
    the broker and of Celery's remote control and events, whoever allows them.

    Args:
        app: The application.
        allow: Patterns for the names of further queues and exchanges.
    """
    settings = app.rabbitdelay.settings
    known = AllowedDestinations.of_queues(_queues(app).values())
    never = [*NEVER, app.conf.event_exchange, f"{app.conf.event_queue_prefix}.*"]
    names = known.queues | known.exchanges
    if not any(name.startswith(NEVER_UNLESS_OWN.rstrip("*")) for name in names):
        never.append(NEVER_UNLESS_OWN)
    return AllowedDestinations(
        known.queues,
        known.exchanges,
        (*(settings.checkin_allowed or ()), *allow),
        frozenset(_names_of_levels(settings.topology)),
        tuple(never),
    )


def check_exists(connection: Connection, queue: str) -> None:
    """Check that a queue exists before messages are redirected to it.

    Raises:
        InvalidDestination: It does not.
    """
    # If it is an exclusive queue of another connection, it exists.
    with suppress(ResourceLocked):
        if queue_counts(connection, [Queue(queue)])[queue] is None:
            raise InvalidDestination(queue, "does not exist: declare it first")


def _check_name(queue: str, allowed: AllowedDestinations) -> None:
    size = len(queue.encode(errors="surrogatepass"))
    if not 0 < size <= MAX_SHORTSTR_BYTES:
        raise InvalidDestination(queue, f"has no name of 1 to {MAX_SHORTSTR_BYTES} bytes")
    if allowed.forbids(queue):
        raise InvalidDestination(
            queue, "belongs to the levels, to the broker or to Celery: name one of your own"
        )


def _queues(app: Celery) -> Mapping[str, Queue]:
    """Return the queues that the configuration names.

    Not ``app.amqp.queues``, which grows with every queue that the application sends to.
    """
    queues: Any = app.amqp.Queues(app.conf.task_queues)
    for name in {*_routed(app.conf.task_routes), *_of_tasks(app)}:
        # It makes the queue as Celery does, unless task_create_missing_queues is off.
        with suppress(KeyError):
            queues[name]
    made: Mapping[str, Queue] = queues
    return made


def _routed(routes: object) -> Iterator[str]:
    """Yield the queues that ``task_routes`` names; routers that are functions name none."""
    if isinstance(routes, list | tuple):
        for each in routes:
            # A pair of pattern and route, or routes one after another.
            yield from _routed(dict([each]) if _is_pair(each) else each)
    elif isinstance(routes, Mapping):
        for route in routes.values():
            queue = route.get("queue") if isinstance(route, Mapping) else route
            name = queue.name if isinstance(queue, Queue) else queue
            if isinstance(name, str):
                yield name


def _is_pair(route: object) -> bool:
    return isinstance(route, list | tuple) and len(route) == 2 and isinstance(route[0], str)


def _of_tasks(app: Celery) -> Iterator[str]:
    for task in app.tasks.values():
        queue = getattr(task, "queue", None)
        if isinstance(queue, str) and queue:
            yield queue


def _names_of_levels(topology: Topology) -> Iterator[str]:
    for each in (topology, *topology.former):
        yield from (queue.name for queue in each.queues)
        yield from (exchange.name for exchange in each.exchanges)
        yield from (each.identity.guard.name, each.identity.marker.name)
