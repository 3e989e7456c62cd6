"""Each trouble of publishing, at an exact message: what becomes of it, and of those beside it.

A publisher and a pipeline share the publish loop; both go through the same table, against a broker
in this process. That the real broker answers so is shown by ``test_publisher`` and
``test_publisher_trouble``.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from threading import Event
from typing import Any, NamedTuple
from unittest import mock

import amqp
import pytest
from amqp import spec
from amqp.exceptions import AccessRefused, NoConsumers, NotFound, PreconditionFailed
from kombu import Connection, Exchange

from celery_rabbitdelay.exceptions import (
    ConfirmTimeout,
    ConnectionBlocked,
    ConnectionLost,
    DeclarationNotPermitted,
    DeclarationRefused,
    MessageNacked,
    MessageNotPermitted,
    MessageRefused,
    MessageReturned,
    PublishError,
    RabbitDelayError,
    TopologyIncomplete,
)
from celery_rabbitdelay.publishing import confirm_channel, kombu_internals, publish_loop
from celery_rabbitdelay.publishing import publisher as publisher_module
from celery_rabbitdelay.publishing.confirm_channel import ConfirmChannel, OnSettled, Unconfirmed
from celery_rabbitdelay.publishing.message import Content, Publication
from celery_rabbitdelay.publishing.publish_loop import DEFAULT_POLICY, PublishLoop, PublishPolicy
from celery_rabbitdelay.publishing.publisher import Pipeline, Publisher
from tests.kernel.unit.frame_broker import FrameBroker, Session
from tests.kernel.unit.waiting import wait_until

AN_HOUR = 3600.0


#: Two resends, at once.
POLICY = PublishPolicy(resends=2, backoff=(0.0, 0.0, 0.0))

NOT_PERMITTED = "write access to exchange 'news' in vhost '/' refused for user 'shop'"


class LeapingClock:
    """The clock of the publish loop, which a test may put forward; nobody sleeps by it."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def sleep(self, seconds: float) -> None:
        self.ahead += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> LeapingClock:
    clock = LeapingClock()
    for module in (publish_loop, confirm_channel, publisher_module, kombu_internals):
        monkeypatch.setattr(module, "time", clock)
    return clock


class Script:
    """Answers each message as its body says, behind a number: ``2: nack, ack``.

    That is a nack, and an ack when it comes again; the last answer is given from then on.

    Attributes:
        times: How often each message came.
        acked: Those that the broker has taken.
    """

    def __init__(self, clock: LeapingClock) -> None:
        self.times: Counter[str] = Counter()
        self.acked: set[str] = set()
        self._clock = clock

    def __call__(self, session: Session, body: str) -> None:
        answers = body.partition(": ")[2].split(", ")
        answer = answers[min(self.times[body], len(answers) - 1)]
        self.times[body] += 1
        if answer.startswith("ack"):
            self.acked.add(body)
            session.ack()
        if answer == "nack":
            session.nack()
        elif answer == "return":
            session.give_back()
        elif answer.startswith("40"):
            session.close_channel(int(answer[:3]), answer[4:])
        elif answer in ("320", "530"):
            session.close_connection(int(answer), "an operator was here")
        elif answer.startswith("block"):
            session.block()
        if answer.endswith("lost"):
            session.lose_connection()
        if answer == "block and unblock":
            session.unblock()
            self.acked.add(body)
            session.ack()
        if answer.endswith("an hour"):
            self._clock.ahead += AN_HOUR
            session.wake()


@pytest.fixture
def script(clock: LeapingClock) -> Script:
    return Script(clock)


@pytest.fixture
def broker(script: Script) -> Iterator[FrameBroker]:
    with FrameBroker(script) as broker:
        yield broker


@pytest.fixture
def publisher(broker: FrameBroker) -> Iterator[Publisher]:
    """A publisher that is connected."""
    publisher = Publisher(broker.connection())
    publisher.publish_all([message("ack")])
    yield publisher
    publisher.discard()


def message(answers: str, number: int = 0) -> Publication:
    """A message, and what is answered to it."""
    body = f"{number}: {answers}"
    return Publication(Content.of(amqp.Message(body)), lambda: ("news", "key"), body)


def batch(*answers: str) -> list[Publication]:
    return [message(each, number) for number, each in enumerate(answers, 1)]


def errors(sent: Iterable[Publication]) -> list[type[BaseException] | None]:
    return [type(each.error) if each.error else None for each in sent]


