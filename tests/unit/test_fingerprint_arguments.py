"""Every argument of what is declared is part of the fingerprint, which no other one replaces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu import Exchange, Queue

from celery_rabbitdelay.levels.entities import Binding
from celery_rabbitdelay.levels.layout import binary, clock, geometric
from celery_rabbitdelay.levels.topology import Topology, arguments_digest, digest_of
from celery_rabbitdelay.publishing.declaration import conflict_with

SMALL = geometric(levels=2, factor=3)


def digest(topology: Topology, **instead: Any) -> str:
    parts = {name: getattr(topology, name) for name in ("exchanges", "queues", "bindings")}
    return digest_of(**{**parts, **instead})


def test_what_is_declared_does_not_change_by_accident() -> None:
    """Where this fails, brokers that hold the former arguments refuse this version.

    RabbitMQ does not let an exchange or a queue change them; users have to move to another prefix.
    """
    assert arguments_digest() == "41a81445ab"


def test_a_fingerprint_names_all_that_differs() -> None:
    layout = clock(tick=0.001, zeros="queue")
    identity = Topology("p", layout, "classic", 3).identity
    expected = f"{layout.fingerprint}-classic-s3-v{arguments_digest()}"
    assert (identity.fingerprint, identity.guard.name) == (expected, "p.layout")
    assert identity.marker.name == f"p.layout.{expected}"


def changed_queues(queue: Queue) -> Iterator[Queue]:
    arguments = queue.queue_arguments or {}
    as_it_is: dict[str, Any] = {"durable": True, "queue_arguments": arguments}
    for name, value in arguments.items():
        other = value + 1 if isinstance(value, int) else f"{value}x"
        yield Queue(queue.name, durable=True, queue_arguments={**arguments, name: other})
    for further in ({"durable": False}, {"exclusive": True}, {"auto_delete": True}):
        yield Queue(queue.name, **{**as_it_is, **further})


def changed_exchanges(exchange: Exchange) -> Iterator[Exchange]:
    arguments = exchange.arguments or {}
    as_it_is: dict[str, Any] = {"type": exchange.type, "durable": True, "arguments": arguments}
    changes: list[dict[str, Any]] = [
        *({"type": "headers"}, {"durable": False}, {"auto_delete": True}),
        {"arguments": {**arguments, "x-new": 1}},
    ]
    for change in changes:
        yield Exchange(exchange.name, **{**as_it_is, **change})


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_every_argument_of_every_exchange_and_queue_is_in_the_digest(queue_type: Any) -> None:
    topology = Topology("p", SMALL, queue_type)
    found = [digest(topology)]
    kinds: Any = (("queues", changed_queues), ("exchanges", changed_exchanges))
    for name, changed in kinds:
        entities = getattr(topology, name)
        for place, entity in enumerate(entities):
            for other in changed(entity):
                instead = [*entities[:place], other, *entities[place + 1 :]]
                found.append(digest(topology, **{name: instead}))
    assert len(set(found)) == len(found) > 50


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


def refusal(here: Topology, theirs: str) -> str:
    return (
        "PRECONDITION_FAILED - inequivalent arg 'alternate-exchange' for exchange "
        f"'{here.identity.guard.name}' in vhost '/': received '{here.identity.marker.name}' but "
        f"current is '{theirs}'"
    )


@pytest.mark.parametrize(
    ("there", "advice"),
    [
        (Topology("p", SMALL, "classic"), "rabbitdelay_queue_type (classic there, quorum here)"),
        (Topology("p", SMALL, shards=3), "rabbitdelay_shards (3 there, 1 here)"),
        (Topology("p", binary()), "rabbitdelay_layout or rabbitdelay_tick (binary-"),
        (None, "another version of celery_rabbitdelay has declared the levels"),
    ],
)
def test_a_conflict_says_in_what_the_levels_differ(there: Topology | None, advice: str) -> None:
    here = Topology("p", SMALL)
    theirs = f"{here.identity.marker.name}0" if there is None else there.identity.marker.name
    reply = refusal(here, theirs)
    text = str(conflict_with(here, reply))
    assert advice in text
    assert reply in text
    others = {"rabbitdelay_queue_type", "rabbitdelay_shards", "rabbitdelay_tick"}
    assert {each for each in others if each in text} <= {each for each in others if each in advice}


@pytest.mark.parametrize("length", [1, 40, 60, 90, 100, 200])
@pytest.mark.parametrize("end", range(200, 256, 5))
def test_a_refusal_that_is_cut_off_blames_no_wrong_setting(length: int, end: int) -> None:
    """RabbitMQ cuts its answer after 255 bytes. Nobody is told to delete the guard.

    If what is missing is of no setting, just the settings that differ are named.
    """
    prefix = "p" * length
    here, there = Topology(prefix, SMALL), Topology(prefix, SMALL, "classic", shards=3)
    whole = refusal(here, there.identity.marker.name)
    reply = whole[:end]
    advice = conflict_with(here, f"Exchange.declare: (406) {reply}").advice
    assert "Delete it" not in advice
    assert "declared the levels with other arguments" not in advice
    names = {"rabbitdelay_layout", "rabbitdelay_tick"}
    differing = {"rabbitdelay_queue_type", "rabbitdelay_shards"}
    named = {name for name in names | differing if name in advice}
    is_told = len(reply) > whole.rindex("-v") + len("-v")
    assert named == (differing if is_told else names | differing)


def test_a_conflict_with_one_queue_does_not_blame_the_settings() -> None:
    reply = (
        "PRECONDITION_FAILED - inequivalent arg 'x-message-ttl' for queue 'p.ms.300' in vhost '/': "
        "received the value '300' of type 'signedint' but current is none"
    )
    text = str(conflict_with(Topology("p", SMALL), reply))
    assert "'p.ms.300'" in text
    assert "rabbitdelay verify" in text
    assert "rabbitdelay_layout" not in text
