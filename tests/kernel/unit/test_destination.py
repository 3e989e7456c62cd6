"""Which queue a message would reach, found among the queues that the application knows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu import Connection, Exchange, Queue, binding
from kombu.common import Broadcast

from celery_rabbitdelay.kombu import DelayedProducer, Destination, Due, Publisher, Topology
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.levels.topology import DISTRIBUTE
from celery_rabbitdelay.publishing.destination import resolve, topic_matches

TOPIC = Exchange("events", type="topic")
ORDERS = Queue("orders", TOPIC, "order.*")
REPORTS = Queue("reports", TOPIC, "report.#")
FANOUT = Queue("mirror", Exchange("all", type="fanout"), "")
DIRECT = Queue("mail", Exchange("mail", type="direct"), "mail")
BOTH = Queue("both", bindings=[binding(TOPIC, "a"), binding(TOPIC, "b.#")])
KNOWN = [ORDERS, REPORTS, FANOUT, DIRECT, BOTH]


@pytest.mark.parametrize(
    ("exchange", "routing_key", "queue"),
    [
        ("", "orders", "orders"),
        ("events", "b.c", "both"),
        ("events", "order.7", "orders"),
        ("events", "report", "reports"),
        ("events", "report.daily.pdf", "reports"),
        ("mail", "mail", "mail"),
    ],
)
def test_the_one_queue_that_matches_gets_it(exchange: str, routing_key: str, queue: str) -> None:
    destination = resolve(exchange, routing_key, KNOWN)
    assert destination.queue is not None
    assert destination.queue.name == queue
    assert (destination.exchange, destination.routing_key) == (exchange, routing_key)


@pytest.mark.parametrize(
    ("urls", "queue_type", "expected"),
    [
        ("amqp://one", "classic", "q"),
        ("amqp://one;amqp://two", None, DISTRIBUTION),
        ("amqp://one;amqp://two", "quorum", "q"),
    ],
)
def test_a_list_of_hosts_says_that_there_is_a_cluster(
    urls: str, queue_type: str | None, expected: str
) -> None:
    queue = Queue("q", queue_arguments={"x-queue-type": queue_type} if queue_type else {})
    producer = DelayedProducer(Publisher(Connection(urls)), Topology(), modules=(DISTRIBUTE,))
    made = producer.delayed_message("x", Destination(queue, "", "q"), Due.after(5))
    assert made.destination == expected


@pytest.mark.parametrize(
    ("exchange", "routing_key", "queues"),
    [
        ("events", "invoice", KNOWN),
        ("events", "order.7", [*KNOWN, Queue("audit", TOPIC, "order.#")]),
        ("headers", "", [Queue("h", Exchange("headers", type="headers"))]),
        ("all", "", [Broadcast("all")]),
        ("all", "", [FANOUT, Queue("second", FANOUT.exchange)]),
    ],
)
def test_else_the_exchange_says_who_gets_it(
    exchange: str, routing_key: str, queues: list[Queue]
) -> None:
    destination = resolve(exchange, routing_key, queues)
    assert destination == (None, exchange, routing_key)
    assert repr(exchange) in str(destination)


def test_a_retry_returns_to_the_queue_it_left_where_several_match() -> None:
    second = Queue("second", FANOUT.exchange)
    assert resolve("all", "", [FANOUT, second], came_from="second").queue is second
    assert resolve("all", "", [FANOUT, second], consumed=["second", "celery"]).queue is second


words = st.lists(st.sampled_from("abc"), max_size=6)


@given(words, words)
def test_a_star_stands_for_one_word_and_a_hash_for_any_number(
    key: list[str], more: list[str]
) -> None:
    assert topic_matches(key, key)
    assert not topic_matches(key, [*key, "a"])
    assert topic_matches(["#"], key)
    assert topic_matches(["*"] * len(key), key)
    assert not topic_matches(["*"] * (len(key) + 1), key)
    assert topic_matches([*key, "#", "z"], [*key, *more, "z"])
    assert not topic_matches([*key, "#", "z"], [*key, *more])
