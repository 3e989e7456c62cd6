"""A fake: what RabbitMQ does with a topology, played by hand on its declared bindings.

It stands in for the broker where thousands of routes are walked; the integration tests send some of
the same routes through the real one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from celery_rabbitdelay.levels.entities import Binding
from celery_rabbitdelay.levels.topology import Route, Topology


@dataclass(frozen=True)
class Walk:
    """Where a message went: the queues it waited in, for how long, and the queues it ended in."""

    stops: tuple[str, ...]
    waited_ms: int
    delivered_to: frozenset[str]


class BrokerModel:
    """The exchanges, queues and bindings of one topology, and the destinations bound to it."""

    def __init__(self, topology: Topology, destinations: tuple[str, ...]) -> None:
        self._queues = {queue.name: queue.queue_arguments for queue in topology.queues}
        self._exchanges = {exchange.name: exchange for exchange in topology.exchanges}
        bindings = [
            *topology.bindings,
            *(
                Binding(
                    topology.delivery.name, topology.keys.destination_pattern(name), name, False
                )
                for name in destinations
            ),
        ]
        self._bindings: dict[str, list[tuple[re.Pattern[str] | None, Binding]]] = {}
        for binding in bindings:
            fanout = self._exchanges[binding.source].type == "fanout"
            pattern = None if fanout else _as_regex(binding.pattern)
            self._bindings.setdefault(binding.source, []).append((pattern, binding))

    def walk(self, route: Route) -> Walk:
        """Publish a message and follow it until it is in no queue of the levels."""
        stops: list[str] = []
        waited = 0
        queues = self._route(route.exchange, route.routing_key)
        while queues & self._waiting_queues:
            assert len(queues) == 1, f"{route} is in several queues at once: {queues}"
            (queue,) = queues
            arguments = self._queues[queue]
            assert arguments is not None
            assert queue not in stops, f"{route} comes back to {queue}"
            stops.append(queue)
            waited += arguments["x-message-ttl"]
            queues = self._route(arguments["x-dead-letter-exchange"], route.routing_key)
        return Walk(tuple(stops), waited, frozenset(queues))

    @property
    def _waiting_queues(self) -> set[str]:
        return {
            name for name, arguments in self._queues.items() if "x-message-ttl" in (arguments or {})
        }

    def _route(self, exchange: str, routing_key: str) -> set[str]:
        reached: set[str] = set()
        matched = False
        for pattern, binding in self._bindings.get(exchange, []):
            if pattern is None or pattern.fullmatch(routing_key):
                matched = True
                if binding.target_is_exchange:
                    reached |= self._route(binding.target, routing_key)
                else:
                    reached.add(binding.target)
        alternate = (self._exchanges[exchange].arguments or {}).get("alternate-exchange")
        if not matched and alternate:
            return self._route(alternate, routing_key)
        return reached


def _as_regex(pattern: str) -> re.Pattern[str]:
    # Only a trailing '#' is used, and the keys always have a word in its place.
    words = [r"[^.]*" if word == "*" else re.escape(word) for word in pattern.split(".")]
    if pattern.endswith("#"):
        words[-1] = r".*"
    return re.compile(r"\.".join(words), re.DOTALL)
