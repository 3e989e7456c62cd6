"""``celery rabbitdelay send``, run as a user does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection

from celery_rabbitdelay.publishing.backlog import backlog_of
from celery_rabbitdelay.testing import wait_for
from tests.integration.shop import PATIENCE
from tests.integration.worker import answer, run_command, start_celery
from tests.json_schemas import checked


def test_every_line_is_sent_once_and_runs_with_what_it_says(
    served_shop: Any, served_configuration: dict[str, Any], tmp_path: Path
) -> None:
    rows = [{"args": [1]}, {"args": [2], "delay": 0.3}, {"args": [3], "task_id": f"{os.getpid()}"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    second = f"{served_configuration['prefix']}.second"
    told = run_command(served_configuration, f"send look {path} -Q {second}")

    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.startswith("3 tasks confirmed in ")
    result = served_shop.AsyncResult(str(os.getpid())).get(timeout=PATIENCE)
    assert (result["given"], result["routing_key"]) == ([3], second)


def test_wrong_lines_are_named_and_all_others_are_sent(
    configuration: dict[str, Any], shop: Any, tmp_path: Path
) -> None:
    # As other systems write it: a byte order mark, carriage returns, no end of the last line.
    lines = [
        b'\xef\xbb\xbf{"args": ["\xc3\xa9"], "delay": "1h30m"}',
        b'{"args": ["not UTF-8: \xe9"]}',
        b"[" * 9000,
        b'{"delay": "-5"}',
        b'{"delay": "soon"}',
        b"7",
        b'{"argz": ["' + b"x" * 100_000 + b'"]}',
        b'{"args": [1], "delay": 3600, "eta": 5}',
        b'{"delay": 3600}',
    ]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\r\n".join(lines))

    told = run_command(configuration, f"send look {path} --json")

    assert told.returncode == 1
    report = checked("send", told.stdout)
    assert (report["confirmed"], report["may_have_arrived"]) == (3, [])
    wrong = report["not_confirmed"]
    assert wrong.keys() == {"2", "3", "5", "6", "7", "8"}
    assert wrong["2"].startswith("row '{")
    assert "'soon'" in wrong["5"]
    assert wrong["6"].startswith("row 7: takes a celery_rabbitdelay.Row, or its fields, such as {")
    assert wrong["7"].startswith("row {'argz': ['xxx")
    assert "has argz; takes args, kwargs" in wrong["7"]
    assert len(wrong["7"]) < 1000
    assert "line 2 was not confirmed: row '{" in told.stderr


def test_a_line_fits_the_task_s_signature_unless_the_task_is_sent_by_name(
    configuration: dict[str, Any], shop: Any
) -> None:
    lines = '{"args": [1], "delay": 3600}\n{"kwargs": {"key": "k"}, "delay": 3600}\n'

    wrong = answer(configuration, "send note", "send", 1, lines)["not_confirmed"]

    assert wrong.keys() == {"1"}
    assert "missing 1 required keyword-only argument: 'key'" in wrong["1"]
    assert answer(configuration, "send note --by-name", "send", 0, lines)["confirmed"] == 2


def test_a_failure_before_anything_is_sent_is_one_line_and_json(
    configuration: dict[str, Any],
) -> None:
    strict = {**configuration, "task_create_missing_queues": False}

    told = run_command(strict, "send look -j -Q nowhere", "{}\n")

    assert told.returncode == 1
    error = json.loads(told.stdout)["error"]
    assert "Queue 'nowhere' missing from task_queues" in error
    assert told.stderr == f"Error: {error}\n"


@pytest.mark.parametrize(
    ("option", "beginnings"),
    [
        # All lines are read before the first envelope is sent.
        ("", ["line 1 was not confirmed: ", "line 2 was not", "line 3 was not"]),
        ("--no-envelopes", ["line 1 was not confirmed: ", "lines from 2 on were not taken"]),
    ],
)
def test_a_broker_that_cannot_be_reached_is_said_in_a_line(
    option: str, beginnings: list[str]
) -> None:
    away = "amqp://guest:guest@127.0.0.1:1//"
    nowhere = {"prefix": "nowhere", "broker_url": away, "rabbitdelay_confirm_timeout": 1}
    lines = '{"delay": 3600}\n{"delay": 4}\n{"delay": 5}\n'

    told = run_command(nowhere, f"send look {option}", lines)

    assert told.returncode == 1
    for line, beginning in zip(told.stderr.splitlines(), beginnings, strict=True):
        assert line.startswith(beginning)
    assert "Connection refused" in told.stderr


def test_ctrl_c_waits_for_the_confirms_and_says_what_is_confirmed(
    configuration: dict[str, Any], make_shop: Callable[..., Any], connection: Connection
) -> None:
    # A task that meditates does so for 49 minutes, and not for 6 s.
    minutes = {**configuration, "rabbitdelay_layout": [("minutes", 50, 60)]}
    shop, pipe = make_shop(**minutes), subprocess.PIPE
    written = 0

    def waiting() -> int:
        meditation = backlog_of(connection, shop.rabbitdelay.topology).others.get("meditation")
        return meditation.messages if meditation else 0

    def has_sent() -> bool:
        nonlocal written
        assert sending.stdin is not None
        # One by one: the last lines before a pause may wait for the next one.
        sending.stdin.write('{"delay": 3600}\n')
        sending.stdin.flush()
        written += 1
        return waiting() > 0

    command = "rabbitdelay send look -j --no-envelopes"
    with start_celery(minutes, command, stdin=pipe, stdout=pipe, stderr=pipe) as sending:
        wait_for(has_sent, "the first message", interval=0.2)
        sending.send_signal(signal.SIGINT)
        told, errors = sending.communicate()
    report = checked("send", told)
    assert 1 <= report["confirmed"] <= written
    assert report["confirmed"] == waiting()
    assert (report["not_confirmed"], report["stopped"]) == ({}, "interrupted")
    assert report["not_taken_from"] == report["confirmed"] + 1
    assert f"lines from {report['not_taken_from']} on were not taken" in errors
    assert sending.returncode == 130
