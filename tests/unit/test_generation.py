"""Generations: every argument is part of the fingerprint, and each generation has its own names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu import Exchange, Queue

from celery_rabbitdelay.levels.entities import Binding
from celery_rabbitdelay.levels.generation import DIGESTS, GENERATIONS, Generation
from celery_rabbitdelay.levels.layout import binary, clock, custom, geometric
from celery_rabbitdelay.levels.topology import (
    DEFAULT_GENERATION,
    Topology,
    digest_of,
    reference_digest,
)
from celery_rabbitdelay.modules.checkin import CheckIn
from celery_rabbitdelay.publishing.conflict import conflict_with

SMALL = geometric(levels=2, factor=3)

LAYOUTS = [
    clock(),
    clock(tick=0.001, zeros="queue"),
    binary(zeros="skip"),
    geometric(),
    custom([("hours", 6, 3600), ("minutes", 60, 60)]),
]


def digest(topology: Topology, **instead: Any) -> str:
    parts = {name: getattr(topology, name) for name in ("exchanges", "queues", "bindings")}
    return digest_of(**{**parts, **instead})


@pytest.mark.parametrize("number", GENERATIONS)
def test_a_generation_never_changes_once_it_is_released(number: int) -> None:
    """Where this fails, do not write the new digest: make another generation.

    Brokers hold what the released versions have declared, and RabbitMQ refuses other arguments.
    """
    assert reference_digest(GENERATIONS[number]) == DIGESTS[number]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.name}-{layout.zeros}")
@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
@pytest.mark.parametrize("shards", [1, 3])
def test_the_second_generation_has_the_fingerprint_that_it_always_had(
    layout: Any, queue_type: Any, shards: int
) -> None:
    topology = Topology("p", layout, queue_type, shards)
    shard = f"-s{shards}" if shards > 1 else ""
    expected = f"{layout.fingerprint}-{queue_type}{shard}-v2"
    assert topology.identity.fingerprint == expected
    assert topology.identity.guard.name == "p.layout"
    assert topology.name_prefix == "p"


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.name}-{layout.zeros}")
@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_arguments_that_no_generation_has_give_another_fingerprint(
    layout: Any, queue_type: Any
) -> None:
    """As a release would that changes an argument and forgets to make a generation of it."""
    known = Topology("p", layout, queue_type)
    changed = replace(known, generation=replace(known.generation, waiting_delivery_limit=7))
    assert changed.name_prefix == known.name_prefix
    assert changed.identity.fingerprint.startswith(f"{known.identity.fingerprint}-")


def altered(value: Any) -> Any:
    return value + 1 if isinstance(value, int) else f"{value}x"


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_every_argument_of_every_exchange_and_queue_is_in_the_digest(queue_type: Any) -> None:
    topology = Topology("p", SMALL, queue_type)
    found = {digest(topology)}
    number = 1
    for place, queue in enumerate(topology.queues):
        for name, value in (queue.queue_arguments or {}).items():
            arguments = {**(queue.queue_arguments or {}), name: altered(value)}
            other = Queue(queue.name, durable=True, queue_arguments=arguments)
            queues = [*topology.queues[:place], other, *topology.queues[place + 1 :]]
            found.add(digest(topology, queues=queues))
            number += 1
        for further in ({"durable": False}, {"exclusive": True}, {"auto_delete": True}):
            kept: dict[str, Any] = {"durable": True, "queue_arguments": queue.queue_arguments}
            changed = Queue(queue.name, **{**kept, **further})
            queues = [*topology.queues[:place], changed, *topology.queues[place + 1 :]]
            found.add(digest(topology, queues=queues))
            number += 1
    for place, exchange in enumerate(topology.exchanges):
        as_it_is = {"type": exchange.type, "durable": True, "arguments": exchange.arguments}
        changes: list[dict[str, Any]] = [
            {"type": "headers"},
            {"durable": False},
            {"auto_delete": True},
            {"arguments": {**(exchange.arguments or {}), "x-new": 1}},
        ]
        for change in changes:
            another = Exchange(exchange.name, **{**as_it_is, **change})
            exchanges = [*topology.exchanges[:place], another, *topology.exchanges[place + 1 :]]
            found.add(digest(topology, exchanges=exchanges))
            number += 1
    assert len(found) == number


@given(st.data())
def test_every_binding_is_in_the_digest(data: st.DataObject) -> None:
    topology = Topology("p", SMALL, shards=2)
    place = data.draw(st.integers(0, len(topology.bindings) - 1))
    others = [*topology.bindings[:place], *topology.bindings[place + 1 :]]
    binding = topology.bindings[place]
    changed = Binding(binding.source, f"{binding.pattern}.x", *binding[2:])
    found = {digest(topology, bindings=each) for each in (others, [*others, changed])}
    assert digest(topology) not in found
    shuffled = data.draw(st.permutations(topology.bindings))
    assert digest(topology, bindings=shuffled) == digest(topology)


def test_the_third_generation_lets_a_message_be_given_back_any_number_of_times() -> None:
    second, third = (Topology("p", SMALL, generation=GENERATIONS[each]) for each in (2, 3))
    modules = third.module_queues
    for queue in (*third.digit_queues, modules.meditation):
        assert (queue.queue_arguments or {})["x-delivery-limit"] == 2**31 - 1
    for queue in (*second.digit_queues, second.module_queues.meditation):
        assert "x-delivery-limit" not in (queue.queue_arguments or {})
    classic = Topology("p", SMALL, "classic", generation=GENERATIONS[3])
    assert "x-delivery-limit" not in (classic.digit_queues[0].queue_arguments or {})


def test_generations_share_no_name_under_a_prefix() -> None:
    def names(topology: Topology) -> set[str]:
        identity = topology.identity
        exchanges = (*topology.exchanges, identity.guard, identity.marker)
        return {each.name for each in exchanges} | {each.name for each in topology.queues}

    second, third = (Topology("p", SMALL, generation=GENERATIONS[each]) for each in (2, 3))
    assert names(second).isdisjoint(names(third))
    assert all(name.startswith("p.v3.") for name in names(third))
    assert third.delivery.name == "p.v3.delivery"
    assert third.route(0.3, "q").stops == ("p.v3.ms.300",)
    assert [each.name_prefix for each in third.former] == ["p"]
    assert second.former == ()


def test_the_default_generation_is_the_one_whose_names_are_promised() -> None:
    assert DEFAULT_GENERATION == 2
    assert Topology().generation == Generation(2)


def test_check_in_knows_what_has_meditated_in_a_former_generation() -> None:
    third = Topology("p", SMALL, generation=GENERATIONS[3])
    assert CheckIn(third, lambda exchange, key: True)._meditated == {
        "p.v3.meditated",
        "p.meditated",
    }


REPLY = (
    "Exchange.declare: (406) PRECONDITION_FAILED - inequivalent arg 'alternate-exchange' for "
    "exchange 'p.layout' in vhost '/': received 'p.layout.{here}' but current is 'p.layout.{there}'"
)


@pytest.mark.parametrize(
    ("there", "advice"),
    [
        (Topology("p", SMALL, "classic"), "rabbitdelay_queue_type (classic there, quorum here)"),
        (Topology("p", SMALL, shards=3), "rabbitdelay_shards (3 there, 1 here)"),
        (Topology("p", binary()), "rabbitdelay_layout or rabbitdelay_tick (binary-"),
        (
            Topology("p", SMALL, generation=Generation(2, 7)),
            "another version of celery_rabbitdelay has declared the levels with other arguments",
        ),
    ],
)
def test_a_conflict_says_in_what_the_levels_differ(there: Topology, advice: str) -> None:
    here = Topology("p", SMALL)
    reply = REPLY.format(here=here.identity.fingerprint, there=there.identity.fingerprint)
    text = str(conflict_with(here, reply))
    assert advice in text
    assert reply in text
    others = {"rabbitdelay_queue_type", "rabbitdelay_shards", "rabbitdelay_tick"}
    assert {each for each in others if each in text} <= {each for each in others if each in advice}


@pytest.mark.parametrize("length", [1, 40, 60, 90, 100, 200])
@pytest.mark.parametrize("end", range(200, 256))
def test_a_refusal_that_is_cut_off_blames_no_wrong_setting(length: int, end: int) -> None:
    """RabbitMQ cuts its answer after 255 bytes. Nobody is told to delete the guard."""
    prefix = "p" * length
    here, there = Topology(prefix, SMALL), Topology(prefix, SMALL, "classic", shards=3)
    whole = (
        "PRECONDITION_FAILED - inequivalent arg 'alternate-exchange' for exchange "
        f"'{here.identity.guard.name}' in vhost '/': received '{here.identity.marker.name}' but "
        f"current is '{there.identity.marker.name}'"
    )
    reply = whole[:end]
    advice = conflict_with(here, f"Exchange.declare: (406) {reply}").advice
    assert "Delete it" not in advice
    assert "declared the levels with other arguments" not in advice
    names = {"rabbitdelay_layout", "rabbitdelay_tick"}
    differing = {"rabbitdelay_queue_type", "rabbitdelay_shards"}
    named = {name for name in names | differing if name in advice}
    assert named == (differing if reply == whole else names | differing)


def test_a_conflict_with_one_queue_does_not_blame_the_settings() -> None:
    reply = (
        "PRECONDITION_FAILED - inequivalent arg 'x-message-ttl' for queue 'p.ms.300' in vhost '/': "
        "received the value '300' of type 'signedint' but current is none"
    )
    text = str(conflict_with(Topology("p", SMALL), reply))
    assert "'p.ms.300'" in text
    assert "rabbitdelay verify" in text
    assert "rabbitdelay_layout" not in text
