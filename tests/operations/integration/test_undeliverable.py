"""Undeliverable messages are read and published again; all others stay where they are."""

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any

import amqp
import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.exceptions import InvalidDelay, InvalidDestination, ReadTooLong
from celery_rabbitdelay.kombu import DelayedProducer, Publisher
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.headers import ENVELOPE
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.envelope import Item, packed
from celery_rabbitdelay.modules.limits import AllowedDestinations
from celery_rabbitdelay.operations import source as source_module
from celery_rabbitdelay.operations.mover import Place
from celery_rabbitdelay.operations.redriving import Redriving, redriving_for
from celery_rabbitdelay.operations.undeliverable import (
    UndeliverableMessage,
    redrive,
    undeliverable_messages,
)
from celery_rabbitdelay.publishing.declaration import declare, missing
from celery_rabbitdelay.testing import RabbitMQServer
from tests.kernel.integration.arrivals import count, take, wait_until_waiting
from tests.kernel.integration.shop import named
from tests.node_control import close_all_connections
from tests.operations.integration.undeliverable_messages import (
    declare_with,
    message,
    put,
    straight,
)

#: More looks than the 20 after which RabbitMQ 4.0 and later drop a message by default.
LOOKS = 21

MODULES = ("check-in", "distribution")


def to_queues(topology: Topology, *queues: Queue, **options: Any) -> Redriving:
    allowed = AllowedDestinations.of_queues(queues)
    producer = DelayedProducer(Publisher(Connection("amqp://")), topology, modules=MODULES)
    return Redriving(producer, allowed, **options)


def numbered(number: int, queue: str = "gone") -> list[amqp.Message]:
    return [message(each, straight(queue)) for each in range(number)]


def envelope_of(headers: dict[str, Any], *items: Item) -> amqp.Message:
    return amqp.Message(
        packed(items),
        application_headers=headers,
        content_type=ENVELOPE,
        delivery_mode=2,
    )


@pytest.fixture
def declared(connection: Connection, topology: Topology, queue: Queue) -> Topology:
    declare_with(connection, topology, queue)
    return topology


def read(connection: Connection, topology: Topology, **options: int) -> list[int]:
    return [int(each.body) for each in undeliverable_messages(connection, topology, **options)]


