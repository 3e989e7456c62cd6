"""A fake: what RabbitMQ does with a topology, played by hand on its declared bindings.

It stands in for the broker where thousands of routes are walked; the integration tests send some of
the same routes through the real one.
"""

import re
from collections import defaultdict
from typing import NamedTuple

from celery_rabbitdelay.levels.topology import Binding, Route, Topology


class Walk(NamedTuple):
    """Where a message went: the queues it waited in, for how long, and the queues it ended in."""

    stops: tuple[str, ...]
    waited_ms: int
    delivered_to: frozenset[str]


class BrokerModel:
    """The exchanges, queues and bindings of one topology, and the destinations bound to it."""

    def __init__(self, topology: Topology, destinations: tuple[str, ...]) -> None:
        every = {queue.name: queue.queue_arguments or {} for queue in topology.queues}
        self._levels = {name: own for name, own in every.items() if "x-message-ttl" in own}
        self._exchanges = {exchange.name: exchange for exchange in topology.exchanges}
        delivery, keys = topology.delivery.name, topology.keys
        own = [Binding(delivery, keys.destination_pattern(name), name) for name in destinations]
        self._bindings: dict[str, list[tuple[re.Pattern[str] | None, Binding]]] = defaultdict(list)
        for binding in (*topology.bindings, *own):
            fanout = self._exchanges[binding.source].type == "fanout"
            pattern = None if fanout else _as_regex(binding.pattern)
            self._bindings[binding.source].append((pattern, binding))

    def walk(self, route: Route) -> Walk:
        """Publish a message and follow it until it is in no queue of the levels."""
        stops: list[str] = []
        waited = 0
        queues = self._route(route.exchange, route.routing_key)
        while queues & self._levels.keys():
            assert len(queues) == 1, f"{route} is in several queues at once: {queues}"
            (queue,) = queues
            arguments = self._levels[queue]
            assert queue not in stops, f"{route} comes back to {queue}"
            stops.append(queue)
            waited += arguments["x-message-ttl"]
            queues = self._route(arguments["x-dead-letter-exchange"], route.routing_key)
        return Walk(tuple(stops), waited, frozenset(queues))

    def _route(self, exchange: str, routing_key: str) -> set[str]:
        found = [
            binding
            for pattern, binding in self._bindings[exchange]
            if pattern is None or pattern.fullmatch(routing_key)
        ]
        alternate = (self._exchanges[exchange].arguments or {}).get("alternate-exchange")
        if not found and alternate:
            return self._route(alternate, routing_key)
        reached = {each.target for each in found if not each.target_is_exchange}
        further = (each.target for each in found if each.target_is_exchange)
        return reached.union(*(self._route(target, routing_key) for target in further))


def _as_regex(pattern: str) -> re.Pattern[str]:
    # Only a trailing '#' is used, and the keys always have a word in its place.
    words = [r"[^.]*" if word == "*" else re.escape(word) for word in pattern.split(".")]
    if pattern.endswith("#"):
        words[-1] = r".*"
    return re.compile(r"\.".join(words), re.DOTALL)
