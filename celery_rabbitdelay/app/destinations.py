"""Where check-in and distribution may publish, according to the application's configuration.

A worker or a command reads the destinations once, when it starts. ``app.amqp.queues`` does not
count, since it grows with every queue that the application sends to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from glob import escape
from typing import Any, Final

from celery.app.routes import MapRoute
from kombu import Queue
from kombu.common import Broadcast

from celery_rabbitdelay.app.delays import DelayingCelery
from celery_rabbitdelay.modules.limits import AllowedDestinations

#: Queues and exchanges that no module publishes to: the broker's own, and Celery's for
#: remote control, its replies, and events.
NEVER: Final = ("amq.*", "*.pidbox", "celeryev", "celeryev.*")

#: The UUID that ends the name of a worker's queue for a broadcast, or of a receiver's queue for
#: events, and a pattern for any UUID.
_UUID: Final = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")
_ANY_UUID: Final = "-".join("?" * length for length in (8, 4, 4, 4, 12))


def checkin_destinations(app: DelayingCelery) -> AllowedDestinations:
    """Return where check-in may publish: its setting's list, or else the queues of ``task_queues``.

    Args:
        app: The application.
    """
    patterns = app.rabbitdelay.settings.checkin_allowed
    if patterns is not None:
        return _without_reserved(AllowedDestinations.matching(patterns), app)
    # If task_queues is unset, Celery makes the default queue.
    queues = app.amqp.Queues(app.conf.task_queues)
    return _without_reserved(AllowedDestinations.of_queues(queues.values()), app)


def distribution_reach(app: DelayingCelery) -> AllowedDestinations:
    """Return where distribution may publish: its setting's list, or else any known destination.

    Args:
        app: The application. In a worker, the queues that it consumes from at its start count too.
    """
    patterns = app.rabbitdelay.settings.distribution_allowed
    if patterns is not None:
        return _without_reserved(AllowedDestinations.matching(patterns), app)
    named = configured_destinations(app)
    consumed: Iterable[Queue] = app.amqp.queues.consume_from.values()
    queues = {*configured_queues(app).values(), *consumed}
    # Each worker has its own queue for a broadcast, whose name ends with a UUID.
    broadcasts = [
        _UUID.sub(_ANY_UUID, escape(queue.name)) for queue in queues if isinstance(queue, Broadcast)
    ]
    return replace(
        named,
        queues=named.queues | {queue.name for queue in queues},
        patterns=(*named.patterns, *broadcasts),
        is_list=False,
    )


def configured_destinations(app: DelayingCelery) -> AllowedDestinations:
    """Return the destinations in the configuration.

    The destinations are the queues of ``task_queues``, ``task_routes`` and the tasks, with their
    exchanges, and the names in ``rabbitdelay_checkin_allowed``.

    Args:
        app: The application.
    """
    known = AllowedDestinations.of_queues(configured_queues(app).values())
    return _without_reserved(
        replace(known, patterns=tuple(app.rabbitdelay.settings.checkin_allowed or ())), app
    )


def configured_queues(app: DelayingCelery) -> Mapping[str, Queue]:
    """Return the queues in the configuration, keyed by their names."""
    queues = app.amqp.Queues(app.conf.task_queues)
    for name in {app.conf.task_default_queue, *_named(app)}:
        # The lookup makes the queue, as Celery does, unless task_create_missing_queues is off.
        with suppress(KeyError):
            queues[name]
    made: Mapping[str, Queue] = queues
    return made


def _without_reserved(allowed: AllowedDestinations, app: DelayingCelery) -> AllowedDestinations:
    """Exclude the destinations that no module ever publishes to.

    These destinations are the levels and their modules, the broker's own names, and the names in
    the settings of Celery's remote control, its replies and its events.
    """
    conf, topology = app.conf, app.rabbitdelay.settings.topology
    names = {conf.event_exchange, conf.result_exchange}
    names.update(exchange.name for exchange in topology.all_exchanges)
    names.update(queue.name for queue in (*topology.queues, topology.probe))
    # Celery's name for a receiver's queue for events; other queues may have the same prefix.
    events = f"{escape(conf.event_queue_prefix)}.{_ANY_UUID}"
    return replace(allowed, never=frozenset(names), never_patterns=(*NEVER, events))


def _named(app: DelayingCelery) -> Iterator[str]:
    """Yield the names of queues in ``task_routes`` and tasks; router functions are not called."""
    maps: list[Any] = [each for each in app.amqp.routes if isinstance(each, MapRoute)]
    routes = [route for each in maps for route in (*each.map.values(), *each.patterns.values())]
    queues = [route.get("queue") if isinstance(route, Mapping) else route for route in routes]
    for queue in (*queues, *(getattr(task, "queue", None) for task in app.tasks.values())):
        name = queue.name if isinstance(queue, Queue) else queue
        if isinstance(name, str) and name:
            yield name