def test_messages_stay_where_they_are_however_often_they_are_read(
    connection: Connection, declared: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "SILENCE", 0.01)
    assert read(connection, declared) == []
    name = put(connection, declared, *numbered(40))
    assert read(connection, declared, limit=15) == [*range(15)]
    for _ in range(LOOKS):
        assert read(connection, declared) == [*range(40)]
    wait_until_waiting(connection, name, 40)


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_a_read_goes_on_behind_what_it_has_taken_and_takes_few_ahead(
    connection: Connection,
    make_topology: Callable[..., Topology],
    monkeypatch: pytest.MonkeyPatch,
    queue_type: str,
) -> None:
    monkeypatch.setattr(source_module, "AHEAD", 10)
    topology = make_topology(queue_type=queue_type)
    declare(connection, topology)
    name = put(connection, topology, *numbered(75))
    with closing(undeliverable_messages(connection, topology)) as messages:
        for number in range(75):
            assert int(next(messages).body) == number
            assert 75 - count(connection, name) <= (number // 10 + 1) * 10
    wait_until_waiting(connection, name, 75)


def test_a_read_that_takes_too_long_fails_and_loses_nothing(
    connection: Connection, declared: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = put(connection, declared, *numbered(5))
    messages = undeliverable_messages(connection, declared)
    assert int(next(messages).body) == 0
    monkeypatch.setattr(source_module, "MOST_SECONDS", 0.0)
    with pytest.raises(ReadTooLong, match=r"1 undeliverable messages.*a lower limit"):
        next(messages)
    wait_until_waiting(connection, name, 5)


def test_messages_come_to_their_queue_and_the_others_stay(
    connection: Connection, declared: Topology, queue: Queue
) -> None:
    name = put(connection, declared, *numbered(95, queue.name))

    def is_odd(copy: UndeliverableMessage) -> bool:
        return int(copy.body) % 2 == 1

    report = redrive(Place(connection, declared), to_queues(declared, queue), is_odd)

    assert (report.present, report.examined, report.matched) == (95, 95, 47)
    assert (report.moved, report.left, report.stopped) == (47, {}, None)
    assert report.is_complete
    wait_until_waiting(connection, name, 48)
    arrived = take(connection, [queue], 47)
    assert sorted(int(each.body) for each in arrived) == [*range(1, 95, 2)]
    assert sorted(read(connection, declared)) == [*range(0, 95, 2)]
    # The header says how often; the others are those of any delayed message.
    headers = arrived[0].message.headers
    assert headers == straight(queue.name, **{header_names.REDRIVEN: 1})


def test_a_limit_and_a_rate_are_kept_and_a_dry_run_changes_nothing(
    connection: Connection, declared: Topology, queue: Queue
) -> None:
    name = put(connection, declared, *numbered(30, queue.name))
    redriving = to_queues(declared, queue)
    assert redrive(Place(connection, declared), redriving, dry_run=True).moved == 30
    wait_until_waiting(connection, name, 30)
    some = redrive(Place(connection, declared), redriving, limit=12, rate=20)
    # The first ones go at once, as after a pause.
    assert (some.moved, some.seconds >= 8 / 20) == (12, True)
    wait_until_waiting(connection, name, 18)
    wait_until_waiting(connection, queue.name, 12)


def test_forged_headers_reach_nothing(
    connection: Connection, make_queue: Callable[..., Queue], shop: Any
) -> None:
    """The allow-list is that of an application; all that strangers name exists, and is bound.

    tests/operations/unit/test_redriving.py has more headers and envelopes.
    """
    topology, own = shop.rabbitdelay.topology, named(shop, "default")
    secret = make_queue("secret")
    channel: Any = connection.default_channel
    declare_with(connection, topology, *shop.amqp.queues.values(), secret)
    channel.queue_bind(secret.name, "amq.topic", "#")
    inner = Item(b"x", {header_names.EXCHANGE: "", header_names.ROUTING_KEY: secret.name})
    messages = [
        message("x", straight(secret.name)),
        message("x", straight(own, **{header_names.EXCHANGE: "amq.topic"})),
        message("x", straight(topology.digit_queues[0].name)),
        envelope_of(straight(own), Item(b"fine"), inner),
    ]
    name = put(connection, topology, *messages)
    put(connection, topology, message("x", {}), routing_key=f"0.0.{secret.name}")

    report = redrive(Place(connection, topology), redriving_for(shop))
    open_to_all = redrive(
        Place(connection, topology), redriving_for(shop, allow=["*"]), dry_run=True
    )

    assert (report.moved, report.left.total()) == (0, len(messages) + 1), report
    wait_until_waiting(connection, name, len(messages) + 1)
    assert count(connection, secret.name) == count(connection, own) == 0
    # A pattern of the user's opens queues of the user's, and nothing of the levels or the broker:
    # the secret queue, by its name, by the key, and in the envelope.
    assert open_to_all.moved == 3


def test_messages_go_only_where_the_application_knows_a_queue(
    make_shop: Callable[..., Any],
) -> None:
    shop = make_shop(
        task_routes=[[("look", {"queue": "from-a-pair"})], {"send": "letters"}],
        rabbitdelay_checkin_allowed=["open.*"],
    )
    allowed = redriving_for(shop, allow=["more?"]).allowed
    for queue in (named(shop, "default"), "from-a-pair", "open.1", "more1"):
        assert allowed.includes("", queue), queue
    for queue in ("other", "amq.rabbitmq.reply-to", "x.pidbox", "celeryev.1", "more"):
        assert not allowed.includes("", queue), queue
    assert allowed.includes(named(shop, "fanout"), "any")
    everything = redriving_for(shop, allow=["*"]).allowed
    for name in (shop.rabbitdelay.topology.delivery.name, "amq.direct", "celery.pidbox"):
        assert not everything.includes(name, "any")
    assert everything.includes("other", "any")


def test_wrong_destinations_and_delays_are_errors_at_once(shop: Any) -> None:
    for wrong in ("", "celery@host.celery.pidbox", "amq.gen-1", "q" * 256):
        with pytest.raises(InvalidDestination):
            redriving_for(shop, to=wrong)
    with pytest.raises(InvalidDelay, match="nan"):
        redriving_for(shop, delay=float("nan"))
    assert redriving_for(shop, delay=-1).delay_ms == 0


def test_attempts_are_counted_through_distribution(connection: Connection, serve: Any) -> None:
    """Distribution finds no queue each time, and writes the count into the headers again."""
    shop = serve(rabbitdelay_retry_for=0, rabbitdelay_checkin_allowed=["test-*"])
    topology = shop.rabbitdelay.topology
    key = {header_names.ROUTING_KEY: f"{topology.prefix}-gone"}
    gone = {header_names.DUE: 5, header_names.EXCHANGE: "", **key}
    envelope = envelope_of(gone, Item(b"in an envelope"))
    name = put(connection, topology, message("by distribution", gone), envelope)
    redriving = redriving_for(shop, max_attempts=2)
    for attempt in (1, 2):
        report = redrive(Place(connection, topology), redriving)
        assert report.moved == 2, report
        wait_until_waiting(connection, name, 2)
        copies = list(undeliverable_messages(connection, topology))
        assert [each.headers[header_names.REDRIVEN] for each in copies] == [attempt] * 2
    report = redrive(Place(connection, topology), redriving)
    assert report.left == {"it was redriven 2 times already": 2}


def test_a_redrive_declares_levels_that_were_deleted(
    connection: Connection, declared: Topology, queue: Queue
) -> None:
    put(connection, declared, *numbered(1, queue.name))
    deleted = next(iter(declared.level_queues.values()))[0]
    deleted(connection.default_channel).delete()
    assert missing(connection, declared) == (deleted.name,)
    assert redrive(Place(connection, declared), to_queues(declared, queue)).moved == 1
    assert missing(connection, declared) == ()


def test_messages_stay_if_the_levels_are_gone(
    connection: Connection, declared: Topology, queue: Queue
) -> None:
    name = put(connection, declared, *numbered(5, queue.name))
    channel: Any = connection.default_channel

    def delete(found: UndeliverableMessage) -> bool:
        if int(found.body) == 1:  # the levels were looked at before
            declared.delivery(channel).delete()
        return True

    place = Place(connection, declared, may_declare=False)
    report = redrive(place, to_queues(declared, queue), delete)
    assert report.moved <= 1
    assert report.left
    wait_until_waiting(connection, name, 5 - report.moved)


def test_if_the_connections_are_lost_a_redrive_says_so_and_the_next_one_moves_the_rest(
    private_rabbitmq: RabbitMQServer, connection: Connection, declared: Topology, queue: Queue
) -> None:
    name = put(connection, declared, *numbered(100, queue.name))
    lost: list[int] = []

    def lose(copy: UndeliverableMessage) -> bool:
        if int(copy.body) >= 20 and not lost:
            lost.append(int(copy.body))
            close_all_connections(private_rabbitmq, "a test")
        return True

    place, redriving = Place(connection, declared), to_queues(declared, queue)
    report = redrive(place, redriving, lose, rate=50)

    assert lost
    assert report.stopped is not None
    assert "cannot be read" in report.stopped
    runs = [report]
    # What the lost connection held may be back in its queue a little later.
    while (again := redrive(place, redriving)).present:
        assert (again.left, again.stopped) == ({}, None)
        runs.append(again)
    number = sum(each.moved for each in runs)
    with connection.clone() as own:
        wait_until_waiting(own, name, 0)
        arrived = Counter(int(each.body) for each in take(own, [queue], number))
    assert {*arrived} == {*range(100)}
    assert arrived.total() <= 100 + report.copies
