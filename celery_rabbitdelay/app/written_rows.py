"""Rows of ``send_many`` that its caller has written as they stand in an envelope."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kombu.utils.json import loads

from celery_rabbitdelay.app.rows import Row
from celery_rabbitdelay.levels.delay import NS_PER_MS, Due, instant_of
from celery_rabbitdelay.modules.envelope import blocks_of, length_prefixed


class WrittenRow(NamedTuple):
    """One of these rows, read again.

    Attributes:
        task_id: The task's id.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        item: The bytes that it was read from.
    """

    task_id: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    item: bytes


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """Rows that are due in the same tick, each as :meth:`.MessageTemplate.item` writes it.

    ``send_many`` writes the first of them again. If that gives other bytes, because the application
    has another serializer for example, it reads all of them and writes each itself.

    Attributes:
        items: The bytes of all of them.
        count: How many they are; at least one.
        due_ms: When they are due, in milliseconds since 1970-01-01 UTC.
    """

    items: bytes
    count: int
    due_ms: int

    @property
    def due(self) -> Due:
        """When they are due."""
        now_ms = time.time_ns() // NS_PER_MS
        return Due(self.due_ms * NS_PER_MS, self.due_ms - now_ms, is_instant=True)

    def read(self) -> Iterator[WrittenRow]:
        """Yield each row."""
        blocks = blocks_of(self.items)
        for own in blocks:
            body = next(blocks)
            headers = json.loads(bytes(own))["headers"]
            args, kwargs, _ = loads(bytes(body))
            if headers.get("argsrepr", "").startswith("("):
                args = tuple(args)  # JSON has lists only
            item = length_prefixed(bytes(own)) + length_prefixed(bytes(body))
            yield WrittenRow(headers["id"], args, kwargs, item)


def one_by_one(
    rows: Iterable[Row | Mapping[str, Any] | WrittenRows],
) -> Iterator[Row | Mapping[str, Any]]:
    """Yield each row, those that are written already as well."""
    for given in rows:
        if isinstance(given, WrittenRows):
            eta = instant_of(given.due_ms)
            for each in given.read():
                yield Row(each.args, each.kwargs, eta=eta, task_id=each.task_id)
        else:
            yield given