def assert_it_still_works(publisher: Publisher) -> None:
    """No answer is taken for one to another message."""
    sent = batch("ack", "return", "ack")
    publisher.publish_all(sent)
    assert errors(sent) == [None, MessageReturned, None]


def by_publisher(publisher: Publisher, sent: list[Publication], **options: Any) -> None:
    with suppress(PublishError):
        publisher.publish_all(iter(sent), **options)


def by_pipeline(
    publisher: Publisher,
    sent: list[Publication],
    policy: PublishPolicy,
    redeclare: Any,
    done: Callable[[Publication], None],
) -> None:
    pipeline = Pipeline(publisher, redeclare, done)
    for each in sent:
        with suppress(RabbitDelayError):
            pipeline.publish(each, policy)
    pipeline.confirm()


class Outcome(NamedTuple):
    """What becomes of a message.

    Attributes:
        error: Its error.
        times: How often the broker gets it; None if that depends on the window.
        may_have_arrived: What the error says.
        ends: Whether a batch ends with it.
        repairs: How often what it needs is declared again; None if nothing can be.
    """

    error: type[PublishError] | None
    times: int | None = None
    may_have_arrived: bool = False
    ends: bool = False
    repairs: int | None = None


#: What the broker answers to a message, each time that it comes.
TROUBLES = {
    "nack, nack, ack": Outcome(None, 3),
    "nack": Outcome(MessageNacked, 3),
    "return": Outcome(MessageReturned, 1),
    "return, ack": Outcome(None, 2, repairs=1),
    "return, return": Outcome(MessageReturned, 2, repairs=1),
    "406 PRECONDITION_FAILED": Outcome(MessageRefused),
    "403 internal exchange": Outcome(MessageRefused, ends=True),
    f"403 {NOT_PERMITTED}": Outcome(MessageNotPermitted, ends=True),
    "404 no exchange": Outcome(MessageReturned, ends=True),
    "404 no exchange, ack": Outcome(None, 2, repairs=1),
    "404 no exchange, 404 no exchange": Outcome(MessageReturned, ends=True, repairs=1),
    "lost, ack": Outcome(None, 2),
    "320, ack": Outcome(None, 2),
    "ack and lost, ack": Outcome(None),
    "lost": Outcome(ConnectionLost, may_have_arrived=True, ends=True),
    "530": Outcome(ConnectionLost, 1, may_have_arrived=True, ends=True),
    # What the broker says the second time tells nothing about the first.
    "lost, nack": Outcome(MessageNacked, 3, may_have_arrived=True),
    "lost, return": Outcome(MessageReturned, 2, may_have_arrived=True),
    "lost, 406 PRECONDITION_FAILED": Outcome(MessageRefused, may_have_arrived=True),
    "block and unblock": Outcome(None, 1),
    "block for an hour": Outcome(ConnectionBlocked, 1, may_have_arrived=True, ends=True),
}


@pytest.mark.parametrize("send", [by_publisher, by_pipeline])
@pytest.mark.parametrize("window", [1, 2, 20])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_message_in_trouble_has_its_own_outcome_and_others_have_theirs(
    publisher: Publisher, script: Script, trouble: str, window: int, send: Callable[..., None]
) -> None:
    expected = TROUBLES[trouble]
    sent = batch("ack", "ack", trouble, "ack", "ack")
    finished: list[Publication] = []
    redeclare = mock.Mock()
    send(
        publisher,
        sent,
        policy=POLICY._replace(window=window),
        redeclare=None if expected.repairs is None else redeclare,
        done=finished.append,
    )
    troubled = sent[2]
    assert errors([troubled]) == [expected.error]
    if expected.times is not None:
        assert script.times[troubled.context] == expected.times
    assert redeclare.call_count == (expected.repairs or 0)
    if troubled.error is not None:
        assert troubled.error.may_have_arrived == expected.may_have_arrived
    assert len(finished) == len({*finished})
    taken = [each for each in sent if each in finished]
    if not expected.ends:
        others = [each for each in sent if each is not troubled]
        assert (taken, {each.error for each in others}) == (sent, {None})
    elif send is by_publisher and window == 1:
        assert taken == sent[:3]
    for each in taken:
        assert each.error is not None or each.context in script.acked
        assert each.error is None or each.error.may_have_arrived or each.context not in script.acked
    if not trouble.startswith("block for"):
        assert_it_still_works(publisher)


