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

    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("3 tasks confirmed in ")
    assert not told.stderr
    result = served_shop.AsyncResult(str(os.getpid())).get(timeout=PATIENCE)
    assert result["given"] == [3]
    assert result["routing_key"] == second


def test_a_file_of_another_system_is_read_line_by_line(
    configuration: dict[str, Any], shop: Any, tmp_path: Path
) -> None:
    good = b'{"args": ["\xc3\xa9"], "delay": 3600}\r\n'
    not_utf8, too_deep = b'{"args": ["\xe9"]}\r\n', b"[" * 9000 + b"\n"
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + good + not_utf8 + good + too_deep + good.rstrip())

    report = answer(configuration, f"send look {path}", "send", 1)

    assert report["confirmed"] == 3
    assert set(report["not_confirmed"]) == {"2", "4"}
    assert report["not_confirmed"]["2"].startswith("row '{")


@pytest.fixture
def minutes(configuration: dict[str, Any]) -> dict[str, Any]:
    """A configuration with which a task that meditates does so for 49 minutes, and not 6 s."""
    return {**configuration, "rabbitdelay_layout": [("minutes", 50, 60)]}


def test_wrong_lines_are_named_and_all_others_are_sent(
    minutes: dict[str, Any], make_shop: Callable[..., Any]
) -> None:
    shop = make_shop(**minutes)
    lines = '{"args": [1], "delay": 3600}\n{"args"\n{"args": [2], "delay": -1, "eta": 5}\n[]\n'

    told = run_command(minutes, "send look --json", lines)

    assert told.returncode == 1
    report = checked("send", told.stdout)
    assert report["confirmed"] == 1
    assert set(report["not_confirmed"]) == {"2", "3", "4"}
    assert report["may_have_arrived"] == []
    assert "line 2 was not confirmed: row '{\"args\"\\n'" in told.stderr
    with Connection(minutes["broker_url"]) as connection:
        backlog = backlog_of(connection, shop.rabbitdelay.topology)
    assert backlog.others["meditation"].messages == 1


def test_a_delay_of_a_line_is_written_as_in_options(
    configuration: dict[str, Any], shop: Any
) -> None:
    lines = '{"delay": "1h30m"}\n{"delay": "-5"}\n{"delay": "soon"}\n7\n'

    told = run_command(configuration, "send look --json", lines)

    report = checked("send", told.stdout)
    assert report["confirmed"] == 2
    assert set(report["not_confirmed"]) == {"3", "4"}
    assert "'soon'" in report["not_confirmed"]["3"]
    example = 'row 7: takes a celery_rabbitdelay.Row, or its fields, such as {"args": [7], "delay"'
    assert report["not_confirmed"]["4"].startswith(example)


def test_of_a_long_line_that_is_wrong_little_is_shown(configuration: dict[str, Any]) -> None:
    line = '{"argz": ["' + "x" * 100_000 + '"]}\n'

    told = run_command(configuration, "send look --json", line)

    for shown in (told.stderr, told.stdout):
        assert "row {'argz': ['xxx" in shown
        assert "has argz; takes args, kwargs" in shown
        assert len(shown) < 1000


def test_a_line_that_does_not_fit_the_task_s_signature_is_wrong(
    configuration: dict[str, Any], shop: Any
) -> None:
    lines = '{"args": [1], "delay": 3600}\n{"kwargs": {"key": "k"}, "delay": 3600}\n'

    wrong = answer(configuration, "send note", "send", 1, lines)["not_confirmed"]

    assert wrong.keys() == {"1"}
    assert "missing 1 required keyword-only argument: 'key'" in wrong["1"]
    assert answer(configuration, "send note --by-name", "send", 0, lines)["confirmed"] == 2


