"""Messages that wait, made of messages as they are received; and waiting for a condition."""

import time
from collections.abc import Callable, Mapping
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


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition is true, at most a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
