"""Undeliverable messages as records of JSON, with everything that is needed to publish them."""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TextIO

import amqp

from celery_rabbitdelay.exceptions import FileNotWritten
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.operations.undeliverable import UndeliverableMessage, as_json
from celery_rabbitdelay.operations.undeliverable_filter import Contents
from celery_rabbitdelay.publishing.wire import UNREADABLE_PROPERTIES, Content


def summary_of(number: int, message: UndeliverableMessage) -> dict[str, Any]:
    """Return what a list of messages tells about one.

    Args:
        number: Its place in the queue, from 1.
        message: The message.
    """
    found = message.found
    redriven = message.headers.get(header_names.REDRIVEN)
    return {
        **_described(number, message),
        "last_stop": found.last_stop,
        "redriven": redriven if isinstance(redriven, int) else None,
        "envelope": Contents.of(message).messages,
        "size": len(message.body),
    }


def as_record(number: int, message: UndeliverableMessage) -> dict[str, Any]:
    """Return a message without its body, in values of JSON.

    ``headers`` and ``properties`` are for people: bytes and instants are texts there. The message
    can be made again from its body and ``amqp_properties``, which has all properties, headers among
    them, as AMQP 0-9-1 encodes them (2.3.5.2 and 4.2.6.1), in base64.

    Args:
        number: Its place in the queue, from 1.
        message: The message.
    """
    return {
        **_described(number, message),
        "exchange": message.exchange,
        "routing_key": message.routing_key,
        "headers": as_json(message.headers),
        "properties": as_json(message.properties),
        "amqp_properties": base64.b64encode(_encoded_properties(message)).decode(),
    }


def _described(number: int, message: UndeliverableMessage) -> dict[str, Any]:
    found = message.found
    return {
        "number": number,
        "task_id": found.task_id,
        "task": found.task,
        "queue": found.queue,
        "due": found.due.isoformat() if found.due else None,
        "since": found.since.isoformat() if found.since else None,
        "reason": found.reason,
    }


def _encoded_properties(message: UndeliverableMessage) -> bytes:
    unreadable = message.headers.get(UNREADABLE_PROPERTIES)
    if isinstance(unreadable, bytes):
        return unreadable
    headers: Any = dict(message.headers)
    properties = dict(message.properties)
    return Content.of(amqp.Message(b"", application_headers=headers, **properties)).properties


def shown_body(body: bytes, most: int) -> dict[str, Any]:
    """Return the beginning of a body: ``size``, ``is_cut_off``, and ``text`` or ``base64``.

    Args:
        body: The body.
        most: How many bytes of it to return at most.
    """
    is_cut_off = len(body) > most
    return {"size": len(body), "is_cut_off": is_cut_off, **_text_or_base64(body[:most], is_cut_off)}


def write_records(file: IO[str], messages: Iterable[tuple[int, UndeliverableMessage]]) -> int:
    """Write messages as lines of JSON: what :func:`as_record` returns, and ``body``.

    Args:
        file: Where to.
        messages: The messages with their places in the queue.

    Returns:
        How many there were.

    Raises:
        FileNotWritten: The file cannot be written.
    """
    count = 0
    for number, message in messages:
        record = {**as_record(number, message), "body": _text_or_base64(message.body, False)}
        with _told(str(file.name)):
            file.write(json.dumps(record) + "\n")
        count += 1
    with _told(str(file.name)):
        file.flush()
    return count


@contextmanager
def new_file(path: Path) -> Iterator[TextIO]:
    """Open a file for writing that appears under its name once it is complete.

    Only its owner can read it: bodies of messages may be confidential.

    Raises:
        FileNotWritten: The file cannot be written.
    """
    with _told(str(path)):
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 - a descriptor
            yield file
            with _told(str(path)):
                file.flush()
                os.fsync(descriptor)
        with _told(str(path)):
            Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


@contextmanager
def _told(path: str) -> Iterator[None]:
    """Raise what the operating system says about a file as :class:`.FileNotWritten`.

    So that nobody takes it for an error of the connection.
    """
    try:
        yield
    except OSError as error:
        raise FileNotWritten(path, error.strerror or str(error)) from error


def _text_or_base64(body: bytes, is_cut_off: bool) -> dict[str, str | None]:
    """Return bytes as text if they are UTF-8, which may end within a character if it is cut off."""
    try:
        return {"text": body.decode(), "base64": None}
    except UnicodeDecodeError as error:
        if is_cut_off and error.start >= len(body) - 3 and error.reason == "unexpected end of data":
            return {"text": body[: error.start].decode(), "base64": None}
    return {"text": None, "base64": base64.b64encode(body).decode()}
