"""What distribution makes of a message that is due; that it arrives, test_modules.py shows."""

from __future__ import annotations

import amqp
import pytest

from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.levels import headers as names
from celery_rabbitdelay.modules.distribution import distribute
from celery_rabbitdelay.modules.envelope import CONTENT_TYPE, Envelope, Item

DUE = 1_800_000_000_000


def letter(*items: Item, **told: str) -> amqp.Message:
    headers = {names.DUE: DUE, **told}
    return amqp.Message(
        Envelope(items).pack(), content_type=CONTENT_TYPE, application_headers=headers
    )


def test_the_messages_of_an_envelope_go_where_it_says_and_where_each_says_itself() -> None:
    own = {names.EXCHANGE: "posts", names.ROUTING_KEY: "airmail", "id": "2"}
    envelope = letter(
        Item(b"one", {"id": "1"}),
        Item(b"two", own),
        **{names.EXCHANGE: "", names.ROUTING_KEY: "queue"},
    )

    one, two = distribute(envelope)

    assert (one.exchange, one.routing_key, one.message.body) == ("", "queue", b"one")
    assert (two.exchange, two.routing_key, two.message.body) == ("posts", "airmail", b"two")
    assert one.message.properties["application_headers"] == {"id": "1", names.DUE: DUE}


def test_an_envelope_of_which_one_message_goes_nowhere_is_refused_whole() -> None:
    known = {names.EXCHANGE: "", names.ROUTING_KEY: "queue"}
    envelope = letter(Item(b"one", known), Item(b"two", {names.EXCHANGE: ""}))
    outgoing = distribute(envelope)

    with pytest.raises(UnprocessableMessage, match="destination is missing"):
        next(outgoing)
