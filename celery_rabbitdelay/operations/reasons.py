"""Finds out from a message's headers why it is undeliverable. Does no I/O.

RabbitMQ gives no reason when it routes to an alternate exchange. But ``x-death`` has the message's
stops, newest first, and its routing key, which together give the stop that should have come next
(https://www.rabbitmq.com/docs/dlx#effects; seen on RabbitMQ 3.10.8, 4.0.5 and 4.3.6).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import compress, count
from typing import Any, Final

from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.levels.headers import UNREADABLE, later_version, shortened
from celery_rabbitdelay.levels.routing_key import (
    DISTRIBUTION,
    decode_destination,
    encode_destination,
)
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.message import MAX_SHORTSTR_BYTES

#: Why the broker dead-letters a message from a module's queue, keyed by the reason in ``x-death``.
CAUSES: Final = {
    "expired": "it expired in {}, before a worker took it: by its own expiration, or by a policy's "
    "message-ttl",
    "rejected": "a worker rejected it unread from {}: it is larger than "
    "rabbitdelay_max_message_bytes, or than RabbitMQ allows; see the worker's log",
    "maxlen": "{} was full: a policy sets max-length",
    "delivery_limit": "delivery limit of {} exceeded: no worker acknowledged it",
}


@dataclass(frozen=True, slots=True)
class Undeliverable:
    """A message that could not be delivered.

    Attributes:
        task_id: The task's id; None if the message is not a Celery task.
        task: The task's name; None if the message is not a Celery task.
        queue: The queue that the message was delayed for; None if unknown.
        due: The due time, aware; None if unknown or after the year 9999.
        reason: Why the message could not be delivered, and which headers have invalid values.
        last_stop: The last level queue that the message passed, or None.
        since: When the first delivery failed, aware; None if unknown.
    """

    task_id: str | None
    task: str | None
    queue: str | None
    due: datetime | None
    reason: str
    last_stop: str | None
    since: datetime | None = None


def examine(
    headers: Mapping[str, object], topology: Topology, routing_key: str | None = None
) -> Undeliverable:
    """Return the task of a message in ``undeliverable``, and why the message is there.

    Invalid headers raise no error, because any client may have published the message.

    Args:
        headers: The message's headers, as the broker returns them.
        topology: The topology that the message was published into.
        routing_key: ``message.delivery_info["routing_key"]``. Needed only for a
            message that was never in a queue of the levels, because its headers lack the key.
    """
    parsed, problems = header_names.parse(headers)
    last_stop, key, cause, died = _last_death(headers, problems)
    key = key if key is not None else routing_key
    queue, word = parsed.queue, key.split(".")[-1] if key else ""
    if queue is None and word not in ("", encode_destination(DISTRIBUTION)):
        queue = decode_destination(word)
    task_id, task, unreadable = (
        _text(headers, name, problems) for name in ("id", "task", UNREADABLE)
    )
    # py-amqp returns naive datetimes in UTC.
    since = died.replace(tzinfo=UTC) if isinstance(died, datetime) else None
    if parsed.failures is not None:
        since = _instant(parsed.failures.since_ms, header_names.FAILED_SINCE, problems)
    reason = (
        # The broker's own reason comes first, because the sender wrote all other headers.
        _by_broker(topology, last_stop, cause)
        or parsed.reason
        or (unreadable and f"its properties cannot be read: {unreadable}")
        or _reason(topology, last_stop, key, queue)
    )
    due = _instant(parsed.due_ms, header_names.DUE, problems)
    later = later_version(headers, None)
    notes = [later] if later is not None and later not in reason else []
    reasons = "; ".join([reason, *notes, *problems.values()])
    return Undeliverable(
        _printable(task_id),
        _printable(task),
        _printable(queue),
        due,
        _printable(reasons) or reasons,
        last_stop,
        since,
    )


def _printable(text: str | None) -> str | None:
    """Escape lone surrogates, which py-amqp reads and no terminal can print."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode()


