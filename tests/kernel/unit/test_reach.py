"""Where distribution may publish, by an application's settings."""

from typing import Any

import amqp
import pytest
from hypothesis import given, settings
from kombu import Exchange, Queue
from kombu.common import Broadcast

from celery_rabbitdelay import Celery, LaterVersion, UnprocessableMessage
from celery_rabbitdelay.app.destinations import checkin_destinations, distribution_reach
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.headers import ENVELOPE
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.distribution import Distribution
from celery_rabbitdelay.modules.envelope import Item, packed
from celery_rabbitdelay.modules.forwarding import EarlyMessages
from celery_rabbitdelay.modules.limits import AllowedDestinations
from tests.kernel.unit.strategies import destinations

TOPOLOGY = Topology()
KNOWN = AllowedDestinations(
    queues=frozenset({"known"}), never_patterns=("*.pidbox",), is_list=False
)
distributed = Distribution(TOPOLOGY, reach=KNOWN).receive


@pytest.mark.filterwarnings("ignore:.*The 'queue' task attribute is deprecated:Warning")
def test_the_queues_that_the_configuration_names_are_known(app: Celery) -> None:
    app.conf.update(
        task_queues=[Queue("letters", Exchange("office"), "a"), Broadcast("news")],
        task_routes=([("look.*", {"queue": "from-a-pair"})], {"note": "by-name"}),
        rabbitdelay_checkin_allowed=["open.*"],
        task_default_queue="usual",
    )

    @app.task(queue="of-a-task", shared=False)
    def remind() -> None: ...

    app.amqp.queues.select_add(Queue("consumed"))
    reach = distribution_reach(app)
    app.amqp.queues["later"]
    for queue in ("letters", "from-a-pair", "by-name", "usual", "of-a-task", "open.1", "consumed"):
        assert reach.names("", queue), queue
    # An early task of a broadcast returns to the queue of its worker.
    assert reach.names("", Broadcast("news").name)
    # By its binding to the levels alone.
    assert not any(reach.names("", queue) for queue in ("later", "bcast.secret"))
    for exchange in ("office", "of-another-application", "open.1"):
        assert reach.names(exchange, "any"), exchange


@pytest.mark.parametrize("patterns", [None, ["*"]])
def test_names_that_others_own_are_never_reached(app: Celery, patterns: Any) -> None:
    app.conf.update(
        rabbitdelay_prefix="levels",
        rabbitdelay_distribution_allowed=patterns,
        rabbitdelay_checkin_allowed=["*"],
        control_exchange="other",
        event_exchange="events",
        event_queue_prefix="shop",
        result_exchange="results",
        task_queues=[Queue("shop.default"), Queue("shop.mail", Exchange("shop.topic", "topic"))],
    )
    reach, checkin = distribution_reach(app), checkin_destinations(app)
    for name in (
        *("amq.topic", "celery.pidbox", "reply.celery.pidbox", "other.pidbox"),
        *("1.reply.other.pidbox", "celeryev", "celeryev.1234", "events", "results"),
        *("levels.delivery", "levels.meditated", "levels.layout", "levels.hours.7"),
        app.events.Receiver(None).queue.name,
    ):
        for exchange, routing_key in ((name, "any"), ("", name)):
            with pytest.raises(UnprocessableMessage, match="rabbitdelay_distribution_allowed"):
                reach.names(exchange, routing_key)
            assert not checkin.includes(exchange, routing_key)
    # Queues with the prefix of those of events belong to the application.
    for exchange, key in (("", "shop.default"), ("", "shop.mail"), ("shop.topic", "m.x")):
        assert reach.names(exchange, key)
        assert checkin.includes(exchange, key)


def test_a_list_is_all_that_is_reached(app: Celery) -> None:
    app.conf.update(task_queues=[Queue("letters")], rabbitdelay_distribution_allowed=["news?"])
    reach = distribution_reach(app)
    assert reach.names("", "news1")
    assert reach.names("news2", "any")
    for exchange, key, why in (
        ("", "letters", "the queue 'letters'"),
        ("office", "a", "the exchange 'office'"),
        ("", "", "neither an exchange nor a queue"),
    ):
        with pytest.raises(UnprocessableMessage, match=why):
            reach.names(exchange, key)


def to(exchange: str, routing_key: str, **more: Any) -> dict[str, Any]:
    return {header_names.EXCHANGE: exchange, header_names.ROUTING_KEY: routing_key, **more}


def waiting(exchange: str, routing_key: str, **more: Any) -> amqp.Message:
    return amqp.Message(b"x", application_headers=to(exchange, routing_key, **more))


