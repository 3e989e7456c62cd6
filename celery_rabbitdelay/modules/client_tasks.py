"""What a client of check-in may not say to Celery: that a worker publishes more than it. Pure.

A task's message may hold signatures: callbacks, errbacks, a chain, a chord. The worker that runs
the task publishes them with its own rights, to whatever exchange they name
(https://docs.celeryq.dev/en/stable/internals/protocol.html). It does the same with signatures that
Celery's own tasks, such as ``celery.group``, take as arguments, and may send a result to the
property ``reply_to``. By any of these, a client would bypass the allow-list of check-in.

A message with the header ``task`` is a task of Celery's protocol 2; any other one whose body is an
object with the name ``task`` is one of protocol 1. Only JSON is read here. A body that a worker
could read, and check-in cannot, is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from kombu.serialization import registry  # type: ignore[attr-defined]

from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.levels.headers import shortened
from celery_rabbitdelay.publishing.message import WaitingMessage

#: What a worker publishes after a task, or takes for it, by the names of protocols 1 and 2.
CANVAS: Final = ("callbacks", "errbacks", "chain", "chord", "group", "taskset")

#: The end of every reason.
SETTING: Final = "see rabbitdelay_checkin_trusted"

#: The names of Celery's own tasks begin so. Some take signatures as arguments.
CELERYS_OWN: Final = "celery."

#: The largest body of protocol 1 that is read, in bytes: JSON takes 20 times as many in Python.
MAX_READ_BYTES: Final = 2**20

_JSON: Final = "application/json"

#: What kombu takes a message for that has no content type.
_DATA: Final = "application/data"

_NULL: Final = rb'"(?:callbacks|errbacks|chain|chord)"\s*:\s*null'

#: The end of a body of protocol 2 without signatures: args, kwargs, and an object of what follows
#: the task, in which all is null. It cannot lie within a string of JSON, which would not be closed.
#: Nobody writes more blanks than that between two words; the end can be read at once.
_PLAIN_END: Final = re.compile(rb",\s*\{\s*(?:%b(?:\s*,\s*%b)*)?\s*\}\s*\]\s*\Z" % (_NULL, _NULL))
_MAX_END_BYTES: Final = 256

_TASK: Final = "task"


def _spelled(word: str) -> bytes:
    r"""Return a pattern for a word in a string of JSON, where each letter may be ``\u00..``."""
    return "".join(rf"(?:{each}|\\u00(?i:{ord(each):02x}))" for each in word).encode()


#: A name of an object that reads ``task``.
_NAMES_TASK: Final = re.compile(rb'"%b"\s*:' % _spelled(_TASK))


def without_more(message: WaitingMessage) -> WaitingMessage:
    """Return a client's message as Celery may take it.

    A task has no ``reply_to`` then. Any other message stays as it is.

    Args:
        message: The message, without the headers that no client may set.

    Raises:
        UnprocessableMessage: It is, or might be, a task by which a worker publishes more; or a
            compressed message, which takes more memory than it has bytes.
    """
    headers, properties = message.headers.others, message.properties
    if headers.get("compression"):
        raise UnprocessableMessage(f"its body is compressed: {SETTING}")
    content_type = properties.get("content_type") or _DATA
    if _TASK in headers:
        _check_version_2(message.body, headers, content_type)
    elif content_type == _JSON:
        if not _is_task_of_version_1(message.body):
            return message
    elif content_type in registry.type_to_name:
        raise UnprocessableMessage(
            f"its content type is {shortened(content_type)}, and check-in does not read whether it "
            f"is a task of Celery: {SETTING}"
        )
    else:
        return message
    return message.having(reply_to=None) if properties.get("reply_to") else message


def _check_version_2(body: bytes, headers: Mapping[str, Any], content_type: object) -> None:
    _check_name(headers[_TASK])
    _check_canvas(headers)
    if content_type != _JSON:
        raise UnprocessableMessage(
            f"it is a task whose content type is {shortened(content_type)}, and check-in reads "
            f"JSON alone: {SETTING}"
        )
    is_list = body[:_MAX_END_BYTES].lstrip().startswith(b"[")
    if not is_list or not _PLAIN_END.search(body[-_MAX_END_BYTES:]):
        raise UnprocessableMessage(
            "it is a task whose body does not end in an object of callbacks, errbacks, chain and "
            f"chord in which all is null: {SETTING}"
        )


def _is_task_of_version_1(body: bytes) -> bool:
    """Return whether JSON is a task of protocol 1, after checking it."""
    if not _NAMES_TASK.search(body):
        return False
    if len(body) > MAX_READ_BYTES:
        raise UnprocessableMessage(
            f"it may be a task of Celery's protocol 1, and has {len(body)} bytes, more than "
            f"{MAX_READ_BYTES}: {SETTING}"
        )
    try:
        read = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise UnprocessableMessage(
            f"its body is not JSON: {shortened(error)}: {SETTING}"
        ) from error
    if not isinstance(read, dict) or _TASK not in read:
        return False
    _check_name(read[_TASK])
    _check_canvas(read)
    return True


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith(CELERYS_OWN):
        raise UnprocessableMessage(
            f"it is the task {shortened(name)}, which Celery keeps to itself: {SETTING}"
        )


def _check_canvas(told: Mapping[str, Any]) -> None:
    for name in CANVAS:
        if told.get(name) is not None:
            raise UnprocessableMessage(
                f"it is a task with {name}, which a worker would publish or take: {SETTING}"
            )
