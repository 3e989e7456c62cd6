"""Serving check-in and distribution of former generations, as long as they are on the broker.

After an upgrade to a version that declares another generation, producers and clients of the former
one still publish there, and what waits there comes due for years. Its messages are treated as those
of the present generation, and what has to wait again waits in the present levels. So the former
levels become empty by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from amqp.exceptions import AccessRefused
from kombu import Connection, Queue

from celery_rabbitdelay.modules.service import ModuleService, NothingToServe
from celery_rabbitdelay.publishing.declaration import queue_counts


def services_of_former(service: ModuleService) -> Iterator[ModuleService]:
    """Yield what serves the queue of the same module in each former generation.

    Args:
        service: Serves the module in the present generation.
    """
    present = service.module
    modules = present.topology.module_queues
    for former in present.topology.former:
        former_modules = former.module_queues
        is_checkin = present.queue.name == modules.checkin.name
        queue = former_modules.checkin if is_checkin else former_modules.distribution
        module = replace(present, name=f"{present.name} {former.generation.word}", queue=queue)
        look_for = partial(_look_for, queue, service.declare)
        yield ModuleService(module, service.connection, look_for, service.on_lost)


def _look_for(queue: Queue, declare: Callable[[Connection], None], connection: Connection) -> None:
    """Declare the present generation; raise ``NothingToServe`` if a former queue is gone."""
    declare(connection)
    try:
        exists = queue_counts(connection, [queue])[queue.name] is not None
    except AccessRefused:
        exists = False  # this user is not to serve it
    if not exists:
        raise NothingToServe(queue.name)
