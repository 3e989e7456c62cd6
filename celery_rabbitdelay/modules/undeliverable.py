"""Why a message lies in ``undeliverable``: read from its headers. Pure; opens no connection.

RabbitMQ routes to an alternate exchange without a word of explanation. But ``x-death`` has the
message's stops, newest first, and its routing key, which says where it should have gone next
(https://www.rabbitmq.com/docs/dlx#effects; seen on 3.10.8, 4.0.5 and 4.3.6).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from celery_rabbitdelay.levels import headers as names
from celery_rabbitdelay.levels.entities import Binding
from celery_rabbitdelay.levels.routing_key import decode_destination
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.destination import topic_matches

__all__ = ["Undeliverable", "examine"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Undeliverable:
    """A message that could not be delivered.

    Attributes:
        task_id: The task's id; None where the message is no Celery task.
        task: The task's name; None where the message is no Celery task.
        queue: The queue that the message was delayed for; None where nothing tells.
        due: The instant at which it was to start, aware; None where the message does not say.
        reason: Why it could not be delivered.
        last_stop: The queue of the levels that it came out of last; None where it was in none.
    """

    task_id: str | None
    task: str | None
    queue: str | None
    due: datetime | None
    reason: str
    last_stop: str | None


def examine(
    headers: Mapping[str, Any], topology: Topology, routing_key: str | None = None
) -> Undeliverable:
    """Say what a message in ``undeliverable`` is and why it is there.

    Args:
        headers: The message's headers, as the broker hands them out.
        topology: The topology that it was published into.
        routing_key: ``message.delivery_info["routing_key"]``. Only a message that no level took
            needs it: its headers do not tell the way that it should have gone.
    """
    death: Mapping[str, Any] = next(iter(headers.get("x-death") or ()), {})
    last_stop = death.get("queue")
    key = next(iter(death.get("routing-keys") or ()), routing_key)
    queue = headers.get(names.QUEUE) or (decode_destination(key.split(".")[-1]) if key else None)
    due = headers.get(names.DUE)
    return Undeliverable(
        task_id=headers.get("id"),
        task=headers.get("task"),
        queue=queue,
        due=None if due is None else _EPOCH + timedelta(milliseconds=due),
        reason=headers.get(names.REASON) or _reason(topology, last_stop, key, queue),
        last_stop=last_stop,
    )


def _reason(topology: Topology, last_stop: str | None, key: str | None, queue: str | None) -> str:
    modules = (topology.modules.checkin.name, topology.modules.distribution.name)
    if last_stop in modules:
        return f"the workers that took it from {last_stop} never finished it"
    if key is None:
        return "none of the levels took it; its headers do not tell which should have"
    if last_stop is None:
        start = _entrance(topology, key)
    else:
        stops = {stop.name: stop for stop in topology.queues}
        if last_stop not in stops:
            return f"it came out of {last_stop}, which is no queue of this layout"
        start = (stops[last_stop].queue_arguments or {}).get("x-dead-letter-exchange")
    way = list(_way(topology, start, key)) if start else []
    if start != topology.delivery.name and not way:
        return f"its routing key {key!r} is none of this layout"
    if not way or way[-1].target == topology.delivery.name:
        likely, others = f"no queue {queue!r} is bound to {topology.delivery.name}", way
    else:
        *others, missing = way
        likely = f"{missing.source} had no binding for {_digits(missing)} ({missing.target})"
    return ", or ".join([likely, *(f"{b.source} had none for {_digits(b)}" for b in others)])


def _entrance(topology: Topology, key: str) -> str | None:
    """The exchange that a message is published to: of its first digit that is not zero."""
    digits = topology.keys.digits(key)
    if digits is None:
        return None
    levels = zip(topology.layout.levels, digits, strict=True)
    first = next((level.name for level, digit in levels if digit != "0"), None)
    return f"{topology.prefix}.{first}" if first else topology.delivery.name


def _way(topology: Topology, exchange: str, key: str) -> Iterator[Binding]:
    """The bindings from an exchange to the next queue or to delivery, one of which was missing."""
    words = key.split(".")
    matching = {
        binding.source: binding
        for binding in topology.bindings
        if binding.pattern and topic_matches(binding.pattern.split("."), words)
    }
    while binding := matching.get(exchange):
        yield binding
        if not binding.target_is_exchange:
            return
        exchange = binding.target


def _digits(binding: Binding) -> str:
    digits = ".".join(word for word in binding.pattern.split(".") if word.isdigit())
    return f"digits {digits}" if "." in digits else f"digit {digits}"