def unrouted(key: str, **told: Any) -> amqp.Message:
    message = amqp.Message(b"x", application_headers=told)
    message.delivery_info = {"exchange": TOPOLOGY.delivery.name, "routing_key": key}
    return message


@settings(max_examples=50)
@given(destinations.filter(lambda name: name != "known" and not name.endswith(".pidbox")))
def test_another_queue_is_reached_by_its_binding_and_nothing_goes_in_circles(queue: str) -> None:
    (outgoing,) = distributed(waiting("", queue, **{header_names.QUEUE: queue}))
    exchange, key = outgoing.address
    assert exchange == TOPOLOGY.delivery.name
    pattern, words = TOPOLOGY.keys.destination_pattern(queue).split("."), key.split(".")
    assert len(pattern) == len(words)
    assert all(part in ("*", word) for part, word in zip(pattern, words, strict=True))
    assert pattern[-1] != TOPOLOGY.keys.destination_pattern(DISTRIBUTION).split(".")[-1]
    # If nothing is bound there, it comes back by the alternate exchange.
    (back,) = distributed(unrouted(key, **{header_names.QUEUE: queue}))
    assert back.exchange == TOPOLOGY.module_queues.undeliverable.exchange.name
    headers = back.message.headers.to_headers()
    assert "rabbitdelay_distribution_allowed" in headers[header_names.REASON]
    assert headers[header_names.ROUTING_KEY] == queue


LONG = "q" * 200
ITSELF = {header_names.QUEUE: "known"}


@pytest.mark.parametrize(
    ("queue", "told"),
    [
        ("known", {}),
        ("known", to("", "known")),
        # A task that is retried by its exchange.
        ("known", to("office", "paper", **ITSELF)),
        (LONG, to("office", "paper", **{header_names.QUEUE: LONG})),
        (LONG, to("", LONG)),
    ],
)
def test_without_a_binding_it_goes_to_the_queue_in_its_key(queue: str, told: Any) -> None:
    (outgoing,) = distributed(unrouted(TOPOLOGY.route(5, queue).routing_key, **told))
    assert outgoing.address == ("", queue)
    assert (outgoing.obstacle is None) == (queue == "known")


@pytest.mark.parametrize("queue", ["known", LONG])
@pytest.mark.parametrize("due", [5, 2**41])
def test_without_a_binding_it_goes_nowhere_else(queue: str, due: int) -> None:
    """A producer may have the right to send to the queue in the key, and to no other."""
    distribution = Distribution(TOPOLOGY, EarlyMessages(TOPOLOGY, 0).put_back, reach=KNOWN)
    key = TOPOLOGY.route(5, queue).routing_key
    for told in (
        to("office", "known"),
        to("", "another"),
        to("", "known", **{header_names.QUEUE: "another"}),
        to("", "known", **{header_names.QUEUE: ["known"]}),
        to("office", "paper", **{header_names.QUEUE: None}),
        to("", ""),
    ):
        message = unrouted(key, **told, **{header_names.DUE: due})
        with pytest.raises(UnprocessableMessage, match=r"not match the queue|a queue's name"):
            list(distribution.receive(message))
    body = packed((Item(b"x", to("office", "paper")),))
    envelope = amqp.Message(body, content_type=ENVELOPE, application_headers=to("", "known"))
    envelope.delivery_info = unrouted(key).delivery_info
    with pytest.raises(UnprocessableMessage, match="in an envelope"):
        list(distributed(envelope))


@pytest.mark.parametrize(
    "headers",
    [
        to("celery.pidbox", "known"),
        # With the envelope's key, or its exchange.
        {header_names.EXCHANGE: "celery.pidbox"},
        {header_names.ROUTING_KEY: "x.celery.pidbox"},
        {header_names.EXCHANGE: 5},
        {"CC": ["secret"]},
        {"BCC": ["secret"]},
        {header_names.VERSION: 2},
    ],
    ids=str,
)
def test_an_envelope_with_something_forbidden_stays_closed(headers: dict[str, Any]) -> None:
    """Whether one message has it or all share it."""
    sound, shared = Item(b"x", {"id": "1"}), to("", "known")
    for body in (
        packed((sound, Item(b"x", headers)), shared),
        packed((sound,), {**shared, **headers}),
    ):
        message = amqp.Message(body, content_type=ENVELOPE, application_headers={})
        with pytest.raises((UnprocessableMessage, LaterVersion)):
            next(distributed(message))
