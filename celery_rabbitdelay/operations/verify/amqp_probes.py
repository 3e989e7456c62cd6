"""What AMQP alone tells: what exists, what this user may do, and what time it is at the broker.

Each probe is a method that changes nothing, whether the broker executes or refuses it:

- a declaration of what exists already, passive or with its own arguments;
- the removal of a binding that does not exist, which takes the permissions of a real one;
- a consumer with an argument that RabbitMQ refuses after it has checked the permission.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import amqp
from amqp.exceptions import AccessRefused, ChannelError, NotFound, PreconditionFailed
from kombu import Connection, Exchange, Queue

from celery_rabbitdelay.operations.verify.application import Application
from celery_rabbitdelay.operations.verify.destinations import destination_missing
from celery_rabbitdelay.operations.verify.finding import Finding
from celery_rabbitdelay.operations.verify.layout import differing, layout_conflict, missing
from celery_rabbitdelay.publishing.amqp_methods import find_queues
from celery_rabbitdelay.publishing.kombu_internals import declared_arguments
from celery_rabbitdelay.publishing.wire import Wire

#: A binding key that nobody uses: the bindings that are removed do not exist.
NO_KEY: Final = "rabbitdelay.verify"

#: Seconds that asking the broker for the time may take. A broker in alarm does not answer.
CLOCK_TIMEOUT: Final = 10.0

_Method: TypeAlias = Callable[[Any], object]


class Probes:
    """Asks the broker one thing after the other, on a channel of its own.

    Args:
        connection: An open connection.
        application: What is expected.
    """

    def __init__(self, connection: Connection, application: Application) -> None:
        self._channel: Any = connection.channel()
        self._application = application
        self._topology = application.topology
        self._user = connection.userid or "guest"
        self._virtual_host = connection.virtual_host or "/"
        identity = self._topology.identity
        self._exchanges = [identity.guard, *self._topology.exchanges, identity.marker]

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def messages(self, queue_name: str) -> int | None:
        """Return how many messages are ready in a queue; None if the broker does not tell."""
        try:
            [found] = find_queues(self._channel, [queue_name])
        except ChannelError:
            return None
        return found and found[0]

    def existing(self) -> tuple[set[str], list[Finding]]:
        """Return what exists of the topology and the destinations, as "queue NAME".

        Also the findings for what does not exist, or may not be seen.
        """
        absent, refused, exist = [], [], set()
        for subject, entity in self._entities():
            answer = self._ask(_declaration(entity, passive=True))
            if isinstance(answer, NotFound):
                absent.append(subject)
            elif isinstance(answer, AccessRefused):
                refused.append(subject)
            else:
                exist.add(subject)
        destinations = {f"queue {queue.name}": queue for queue in self._destinations()}
        ours = [subject for subject in absent if subject not in destinations]
        findings = [
            *missing(self._application, ours),
            *(
                destination_missing(self._application, destinations[subject].name)
                for subject in absent
                if subject in destinations
            ),
        ]
        if refused:
            findings.append(self._not_permitted("configure", refused))
        return exist, findings

    def declarations(self, exist: set[str]) -> Iterator[Finding]:
        """Declare what exists again, and find other arguments, and missing permissions."""
        refused = []
        destinations = {f"queue {queue.name}" for queue in self._destinations()}
        for subject, entity in self._entities():
            if subject not in exist:
                continue
            answer = self._ask(_declaration(entity, passive=False))
            if isinstance(answer, AccessRefused):
                refused.append(subject)
            elif isinstance(answer, PreconditionFailed):
                if entity is self._topology.identity.guard:
                    yield layout_conflict(self._topology, _text(answer))
                elif subject in destinations:
                    yield differing(subject, _text(answer))._replace(code="destination-differs")
                else:
                    yield differing(subject, _text(answer))
        if refused:
            yield self._not_permitted("configure", refused)

    def permissions(self, exist: set[str]) -> Iterator[Finding]:
        """Find permissions that producers and workers need and this user does not have."""
        topology, modules = self._topology, self._topology.module_queues
        written = [exchange for exchange in topology.exchanges if exchange != modules.meditated]
        refused = [
            f"exchange {exchange.name}"
            for exchange in written
            if f"exchange {exchange.name}" in exist and not self._may_write(exchange)
        ]
        bound = [f"queue {queue.name}" for queue in self._destinations()]
        if self._application.may_declare and f"exchange {topology.delivery.name}" in exist:
            unbind = partial(_unbind_queue, exchange=topology.delivery.name)
            for subject in bound:
                name = subject.removeprefix("queue ")
                answer = self._ask(partial(unbind, queue=name)) if subject in exist else None
                if isinstance(answer, AccessRefused):
                    of_queue = f"queue '{name}'" in str(answer)
                    kind = subject if of_queue else f"exchange {topology.delivery.name}"
                    yield self._not_permitted("write" if of_queue else "read", [kind])
        if refused:
            yield self._not_permitted("write", refused)
        served = {"check-in": modules.checkin, "distribution": modules.distribution}
        unread = [
            f"queue {queue.name}"
            for module, queue in served.items()
            if module in self._application.modules
            and f"queue {queue.name}" in exist
            and isinstance(self._ask(partial(_consume_nothing, queue=queue.name)), AccessRefused)
        ]
        if unread:
            yield self._not_permitted("read", unread)

    def _may_write(self, exchange: Exchange) -> bool:
        # The permission to write to the target of a binding is checked before that to read from
        # its source.
        source = self._topology.delivery.name
        if exchange.name == source:
            source = self._topology.module_queues.undeliverable.name
        answer = self._ask(partial(_unbind_exchange, target=exchange.name, source=source))
        return not (isinstance(answer, AccessRefused) and f"'{exchange.name}'" in str(answer))

    def _entities(self) -> Iterator[tuple[str, Exchange | Queue]]:
        for exchange in self._exchanges:
            yield f"exchange {exchange.name}", exchange
        for queue in (*self._topology.queues, *self._destinations()):
            yield f"queue {queue.name}", queue

    def _destinations(self) -> Iterable[Queue]:
        return (
            queue
            for queue in self._application.destinations
            if not (queue.exclusive or queue.auto_delete or getattr(queue, "no_declare", False))
        )

    def _ask(self, method: _Method) -> ChannelError | None:
        """Call a method; return the error that the broker answers with, None if it does it."""
        try:
            method(self._channel)
            # Answered behind the method, or not at all if the broker has refused it. A declaration
            # that waited for its own answer would have the broker ask the queue's leader.
            self._channel.basic_qos(0, 1, False)
        except ChannelError as refused:
            return refused  # py-amqp has opened the channel again
        return None

    def _not_permitted(self, permission: str, subjects: Iterable[str]) -> Finding:
        consequences = {
            "configure": "the levels or the task queues cannot be declared: ACCESS_REFUSED",
            "write": "delayed tasks cannot be sent, bound or put back: ACCESS_REFUSED",
            "read": "queues cannot be bound, or the modules get no messages: ACCESS_REFUSED",
        }
        remedy = (
            f"rabbitmqctl set_permissions -p {shlex.quote(self._virtual_host)} "
            f"{shlex.quote(self._user)} CONFIGURE WRITE READ, with patterns that "
            f"match the names that begin with {self._topology.prefix + '.'!r}, and the task queues"
        )
        return Finding(
            "danger",
            f"permission-{permission}",
            tuple(subjects),
            f"the user {self._user!r} has no permission to {permission}",
            consequences[permission],
            remedy,
        )


class ClockProbe(NamedTuple):
    """How far this machine's clock is ahead of the broker's, in seconds, between two bounds."""

    at_least: float
    at_most: float

    @property
    def difference(self) -> float:
        """The smallest difference that is possible, without its sign."""
        return max(0.0, self.at_least, -self.at_most)


def clock_difference(connection: Connection, now: Callable[[], float] = time.time) -> ClockProbe:
    """Compare this machine's clock with the broker's, which tells when it dead-letters a message.

    That takes two exclusive queues, which are deleted before this returns.

    Args:
        connection: The broker; another connection like it is used.
        now: Returns seconds since the epoch.

    Raises:
        AccessRefused: The user may not declare such queues.
        TimeoutError: The broker has not answered for some seconds.
    """
    own = connection.clone()
    try:
        own.connect()
        with Wire(own).all_answers_within(CLOCK_TIMEOUT):
            channel: Any = own.channel()
            gets = channel.queue_declare("", exclusive=True).queue
            arguments = {
                "x-message-ttl": 0,
                "x-dead-letter-exchange": "",
                "x-dead-letter-routing-key": gets,
            }
            expires = channel.queue_declare("", exclusive=True, arguments=arguments).queue
            before = now()
            channel.basic_publish(amqp.Message(b""), "", expires)
            while (message := channel.basic_get(gets, no_ack=True)) is None:
                pass
            after = now()
        # In whole seconds, rounded down. py-amqp returns naive datetimes in UTC.
        died = message.headers["x-death"][0]["time"].replace(tzinfo=UTC).timestamp()
    finally:
        own.release()
    return ClockProbe(before - died - 1, after - died)


def check_clock(probe: ClockProbe, application: Application) -> Iterator[Finding]:
    """Find clocks that differ by more than a worker tolerates."""
    difference = probe.difference
    if difference <= application.early_tolerance:
        return
    ahead = "ahead of" if probe.at_least > 0 else "behind"
    yield Finding(
        "warning",
        "clock-difference",
        ("this machine",),
        f"its clock is at least {difference:.1f} s {ahead} the broker's",
        "an eta means another instant on this machine, and tasks are late by that where the clocks "
        "of producer and worker differ: a worker whose clock is behind puts due tasks back",
        "synchronize all clocks (NTP); workers tolerate rabbitdelay_early_tolerance",
    )


def _declaration(entity: Exchange | Queue, passive: bool) -> _Method:
    def declare(channel: Any) -> None:
        if isinstance(entity, Exchange):
            entity(channel).declare(nowait=True, passive=passive)
        else:
            # Not kombu's own method, which calls the queue's hook on_declared.
            channel.queue_declare(
                entity.name,
                passive=passive,
                durable=entity.durable,
                auto_delete=entity.auto_delete,
                nowait=True,
                arguments=declared_arguments(entity),
            )

    return declare


def _unbind_exchange(channel: Any, target: str, source: str) -> None:
    channel.exchange_unbind(target, source, NO_KEY)


def _unbind_queue(channel: Any, queue: str, exchange: str) -> None:
    channel.queue_unbind(queue, exchange, NO_KEY)


def _consume_nothing(channel: Any, queue: str) -> None:
    # Should a broker take it after all, it gets one message and gives it back.
    channel.basic_qos(0, 1, False)
    tag = channel.basic_consume(queue, arguments={"x-priority": "refused"})
    channel.basic_cancel(tag)
    channel.basic_recover(requeue=True)


def _text(error: ChannelError) -> str:
    return " ".join(str(error).split())
