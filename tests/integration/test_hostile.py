"""For some seconds, what ``python -m tests.hostile`` does for longer: a client attacks a worker."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any, Final

import pytest
from kombu import Connection

from tests.hostile.campaign import attack
from tests.hostile.kinds import BEHIND, KINDS
from tests.integration.modules import OPEN, Client
from tests.integration.shop import PATIENCE, named


def test_every_hostile_message_is_accounted_for_and_nobody_else_notices(
    broker_url: str, prefix: str
) -> None:
    account = attack(broker_url, prefix, 1_000, seed=7)
    assert account.is_good, str(account)
    assert account.kinds.keys() == KINDS.keys()
    assert account.places["undeliverable"] > 250
    assert account.places["allowed"] > 250
    assert account.refused > 0


@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_a_worker_of_another_pool_runs_each_task_behind_a_malformed_one(
    broker_url: str, prefix: str, pool: str
) -> None:
    account = attack(broker_url, prefix, 300, 7, pool)
    assert account.is_good, str(account)
    assert account.kinds[BEHIND] > 50


#: More than a worker with one slot takes at a time.
TIMES: Final = 6

#: Headers that Celery does not expect, and bodies.
HEADERS: Final[list[dict[str, Any]]] = [
    *({"stamped_headers": 5}, {"stamped_headers": [[]]}, {"stamped_headers": True}),
    *({"expires": ""}, {"eta": ""}, {"eta": "2999-01-01T00:00:00"}, {"timelimit": "ab"}),
    *({"shadow": {"a": 1}}, {"get": 1}),
]
BODIES: Final = (b"", b"[[1], {}]", b"[[1], {}, {}, {}]", b"[[1], {}, [1]]")

AS_JSON: Final[dict[str, Any]] = {"content_type": "application/json", "content_encoding": "utf-8"}

#: The same in protocol 1, whose fields are in the body.
VERSION_1: Final[list[dict[str, Any]]] = [
    *({"eta": ""}, {"eta": {}}, {"expires": ""}, {"id": {}}, {"shadow": [1]}),
]


@pytest.mark.parametrize(("pool", "trusted"), [("prefork", False), ("gevent", True)])
def test_what_celery_cannot_run_is_undeliverable_and_costs_the_worker_nothing(
    serve: Callable[..., Any], connection: Connection, pool: str, trusted: bool
) -> None:
    shop = serve(f"--pool={pool}", only="default", **OPEN, rabbitdelay_checkin_trusted=trusted)
    client, queue = Client(connection, shop), named(shop, "default")
    producer = connection.Producer()
    exchange, routing_key, _ = shop.rabbitdelay.topology.route(0.1, queue)
    checkin = shop.rabbitdelay.topology.module_queues.checkin.exchange.name
    task = {"task": "look", "id": "1"}
    messages = [
        *(({**task, **fields}, b"[[1], {}, {}]") for fields in HEADERS),
        *((task, body) for body in BODIES),
        *(({}, json.dumps({**task, "args": [1], **fields}).encode()) for fields in VERSION_1),
    ]
    if trusted:
        # Check-in does not open it.
        compressed = {**task, "compression": "application/x-gzip"}
        messages.append((compressed, zlib.compress(b"[[1], {}]")))
    ways: list[tuple[str, str, dict[str, Any]]] = [
        *((checkin, queue, own) for own in ({}, {"x-delay": 100})),
        (exchange, routing_key, {"rabbitdelay-due": 5}),
    ]
    for to, key, own in ways:
        # What comes from the levels unchecked, Celery itself may drop as invalid.
        checked_in = len(messages) * TIMES if to == checkin else 0
        for told, body in messages:
            for _ in range(TIMES):
                producer.publish(body, key, exchange=to, headers={**told, **own}, **AS_JSON)
        for delay in (None, 0.2):
            assert shop.tasks["look"].apply_async((1,), delay=delay).get(timeout=PATIENCE)
        if checked_in:
            client.undeliverable(checked_in)
    assert "Unrecoverable" not in shop.worker.log