def _text(headers: Mapping[str, object], name: str, problems: dict[str, str]) -> str | None:
    """Return a header's text; None if it is missing or not a string."""
    value = headers.get(name)
    if value is None or isinstance(value, str):
        return value or None
    problems[name] = f"its header {name} is {shortened(value)}, not a string"
    return None


def _instant(at_ms: int | None, name: str, problems: dict[str, str]) -> datetime | None:
    try:
        return None if at_ms is None else instant_of(at_ms)
    except OverflowError:
        problems[name] = f"its header {name} is {at_ms}, not an instant before the year 10000"
        return None


def _last_death(
    headers: Mapping[str, Any], problems: dict[str, str]
) -> tuple[str | None, str | None, object, object]:
    """Return the queue, key, reason and time of a message's last dead-lettering."""
    deaths = headers.get("x-death")
    newest = deaths[0] if isinstance(deaths, list) and deaths else deaths or {}
    is_table = isinstance(newest, Mapping) and isinstance(deaths, list | None)
    stop, keys = (newest.get("queue"), newest.get("routing-keys")) if is_table else (None, None)
    key = keys[0] if isinstance(keys, list) and keys else keys or None
    is_text = isinstance(stop, str | None) and isinstance(key, str | None)
    is_long = is_text and len((key or "").encode(errors="surrogatepass")) > MAX_SHORTSTR_BYTES
    if not is_table or not is_text or is_long:
        problems["x-death"] = f"its header x-death is {shortened(deaths)}, not RabbitMQ's own"
        return None, None, None, None
    return stop or None, key, newest.get("reason"), newest.get("time")


def _by_broker(topology: Topology, last_stop: str | None, cause: object) -> str | None:
    """Return why a message was dead-lettered from a module's queue; None for other queues."""
    modules = topology.module_queues
    if last_stop not in (modules.checkin.name, modules.distribution.name):
        return None
    return CAUSES.get(str(cause), CAUSES["delivery_limit"]).format(last_stop)


def _reason(topology: Topology, last_stop: str | None, key: str | None, queue: str | None) -> str:
    modules = topology.module_queues
    if last_stop == modules.meditation.name:
        return f"{modules.meditated.name} had no binding to {modules.checkin.name}"
    if key is None:
        return "unknown: no level queue dead-lettered it, and no routing key was given"
    try:
        start, following = _gap(topology, last_stop, key)
    except (LookupError, ValueError):
        where = f"it came from {last_stop}, and " if last_stop else ""
        return f"{where}its routing key {key!r} does not belong to this layout"
    delivery = topology.delivery.name
    gap = f"a binding is missing between {start} and {following}"
    if following != delivery:
        return gap
    if key.split(".")[-1] == encode_destination(DISTRIBUTION):
        return f"a binding is missing between {start} and {modules.distribution.name}"
    unbound = f"no queue {queue!r} is bound to {delivery}"
    return unbound if start == delivery else f"{unbound}, or {gap}"


def _gap(topology: Topology, last_stop: str | None, key: str) -> tuple[str, str]:
    """Return the exchange after a stop, and the next stop; delivery after the last stop.

    Raises:
        LookupError: The stop or the key does not belong to this layout.
        ValueError: The key does not belong to this layout.
    """
    exchanges = [*(each.name for each in topology.level_exchanges), topology.delivery.name]
    digits = tuple(map(int, topology.keys.digits(key) or ("none",)))
    shards = [topology.keys.shard_words(number) for number in range(topology.shards)]
    shard = shards.index(tuple(key.split(".")[: -1 - len(digits)]))
    if last_stop is None:
        first = next(compress(count(), digits), len(digits))
    else:
        left = {each.name: each.queue_arguments or {} for each in topology.digit_queues}
        first = exchanges.index(left[last_stop]["x-dead-letter-exchange"])
    stops = topology.route_of(digits, first, shard, "").stops
    return exchanges[first], stops[0] if stops else exchanges[-1]
