"""A fake channel that notes what :func:`celery_rabbitdelay.kombu.declare` declares."""

from __future__ import annotations

from typing import Any

from celery_rabbitdelay.kombu import Topology, declare


class DeclaringModel:
    """What ``declare`` makes of a topology.

    Args:
        topology: The topology.

    Attributes:
        exchanges: Type, durable, auto_delete and arguments of each exchange, by its name.
        queues: Durable, auto_delete and arguments of each queue, by its name.
        bindings: Source, routing key, target, and "queue" or "exchange" of each binding.
    """

    connected = True

    def __init__(self, topology: Topology) -> None:
        self.exchanges: dict[str, Any] = {}
        self.queues: dict[str, Any] = {}
        self.bindings: set[tuple[str, ...]] = set()
        declare(self, topology)  # type: ignore[arg-type]

    def channel(self) -> _Channel:
        return _Channel(self)


class _Channel:
    """The methods of a channel that ``declare`` calls."""

    channel_id = 1

    def __init__(self, model: DeclaringModel) -> None:
        self._model = model

    def close(self) -> None: ...

    def prepare_queue_arguments(self, arguments: Any, **others: Any) -> Any:
        assert not any(others.values())
        return arguments

    def exchange_declare(self, *, exchange: str, type: str, arguments: Any, **flags: Any) -> None:  # noqa: A002
        own = (type, flags["durable"], flags["auto_delete"], arguments or {})
        self._model.exchanges[exchange] = own

    def queue_declare(self, *, queue: str, arguments: Any, **flags: Any) -> None:
        assert not flags["exclusive"]
        self._model.queues[queue] = (flags["durable"], flags["auto_delete"], arguments or {})

    def queue_bind(self, queue: str, exchange: str, routing_key: str, nowait: bool) -> None:
        self._model.bindings.add((exchange, routing_key, queue, "queue"))

    def exchange_bind(self, destination: str, source: str, routing_key: str, nowait: bool) -> None:
        self._model.bindings.add((source, routing_key, destination, "exchange"))
