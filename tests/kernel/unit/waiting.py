"""Messages that wait, made of messages as they are received."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import amqp

from celery_rabbitdelay.levels.headers import DelayHeaders, parse
from celery_rabbitdelay.publishing.message import WaitingMessage, headers_of
from celery_rabbitdelay.publishing.signature import SigningKeys


def waiting(message: amqp.Message) -> WaitingMessage:
    """Return a message with what its headers say."""
    return WaitingMessage.of(message, said(headers_of(message)))


def said(headers: Mapping[str, Any]) -> DelayHeaders:
    """Return what headers say."""
    return parse(headers)[0]


def signed(keys: SigningKeys, message: amqp.Message) -> amqp.Message:
    """Return a message as it is published with a signature."""
    return keys.sign(waiting(message)).amqp()


def verifies(keys: SigningKeys, message: amqp.Message | WaitingMessage) -> bool:
    """Return whether a message has a valid signature."""
    return keys.verifies(*(message if isinstance(message, WaitingMessage) else waiting(message)))
