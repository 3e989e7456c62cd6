"""Everything that ``declare`` makes, as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kombu import Exchange

from celery_rabbitdelay.levels.entities import Binding
from celery_rabbitdelay.levels.topology import Topology


class PlainExchange(NamedTuple):
    """A durable exchange.

    Attributes:
        name: Its name.
        type: ``topic`` or ``fanout``.
        arguments: Its arguments.
    """

    name: str
    type: str
    arguments: Mapping[str, Any]


class PlainQueue(NamedTuple):
    """A durable queue.

    Attributes:
        name: Its name.
        arguments: Its arguments, its type among them.
    """

    name: str
    arguments: Mapping[str, Any]


def all_exchanges(topology: Topology) -> Iterator[PlainExchange]:
    """Yield every exchange that ``declare`` makes: the guard first, the marker last.

    The guard refuses other layouts under the prefix. The marker tells processes with
    ``rabbitdelay_declare = "auto"`` that the topology is complete.
    """
    yield _plain(topology.identity.guard)
    yield from map(_plain, topology.exchanges)
    yield _plain(topology.identity.marker)


def all_queues(topology: Topology) -> Iterator[PlainQueue]:
    """Yield every queue that ``declare`` makes."""
    for queue in topology.queues:
        yield PlainQueue(queue.name, dict(queue.queue_arguments or {}))


def all_bindings(topology: Topology) -> tuple[Binding, ...]:
    """Return every binding that ``declare`` makes; those of destinations are not among them."""
    return topology.bindings


def _plain(exchange: Exchange) -> PlainExchange:
    return PlainExchange(exchange.name, exchange.type, dict(exchange.arguments or {}))
