"""Why a message lies in ``undeliverable``: read from its headers. Pure.

RabbitMQ gives no reason when it routes to an alternate exchange. But ``x-death`` has the message's
stops, newest first, and its routing key, which together say where it should have gone next
(https://www.rabbitmq.com/docs/dlx#effects; seen on 3.10.8, 4.0.5 and 4.3.6).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.delay import instant_of, milliseconds_of
from celery_rabbitdelay.levels.headers import UNREADABLE, is_int, later_version, shortened
from celery_rabbitdelay.levels.routing_key import (
    DISTRIBUTION,
    decode_destination,
    encode_destination,
)
from celery_rabbitdelay.levels.topology import Binding, Topology
from celery_rabbitdelay.publishing.destination import topic_matches
from celery_rabbitdelay.publishing.message import MAX_SHORTSTR_BYTES

#: The last millisecond that a datetime can express, of the year 9999.
_LAST_MS: Final = milliseconds_of(datetime.max.replace(tzinfo=UTC))


@dataclass(frozen=True, slots=True)
class Undeliverable:
    """A message that could not be delivered.

    Attributes:
        task_id: The task's id; None if the message is not a Celery task.
        task: The task's name; None if the message is not a Celery task.
        queue: The queue that the message was delayed for; None if unknown.
        due: The instant at which it was to start, aware; None if unknown or after the year 9999.
        reason: Why it could not be delivered, and which of its headers have invalid values.
        last_stop: The last level queue it passed, or None.
        since: When it could not be delivered for the first time, aware; None if no header says it.
    """

    task_id: str | None
    task: str | None
    queue: str | None
    due: datetime | None
    reason: str
    last_stop: str | None
    since: datetime | None = None


def examine(
    headers: Mapping[str, Any], topology: Topology, routing_key: str | None = None
) -> Undeliverable:
    """Say what a message in ``undeliverable`` is and why it is there.

    It never raises, whatever the headers hold: anybody may have published the message.

    Args:
        headers: The message's headers, as the broker returns them.
        topology: The topology that it was published into.
        routing_key: ``message.delivery_info["routing_key"]``. Only a message that never was in a
            queue of the levels needs it: its headers do not say where it was published.
    """
    reader = _HeaderReader(headers)
    last_stop, key, cause = reader.death()
    by_broker = _by_broker(topology, last_stop, cause)
    key = key if key is not None else routing_key
    queue = reader.text(header_names.QUEUE)
    word = key.split(".")[-1] if key else ""
    if queue is None and word not in ("", encode_destination(DISTRIBUTION)):
        queue = decode_destination(word)
    due, since = reader.instant(header_names.DUE), reader.since()
    task_id, task = reader.text("id"), reader.text("task")
    reason = (
        # First: a message that no module has put here may have any headers of its sender.
        by_broker
        or reader.text(header_names.REASON)
        or reader.unreadable_properties()
        or _reason(topology, last_stop, key, queue)
    )
    later = later_version(headers, None)
    notes = [later] if later is not None and later not in reason else []
    reasons = "; ".join([reason, *notes, *reader.unreadable])
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
    """Return a text without lone surrogates, which py-amqp reads and no terminal writes."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode()


