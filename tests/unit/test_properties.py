"""What the messages of a template share; how properties are written is in test_wire.py."""

from __future__ import annotations

import amqp

from celery_rabbitdelay.publishing.properties import PropertiesEncoder


def test_messages_share_no_correlation_id_and_no_option_that_amqp_lacks() -> None:
    headers = {"id": "a", "task": "look"}
    message = amqp.Message(b"", application_headers=headers, correlation_id="a", priority=1)
    message.properties["retry"] = True
    encoder = PropertiesEncoder(message, {"id"})
    assert (encoder.headers, encoder.properties) == ({"task": "look"}, {"priority": 1})
