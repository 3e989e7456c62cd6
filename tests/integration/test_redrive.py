"""Undeliverable messages are published again, and those that may not be stay where they are."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import amqp
import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.exceptions import InvalidDelay, InvalidDestination
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.headers import ENVELOPE
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.allowed import AllowedDestinations
from celery_rabbitdelay.modules.envelope import Envelope, Item
from celery_rabbitdelay.operations.undeliverable import reader as undeliverable_reader
from celery_rabbitdelay.operations.undeliverable.messages import (
    UndeliverableMessage,
    undeliverable_messages,
)
from celery_rabbitdelay.operations.undeliverable.redrive import (
    check_exists,
    purge,
    redrive,
    redrive_destinations,
    redriving_for,
)
from celery_rabbitdelay.operations.undeliverable.redriving import Redriving
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.integration.arrivals import count, take, wait_until_waiting
from tests.integration.notes import Notes
from tests.integration.shop import named
from tests.integration.undeliverable_messages import (
    break_level,
    declare_with,
    message,
    put,
    straight,
)
from tests.integration.worker import Worker

MODULES = ("check-in", "distribution")


def to_queues(topology: Topology, *queues: Queue, **options: Any) -> Redriving:
    allowed = AllowedDestinations.of_queues(queues)
    return Redriving(topology, allowed, modules=MODULES, **options)


def numbered(numbers: Any, queue: str) -> list[amqp.Message]:
    return [message(number, straight(queue)) for number in numbers]


def bodies(connection: Connection, topology: Topology) -> list[int]:
    return [int(each.body) for each in undeliverable_messages(connection, topology)]


@pytest.fixture
def declared(connection: Connection, topology: Topology, queue: Queue) -> Topology:
    declare_with(connection, topology, queue)
    return topology


def test_messages_come_to_their_queue_and_the_others_stay_in_their_order(
    connection: Connection, declared: Topology, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(undeliverable_reader, "AHEAD", 10)
    name = put(connection, declared, *numbered(range(95), queue.name))

    def odd(copy: Any) -> bool:
        return int(copy.body) % 2 == 1

    report = redrive(connection, declared, to_queues(declared, queue), odd)

    assert (report.present, report.examined, report.matched) == (95, 95, 47)
    assert (report.removed, report.left, report.stopped) == (47, {}, None)
    assert report.is_complete
    wait_until_waiting(connection, name, 48)
    arrived = take(connection, [queue], 47)
    assert [int(each.body) for each in arrived] == [*range(1, 95, 2)]
    for _ in range(2):
        assert bodies(connection, declared) == [*range(0, 95, 2)]
    # The header says how often; the others are those of any delayed message.
    headers = arrived[0].message.headers
    assert headers == straight(queue.name, **{header_names.REDRIVEN: 1})


def test_of_many_messages_none_comes_twice_and_the_others_keep_their_order(
    connection: Connection, declared: Topology, queue: Queue
) -> None:
    name = put(connection, declared, *numbered(range(3000), queue.name))

    def odd(copy: Any) -> bool:
        return int(copy.body) % 2 == 1

    assert redrive(connection, declared, to_queues(declared, queue), odd).removed == 1500
    assert count(connection, name) == 1500
    assert bodies(connection, declared) == [*range(0, 3000, 2)]
    assert purge(connection, declared).removed == 1500
    assert bodies(connection, declared) == []
    assert count(connection, queue.name) == 1500


def test_a_limit_is_kept_and_a_dry_run_changes_nothing(
    connection: Connection, declared: Topology, queue: Queue
) -> None:
    name = put(connection, declared, *numbered(range(30), queue.name))
    redriving = to_queues(declared, queue)

    tried = redrive(connection, declared, redriving, dry_run=True)
    assert (tried.matched, tried.removed) == (30, 30)
    wait_until_waiting(connection, name, 30)
    assert count(connection, queue.name) == 0

    some = redrive(connection, declared, redriving, limit=12)
    assert some.removed == 12
    wait_until_waiting(connection, name, 18)
    wait_until_waiting(connection, queue.name, 12)


def test_a_rate_is_kept(connection: Connection, declared: Topology, queue: Queue) -> None:
    put(connection, declared, *numbered(range(21), queue.name))
    report = redrive(connection, declared, to_queues(declared, queue), rate=20)
    assert report.removed == 21
    # The first one goes at once.
    assert report.seconds >= 1.0


def test_messages_wait_for_the_delay_and_never_come_before_they_are_due(
    connection: Connection, declared: Topology, queue: Queue
) -> None:
    began = time.time()
    due_ms = int((began + 3) * 1000)
    put(
        connection,
        declared,
        message("past", straight(queue.name)),
        message("ahead", straight(queue.name, **{header_names.DUE: due_ms})),
    )
    report = redrive(connection, declared, to_queues(declared, queue, delay_ms=1500))
    assert report.removed == 2
    first, second = take(connection, [queue], 2)
    assert (first.body, second.body) == ("past", "ahead")
    assert first.at >= began + 1.5
    assert first.message.headers[header_names.DUE] / 1000 == pytest.approx(began + 1.5, abs=30)
    assert second.at * 1000 >= second.message.headers[header_names.DUE] == due_ms


def test_a_message_that_comes_back_is_redriven_no_more_than_it_may_be(
    connection: Connection, declared: Topology, queue: Queue
) -> None:
    """The queue is gone, and so is the alternate: it returns to ``undeliverable`` each time."""
    modules = declared.module_queues
    channel: Any = connection.default_channel
    queue(channel).delete()
    modules.distribution(channel).delete()
    name = put(connection, declared, message("poison", straight(queue.name)))
    redriving = to_queues(declared, queue)
    for attempt in (1, 2, 3):
        report = redrive(connection, declared, redriving)
        assert (report.examined, report.removed) == (1, 1)
        wait_until_waiting(connection, name, 1)
        (copy,) = undeliverable_messages(connection, declared)
        assert copy.headers[header_names.REDRIVEN] == attempt

    report = redrive(connection, declared, redriving)
    assert report.left == {"it was redriven 3 times already": 1}
    assert (report.removed, report.is_complete) == (0, False)
    wait_until_waiting(connection, name, 1)
    assert redrive(connection, declared, to_queues(declared, queue, max_attempts=4)).removed == 1


def test_forged_headers_reach_nothing(
    connection: Connection, make_queue: Callable[..., Queue], make_shop: Callable[..., Any]
) -> None:
    """The allow-list is that of an application; all that strangers name exists, and is bound."""
    shop = make_shop(control_exchange="test-redrive", event_exchange="test-redrive-events")
    topology, own = shop.rabbitdelay.topology, named(shop, "default")
    secret = make_queue("secret")
    channel: Any = connection.default_channel
    declare_with(connection, topology, *shop.amqp.queues.values(), secret)
    ours = ("test-redrive.pidbox", "reply.test-redrive.pidbox", "test-redrive-events")
    exchanges = (*ours, "amq.topic")
    for exchange in ours:
        channel.exchange_declare(exchange, "topic", durable=True, auto_delete=False)
    control = [channel.queue_declare("", exclusive=True).queue for _ in exchanges]
    for watch, exchange in zip(control, exchanges, strict=True):
        channel.queue_bind(watch, exchange, "#")
    levels = [topology.delivery.name, topology.module_queues.checkin.exchange.name]

    forged = [
        straight(secret.name),
        straight(own, **{header_names.EXCHANGE: "amq.topic"}),
        *(
            {header_names.DUE: 5, header_names.EXCHANGE: exchange, header_names.ROUTING_KEY: "x"}
            for exchange in exchanges
        ),
        *(straight(name) for name in (topology.digit_queues[0].name, control[0], "")),
        *({**straight(secret.name), header_names.EXCHANGE: each} for each in levels),
        *({header_names.EXCHANGE: each, header_names.ROUTING_KEY: "x"} for each in levels),
        straight(own, CC=[secret.name]),
        straight(own, **{header_names.QUEUE: ["list"]}),
        straight(own, **{header_names.EXCHANGE: 7}),
        {"x-death": [{"queue": "x", "routing-keys": [f"0.0.{secret.name}"]}]},
        *(
            straight(own, **{header_names.REDRIVEN: wrong})
            for wrong in (3, 2**40, -1, "1", True, [1], {"a": 1}, 0.5)
        ),
    ]
    inner = Item(b"x", {header_names.EXCHANGE: "", header_names.ROUTING_KEY: secret.name})
    copied = Item(b"x", {"CC": [secret.name]})
    envelopes = [
        amqp.Message(
            Envelope((Item(b"fine"), each)).pack(),
            application_headers={
                header_names.DUE: 5,
                header_names.EXCHANGE: "",
                header_names.ROUTING_KEY: own,
            },
            content_type=content_type,
        )
        for each, content_type in (
            (inner, ENVELOPE),
            (copied, ENVELOPE),
            (Item(b"fine"), "application/vnd.rabbitdelay.envelope.2"),
        )
    ]
    broken = amqp.Message(b"no envelope", content_type=ENVELOPE)
    messages = [message("x", each) for each in forged] + [*envelopes, broken]
    name = put(connection, topology, *messages)
    put(connection, topology, message("x", {}), routing_key=f"0.0.{secret.name}")

    report = redrive(connection, topology, redriving_for(shop))
    open_to_all = redrive(connection, topology, redriving_for(shop, allow=["*"]), dry_run=True)

    assert report.removed == 0, report
    wait_until_waiting(connection, name, len(messages) + 1)
    assert count(connection, secret.name) == count(connection, own) == 0
    assert not any(count(connection, each) for each in control)
    assert sum(report.left.values()) == len(messages) + 1
    # A pattern of the user's opens queues of the user's, and nothing of Celery or of the broker:
    # the secret queue, by its name, by the key, and in the envelope; and the queue of a stranger.
    assert open_to_all.removed == 4
    for exchange in ours:
        channel.exchange_delete(exchange)


def test_messages_go_only_where_the_application_knows_a_queue(
    make_shop: Callable[..., Any],
) -> None:
    shop = make_shop(
        task_routes=[("look", {"queue": "from-a-pair"}), {"note": "by-name", "x": {"queue": "y"}}],
        rabbitdelay_checkin_allowed=["open.*"],
    )
    allowed = redrive_destinations(shop, ["more?"])
    for queue in (named(shop, "default"), "from-a-pair", "by-name", "y", "open.1", "more1"):
        assert allowed.includes("", queue), queue
    for queue in ("other", "amq.rabbitmq.reply-to", "x.pidbox", "celeryev.1", "reply.x", "more"):
        assert not allowed.includes("", queue), queue
    assert allowed.includes(named(shop, "fanout"), "any")
    everything = redrive_destinations(shop, ["*"])
    for name in (shop.rabbitdelay.topology.delivery.name, "amq.direct", "celery.pidbox"):
        assert not everything.includes(name, "any")
    assert everything.includes("other", "any")


def test_an_application_can_have_a_queue_whose_name_begins_as_those_of_replies(
    make_shop: Callable[..., Any],
) -> None:
    shop = make_shop(task_routes={"look": "reply.letters"})
    allowed = redrive_destinations(shop, ["*"])
    assert allowed.includes("", "reply.letters")
    assert not allowed.includes("reply.celery.pidbox", "any")


def test_wrong_destinations_and_delays_are_errors_at_once(
    connection: Connection, shop: Any, queue: Queue
) -> None:
    for wrong in ("", "celery@host.celery.pidbox", "amq.gen-1", "q" * 256):
        with pytest.raises(InvalidDestination):
            redriving_for(shop, to=wrong)
    with pytest.raises(InvalidDelay, match="-1"):
        redriving_for(shop, delay=-1)
    with pytest.raises(InvalidDestination, match="does not exist: declare it first"):
        check_exists(connection, queue.name)


def test_all_messages_can_go_to_one_queue(
    connection: Connection, declared: Topology, queue: Queue, make_queue: Callable[..., Queue]
) -> None:
    aside = make_queue("aside")
    declare_with(connection, declared, aside)
    put(
        connection, declared, message("known", straight(queue.name)), message("unknown", {"own": 1})
    )
    report = redrive(connection, declared, to_queues(declared, to=aside.name))
    assert report.removed == 2
    known, unknown = (each.message.headers for each in take(connection, [aside], 2))
    assert known[header_names.QUEUE] == known[header_names.ROUTING_KEY] == aside.name
    assert unknown["own"] == 1


def test_messages_of_every_kind_run_as_they_would_have(
    connection: Connection, shop: Any, worker: Worker, noted: Notes
) -> None:
    """500 tasks: straight, for exchanges, of a high priority, and in envelopes."""
    topology, delays = shop.rabbitdelay.topology, shop.rabbitdelay
    kinds: list[tuple[int, dict[str, Any]]] = [
        (200, {"queue": named(shop, "second")}),
        (50, {"exchange": named(shop, "topic"), "routing_key": "topic.daily.reports"}),
        (25, {"exchange": named(shop, "fanout")}),
        (25, {"priority": 9}),
        *[(20, {"envelopes": True})] * 10,
    ]
    # Of each kind, one that waits in a level which stays.
    for options in (kinds[index][1] for index in range(5)):
        delays.send_many("note", [noted.row(-1, delay=0.2)], **{"envelopes": False, **options})
    expected = [(note["exchange"], note["routing_key"]) for note in noted.wait(5)]
    noted.forget()
    break_level(connection, topology)
    first = 0
    for number, options in kinds:
        rows = [noted.row(each, delay=0.5) for each in range(first, first + number)]
        delays.send_many("note", rows, **{"envelopes": False, **options})
        first += number
    name = topology.module_queues.undeliverable.name
    wait_until_waiting(connection, name, 310)

    report = redrive(connection, topology, redriving_for(shop), declare=delays.declare)

    assert (report.removed, report.left) == (310, {})
    notes = noted.wait(500)
    assert Counter(note["given"][0] for note in notes) == Counter(range(500))
    of_each_kind = [notes_of[0] for notes_of in _by_kind(notes, (0, 200, 250, 275, 300))]
    came_by = [(note["exchange"], note["routing_key"]) for note in of_each_kind]
    assert sorted(came_by) == sorted(expected)
    assert of_each_kind[3]["priority"] == 9
    assert all(header_names.REDRIVEN not in note["headers"] for note in notes)
    assert count(connection, name) == 0


def _by_kind(notes: list[dict[str, Any]], firsts: tuple[int, ...]) -> list[list[dict[str, Any]]]:
    return [[note for note in notes if note["given"] == [first]] for first in firsts]


def test_attempts_are_counted_through_distribution(
    connection: Connection, make_shop: Callable[..., Any], configuration: dict[str, Any]
) -> None:
    """Distribution finds no queue each time, and writes the count into the headers again."""
    once = {"rabbitdelay_retry_for": 0, "rabbitdelay_checkin_allowed": ["test-*"]}
    shop = make_shop(**once)
    topology = shop.rabbitdelay.topology
    declare_with(connection, topology)
    gone = {header_names.EXCHANGE: "", header_names.ROUTING_KEY: f"{topology.prefix}-gone"}
    item = Item(b"in an envelope")
    name = put(
        connection,
        topology,
        message("by distribution", {header_names.DUE: 5, **gone}),
        amqp.Message(
            Envelope((item,)).pack(),
            application_headers={header_names.DUE: 5, **gone},
            content_type=ENVELOPE,
            delivery_mode=2,
        ),
    )
    redriving = redriving_for(shop, max_attempts=2)
    with Worker({**configuration, **once}):
        for attempt in (1, 2):
            report = redrive(connection, topology, redriving)
            assert report.removed == 2, report
            wait_until_waiting(connection, name, 2)
            copies = list(undeliverable_messages(connection, topology))
            assert [each.headers[header_names.REDRIVEN] for each in copies] == [attempt] * 2
        report = redrive(connection, topology, redriving)
    assert report.left == {"it was redriven 2 times already": 2}


def test_messages_stay_if_the_levels_are_gone(
    connection: Connection, declared: Topology, queue: Queue
) -> None:
    name = put(connection, declared, *numbered(range(5), queue.name))
    channel: Any = connection.default_channel
    declared.delivery(channel).delete()
    report = redrive(connection, declared, to_queues(declared, queue))
    assert report.removed == 0
    assert sum(report.left.values()) >= 1
    assert not report.is_complete
    wait_until_waiting(connection, name, 5)


def test_messages_that_were_read_stay_if_reading_takes_too_long(
    connection: Connection, declared: Topology, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = put(connection, declared, *numbered(range(5), queue.name))
    monkeypatch.setattr(undeliverable_reader, "MOST_SECONDS", 0.0)
    report = redrive(connection, declared, to_queues(declared, queue))
    assert report.removed == 0
    assert "cannot be read further" in str(report.stopped)
    wait_until_waiting(connection, name, 5)


def test_what_a_client_checks_in_and_check_in_refuses_keeps_its_delay(
    connection: Connection, declared: Topology, queue: Queue
) -> None:
    checkin = declared.module_queues.checkin.exchange.name
    refused = {
        "x-delay": 1000,
        header_names.EXCHANGE: checkin,
        header_names.ROUTING_KEY: queue.name,
        header_names.REASON: "check-in may not reach the queue",
    }
    wrong = {**refused, "x-delay": "soon"}
    put(connection, declared, message("later", refused), message("wrong", wrong))
    report = redrive(connection, declared, to_queues(declared, queue))
    assert report.removed == 1
    assert report.left == {"x-delay is 'soon', not a number of milliseconds: give a delay": 1}
    given = redrive(connection, declared, to_queues(declared, queue, delay_ms=0))
    assert given.removed == 1
    distribution = declared.module_queues.distribution
    arrived = {each.body: each for each in take(connection, [distribution], 2)}
    headers = arrived["later"].message.headers
    assert arrived["later"].at * 1000 >= headers[header_names.DUE]
    assert headers[header_names.ROUTING_KEY] == queue.name
    assert headers[header_names.EXCHANGE] == ""
    assert "x-delay" not in headers


def test_if_the_connections_are_lost_the_report_says_so_and_no_message_is(
    private_rabbitmq: RabbitMQServer, connection: Connection, declared: Topology, queue: Queue
) -> None:
    name = put(connection, declared, *numbered(range(100), queue.name))
    lost: list[int] = []

    def lose(copy: UndeliverableMessage) -> bool:
        if int(copy.body) >= 20 and not lost:
            lost.append(int(copy.body))
            private_rabbitmq.ctl("close_all_connections", "a test")
        return True

    report = redrive(connection, declared, to_queues(declared, queue), lose, rate=50)

    assert lost
    assert report.stopped is not None
    assert not report.is_complete
    with connection.clone() as again:
        wait_for(
            lambda: count(again, name) + count(again, queue.name) >= 100, "all of the messages"
        )
        assert redrive(again, declared, to_queues(declared, queue)).left == {}
        wait_until_waiting(again, name, 0)
        arrived = take(again, [queue], count(again, queue.name))
    assert {int(each.body) for each in arrived} == {*range(100)}


def test_only_messages_that_are_meant_are_deleted(
    connection: Connection, declared: Topology, queue: Queue
) -> None:
    name = put(connection, declared, *numbered(range(40), queue.name))

    def small(copy: Any) -> bool:
        return int(copy.body) < 10

    tried = purge(connection, declared, small, dry_run=True)
    assert tried.removed == 10
    wait_until_waiting(connection, name, 40)
    assert purge(connection, declared, small, limit=4).removed == 4
    wait_until_waiting(connection, name, 36)
    assert purge(connection, declared, small).removed == 6
    assert sorted(bodies(connection, declared)) == [*range(10, 40)]
    assert purge(connection, declared).removed == 30
    assert purge(connection, declared).present == 0
