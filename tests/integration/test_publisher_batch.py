"""Many messages in flight: each has its own outcome, and none is missing, whatever happens."""

from __future__ import annotations

import threading
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
from celery_rabbitdelay.frames import Content
from celery_rabbitdelay.posting import Patience, Posting
from celery_rabbitdelay.publisher import Publisher
from celery_rabbitdelay.testing.servers import wait_for
from tests.integration.arrivals import count, take

#: What a machine may add to a time limit before it has clearly not been kept.
GRACE = 8.0


def posting(key: str, body: str | bytes = "x", exchange: str = "") -> Posting:
    data = body if isinstance(body, bytes) else body.encode()
    message = amqp.Message(data, content_encoding="binary", delivery_mode=2)
    return Posting(Content.of(message), lambda: (exchange, key), body)


def postings(key: str, number: int) -> list[Posting]:
    return [posting(key, str(each)) for each in range(number)]


def work(seconds: float) -> None:
    until = time.monotonic() + seconds
    wait_for(lambda: time.monotonic() > until, "the caller's own work")


def bodies(connection: Connection, queue: Queue, number: int) -> Counter[str]:
    """The bodies of so many messages, each with how often it came."""
    return Counter(bytes(arrival.body).decode() for arrival in take(connection, [queue], number))


@pytest.fixture
def publisher(connection: Connection) -> Iterator[Publisher]:
    publisher = Publisher(connection.clone())
    yield publisher
    publisher.close()


@pytest.fixture
def declared(connection: Connection, queue: Queue) -> Queue:
    queue(connection.default_channel).declare()
    return queue


@pytest.fixture
def still_works(
    connection: Connection, publisher: Publisher, make_queue: Callable[..., Queue]
) -> Callable[[], None]:
    """Shows that a publisher can be used, and takes no answer for another message's."""
    after = make_queue("after")
    after(connection.default_channel).declare()

    def check() -> None:
        sent = [posting(after.name), posting("test-nowhere"), posting(after.name)]
        publisher.publish_all(sent)
        assert [type(each.error) for each in sent] == [type(None), MessageReturned, type(None)]
        assert count(connection, after.name) == 2

    return check


@pytest.fixture
def make_full(connection: Connection, make_queue: Callable[..., Queue]) -> Callable[[int], Queue]:
    """Makes a queue that refuses messages once it holds so many."""

    def make(most: int) -> Queue:
        full = make_queue("full", max_length=most, queue_arguments={"x-overflow": "reject-publish"})
        full(connection.default_channel).declare()
        return full

    return make


@pytest.mark.parametrize("window", [1, 2, 7, 1000])
def test_all_arrive_and_never_more_than_the_window_are_in_flight(
    connection: Connection, publisher: Publisher, declared: Queue, window: int
) -> None:
    number = 60 if window == 1 else 2500
    in_flight = most = 0
    finished: list[Posting] = []

    def source() -> Iterator[Posting]:
        nonlocal in_flight, most
        for each in postings(declared.name, number):
            in_flight += 1
            most = max(most, in_flight)
            yield each

    def done(each: Posting) -> None:
        nonlocal in_flight
        in_flight -= 1
        finished.append(each)

    publisher.publish_all(source(), Patience(window=window), done=done)
    assert most == window
    assert {each.error for each in finished} == {None}
    assert Counter(each.subject for each in finished) == Counter(map(str, range(number)))
    assert bodies(connection, declared, number) == Counter(map(str, range(number)))


def test_nothing_to_publish_is_nothing(publisher: Publisher) -> None:
    publisher.publish_all([])
    assert not publisher.connection.connected


