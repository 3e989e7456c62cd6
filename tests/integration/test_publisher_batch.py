"""Many messages in flight: each has its own outcome, and none is missing, whatever happens."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import amqp
import pytest
from kombu import Connection, Exchange, Queue

from celery_rabbitdelay.exceptions import (
    ConfirmTimeout,
    MessageNacked,
    MessageReturned,
    PublishError,
)
from celery_rabbitdelay.publishing.publication import Publication, PublishPolicy
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.publishing.wire import Content
from celery_rabbitdelay.testing import wait_for
from tests.integration.arrivals import count, take
from tests.integration.publishing import bodies, posting, postings, work


@pytest.mark.parametrize("window", [1, 2, 7, 1000])
def test_all_arrive_and_never_more_than_the_window_are_in_flight(
    connection: Connection, publisher: Publisher, target: Queue, window: int
) -> None:
    number = 60 if window == 1 else 2500
    in_flight = most = 0
    finished: list[Publication] = []

    def source() -> Iterator[Publication]:
        nonlocal in_flight, most
        for each in postings(target.name, number):
            in_flight += 1
            most = max(most, in_flight)
            yield each

    def done(each: Publication) -> None:
        nonlocal in_flight
        in_flight -= 1
        finished.append(each)

    publisher.publish_all(source(), PublishPolicy(window=window), done=done)
    # A broker that confirms fast may never leave a thousand unconfirmed.
    assert most == window if window < 1000 else 7 < most <= window
    assert {each.error for each in finished} == {None}
    assert Counter(each.context for each in finished) == Counter(map(str, range(number)))
    assert bodies(connection, target, number) == Counter(map(str, range(number)))


def test_nothing_to_publish_is_nothing(publisher: Publisher) -> None:
    publisher.publish_all([])
    assert not publisher.connection.connected


def test_each_error_belongs_to_its_own_message(
    connection: Connection,
    publisher: Publisher,
    target: Queue,
    make_full: Callable[[int], Queue],
    prefix: str,
) -> None:
    full = make_full(1)
    publisher.publish_all([posting(full.name)])
    keys = {0: target.name, 1: f"{prefix}-nowhere", 2: full.name, 3: "k" * 300, 4: target.name}
    errors = {0: None, 1: MessageReturned, 2: MessageNacked, 3: PublishError, 4: None}
    sent = [posting(keys[number % 5], str(number)) for number in range(1000)]
    finished: list[Publication] = []
    publisher.publish_all(sent, PublishPolicy(resends=0, window=50), done=finished.append)
    assert Counter(map(id, finished)) == Counter(map(id, sent))
    for number, each in enumerate(sent):
        expected = errors[number % 5]
        assert each.error is None if expected is None else type(each.error) is expected
        assert each.error is None or each.error.routing_key == keys[number % 5]
    confirmed = [str(number) for number in range(1000) if number % 5 in (0, 4)]
    assert bodies(connection, target, 400) == Counter(confirmed)


class TimeIsUp(BaseException):
    """As Celery's soft time limit, or Ctrl-C."""


@pytest.mark.parametrize("error", [ValueError, ConnectionResetError, TimeoutError, TimeIsUp])
@pytest.mark.parametrize("where", ["iterator", "done", "prepare"])
def test_what_the_caller_s_own_code_raises_is_raised_as_it_is(
    publisher: Publisher,
    target: Queue,
    still_works: Callable[[], None],
    error: type[BaseException],
    where: str,
) -> None:
    """Also what looks like a lost connection: a file, a pipe or a database may raise it."""
    if where == "prepare" and issubclass(error, OSError):
        return  # It works on the publisher's connection, whose loss it then is.
    raised: list[BaseException] = []

    def fail() -> None:
        raised.append(error("the caller's"))
        raise raised[-1]

    def source() -> Iterator[Publication]:
        yield from postings(target.name, 50)
        if where == "iterator":
            fail()

    def done(_: Publication) -> None:
        if where == "done":
            fail()

    def prepare(_: Connection) -> None:
        if where == "prepare":
            fail()

    with pytest.raises(error) as caught:
        publisher.publish_all(source(), PublishPolicy(window=20), declare=prepare, done=done)
    assert caught.value is raised[0]
    assert len(raised) == 1
    still_works()


def test_an_iterator_may_take_its_time(
    connection: Connection, publisher: Publisher, target: Queue
) -> None:
    """The broker is not late when the caller is; and what was given does not wait for the rest."""

    def holds(number: int) -> bool:
        return count(connection, target.name) == number

    def source() -> Iterator[Publication]:
        sent = postings(target.name, 40)
        yield from sent[:20]
        work(4.5)
        for number, each in enumerate(sent[20:], start=21):
            yield each
            work(0.02)
            wait_for(partial(holds, number), "all that were given")
        work(4.5)

    outcomes: list[Publication] = []
    publisher.connection.ensure_connection()
    publisher.publish_all(source(), PublishPolicy(4.0), done=outcomes.append)
    assert len(outcomes) == 40
    assert {each.error for each in outcomes} == {None}
    assert bodies(connection, target, 40) == Counter(map(str, range(40)))


def test_a_message_whose_time_is_over_before_anybody_looks_ends_all_the_same(
    publisher: Publisher, target: Queue, still_works: Callable[[], None]
) -> None:
    """As where this process is suspended; too short a time for the iterator to be called slow."""
    publisher.publish_all([posting(target.name)])
    sent = posting(target.name)

    def source() -> Iterator[Publication]:
        yield sent
        until = time.monotonic() + 0.045
        while time.monotonic() < until:
            pass

    finished: list[Publication] = []
    # Whether it is confirmed depends on the machine.
    with suppress(ConfirmTimeout):
        publisher.publish_all(source(), PublishPolicy(0.04), done=finished.append)
    assert finished == [sent]
    still_works()


@pytest.mark.parametrize("size", [0, 1, 131_064, 131_065, 300_000])
def test_a_body_may_have_any_size(
    connection: Connection, publisher: Publisher, target: Queue, size: int
) -> None:
    body = bytes(number % 251 for number in range(size))
    sent = [posting(target.name, body) for _ in range(5)]
    publisher.publish_all(sent, PublishPolicy(window=3))
    assert {each.error for each in sent} == {None}
    for arrival in take(connection, [target], 5):
        assert bytes(arrival.body or b"") == body


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
