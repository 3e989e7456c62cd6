"""The publish loop without a channel: what it says of messages that wait when nothing helps."""

from __future__ import annotations

import amqp
import pytest

from celery_rabbitdelay.exceptions import ConnectionLost
from celery_rabbitdelay.publishing.policy import DEFAULT_POLICY
from celery_rabbitdelay.publishing.publication import Publication
from celery_rabbitdelay.publishing.publish_loop import PublishLoop
from celery_rabbitdelay.publishing.wire import Content


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
        assert each.error.may_have_arrived == may_have_arrived
        assert each.error.args == error.args
        assert each.error.__cause__ is cause
    assert error in [each.error for each in done]
    assert error.may_have_arrived == raised