def test_each_error_belongs_to_its_own_message(
    connection: Connection,
    publisher: Publisher,
    declared: Queue,
    make_full: Callable[[int], Queue],
    prefix: str,
) -> None:
    full = make_full(1)
    publisher.publish_all([posting(full.name)])
    keys = {0: declared.name, 1: f"{prefix}-nowhere", 2: full.name, 3: "k" * 300, 4: declared.name}
    errors = {0: None, 1: MessageReturned, 2: MessageNacked, 3: PublishError, 4: None}
    sent = [posting(keys[number % 5], str(number)) for number in range(1000)]
    finished: list[Posting] = []
    publisher.publish_all(sent, Patience(resends=0, window=50), done=finished.append)
    assert Counter(map(id, finished)) == Counter(map(id, sent))
    for number, each in enumerate(sent):
        expected = errors[number % 5]
        assert each.error is None if expected is None else type(each.error) is expected
        assert each.error is None or each.error.routing_key == keys[number % 5]
    confirmed = [str(number) for number in range(1000) if number % 5 in (0, 4)]
    assert bodies(connection, declared, 400) == Counter(confirmed)


def test_a_message_alone_that_cannot_be_written_is_its_own_error(
    publisher: Publisher, still_works: Callable[[], None]
) -> None:
    for key, exchange in (("k" * 300, ""), ("k", "e" * 300)):
        (sent,) = [posting(key, exchange=exchange)]
        publisher.publish_all([sent])
        assert isinstance(sent.error, PublishError)
        assert "cannot be written" in str(sent.error)
    with pytest.raises(PublishError, match="cannot be written"):
        publisher.publish(amqp.Message("x"), lambda: ("", "k" * 300))
    still_works()


def test_what_a_full_queue_refuses_is_sent_again_until_it_is_drained(
    connection: Connection, publisher: Publisher, make_full: Callable[[int], Queue]
) -> None:
    full = make_full(50)
    arrived: Counter[str] = Counter()

    def drain() -> None:
        with connection.clone() as own:
            wait_for(lambda: count(own, full.name) == 50, "a full queue")
            arrived.update(bodies(own, full, 300))

    thread = threading.Thread(target=drain)
    thread.start()
    sent = postings(full.name, 300)
    publisher.publish_all(sent, Patience(resends=None, backoff=(0.0, 0.02, 0.1), window=80))
    thread.join()
    assert {each.error for each in sent} == {None}
    assert sum(each.resent for each in sent) > 0
    assert arrived == Counter(map(str, range(300)))


def test_what_a_full_queue_goes_on_to_refuse_is_an_error_after_so_many_resends(
    publisher: Publisher, make_full: Callable[[int], Queue], still_works: Callable[[], None]
) -> None:
    full = make_full(3)
    sent = postings(full.name, 100)
    publisher.publish_all(sent, Patience(resends=2, backoff=(0.0, 0.01, 0.01), window=10))
    refused = [each for each in sent if each.error is not None]
    assert len(refused) == 97
    assert {type(each.error) for each in refused} == {MessageNacked}
    assert {each.resent for each in refused} == {2}
    still_works()


def test_a_resend_that_is_due_later_holds_up_none_that_is_due_now(
    publisher: Publisher,
    declared: Queue,
    make_queue: Callable[..., Queue],
    make_full: Callable[[int], Queue],
) -> None:
    full, late = make_full(1), make_queue("late")
    publisher.publish_all([posting(full.name)])
    refused, repaired = posting(full.name), posting(late.name)

    def source() -> Iterator[Posting]:
        yield refused
        while refused.resent < 2:
            yield posting(declared.name)
        yield repaired

    def repair(connection: Connection) -> None:
        late(connection.default_channel).declare()

    finished: list[Posting] = []
    patience = Patience(20.0, resends=2, backoff=(0.0, 1.0, 1.0), window=4)
    began = time.monotonic()
    publisher.publish_all(source(), patience, repair=repair, done=finished.append)
    assert time.monotonic() - began < GRACE
    assert isinstance(refused.error, MessageNacked)
    assert repaired.error is None
    assert finished.index(repaired) < finished.index(refused)


def test_an_exchange_that_does_not_exist_is_an_error_of_all_that_are_not_confirmed(
    publisher: Publisher, declared: Queue, prefix: str, still_works: Callable[[], None]
) -> None:
    sent = [posting(declared.name, str(number)) for number in range(200)]
    sent[150] = posting("key", exchange=f"{prefix}-nothing")
    source = iter(sent)
    with pytest.raises(MessageReturned, match="no exchange"):
        publisher.publish_all(source, Patience(window=20))
    assert isinstance(sent[150].error, MessageReturned)
    not_taken = list(source)
    taken = sent[: len(sent) - len(not_taken)]
    assert len(not_taken) >= 200 - 150 - 2 * 20
    without = [number for number, each in enumerate(taken) if each.error is not None]
    assert min(without) > 150 - 2 * 20
    still_works()


