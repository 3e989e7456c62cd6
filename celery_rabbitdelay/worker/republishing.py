"""What a worker publishes for messages that it has received."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import amqp
from kombu import Queue

from celery_rabbitdelay.app.delays import Delays
from celery_rabbitdelay.publishing.message import Address, Publication
from celery_rabbitdelay.publishing.producer import DelayedProducer
from celery_rabbitdelay.publishing.publish_loop import PublishPolicy

ItemT = TypeVar("ItemT")

#: The queue that has to exist, if a message is for one; the message; and where it is published.
ToPublish: TypeAlias = tuple[Queue | None, amqp.Message, Address]


def publish_each(
    delays: Delays,
    items: Sequence[ItemT],
    made: Callable[[DelayedProducer, ItemT], ToPublish],
    settled: Callable[[ItemT, Exception | None], None],
    resends: int | None,
) -> None:
    """Publish a message for each item, those for one queue together. Raises nothing.

    Args:
        delays: The ``app.rabbitdelay``.
        items: What messages are made of.
        made: Makes the message of an item; what it raises is the error of that item alone.
        settled: Called once with each item, and with its error if its message is not confirmed.
        resends: How often each is sent again.
    """
    unsettled = {id(item): item for item in items}

    def settle(item: ItemT, error: Exception | None) -> None:
        if unsettled.pop(id(item), None) is not None:
            settled(item, error)

    def publish(producer: DelayedProducer, queue: Queue | None, group: list[Publication]) -> None:
        try:
            producer.publisher.publish_all(
                group,
                PublishPolicy(producer.timeout, resends=resends),
                done=lambda each: settle(each.context, each.error),
                **producer.declarations(queue, ()),
            )
        except Exception as error:  # noqa: BLE001 - it is the error of all that are not confirmed
            for each in group:
                settle(each.context, error)

    try:
        with delays.publisher() as publisher:
            producer = DelayedProducer(publisher, **delays.settings.for_producer)
            groups: dict[str | None, tuple[Queue | None, list[Publication]]] = {}
            for item in items:
                try:
                    queue, message, address = made(producer, item)
                    publication = Publication.of(message, address, item)
                except Exception as error:  # noqa: BLE001 - the others are published
                    settle(item, error)
                    continue
                name = None if queue is None else queue.name
                groups.setdefault(name, (queue, []))[1].append(publication)
            for queue, group in groups.values():
                publish(producer, queue, group)
    except Exception as error:  # noqa: BLE001 - likewise
        for item in items:
            settle(item, error)
