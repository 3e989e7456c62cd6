"""The permissions that the application's user lacks, asked over AMQP.

The management API shows permissions to administrators only. So the broker is asked to do what it
either refuses or does without a change:

- to declare what exists, with the arguments that it should have;
- to remove a binding that does not exist, which takes the permissions of a real one;
- to consume with an argument that RabbitMQ refuses after it has checked the permission.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, Final, TypeAlias

from amqp.exceptions import AccessRefused, ChannelError
from kombu import Connection, Exchange, Queue

from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.levels.entities import CHECK_IN, DISTRIBUTE
from celery_rabbitdelay.operations.verify.findings import FoundRow
from celery_rabbitdelay.operations.verify.management import Inventory
from celery_rabbitdelay.publishing.kombu_internals import declared_arguments

#: A binding key that nobody uses: the bindings that are removed do not exist.
NO_KEY: Final = "rabbitdelay.verify"

#: A permission, what it is for, as ``queue`` and a name, and a method that needs it.
_Question: TypeAlias = tuple[str, str, str, Callable[[Any], object]]


def check_permissions(
    connection: Connection, settings: Settings, queues: Sequence[Queue], inventory: Inventory
) -> Iterator[FoundRow]:
    """Find permissions that producers and workers need and this user does not have.

    Args:
        connection: An open connection of the user.
        settings: The application's settings.
        queues: The queues of its tasks.
        inventory: What exists; nothing else is asked for.
    """
    exist = {"exchange": inventory.exchanges, "queue": inventory.queues}
    user = connection.userid or "guest"
    channel: Any = connection.channel()
    for permission, kind, name, method in _questions(settings, queues):
        try:
            if name in exist[kind]:
                method(channel)
                # Answered behind the method, or not at all if the broker has refused it. A
                # declaration that waited for its own answer would have the broker ask the queue's
                # leader.
                channel.basic_qos(0, 1, False)
        except AccessRefused as refused:  # py-amqp has opened the channel again
            # A method may need several permissions.
            if f"{kind} '{name}'" in str(refused):
                yield (
                    "permission-missing",
                    f"{kind} {name}",
                    {"user": user, "permission": permission},
                )
        except ChannelError:
            pass
    channel.close()


def _questions(settings: Settings, queues: Sequence[Queue]) -> Iterator[_Question]:
    topology, modules = settings.topology, settings.topology.module_queues
    delivery = topology.delivery.name
    if settings.declare == "auto":
        declared = [queue for queue in queues if not getattr(queue, "no_declare", False)]
        for exchange in (topology.identity.guard, *topology.exchanges, topology.identity.marker):
            yield "configure", "exchange", exchange.name, _declaring(exchange)
        for queue in (*topology.queues, *declared):
            yield "configure", "queue", queue.name, _declaring(queue)
        for queue in declared:
            unbind = methodcaller("queue_unbind", queue.name, delivery, NO_KEY)
            yield "write", "queue", queue.name, unbind
            yield "read", "exchange", delivery, unbind
    for exchange in topology.exchanges:
        if exchange != modules.meditated:
            source = modules.undeliverable.name if exchange.name == delivery else delivery
            unbind = methodcaller("exchange_unbind", exchange.name, source, NO_KEY)
            yield "write", "exchange", exchange.name, unbind
    for module, queue in ((CHECK_IN, modules.checkin), (DISTRIBUTE, modules.distribution)):
        if module in settings.modules:
            yield "read", "queue", queue.name, partial(_consume_nothing, queue.name)


def _declaring(entity: Exchange | Queue) -> Callable[[Any], object]:
    flags: dict[str, Any] = {
        "durable": entity.durable,
        "auto_delete": entity.auto_delete,
        "nowait": True,
    }
    if isinstance(entity, Queue):
        # Not kombu's own method, which calls the queue's hook on_declared.
        flags["arguments"] = declared_arguments(entity)
        return methodcaller("queue_declare", entity.name, **flags)
    flags["arguments"] = entity.arguments
    return methodcaller("exchange_declare", entity.name, entity.type, **flags)


def _consume_nothing(name: str, channel: Any) -> None:
    # Should a broker take it after all, it gets one message and gives it back.
    channel.basic_qos(0, 1, False)
    tag = channel.basic_consume(name, arguments={"x-priority": "refused"})
    channel.basic_cancel(tag)
    channel.basic_recover(requeue=True)