def test_an_exchange_that_does_not_exist_is_repaired_and_none_is_missing(
    connection: Connection,
    publisher: Publisher,
    make_queue: Callable[..., Queue],
    declared: Queue,
    prefix: str,
) -> None:
    exchange = Exchange(f"{prefix}-news", type="fanout")
    news = make_queue("news", exchange)
    repaired: list[Connection] = []

    def repair(connection: Connection) -> None:
        repaired.append(connection)
        news(connection.default_channel).declare()

    sent = [
        posting("key", str(number), exchange.name)
        if number % 2
        else posting(declared.name, str(number))
        for number in range(200)
    ]
    publisher.publish_all(sent, Patience(window=30), repair=repair)
    assert len(repaired) == 1
    assert {each.error for each in sent} == {None}
    assert set(bodies(connection, news, 100)) == {str(n) for n in range(200) if n % 2}
    assert set(bodies(connection, declared, 100)) == {str(n) for n in range(200) if not n % 2}


def test_a_repair_that_mends_nothing_ends_it(
    publisher: Publisher, prefix: str, still_works: Callable[[], None]
) -> None:
    repaired: list[Connection] = []
    sent = [posting("key", str(number), f"{prefix}-nothing") for number in range(20)]
    with pytest.raises(MessageReturned):
        publisher.publish_all(sent, repair=repaired.append)
    assert len(repaired) == 1
    assert {type(each.error) for each in sent} == {MessageReturned}
    still_works()


def test_a_queue_that_does_not_exist_is_repaired_once_for_each_message_that_comes_back(
    connection: Connection, publisher: Publisher, queue: Queue, prefix: str
) -> None:
    def repair(connection: Connection) -> None:
        queue(connection.default_channel).declare()

    sent = [posting(queue.name, str(number)) for number in range(50)]
    sent.append(posting(f"{prefix}-nowhere"))
    publisher.publish_all(sent, Patience(window=10), repair=repair)
    assert [each.error for each in sent[:-1]] == [None] * 50
    assert isinstance(sent[-1].error, MessageReturned)
    assert sent[-1].resent == 1
    assert bodies(connection, queue, 50) == Counter(map(str, range(50)))


def test_what_comes_back_while_a_slow_iterator_is_asked_is_sent_again_after_the_repair(
    connection: Connection, publisher: Publisher, queue: Queue
) -> None:
    def source() -> Iterator[Posting]:
        for each in sent:
            work(0.01)
            yield each

    def repair(connection: Connection) -> None:
        queue(connection.default_channel).declare()

    sent = postings(queue.name, 50)
    publisher.publish_all(source(), repair=repair)
    assert [each.error for each in sent] == [None] * 50
    assert bodies(connection, queue, 50) == Counter(map(str, range(50)))


def test_a_repair_is_made_for_one_message_that_came_back_among_many(
    connection: Connection, publisher: Publisher, declared: Queue, make_queue: Callable[..., Queue]
) -> None:
    late = make_queue("late")

    def source() -> Iterator[Posting]:
        yield sent[0]
        for each in sent[1:]:
            if each is sent[1]:
                work(0.1)
            yield each

    def repair(connection: Connection) -> None:
        late(connection.default_channel).declare()

    sent = [posting(late.name), *postings(declared.name, 30)]
    publisher.publish_all(source(), Patience(window=4), repair=repair)
    assert [each.error for each in sent] == [None] * 31
    assert count(connection, late.name) == 1


class TimeIsUp(BaseException):
    """As Celery's soft time limit, or Ctrl-C."""