def test_each_message_that_closes_the_channel_is_found(
    publisher: Publisher, script: Script
) -> None:
    sent = batch(*["ack"] * 60)
    for number in (0, 30, 31, 59):
        sent[number] = message("406 PRECONDITION_FAILED", number + 1)
    publisher.publish_all(sent)
    refused = [number for number, each in enumerate(sent) if each.error is not None]
    assert refused == [0, 30, 31, 59]
    assert {*errors(sent)} == {MessageRefused, None}
    assert len(script.acked) == 56 + 1


def declare(connection: Connection) -> None:
    """Declare something, which the broker answers."""
    Exchange("news")(connection.default_channel).declare()


def passing() -> NotFound:
    """RabbitMQ's answer about a classic queue whose node is down; test_cluster has a real one."""
    text = "NOT_FOUND - home node 'b@c' of durable queue 'q' in vhost '/' is down or inaccessible"
    return NotFound(text, spec.Queue.Declare)


#: What declaring raises each time, the error of the message, its text, and how often it is tried.
DECLARING: dict[str, tuple[list[BaseException], type[RabbitDelayError] | None, str, int]] = {
    "a node that is back soon": ([passing() for _ in range(5)], None, "", 6),
    "a node that is down": ([passing() for _ in range(9)], DeclarationRefused, "home node", 3),
    "another queue": ([PreconditionFailed("inequivalent arg")], DeclarationRefused, "inequiv", 1),
    "no permission": ([AccessRefused(NOT_PERMITTED)], DeclarationNotPermitted, "write", 1),
    "a lost connection": ([ConnectionResetError()], None, "", 2),
    "no connection": ([ConnectionResetError("gone")] * 9, ConnectionLost, "gone", 3),
    "levels that are missing": ([TopologyIncomplete("p", ("q",))], TopologyIncomplete, "q", 1),
    "a broker that is slow": ([TimeoutError()] * 9, ConnectionLost, "rabbitdelay declare", 3),
}


@pytest.mark.parametrize("before", ["", "lost, "], ids=["first", "after a loss"])
@pytest.mark.parametrize("what", DECLARING)
def test_what_declaring_raises_is_an_error_of_the_message(
    publisher: Publisher, script: Script, what: str, before: str
) -> None:
    raised, error, text, times = DECLARING[what]
    declaring = mock.Mock(side_effect=[*([None] if before else []), *raised, None])
    sent = message(f"{before}ack", 1)
    policy = POLICY._replace(resends=None if error is None else 2 + bool(before))
    if error is None:
        publisher.publish(sent, policy, declare=declaring)
    else:
        with pytest.raises(error, match=text) as caught:
            publisher.publish(sent, policy, declare=declaring)
        assert caught.value.may_have_arrived is bool(before)
    assert declaring.call_count == times + bool(before)
    assert (sent.context in script.acked) is (error is None)
    assert_it_still_works(publisher)


def test_what_is_declared_is_declared_again_on_each_new_connection(publisher: Publisher) -> None:
    declaring = mock.Mock()
    for answers, times in (("ack", 1), ("ack", 1), ("lost, ack", 2)):
        publisher.publish(message(answers), POLICY, declare=declaring)
        assert declaring.call_count == times


