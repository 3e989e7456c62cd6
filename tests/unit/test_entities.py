"""How exchanges, queues and bindings are declared: names and arguments as brokers hold them."""

from __future__ import annotations

from typing import Any

import pytest
from kombu import Exchange, Queue

from celery_rabbitdelay.levels.entities import Binding, Entities, Identity, ModuleQueues, QueueType

QUORUM = Entities("p", "quorum")
CLASSIC = Entities("p", "classic")
HOUR_MS = 3_600_000


def arguments(entity: Queue | Exchange) -> dict[str, Any]:
    found = entity.queue_arguments if isinstance(entity, Queue) else entity.arguments
    return dict(found or {})


QUORUM_ARGUMENTS = {"x-queue-type": "quorum", "x-queue-leader-locator": "balanced"}

#: Arguments of queues and exchanges, as brokers hold them.
DECLARED: dict[str, tuple[Queue | Exchange, dict[str, Any]]] = {
    "an exchange that passes on what no queue takes": (
        QUORUM.exchange("hours.x1", "topic"),
        {"alternate-exchange": "p.undeliverable"},
    ),
    "a quorum queue that keeps a message until the next has it": (
        QUORUM.queue("hours.7", ttl_ms=7 * HOUR_MS, dead_letter_to="p.minutes.x1"),
        {
            **QUORUM_ARGUMENTS,
            "x-message-ttl": 25_200_000,
            "x-dead-letter-exchange": "p.minutes.x1",
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        },
    ),
    "a quorum queue that does not dead-letter": (QUORUM.queue("q"), QUORUM_ARGUMENTS),
    "a quorum queue with a limit": (
        QUORUM.queue("q", delivery_limit=0),
        {**QUORUM_ARGUMENTS, "x-delivery-limit": 0},
    ),
    "a classic queue, which knows less": (
        CLASSIC.queue("q", ttl_ms=5, dead_letter_to="p.next", delivery_limit=9),
        {"x-queue-type": "classic", "x-message-ttl": 5, "x-dead-letter-exchange": "p.next"},
    ),
    "the first exchange, to which the others pass on": (
        ModuleQueues.of(QUORUM, HOUR_MS).exchanges[0],
        {},
    ),
}


@pytest.mark.parametrize(("entity", "expected"), DECLARED.values(), ids=DECLARED)
def test_what_is_declared_is_durable_and_has_its_arguments(
    entity: Queue | Exchange, expected: dict[str, Any]
) -> None:
    assert entity.durable
    assert arguments(entity) == expected


@pytest.mark.parametrize(("queue_type", "limited"), [("quorum", True), ("classic", False)])
def test_what_ends_100_workers_is_undeliverable(queue_type: QueueType, limited: bool) -> None:
    modules = ModuleQueues.of(Entities("p", queue_type), HOUR_MS)
    for queue in (modules.checkin, modules.distribution):
        assert arguments(queue)["x-dead-letter-exchange"] == "p.undeliverable"
        assert arguments(queue).get("x-delivery-limit") == (100 if limited else None)
        assert "x-message-ttl" not in arguments(queue)
    held = arguments(modules.undeliverable)
    assert held.get("x-delivery-limit") == (2_147_483_647 if limited else None)
    assert not {"x-message-ttl", "x-dead-letter-exchange"} & set(held)


@pytest.mark.parametrize(
    ("capacity_ms", "ttl_ms"),
    [(HOUR_MS, HOUR_MS), (315_360_000_000,) * 2, (315_360_000_001, 315_360_000_000)],
)
def test_meditation_takes_a_capacity_or_what_rabbitmq_allows(capacity_ms: int, ttl_ms: int) -> None:
    modules = ModuleQueues.of(QUORUM, capacity_ms)
    meditation = arguments(modules.meditation)
    assert meditation["x-message-ttl"] == ttl_ms
    assert meditation["x-dead-letter-exchange"] == modules.meditated.name == "p.meditated"
    assert meditation["x-delivery-limit"] == 2_147_483_647


def test_what_a_module_s_exchange_does_not_take_is_undeliverable() -> None:
    first, *others = ModuleQueues.of(QUORUM, HOUR_MS).exchanges
    for exchange in others:
        # A worker gets a paused task back that this exchange cannot route.
        alternate = {} if exchange.name == "p.paused" else {"alternate-exchange": first.name}
        assert arguments(exchange) == alternate


def test_what_comes_back_to_a_module_comes_through_an_exchange_of_its_own() -> None:
    assert ModuleQueues.of(QUORUM, HOUR_MS).bindings == (
        Binding("p.undeliverable", "", "p.undeliverable"),
        Binding("p.checkin", "", "p.checkin"),
        Binding("p.meditation", "", "p.meditation"),
        Binding("p.paused", "", "p.paused"),
        Binding("p.meditated", "", "p.checkin"),
        Binding("p.unrouted", "", "p.distribution"),
    )
    assert not Binding("exchange", "", "queue").target_is_exchange


def test_the_guard_of_a_topology_refers_to_the_marker_that_says_which_it_is() -> None:
    identity = Identity.of(QUORUM, "clock-1a2b")
    assert identity.fingerprint == "clock-1a2b"
    assert (identity.guard.name, identity.marker.name) == ("p.layout", "p.layout.clock-1a2b")
    assert arguments(identity.guard) == {"alternate-exchange": "p.layout.clock-1a2b"}
    assert arguments(identity.marker) == {}
    for exchange in (identity.guard, identity.marker):
        assert exchange.durable
        assert exchange.type == "fanout"
