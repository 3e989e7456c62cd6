"""The publish loop without a broker: what it says of messages that nobody has confirmed."""

from __future__ import annotations

import time
from typing import Any

import amqp
import pytest

from celery_rabbitdelay.exceptions import ConfirmTimeout, ConnectionBlocked, ConnectionLost
from celery_rabbitdelay.publishing import publish_loop
from celery_rabbitdelay.publishing.confirm_channel import ConfirmChannel, OnSettled, Unconfirmed
from celery_rabbitdelay.publishing.publication import DEFAULT_POLICY, Publication
from celery_rabbitdelay.publishing.publish_loop import PublishLoop
from celery_rabbitdelay.publishing.wire import Content


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


def publication() -> Publication:
    return Publication(Content.of(amqp.Message(b"x")), lambda: ("exchange", "key"))


@pytest.mark.parametrize("raised", [True, False], ids=["may have arrived", "has not"])
def test_each_message_is_told_of_itself_whether_it_may_have_arrived(raised: bool) -> None:
    done: list[Publication] = []
    loop = PublishLoop(lambda: None, DEFAULT_POLICY, done.append)
    written, suspected, never = (publication() for _ in range(3))
    written.unanswered = True
    suspected.suspected = True
    for each in (written, suspected, never):
        loop.send_first(each)
    assert loop.may_have_arrived
    cause = OSError("gone")
    error = ConnectionLost("exchange", "key", "no connection")
    error.__cause__ = cause
    error.may_have_arrived = raised
    loop.fail_all(error)
    assert done == [never, suspected, written]
    assert not loop.may_have_arrived
    for each, may_have_arrived in ((written, True), (suspected, True), (never, False)):
        assert isinstance(each.error, ConnectionLost)
        assert (each.error.may_have_arrived, each.error.args) == (may_have_arrived, error.args)
        assert each.error.__cause__ is cause
    assert error in [each.error for each in done]
    assert error.may_have_arrived == raised


def sent_on_a_silent_channel() -> tuple[PublishLoop, Silent, list[Publication], list[Publication]]:
    """Two messages that are written, and one that is not yet; and those that have an outcome."""
    done: list[Publication] = []
    loop = PublishLoop(lambda: None, DEFAULT_POLICY, done.append)
    channel = Silent(loop.settled)
    loop.use(channel)
    sent = [publication() for _ in range(3)]
    for each in sent[:2]:
        channel.send(each, 1.0)
    channel.flush(1.0)
    channel.send(sent[2], 1.0)
    return loop, channel, sent, done


def test_a_message_that_is_given_up_alone_may_have_arrived_if_it_was_written() -> None:
    loop, channel, sent, done = sent_on_a_silent_channel()
    sent[0].deadline = sent[2].deadline = time.monotonic() - 1
    loop.last_settled = time.monotonic()  # another message was confirmed just now
    loop.check_time()
    assert (done, channel.unconfirmed.all()) == ([sent[0], sent[2]], [sent[1]])
    assert all(isinstance(each.error, ConfirmTimeout) for each in done)
    assert [each.error.may_have_arrived for each in done if each.error] == [True, False]
    assert not sent[1].may_have_arrived


def test_a_message_that_waits_for_the_end_of_a_block_has_not_arrived() -> None:
    loop, channel, sent, done = sent_on_a_silent_channel()
    channel.blocked = "low on memory"
    channel.flush(1.0)
    sent[0].deadline = time.monotonic() - 1
    with pytest.raises(ConnectionBlocked) as caught:
        loop.check_time()
    loop.take_back()
    caught.value.may_have_arrived = loop.may_have_arrived
    loop.fail_all(caught.value)
    assert done == sent
    assert [each.error.may_have_arrived for each in done if each.error] == [True, True, False]


def test_a_message_that_was_returned_has_not_arrived_although_its_ack_is_missing() -> None:
    loop, channel, sent, _ = sent_on_a_silent_channel()
    channel.unconfirmed.returned(
        amqp.exceptions.NoConsumers("NO_ROUTE"), "exchange", "key", amqp.Message(b"x")
    )
    assert (loop.take_back(), [each.may_have_arrived for each in sent]) == (3, [False, True, False])
    assert {each.error for each in sent} == {None}


def test_a_single_attempt_is_given_up_alone_although_the_broker_has_answered_nothing() -> None:
    loop, _, sent, done = sent_on_a_silent_channel()
    sent[1].single_attempt = True
    for each in sent:
        each.deadline = time.monotonic() - 1
    loop.check_time()
    assert done == [sent[1]]
    assert isinstance(sent[1].error, ConfirmTimeout)
    # Those that are left say that the broker does not answer at all.
    with pytest.raises(ConfirmTimeout):
        loop.check_time()


def test_a_suspect_that_is_given_up_does_not_keep_the_loop_from_its_source() -> None:
    source = [publication()]
    done: list[Publication] = []
    loop = PublishLoop(lambda: source.pop() if source else None, DEFAULT_POLICY, done.append)
    loop.use(Silent(loop.settled))
    suspects = [publication() for _ in range(2)]
    for each in suspects:
        loop.channel.send(each, 1.0)
    closed = amqp.exceptions.AccessRefused("no", method_sig=amqp.spec.Basic.Publish)
    assert loop.channel_closed(closed) is None
    loop.use(Silent(loop.settled))
    for each in suspects:
        loop.send()
        # One at a time, and none of the source's.
        assert loop.channel.unconfirmed.all() == [each]
        each.single_attempt, each.deadline = True, time.monotonic() - 1
        loop.check_time()
    assert done == suspects
    loop.send()
    assert not source
    assert len(loop.channel.unconfirmed) == 1


@pytest.mark.parametrize(
    ("read_every", "messages", "blocked", "may_go_on"),
    [
        (-1.0, 2, None, True),
        (60.0, 1, None, False),
        (60.0, 3, None, False),
        (-1.0, 2, "low", False),
    ],
    ids=["time is up", "the source is empty", "the window is full", "blocked"],
)
def test_it_says_whether_it_has_stopped_for_the_time(
    monkeypatch: pytest.MonkeyPatch,
    read_every: float,
    messages: int,
    blocked: str | None,
    may_go_on: bool,
) -> None:
    monkeypatch.setattr(publish_loop, "READ_EVERY", read_every)
    source = [publication() for _ in range(messages)]
    loop = PublishLoop(lambda: source.pop() if source else None, DEFAULT_POLICY, lambda _: None)
    loop.window = 2
    loop.use(channel := Silent(loop.settled))
    channel.blocked = blocked
    assert loop.send() is may_go_on


@pytest.mark.parametrize("single_attempt", [True, False])
def test_a_single_attempt_is_not_sent_again_after_a_nack(single_attempt: bool) -> None:
    done: list[Publication] = []
    loop = PublishLoop(lambda: None, DEFAULT_POLICY, done.append)
    loop.use(Silent(loop.settled))
    nacked = publication()
    nacked.single_attempt = single_attempt
    loop.channel.send(nacked, 1.0)
    loop.channel.unconfirmed.settle(1, False, is_nack=True)
    assert done == ([nacked] if single_attempt else [])
    assert loop.has_more() is not single_attempt
