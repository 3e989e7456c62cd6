"""Signed tasks on every path through the levels, with real workers; nothing unsigned is opened."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from kombu import Connection, Queue

from celery_rabbitdelay import Outcome
from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.operations.mover import Place
from celery_rabbitdelay.operations.redriving import redriving_for
from celery_rabbitdelay.operations.undeliverable import redrive
from celery_rabbitdelay.publishing.signature import NOT_SIGNED
from celery_rabbitdelay.testing import wait_for
from tests.kernel.integration.arrivals import Arrival, take, wait_until_waiting
from tests.kernel.integration.modules import OPEN
from tests.kernel.integration.notes import Notes
from tests.kernel.integration.shop import named

SIGNING: Final = {**OPEN, "rabbitdelay_signing_key": "n" * 32}


def undeliverable(connection: Connection, shop: Any, number: int = 1) -> list[Arrival]:
    return take(connection, [shop.rabbitdelay.topology.module_queues.undeliverable], number)


def publish(connection: Connection, shop: Any, told: dict[str, Any], **properties: Any) -> None:
    exchange, routing_key, _ = shop.rabbitdelay.topology.route(0, DISTRIBUTION)
    connection.Producer().publish(
        "x", exchange=exchange, routing_key=routing_key, headers=told, **properties
    )


def test_only_a_signed_message_decides_about_a_task(
    serve: Any, connection: Connection, redis_url: str
) -> None:
    """A stranger sends a message under the id of a task that is sent with ``once`` and a key."""
    shop = serve(**SIGNING, rabbitdelay_registry_url=redis_url)
    notes, delays = Notes(shop), shop.rabbitdelay
    options: list[dict[str, Any]] = [
        {},
        {"priority": 9},
        {"exchange": named(shop, "topic"), "routing_key": "topic.daily.reports"},
    ]
    first = notes.send("victim", delay=4, once=True, key="victim")
    topology, queue = delays.topology, named(shop, "default")
    now_ms = int(time.time() * 1000)
    told = {"id": first.id, "task": "note", "lang": "py", "retries": 0, headers.DUE: now_ms}
    told |= {headers.QUEUE: queue, headers.EXCHANGE: "", headers.ROUTING_KEY: queue}
    exchange, routing_key, _ = topology.route(0, queue)
    for words in ({headers.ONCE: True}, {headers.COPY: "000000000000", headers.KEY: "victim"}):
        connection.Producer().publish(
            [["forged"], {"key": notes.key}, {}],
            exchange=exchange,
            routing_key=routing_key,
            headers={**told, **words},
            correlation_id=first.id,
        )
    notes.send("keyed", delay=4, key="keyed")
    # As if they had not been in the levels: a worker puts one back for its eta, retries another.
    eta = (datetime.now(UTC) + timedelta(seconds=2)).isoformat()
    plain = {"id": first.id, "task": "note", headers.ONCE: True, "eta": eta}
    other = {"id": "other", "task": "retry", headers.COPY: "0" * 12, headers.KEY: "keyed"}
    retried = [[], 1, {"countdown": 0.3}]
    for told, args, kwargs in ((plain, ["plain"], {"key": notes.key}), (other, retried, {})):
        connection.Producer().publish(
            [args, kwargs, {}],
            exchange=topology.delivery.name,
            routing_key=topology.keys.key_without_digits(queue),
            headers={"lang": "py", "retries": 0, **told},
            correlation_id=told["id"],
        )
    for number, each in enumerate(options):
        notes.send(number, delay=1, once=True, key=f"key-{number}", track=True, **each)
        rows = [notes.row(f"{number}-{row}", delay=1, key=f"row-{number}-{row}") for row in (1, 2)]
        delays.send_many("note", rows[:1], envelopes=False, once=True, track=True, **each)
        delays.send_many("note", rows, envelopes=True, once=True, track=True, **each)
    moved = notes.send("moved", delay=5, track=True, once=True)
    assert delays.postpone(moved, delay=6) is Outcome.DONE
    with delays.job(notes.key, expires=60):
        notes.send("job", delay=0.2, job=notes.key)
    shop.tasks["retry"].apply_async(([], 1, {"countdown": 0.2}), delay=0.5, once=True).get(60)
    rows_sent = {f"{number}-{row}" for number in range(3) for row in (1, 2)}
    wanted = {"victim", "keyed", "plain", "moved", "job", *range(3), *rows_sent}
    wait_for(lambda: set(notes()) >= wanted, "all tasks")
    assert set(notes()) == wanted
    # Whatever it came through, no task sees a signature.
    assert not [note for note in notes.found() if headers.SIGNATURE in note["headers"]]
    found = undeliverable(connection, shop, 2)
    assert {each.message.headers[headers.REASON] for each in found} == {NOT_SIGNED}
    assert {each.message.headers["id"] for each in found} == {first.id}


def test_what_is_refused_for_long_is_signed_and_can_be_redriven(
    serve: Any, connection: Connection, make_full: Callable[[int], Queue]
) -> None:
    soon = {**SIGNING, "rabbitdelay_retry_for": 2, "rabbitdelay_may_refuse": ["test-*"]}
    shop, full = serve(only="default", **soon), make_full(0)
    shop.amqp.queues.add(full)
    topology = shop.rabbitdelay.topology
    undeliverable = topology.module_queues.undeliverable.name
    for _ in range(2):
        shop.send_task("look", queue=full.name, delay=0.2)
    wait_until_waiting(connection, undeliverable, 2)
    publish(connection, shop, {headers.EXCHANGE: "", headers.ROUTING_KEY: full.name})
    wait_until_waiting(connection, undeliverable, 3)
    channel: Any = connection.default_channel
    channel.queue_delete(full.name)
    place = Place(connection, topology)
    report = redrive(place, redriving_for(shop, allow=[full.name]))
    assert (report.moved, report.left) == (2, {NOT_SIGNED: 1})
    vouched = redriving_for(shop, allow=[full.name], vouches=True)
    assert redrive(place, vouched).moved == 1
    channel.queue_declare(full.name, durable=True, auto_delete=False)
    assert len(take(connection, [full], 3)) == 3