@pytest.mark.parametrize("error", [ValueError, ConnectionResetError, TimeoutError, TimeIsUp])
@pytest.mark.parametrize("where", ["iterator", "done", "prepare"])
def test_what_the_caller_s_own_code_raises_is_raised_as_it_is(
    publisher: Publisher,
    declared: Queue,
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

    def source() -> Iterator[Posting]:
        yield from postings(declared.name, 50)
        if where == "iterator":
            fail()

    def done(_: Posting) -> None:
        if where == "done":
            fail()

    def prepare(_: Connection) -> None:
        if where == "prepare":
            fail()

    with pytest.raises(error) as caught:
        publisher.publish_all(source(), Patience(window=20), prepare=prepare, done=done)
    assert caught.value is raised[0]
    assert len(raised) == 1
    still_works()


def test_an_iterator_may_take_its_time(
    connection: Connection, publisher: Publisher, declared: Queue
) -> None:
    """The broker is not late when the caller is; and what was given does not wait for the rest."""

    def holds(number: int) -> bool:
        return count(connection, declared.name) == number

    def source() -> Iterator[Posting]:
        sent = postings(declared.name, 40)
        yield from sent[:20]
        work(2.5)
        for number, each in enumerate(sent[20:], start=21):
            yield each
            work(0.02)
            wait_for(partial(holds, number), "all that were given")
        work(2.5)

    outcomes: list[Posting] = []
    publisher.publish_all(source(), Patience(1.0), done=outcomes.append)
    assert len(outcomes) == 40
    assert {each.error for each in outcomes} == {None}
    assert bodies(connection, declared, 40) == Counter(map(str, range(40)))


def test_a_message_whose_time_is_over_before_anybody_looks_ends_all_the_same(
    publisher: Publisher, declared: Queue, still_works: Callable[[], None]
) -> None:
    """As where this process is suspended; too short a time for the iterator to be called slow."""
    publisher.publish_all([posting(declared.name)])
    sent = posting(declared.name)

    def source() -> Iterator[Posting]:
        yield sent
        until = time.monotonic() + 0.045
        while time.monotonic() < until:
            pass

    finished: list[Posting] = []
    # Whether it is confirmed depends on the machine.
    with suppress(ConfirmTimeout):
        publisher.publish_all(source(), Patience(0.04), done=finished.append)
    assert finished == [sent]
    still_works()


@pytest.mark.parametrize("size", [0, 1, 131_064, 131_065, 300_000])
def test_a_body_may_have_any_size(
    connection: Connection, publisher: Publisher, declared: Queue, size: int
) -> None:
    body = bytes(number % 251 for number in range(size))
    sent = [posting(declared.name, body) for _ in range(5)]
    publisher.publish_all(sent, Patience(window=3))
    assert {each.error for each in sent} == {None}
    for arrival in take(connection, [declared], 5):
        assert bytes(arrival.body or b"") == body


def test_names_keys_and_headers_may_be_of_any_script(
    connection: Connection, publisher: Publisher, make_queue: Callable[..., Queue], prefix: str
) -> None:
    exchange = Exchange(f"{prefix}-новости", type="direct")
    queue = make_queue("очередь", exchange, "ключ-🗝")
    queue(connection.default_channel).declare()
    headers: dict[str, Any] = {"naïve-é": "日本"}
    message = amqp.Message("größe", application_headers=headers, delivery_mode=2)
    sent = Posting(Content.of(message), lambda: (exchange.name, "ключ-🗝"))
    publisher.publish_all([sent, posting("ключ-nowhere", exchange=exchange.name)])
    assert sent.error is None
    (arrival,) = take(connection, [queue], 1)
    assert arrival.message.headers == headers
    assert arrival.message.delivery_info["routing_key"] == "ключ-🗝"
    assert arrival.body == "größe"


def test_a_resend_that_comes_due_while_it_is_looked_for_is_sent(
    publisher: Publisher, make_full: Callable[[int], Queue]
) -> None:
    full = make_full(1)
    publisher.publish_all(postings(full.name, 1))
    for microseconds in range(2, 60):
        # Over all of them, some come due between two looks at the clock.
        patience = Patience(timeout=5, resends=5, backoff=(microseconds / 1e6, 0.0, 1.0), window=1)
        sent = postings(full.name, 5)
        publisher.publish_all(sent, patience)
        assert all(isinstance(each.error, MessageNacked) for each in sent)