def test_each_host_of_a_list_has_its_share_of_the_time(
    clock: LeapingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    def say_nothing(connection: Connection) -> None:
        given.append(round(connection.connect_timeout, 1))
        clock.ahead += connection.connect_timeout
        raise TimeoutError

    monkeypatch.setattr(kombu_internals, "open_connection", say_nothing)
    hosts = Connection(";".join(f"amqp://host{number}//" for number in range(3)), connect_timeout=5)
    with pytest.raises(ConnectionLost):
        Publisher(hosts).publish(message("ack"), PublishPolicy(9.0, resends=0))
    assert (given, hosts.connect_timeout) == ([3.0, 3.0, 3.0], 5)
    with pytest.raises(ConnectionLost):
        Publisher(hosts).publish(message("ack"), PublishPolicy(60.0, resends=0))
    assert given[3:] == [5.0, 5.0, 5.0]


def test_a_message_that_is_not_answered_is_given_up_and_the_broker_goes_on_with_others(
    publisher: Publisher,
) -> None:
    sent = batch("ack", "silence", "ack", "ack for an hour")
    publisher.publish_all(sent)
    assert errors(sent) == [None, ConfirmTimeout, None, None]
    assert sent[1].error is not None
    assert sent[1].error.may_have_arrived
    assert publisher.connection.connected


@pytest.mark.parametrize("send", [by_publisher, by_pipeline])
def test_a_broker_that_falls_silent_is_a_timeout_of_all_and_its_connection_is_not_used_again(
    publisher: Publisher, send: Callable[..., None]
) -> None:
    sent = batch("silence", "silence", "silence for an hour")
    send(publisher, sent, policy=POLICY, redeclare=None, done=mock.Mock())
    assert errors(sent) == [ConfirmTimeout] * 3
    assert all(each.error and each.error.may_have_arrived for each in sent)
    assert not publisher.connection.connected
    assert_it_still_works(publisher)


def test_a_connection_of_our_own_is_kept_while_it_is_blocked_and_late_answers_count_for_no_other(
    broker: FrameBroker,
) -> None:
    """RabbitMQ keeps each connection until the alarm is over, even if it was closed."""
    publisher = Publisher(broker.connection(), is_alone=True)
    with pytest.raises(ConnectionBlocked):
        publisher.publish_all(batch("block for an hour"))
    (session,) = broker.sessions
    session.unblock()
    session.ack()
    assert_it_still_works(publisher)
    assert broker.sessions == [session]
    publisher.discard()


def test_a_broker_that_reads_nothing_is_an_error_in_time(
    broker: FrameBroker, publisher: Publisher
) -> None:
    """Writing does not end by itself, once the sockets are full."""
    reads_on = Event()
    broker.answer = lambda *_: reads_on.wait(60)
    sent = [Publication(Content.of(amqp.Message(b"x" * 10**6)), lambda: ("", "q"))] * 100
    source = iter(sent)
    with pytest.raises(PublishError):
        publisher.publish_all(source, PublishPolicy(0.2))
    reads_on.set()
    assert len([*source]) > 50


class TimeIsUp(BaseException):
    """As Celery's soft time limit, or Ctrl-C."""


@pytest.mark.parametrize("error", [ValueError, ConnectionResetError, TimeoutError, TimeIsUp])
@pytest.mark.parametrize("where", ["source", "done", "declare"])
def test_what_the_caller_s_own_code_raises_is_raised_as_it_is(
    publisher: Publisher, error: type[BaseException], where: str
) -> None:
    """Also what looks like a lost connection: a file, a pipe or a database may raise it."""
    if where == "declare" and issubclass(error, OSError):
        return  # it works on the publisher's connection, whose loss it then is
    own = error("the caller's")
    fail = mock.Mock(side_effect=own)

    def source() -> Iterator[Publication]:
        yield from batch(*["ack"] * 50)
        if where == "source":
            fail()

    options = {} if where == "source" else {where: fail}
    with pytest.raises(error) as caught:
        publisher.publish_all(source(), PublishPolicy(window=20), **options)
    assert caught.value is own
    assert fail.call_count == 1
    assert_it_still_works(publisher)


@pytest.mark.parametrize("window", [1, 2, 7])
def test_never_more_than_the_window_are_in_flight(publisher: Publisher, window: int) -> None:
    taken: list[Publication] = []
    finished: list[Publication] = []
    most = 0

    def source() -> Iterator[Publication]:
        nonlocal most
        for each in batch(*["ack"] * 100):
            taken.append(each)
            most = max(most, len(taken) - len(finished))
            yield each

    publisher.publish_all(source(), PublishPolicy(window=window), done=finished.append)
    assert (most, errors(finished)) == (window, [None] * 100)


def test_a_source_may_take_its_time_and_what_it_gave_does_not_wait_for_the_rest(
    broker: FrameBroker, publisher: Publisher, clock: LeapingClock
) -> None:
    sent = batch(*["ack"] * 4)

    def source() -> Iterator[Publication]:
        clock.ahead += AN_HOUR
        for number, each in enumerate(sent, 1):
            yield each
            clock.ahead += AN_HOUR
            if number > 1:  # the first one has shown that the source is slow
                wait_until(lambda: len(broker.published) == number + 1)  # noqa: B023

    publisher.publish_all(source())
    assert errors(sent) == [None] * 4


class Silent(ConfirmChannel):
    """A channel to a broker that takes every byte and never answers. A fake: it has no socket."""

    def __init__(self, on_settled: OnSettled) -> None:
        self.wire: Any = self
        self.frame_max = 131_072
        self.blocked = None
        self.unconfirmed = Unconfirmed(on_settled)
        self._number = 1
        self._sent = 0
        self._collected = []
        self._collected_bytes = 0

    def write(self, frames: bytes, timeout: float) -> None:
        """Take the bytes."""

    def read_all(self) -> None:
        """Nothing has arrived."""


class Sent(NamedTuple):
    """Two messages that are written, and one that is not yet; and those that have an outcome."""

    loop: PublishLoop
    channel: Silent
    messages: list[Publication]
    done: list[Publication]

    def may_have_arrived(self) -> list[bool]:
        return [each.error.may_have_arrived for each in self.done if each.error]


@pytest.fixture
def sent() -> Sent:
    done: list[Publication] = []
    policy = DEFAULT_POLICY._replace(backoff=(60.0, 0.0, 60.0))
    loop = PublishLoop(lambda: None, policy, done.append, redeclare=lambda _: None)
    loop.use(channel := Silent(loop.settled))
    messages = batch("first", "second", "third")
    for each in messages[:2]:
        channel.send(each, 1.0)
    channel.flush(1.0)
    channel.send(messages[2], 1.0)
    return Sent(loop, channel, messages, done)


def is_over(*publications: Publication) -> None:
    for each in publications:
        each.deadline = time.monotonic() - 1


def test_a_message_that_is_given_up_alone_may_have_arrived_if_it_was_written(sent: Sent) -> None:
    first, second, third = sent.messages
    is_over(first, third)
    sent.loop.last_settled = time.monotonic()  # another message was confirmed just now
    sent.loop.check_time()
    assert (sent.done, [*sent.channel.unconfirmed.values()]) == ([first, third], [second])
    assert sent.may_have_arrived() == [True, False]


def test_a_message_that_waits_for_the_end_of_a_block_has_not_arrived(sent: Sent) -> None:
    sent.channel.blocked = "low on memory"
    sent.channel.flush(1.0)
    is_over(sent.messages[0])
    with pytest.raises(ConnectionBlocked) as caught:
        sent.loop.check_time()
    sent.loop.take_back()
    sent.loop.fail_all(caught.value)
    assert sent.done == sent.messages
    assert sent.may_have_arrived() == [True, True, False]


def test_what_a_blocked_channel_has_not_written_is_not_counted(sent: Sent) -> None:
    """The broker counts what it gets, and its answers name messages by that number."""
    sent.channel.give_up()
    sent.channel.send(message("ack"), 1.0)
    assert [*sent.channel.unconfirmed] == [3]


def test_a_single_attempt_is_given_up_alone_and_not_sent_again(sent: Sent) -> None:
    sent.messages[1].single_attempt = True
    is_over(*sent.messages)
    sent.loop.check_time()
    assert sent.done == [sent.messages[1]]
    # Those that are left say that the broker does not answer at all.
    with pytest.raises(ConfirmTimeout):
        sent.loop.check_time()
    sent.messages[0].single_attempt = True
    sent.channel.unconfirmed.settle(1, False, is_nack=True)
    assert sent.done == [sent.messages[1], sent.messages[0]]


def test_a_resend_that_is_due_later_holds_up_none_that_is_due_now(sent: Sent) -> None:
    returned = sent.messages[1]
    is_returned = NoConsumers("NO_ROUTE"), "news", "key", amqp.Message("2: second")
    sent.channel.unconfirmed.settle(1, False, is_nack=True)
    sent.channel.unconfirmed.returned(*is_returned)
    sent.channel.unconfirmed.settle(2, False)
    assert (sent.loop.next_waiting, sent.done) == (returned, [])


def test_a_resend_that_came_due_while_it_was_looked_for_is_not_waited_for(sent: Sent) -> None:
    sent.channel.unconfirmed.clear()
    sent.loop.send_first(sent.messages[0])
    sent.loop.wait()  # or it would read from this channel
    assert sent.loop.has_unwritten


def test_a_suspect_that_is_given_up_does_not_keep_the_loop_from_its_source(sent: Sent) -> None:
    source, done = iter([message("ack")]), list[Publication]()
    loop = PublishLoop(partial(next, source, None), DEFAULT_POLICY, done.append)
    loop.use(Silent(loop.settled))
    for each in sent.messages:
        loop.channel.send(each, 1.0)
    assert loop.channel_closed(AccessRefused("no", method_sig=spec.Basic.Publish)) is None
    loop.use(Silent(loop.settled))
    for each in sent.messages:
        loop.send()
        # One at a time, and none of the source's.
        assert [*loop.channel.unconfirmed.values()] == [each]
        each.single_attempt = True
        is_over(each)
        loop.check_time()
    assert done == sent.messages
    loop.send()
    assert [*source] == []
