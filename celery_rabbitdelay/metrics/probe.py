"""Probes: small messages through all levels, which show whether and when delays end."""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Final, NamedTuple, cast
from uuid import uuid4

import amqp
from kombu import Connection
from kombu.transport.pyamqp import Channel

from celery_rabbitdelay.app.delays import DelayingCelery
from celery_rabbitdelay.levels.routing_key import PROBES
from celery_rabbitdelay.levels.topology import PROBE, PROBE_TYPE, Route, Topology
from celery_rabbitdelay.modules.service import Service
from celery_rabbitdelay.publishing.declaration import opened_channel
from celery_rabbitdelay.publishing.kombu_internals import find_queues
from celery_rabbitdelay.publishing.refusals import permissions_named
from celery_rabbitdelay.publishing.wire import Wire
from celery_rabbitdelay.worker.bootsteps import HEARTBEAT, WorkerDeclaration

logger = logging.getLogger(__name__)

#: The type of the token, a message that only the probing worker holds.
TOKEN_TYPE: Final = "rabbitdelay-probe-token"  # noqa: S105 - no password

#: The name of the route through all levels, used like the name of a level.
ROUTE: Final = "route"

#: The number of levels per round; with the route and the token, a round has ten messages.
LEVELS_PER_ROUND: Final = 8

#: The longest wait of a probe in a level, in milliseconds. In the queue of a larger digit, a probe
#: has an ``expiration``.
LONGEST_WAIT_MS: Final = 60_000
EXPIRATION_MS: Final = 1000

#: Seconds to wait for a frame.
READ_TIMEOUT: Final = 0.2

#: The prefetch of the queue of probes.
PREFETCH: Final = 100


class Probe(NamedTuple):
    """A probe that was sent.

    Attributes:
        level: The level's name, or :data:`ROUTE`.
        due: When the probe has to arrive, in seconds of :func:`time.monotonic`.
        behind: The queue in which an earlier message would hold up the probe; None if all messages
            of the queue wait equally long.
    """

    level: str
    due: float
    behind: str | None


