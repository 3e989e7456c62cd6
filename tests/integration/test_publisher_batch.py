"""Many messages in flight: each has its own outcome, and arrives as it was given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import amqp
from kombu import Connection, Exchange, Queue

from celery_rabbitdelay.exceptions import MessageNacked, MessageReturned, PublishError
from celery_rabbitdelay.publishing.publication import Publication, PublishPolicy
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.publishing.wire import Content
from tests.integration.arrivals import take
from tests.integration.publishing import bodies, posting


def test_each_error_belongs_to_its_own_message(
    connection: Connection,
    publisher: Publisher,
    target: Queue,
    make_full: Callable[[int], Queue],
    prefix: str,
) -> None:
    full = make_full(1)
    publisher.publish_all([posting(full.name)])
    keys = [target.name, f"{prefix}-nowhere", full.name, "k" * 300, target.name]
    errors = [type(None), MessageReturned, MessageNacked, PublishError, type(None)]
    sent = [posting(keys[number % 5], str(number)) for number in range(1000)]
    finished: list[Publication] = []
    publisher.publish_all(sent, PublishPolicy(resends=0, window=50), done=finished.append)
    assert Counter(map(id, finished)) == Counter(map(id, sent))
    assert [type(each.error) for each in sent] == errors * 200
    assert all(each.error is None or each.error.routing_key == each.address()[1] for each in sent)
    confirmed = [str(number) for number in range(1000) if number % 5 in (0, 4)]
    assert bodies(connection, target, 400) == Counter(confirmed)


def test_a_body_may_have_any_size(
    connection: Connection, publisher: Publisher, target: Queue
) -> None:
    """Also one that fills a frame, and one that is larger by a byte."""
    sizes = [0, 1, 131_064, 131_065, 300_000]
    given = [bytes(number % 251 for number in range(size)) for size in sizes]
    publisher.publish_all([posting(target.name, body) for body in given], PublishPolicy(window=3))
    assert [bytes(arrival.body or b"") for arrival in take(connection, [target], 5)] == given


def test_names_keys_and_headers_may_be_of_any_script(
    connection: Connection, publisher: Publisher, make_queue: Callable[..., Queue], prefix: str
) -> None:
    exchange = Exchange(f"{prefix}-новости", type="direct")
    queue = make_queue("очередь", exchange, "ключ-🗝")
    queue(connection.default_channel).declare()
    headers: dict[str, Any] = {"naïve-é": "日本"}
    message = amqp.Message("größe", application_headers=headers, delivery_mode=2)
    sent = Publication(Content.of(message), lambda: (exchange.name, "ключ-🗝"))
    publisher.publish_all([sent, posting("ключ-nowhere", exchange=exchange.name)])
    assert sent.error is None
    (arrival,) = take(connection, [queue], 1)
    assert arrival.message.headers == headers
    assert arrival.message.delivery_info["routing_key"] == "ключ-🗝"
    assert arrival.body == "größe"
