"""Tasks of clients of check-in after which a worker would publish further messages."""

import json
from types import MappingProxyType
from typing import Any

import pytest
from celery import Celery

from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.levels.headers import DelayHeaders
from celery_rabbitdelay.modules.checkin import CANVAS, NOT_TAKEN_OVER, checked_task
from celery_rabbitdelay.publishing.message import WaitingMessage

NOTHING = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
EVIL = [{"task": "t", "args": [], "kwargs": {}, "options": {"exchange": "celery.pidbox"}}]
JSON = "application/json"


def message(
    body: Any,
    headers: Any = MappingProxyType({"task": "t", "id": "1"}),
    content_type: str | None = JSON,
    **more: Any,
) -> WaitingMessage:
    written = body if isinstance(body, bytes) else json.dumps(body).encode()
    return WaitingMessage(
        written, {"content_type": content_type, **more}, DelayHeaders(others=headers)
    )


@pytest.mark.parametrize(
    "embed", [NOTHING, {}, {"chain": None}, {"chord": None, "callbacks": None}]
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n", "\t: ")])
def test_a_plain_task_passes_without_reply_to(embed: Any, separators: tuple[str, str]) -> None:
    body = json.dumps([[1, "[{}]"], {"callbacks": EVIL}, embed], separators=separators)
    given = message(f" {body}\n".encode(), reply_to="somebody", priority=3)
    kept = checked_task(given)
    assert kept.properties == {"content_type": JSON, "priority": 3, "reply_to": None}
    assert (kept.body, kept.headers) == (given.body, given.headers)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'{"args": [], "callbacks": [1], "x": [1, {}]}',  # of both protocols
        b'[[], {}, {"chain": [1], "callbacks": ", {}]"}]',
        b"[[], {}, {}]" + b" " * 300,
        b'[[], {}, {"chain": null}, 1]',
        *([[], {}, {**NOTHING, name: EVIL}] for name in (*NOTHING, "reply_to", "group")),
        [[], {}, {"chain": EVIL, "callbacks": None}],
    ],
)
def test_a_body_that_does_not_end_like_a_plain_one_is_refused(body: Any) -> None:
    with pytest.raises(UnprocessableMessage, match="all null: see rabbitdelay_checkin_trusted"):
        checked_task(message(body))


@pytest.mark.parametrize("name", CANVAS)
def test_a_header_that_a_worker_takes_for_them_is_refused(name: str) -> None:
    with pytest.raises(UnprocessableMessage, match=f"with {name}"):
        checked_task(message([[], {}, {}], {"task": "t", "id": "1", name: EVIL}))


@pytest.mark.parametrize("name", ["celery.group", "celery.chord_unlock", None, 5, {}])
def test_celerys_own_tasks_take_signatures_as_arguments(name: Any) -> None:
    for each in (message([[], {}, {}], {"task": name}), message({"task": name}, {})):
        with pytest.raises(UnprocessableMessage, match="is reserved for Celery"):
            checked_task(each)


TASK = {"task": "t"}


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        *(
            (message(body, {}), "not JSON")
            for body in (b'{"task": "t"', b'{"task": "\xff"}', b'{"task": ' + b"[" * 100_000)
        ),
        *(
            (message([[], {}, {}], TASK, content_type), "reads JSON only")
            for content_type in ("application/x-python-serialize", "text/plain", None)
        ),
        # Whatever it looks like.
        *(
            (message([[], {}, {}], told, content_encoding=encoding), "reads UTF-8 only")
            for told in ({}, TASK)
            for encoding in ("utf-16", "UTF-7", "unicode_escape", "rot13", 5)
        ),
        # Only a worker can open these.
        *(
            (message(b"task: t", {}, content_type), "cannot check whether")
            for content_type in ("application/x-yaml", "application/x-msgpack")
        ),
        (message(b"x", {"compression": "application/x-gzip"}, None), "compressed"),
        # These take long to decode.
        *(
            (message(b"-bbb", {}, "text/x-none", content_encoding=encoding), "content encoding")
            for encoding in ("punycode", "Punycode", "idna")
        ),
    ],
)
def test_what_might_be_a_task_and_cannot_be_read_is_refused(
    refused: WaitingMessage, why: str
) -> None:
    with pytest.raises(UnprocessableMessage, match=why):
        checked_task(refused)


@pytest.mark.parametrize("spelled", ["task", "tas\\u006B", "\\u0074\\u0061\\u0073\\u006b"])
def test_a_task_of_protocol_1_is_found_however_it_is_spelled(spelled: str) -> None:
    plain = f'{{"id": "1", "{spelled}" : "t", "callbacks": null}}'.encode()
    assert checked_task(message(plain, {}, reply_to="x")).properties["reply_to"] is None
    for name in CANVAS:
        evil = f'{{"{spelled}": "t", "{name}": [1]}}'.encode()
        with pytest.raises(UnprocessableMessage, match=f"with {name}"):
            checked_task(message(evil, {}))
    checked_task(message(plain.ljust(2**20), {}))
    with pytest.raises(UnprocessableMessage, match="has 1048577 bytes, more than 1048576"):
        checked_task(message(plain.ljust(2**20 + 1), {}))


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b'{"order": 7, "chord": [1], "todo": {"task": "paint", "chain": 1}}', JSON),
        (b'["task", {"callbacks": [1]}]', JSON),
        (b"not JSON", JSON),
        (b"hello", None),
        (b"\x80\x04]\x94.", "application/octet-stream"),
        (b"<task/>", "text/xml"),
    ],
)
def test_what_is_no_task_passes_unchanged(body: bytes, content_type: str | None) -> None:
    given = message(body, {"mine": 1}, content_type, reply_to="caller")
    assert checked_task(given) is given


@pytest.mark.parametrize("encoding", [None, "", "utf-8", "UTF-8", "us-ascii", "binary"])
def test_json_in_utf_8_passes_and_what_is_no_json_in_any_other(encoding: Any) -> None:
    given = message([[], {}, {}], content_encoding=encoding)
    assert checked_task(given) is given
    assert checked_task(message(b"-bbb", {}, "text/x-none", content_encoding="latin-1"))


@pytest.mark.parametrize("name", sorted(NOT_TAKEN_OVER))
def test_a_retry_takes_over_no_name_that_celery_or_rabbitmq_reads(name: str) -> None:
    task, version_1 = {"task": "t", "id": "1"}, b'{"task": "t", "id": "1"}'
    for taken in ({name: "x"}, {"headers": {name: "x"}}):
        for evil in (message([[], {}, {}], {**task, "headers": taken}), message(version_1, taken)):
            with pytest.raises(UnprocessableMessage):
                checked_task(evil)
    checked_task(message([[], {}, {}], {**task, "headers": {"sentry-trace": "x", "headers": {}}}))


def test_the_names_that_celery_writes_are_among_these() -> None:
    app = Celery(set_as_current=False)
    assert set(app.amqp.as_task_v2("1", "t").headers) <= NOT_TAKEN_OVER