class _HeaderReader:
    """Reads headers that anybody may have written, and notes what cannot be read.

    Attributes:
        unreadable: A text for each invalid header: its name, its value, what was expected.
    """

    def __init__(self, headers: Mapping[str, Any]) -> None:
        self._headers = headers
        self.unreadable: list[str] = []
        deaths = headers.get("x-death")
        newest = deaths[0] if isinstance(deaths, list) and deaths else None
        self._newest_death: Mapping[str, Any] = newest if isinstance(newest, Mapping) else {}
        if deaths and not isinstance(newest, Mapping):
            self._note("x-death", deaths, "a list of tables")

    def text(self, name: str) -> str | None:
        """Return a header that should be a text; None if it is missing or something else."""
        value = self._headers.get(name)
        if value is None or isinstance(value, str):
            return value or None
        self._note(name, value, "a text")
        return None

    def instant(self, name: str) -> datetime | None:
        """Return a header in milliseconds since 1970; None if it is missing or no datetime."""
        value = self._headers.get(name)
        if value is None:
            return None
        if not is_int(value, 0, _LAST_MS):
            self._note(name, value, "an instant before the year 10000")
            return None
        return instant_of(value)

    def since(self) -> datetime | None:
        """Return when a module first failed to deliver it, or when it left its last stop."""
        failed = self.instant(header_names.FAILED_SINCE)
        if failed is not None:
            return failed
        died = self._newest_death.get("time")
        # py-amqp returns naive datetimes in UTC.
        return died.replace(tzinfo=UTC) if isinstance(died, datetime) else None

    def unreadable_properties(self) -> str | None:
        """Return why the message could not be read, if so."""
        why = self.text(UNREADABLE)
        return None if why is None else f"its properties cannot be read: {why}"

    def death(self) -> tuple[str | None, str | None, object]:
        """Return the queue that the message was dead-lettered from last, its key, and why."""
        newest = self._newest_death
        stop, keys = newest.get("queue"), newest.get("routing-keys")
        key = keys[0] if isinstance(keys, list) and keys else keys or None
        if not isinstance(stop, str | None) or not isinstance(key, str | None):
            self._note("x-death", newest, "a queue and its routing keys")
            return None, None, None
        if key and len(key.encode(errors="surrogatepass")) > MAX_SHORTSTR_BYTES:
            self._note("x-death", key, "a routing key that AMQP can carry")
            key = None
        return stop or None, key, newest.get("reason")

    def _note(self, name: str, value: object, expected: str) -> None:
        self.unreadable.append(f"its header {name} is {shortened(value)}, not {expected}")


def _by_broker(topology: Topology, last_stop: str | None, cause: object) -> str | None:
    """Return why the broker took a message out of a module's queue; None if it has not."""
    modules = topology.module_queues
    if last_stop not in (modules.checkin.name, modules.distribution.name):
        return None
    if cause == "expired":
        return (
            f"it expired in {last_stop}, before a worker took it: by its own expiration, or by a "
            "policy's message-ttl"
        )
    if cause == "rejected":
        return (
            f"a worker rejected it unread from {last_stop}: it is larger than "
            "rabbitdelay_max_message_bytes, or than what RabbitMQ takes; the worker's log says more"
        )
    if cause == "maxlen":
        return f"{last_stop} was full, by a policy's max-length"
    return f"delivery limit of {last_stop} exceeded: no worker acknowledged it"


def _reason(topology: Topology, last_stop: str | None, key: str | None, queue: str | None) -> str:
    modules = topology.module_queues
    if last_stop == modules.meditation.name:
        return f"{modules.meditated.name} had no binding to {modules.checkin.name}"
    if key is None:
        return "it was not dead-lettered by a level queue, and no routing key was given"
    if last_stop is None:
        start = _entrance(topology, key)
    else:
        stops = {stop.name: stop for stop in topology.queues}
        if last_stop not in stops:
            return f"it came out of {last_stop}, which is not a queue of this layout"
        start = (stops[last_stop].queue_arguments or {}).get("x-dead-letter-exchange")
    path = list(_path(topology, start, key)) if start else []
    if start != topology.delivery.name and not path:
        return f"its routing key {key!r} does not belong to this layout"
    if path and path[-1].target == modules.distribution.name:
        *others, missing = path
        likely = f"{missing.source} had no binding to {missing.target}"
    elif not path or path[-1].target == topology.delivery.name:
        likely, others = f"no queue {queue!r} is bound to {topology.delivery.name}", path
    else:
        *others, missing = path
        likely = f"{missing.source} had no binding for {_digits(missing)} ({missing.target})"
    return ", or ".join([likely, *(f"{b.source} had none for {_digits(b)}" for b in others)])


def _entrance(topology: Topology, key: str) -> str | None:
    """Return the exchange that a message is published to: that of its first non-zero digit."""
    digits = topology.keys.digits(key)
    if digits is None:
        return None
    levels = zip(topology.layout.levels, digits, strict=True)
    first = next((level.name for level, digit in levels if digit != "0"), None)
    return f"{topology.prefix}.{first}" if first else topology.delivery.name


def _path(topology: Topology, exchange: str, key: str) -> Iterator[Binding]:
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