@dataclass(eq=False, repr=False)
class ProbeService(Service):
    """Sends probes through the levels, in one worker at a time.

    RabbitMQ delivers the messages in the queue of probes to a single consumer. The service that
    receives a message is therefore active, and sends a round of probes every minute. The service
    holds one message, the token; if the service is lost, the broker delivers the token to the next
    consumer.

    Attributes:
        topology: The levels.
        timeout: Seconds for an answer of the broker.
        interval: Seconds between two rounds.
        missing_after: Seconds after its due time until a probe counts as missing.
        late: By level, the lateness of the last probe in seconds, negative if it was early; of a
            missing probe, the lateness so far. Empty unless this service is active.
        missing: By level, the number of missing probes.
        rounds: The number of rounds sent.
    """

    topology: Topology
    timeout: float = field(default=30.0, kw_only=True)
    interval: float = 60.0
    missing_after: float = 60.0
    late: dict[str, float] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)
    rounds: int = 0

    def __post_init__(self) -> None:
        self.name, self.max_bytes = PROBE, 1  # a probe has no body
        # Confirms are not needed: a refused probe counts as missing, and nothing else is lost.
        options = {**(self.connection.transport_options or {}), "confirm_publish": False}
        self.connection = self.connection.clone(transport_options=options)
        self._turn = cycle(range(len(self.topology.layout.levels)))
        self._sent: dict[str, Probe] = {}
        self._token: amqp.Message | None = None
        self._is_active = False

    def status(self) -> dict[str, object]:
        """Return the measurements by level, and the prefix of the levels."""
        measured = {"late": dict(self.late), "missing": dict(self.missing)}
        return {"prefix": self.topology.prefix, **measured}

    @property
    def _progress(self) -> int:
        return self.rounds

    def _serve_on(self, connection: Connection) -> bool:
        logger.info("rabbitdelay %s: serving the queue %s.", self.name, self.topology.probe.name)
        channel = cast(Channel, connection.channel())
        with permissions_named(), Wire(connection).answers_within(self.timeout):
            channel.basic_qos(0, PREFETCH, False)
            channel.basic_consume(self.topology.probe.name, callback=self._received)
            self._publish(channel, "", self.topology.probe.name, TOKEN_TYPE)
            try:
                self._send_and_receive(connection, channel)
            finally:
                # A probe that arrives between two connections cannot be measured.
                self._sent.clear()
                self._token, self._is_active, self.late = None, False, {}
        return True

    def _send_and_receive(self, connection: Connection, channel: Channel) -> None:
        asking = cast(Channel, connection.channel())
        next_at = 0.0
        while not self.stopping.is_set():
            if self._is_active and time.monotonic() >= next_at:
                next_at = time.monotonic() + self.interval
                self._send_round(channel, asking)
            try:
                connection.drain_events(timeout=READ_TIMEOUT)
            except TimeoutError:
                # Check only now, because a probe may have arrived while this process was suspended.
                self._find_missing(asking)
            connection.heartbeat_check()

    def _send_round(self, channel: Channel, asking: Channel) -> None:
        layout = self.topology.layout
        self._publish(channel, "", self.topology.probe.name, TOKEN_TYPE)
        # The probe of the route passes all exchanges, and waits in a level of a second or more.
        long = [index for index, place_ms in enumerate(layout.places_ms) if place_ms >= 1000]
        index = long[-1] if long else 0
        self._send(channel, ROUTE, self._routes(index, enters_at=0)[0], layout.places_ms[index])
        for index in islice(self._turn, min(len(layout.levels), LEVELS_PER_ROUND)):
            level, routes = layout.levels[index], self._routes(index, enters_at=index)
            if level.place_ms <= LONGEST_WAIT_MS:
                self._send(channel, level.name, routes[0], level.place_ms)
            elif empty := self._empty(routes, asking):
                route = random.choice(empty)  # noqa: S311 - no secret
                self._send(channel, level.name, route, EXPIRATION_MS, route.stops[0])
        self.rounds += 1

    def _routes(self, index: int, enters_at: int) -> list[Route]:
        """Return the routes through all digit queues of a level, in one of the shards."""
        layout, keys = self.topology.layout, self.topology.keys
        shard = keys.shard(str(uuid4()))
        before, behind = (0,) * index, (0,) * (len(layout.levels) - index - 1)
        return [
            self.topology.route_of((*before, digit, *behind), enters_at, shard, PROBES)
            for digit in range(1, layout.bases[index])
        ]

    def _empty(self, routes: list[Route], asking: Channel) -> list[Route]:
        """Return routes whose first queue is empty: earlier messages would hold up the probe."""
        found = find_queues(asking, [route.stops[0] for route in routes])
        pairs = zip(routes, found, strict=True)
        return [route for route, counts in pairs if counts is not None and not counts[0]]

    def _send(
        self, channel: Channel, level: str, route: Route, wait_ms: int, behind: str | None = None
    ) -> None:
        # The id is random, so that no other client can fake an arrival.
        probe_id = str(uuid4())
        self.missing.setdefault(level, 0)
        self._sent[probe_id] = Probe(level, time.monotonic() + wait_ms / 1000, behind)
        expires = {} if behind is None else {"expiration": str(wait_ms)}
        self._publish(channel, *route[:2], PROBE_TYPE, message_id=probe_id, **expires)

    def _publish(
        self, channel: Channel, exchange: str, routing_key: str, kind: str, **properties: str
    ) -> None:
        message = amqp.Message("", type=kind, delivery_mode=1, **properties)
        channel.basic_publish(message, exchange, routing_key)

    def _received(self, message: amqp.Message) -> None:
        self._is_active = True
        done: amqp.Message | None = message
        if message.properties.get("type") == TOKEN_TYPE:
            done, self._token = self._token, message
        if done is not None:
            done.channel.basic_ack(done.delivery_tag)
        # Other probes are from another worker, or from a former connection.
        probe = self._sent.pop(str(message.properties.get("message_id")), None)
        if probe is not None:
            self.late[probe.level] = time.monotonic() - probe.due

    def _find_missing(self, asking: Channel) -> None:
        now = time.monotonic()
        for probe_id, (level, due, behind) in list(self._sent.items()):
            if now - due < self.missing_after:
                continue
            del self._sent[probe_id]
            counts = find_queues(asking, [behind])[0] if behind else None
            # If its queue has more messages, the probe may be waiting behind another message.
            if counts is None or counts[0] <= 1:
                if self.late.get(level, 0.0) < self.missing_after:
                    logger.error(
                        "rabbitdelay %s: delays in %s do not end, or end late: run "
                        "`celery rabbitdelay verify`",
                        self.name,
                        level,
                    )
                self.late[level] = now - due
                self.missing[level] += 1


def probe_service(app: DelayingCelery, declaration: WorkerDeclaration) -> ProbeService:
    """Return the service that sends a worker's probes.

    Args:
        app: The worker's application.
        declaration: Declares the worker's exchanges and queues.
    """
    settings = app.rabbitdelay.settings
    topology = settings.topology

    def declare(connection: Connection) -> None:
        declaration.declare(connection)
        if settings.declare == "auto":
            # The queue of probes is not a part of the levels.
            with opened_channel(connection) as channel:
                topology.probe(channel).queue_declare()
                source, pattern, target, _ = topology.probe_binding
                channel.queue_bind(target, source, pattern)

    connection = app.connection_for_write(heartbeat=HEARTBEAT)
    on_lost, timeout = declaration.connection_lost, settings.confirm_timeout
    return ProbeService(connection, declare, on_lost, topology, timeout=timeout)