def test_a_mistyped_task_is_not_sent_unless_it_is_meant(
    configuration: dict[str, Any], shop: Any
) -> None:
    told = run_command(configuration, "send lok", "{}\n")
    meant = run_command(configuration, "send lok --by-name", '{"delay": 3600}\n')

    assert told.returncode == 2
    assert "'lok' is not a task of" in told.stderr
    assert "is it 'look'? use --by-name to send it anyway" in told.stderr
    assert meant.returncode == 0, meant.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-Q nowhere", "Queue 'nowhere' missing from task_queues"),
        ("--envelopes", "an envelope cannot be delayed: "),
    ],
)
def test_a_failure_before_anything_is_sent_is_one_line_and_json(
    configuration: dict[str, Any], options: str, message: str
) -> None:
    strict = {
        **configuration,
        "task_create_missing_queues": False,
        "rabbitdelay_modules": ["check-in"],
    }

    told = run_command(strict, f"send look -j {options}", "{}\n")

    assert told.returncode == 1
    error = json.loads(told.stdout)["error"]
    assert message in error
    assert told.stderr == f"Error: {error}\n"


@pytest.mark.parametrize(
    "options", ["--tolerance -1", "--tolerance nan", "--priority 256", "--nothing", "no-such-file"]
)
def test_what_is_wrong_in_the_command_line_itself_exits_with_2(
    configuration: dict[str, Any], options: str
) -> None:
    told = run_command(configuration, f"send look {options} --json", "{}\n")

    assert told.returncode == 2
    assert not told.stdout
    assert "Usage: " in told.stderr


@pytest.mark.parametrize("command", ["send look", "status"])
def test_a_setting_that_is_wrong_exits_with_2(configuration: dict[str, Any], command: str) -> None:
    told = run_command({**configuration, "rabbitdelay_tick": "soon"}, command, "{}\n")

    assert told.returncode == 2
    assert "rabbitdelay_tick" in told.stderr
    assert "Traceback" not in told.stderr


def test_ctrl_c_waits_for_the_confirms_and_says_what_is_confirmed(
    minutes: dict[str, Any], make_shop: Callable[..., Any], connection: Connection
) -> None:
    shop, pipe = make_shop(**minutes), subprocess.PIPE
    command = "rabbitdelay send look -j --no-envelopes"
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

    with start_celery(minutes, command, stdin=pipe, stdout=pipe, stderr=pipe) as sending:
        wait_for(has_sent, "the first message", interval=0.2)
        sending.send_signal(signal.SIGINT)
        told, errors = sending.communicate()
    report = checked("send", told)
    assert 1 <= report["confirmed"] <= written
    assert report["confirmed"] == waiting()
    assert report["not_confirmed"] == {}
    assert report["not_taken_from"] == report["confirmed"] + 1
    assert report["stopped"] == "interrupted"
    assert f"lines from {report['not_taken_from']} on were not taken" in errors
    assert "Aborted" not in errors
    assert sending.returncode == 130


@pytest.mark.parametrize(
    ("option", "beginnings"),
    [
        # All lines are read before the first envelope is sent.
        ("", ["line 1 was not confirmed: ", "line 2 was not", "line 3 was not"]),
        ("--no-envelopes", ["line 1 was not confirmed: ", "lines from 2 on were not taken"]),
    ],
)
def test_a_broker_that_cannot_be_reached_is_said_in_a_line(
    configuration: dict[str, Any], option: str, beginnings: list[str]
) -> None:
    nowhere = {
        **configuration,
        "broker_url": "amqp://guest:guest@127.0.0.1:1//",
        "rabbitdelay_confirm_timeout": 3,
    }
    lines = '{"delay": 3600}\n{"delay": 4}\n{"delay": 5}\n'

    told = run_command(nowhere, f"send look {option}", lines)

    assert told.returncode == 1
    for line, beginning in zip(told.stderr.splitlines(), beginnings, strict=True):
        assert line.startswith(beginning)
    assert "Connection refused" in told.stderr
    assert "Traceback" not in told.stderr
