"""Many messages in flight: what is refused is sent again, and what is missing is repaired."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from kombu import Connection, Exchange, Queue

from celery_rabbitdelay.exceptions import MessageNacked, MessageRefused, MessageReturned
from celery_rabbitdelay.publishing.publication import Publication, PublishPolicy
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.testing import wait_for
from tests.integration.arrivals import count
from tests.integration.publishing import Declaring, bodies, in_time, posting, postings, work


def test_what_a_full_queue_refuses_is_sent_again_until_it_is_drained(
    connection: Connection, publisher: Publisher, make_full: Callable[[int], Queue]
) -> None:
    full = make_full(50)
    arrived: Counter[str] = Counter()
    sent = postings(full.name, 300)

    def drain() -> None:
        with connection.clone() as own:
            wait_for(lambda: any(each.resent for each in sent), "a full queue that refuses")
            arrived.update(bodies(own, full, 300))

    thread = threading.Thread(target=drain)
    thread.start()
    publisher.publish_all(sent, PublishPolicy(resends=None, backoff=(0.0, 0.02, 0.1), window=80))
    thread.join()
    assert {each.error for each in sent} == {None}
    assert arrived == Counter(map(str, range(300)))


def test_what_a_full_queue_goes_on_to_refuse_is_an_error_after_so_many_resends(
    publisher: Publisher, make_full: Callable[[int], Queue], still_works: Callable[[], None]
) -> None:
    full = make_full(3)
    sent = postings(full.name, 100)
    publisher.publish_all(sent, PublishPolicy(resends=2, backoff=(0.0, 0.01, 0.01), window=10))
    refused = [each for each in sent if each.error is not None]
    assert len(refused) == 97
    assert {type(each.error) for each in refused} == {MessageNacked}
    assert {each.resent for each in refused} == {2}
    still_works()


def test_a_resend_that_is_due_later_holds_up_none_that_is_due_now(
    publisher: Publisher,
    target: Queue,
    make_queue: Callable[..., Queue],
    make_full: Callable[[int], Queue],
) -> None:
    full, late = make_full(1), make_queue("late")
    publisher.publish_all([posting(full.name)])
    refused, repaired = posting(full.name), posting(late.name)

    def source() -> Iterator[Publication]:
        yield refused
        while refused.resent < 2:
            yield posting(target.name)
        yield repaired

    finished: list[Publication] = []
    # So long that even a slow machine has repaired the other by then.
    patience = PublishPolicy(60.0, resends=2, backoff=(0.0, 4.0, 4.0), window=4)
    with in_time(0):
        publisher.publish_all(source(), patience, redeclare=Declaring(late), done=finished.append)
    assert isinstance(refused.error, MessageNacked)
    assert repaired.error is None
    assert finished.index(repaired) < finished.index(refused)


def test_a_resend_that_comes_due_while_it_is_looked_for_is_sent(
    publisher: Publisher, make_full: Callable[[int], Queue]
) -> None:
    full = make_full(1)
    publisher.publish_all(postings(full.name, 1))
    for microseconds in range(2, 60):
        # Over all of them, some come due between two looks at the clock.
        patience = PublishPolicy(
            timeout=30, resends=5, backoff=(microseconds / 1e6, 0.0, 1.0), window=1
        )
        sent = postings(full.name, 5)
        publisher.publish_all(sent, patience)
        assert all(isinstance(each.error, MessageNacked) for each in sent)


def test_an_exchange_that_does_not_exist_is_an_error_of_all_that_are_not_confirmed(
    publisher: Publisher, target: Queue, prefix: str, still_works: Callable[[], None]
) -> None:
    sent = postings(target.name, 200)
    sent[150] = posting("key", exchange=f"{prefix}-nothing")
    source = iter(sent)
    with pytest.raises(MessageReturned, match="no exchange"):
        publisher.publish_all(source, PublishPolicy(window=20))
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
    target: Queue,
    prefix: str,
) -> None:
    exchange = Exchange(f"{prefix}-news", type="fanout")
    news = make_queue("news", exchange)
    sent = postings(target.name, 200)
    sent[1::2] = [posting("key", str(number), exchange.name) for number in range(1, 200, 2)]
    repair = Declaring(news)
    publisher.publish_all(sent, PublishPolicy(window=30), redeclare=repair)
    assert repair.times == 1
    assert {each.error for each in sent} == {None}
    assert set(bodies(connection, news, 100)) == {str(n) for n in range(200) if n % 2}
    assert set(bodies(connection, target, 100)) == {str(n) for n in range(200) if not n % 2}


def test_a_repair_that_mends_nothing_ends_it(
    publisher: Publisher, prefix: str, still_works: Callable[[], None]
) -> None:
    repaired: list[Connection] = []
    sent = [posting("key", str(number), f"{prefix}-nothing") for number in range(20)]
    with pytest.raises(MessageReturned):
        publisher.publish_all(sent, redeclare=repaired.append)
    assert len(repaired) == 1
    assert {type(each.error) for each in sent} == {MessageReturned}
    still_works()


@pytest.mark.parametrize("pause", [0, 0.01], ids=["fast iterator", "slow iterator"])
def test_a_queue_that_does_not_exist_is_repaired_once_for_each_message_that_comes_back(
    connection: Connection, publisher: Publisher, queue: Queue, prefix: str, pause: float
) -> None:
    def source() -> Iterator[Publication]:
        for each in sent:
            work(pause)
            yield each

    sent = [*postings(queue.name, 50), posting(f"{prefix}-nowhere")]
    publisher.publish_all(source(), PublishPolicy(window=10), redeclare=Declaring(queue))
    assert [each.error for each in sent[:-1]] == [None] * 50
    assert isinstance(sent[-1].error, MessageReturned)
    assert sent[-1].resent == 1
    assert bodies(connection, queue, 50) == Counter(map(str, range(50)))


@pytest.mark.parametrize("window", [1, 20, 1000])
def test_messages_that_the_broker_closes_the_channel_for_are_their_own_errors(
    connection: Connection, publisher: Publisher, target: Queue, window: int
) -> None:
    sent = postings(target.name, 60)
    for number in (0, 30, 31, 59):
        sent[number] = posting(target.name, str(number), expiration="soon")
    publisher.publish_all(sent, PublishPolicy(window=window))
    refused = {each.context: str(each.error) for each in sent if each.error is not None}
    assert set(refused) == {"0", "30", "31", "59"}
    assert all("invalid expiration" in reason for reason in refused.values())
    assert all(isinstance(each.error, MessageRefused | None) for each in sent)
    # Those that were on their way when the channel was closed may come twice.
    arrived = bodies(connection, target, count(connection, target.name))
    assert set(arrived) == {str(number) for number in range(60)} - set(refused)


def test_a_message_that_closes_the_channel_during_the_repair_for_another_is_its_own_error(
    connection: Connection, publisher: Publisher, target: Queue, make_queue: Callable[..., Queue]
) -> None:
    late = make_queue("late")
    sent = [posting(late.name), *postings(target.name, 30)]
    sent[1] = posting(target.name, expiration="soon")
    # With this window, the repair begins as soon as the first message has come back.
    publisher.publish_all(sent, PublishPolicy(window=4), redeclare=Declaring(late))
    refused = [each for each in sent if each.error is not None]
    assert refused == [sent[1]]
    assert isinstance(sent[1].error, MessageRefused)
    assert count(connection, late.name) == 1
