"""``celery rabbitdelay``, run as a user does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery.platforms import EX_UNAVAILABLE
from kombu import Connection, Queue

from celery_rabbitdelay.publishing.backlog import backlog_of
from celery_rabbitdelay.testing import wait_for
from tests.integration.modules import MODULES
from tests.integration.shop import PATIENCE
from tests.integration.waited import put_into
from tests.integration.worker import PlainWorker, run_celery, start_celery
from tests.json_schemas import checked


def test_the_status_says_what_waits_where_and_what_the_workers_do(
    served_shop: Any, configuration: dict[str, Any], make_shop: Callable[..., Any]
) -> None:
    hours = {"rabbitdelay_layout": [("hours", 6, 3600), ("tenths", 10, 360)]}
    shop = make_shop(**hours)
    for delay in (3600, 3700, 7200, 20 * 3600):
        shop.tasks["look"].apply_async(delay=delay)

    told = run_celery({**configuration, **hours}, "rabbitdelay status")
    answer = run_celery({**configuration, **hours}, "rabbitdelay status --json")
    data = json.loads(answer.stdout)

    assert told.returncode == 0, told.stderr
    assert f"  {'hours.x1':16} {3:10,} waiting" in told.stdout
    assert data["levels"] == {"hours.x1": 3, "tenths.x1": 0}
    assert data["others"]["check-in"] == {"messages": 0, "consumers": 0}
    assert data["others"]["meditation"] == {"messages": 1, "consumers": 0}
    assert data["missing"] == []
    ((worker, modules),) = data["workers"].items()
    assert set(modules) == {"check-in", "distribution", "tasks"}
    assert worker in told.stdout
    assert "received" in told.stdout


def test_the_status_of_levels_that_do_not_stand_names_their_queues(
    configuration: dict[str, Any],
) -> None:
    told = run_celery(configuration, "rabbitdelay status --timeout 0.1")
    answer = run_celery(configuration, "rabbitdelay status --timeout 0.1 -j")

    assert told.returncode == 1, told.stderr
    assert "queues are missing: " in told.stdout
    assert not told.stderr
    assert answer.returncode == 1, answer.stderr
    assert f"{configuration['prefix']}.seconds.1" in json.loads(answer.stdout)["missing"]


def test_the_status_is_that_of_the_broker_that_tasks_are_sent_to(
    configuration: dict[str, Any], shop: Any
) -> None:
    shop.tasks["look"].apply_async(delay=5)
    urls = {
        "broker_read_url": "amqp://guest:guest@127.0.0.1:1//",
        "broker_write_url": configuration["broker_url"],
    }
    told = run_celery({**configuration, **urls}, "rabbitdelay status --timeout 0.1")
    assert told.returncode == 0, told.stderr


@pytest.mark.parametrize(
    "url", ["amqp://guest:secret@127.0.0.1:1//", "amqp://guest@nowhere.invalid"]
)
def test_the_status_of_a_broker_that_is_down_is_one_line(
    configuration: dict[str, Any], url: str
) -> None:
    down = {**configuration, "broker_url": url}

    told = run_celery(down, "rabbitdelay status")
    answer = run_celery(down, "rabbitdelay status --json")

    assert told.returncode == answer.returncode == EX_UNAVAILABLE
    (line,) = told.stderr.splitlines()
    assert line.startswith("Error: cannot ask the broker amqp://guest")
    assert "secret" not in line
    assert not told.stdout
    assert json.loads(answer.stdout) == {"error": line.removeprefix("Error: ")}


def test_the_status_says_which_workers_are_of_plain_celery(
    configuration: dict[str, Any], shop: Any
) -> None:
    with PlainWorker(configuration):
        told = run_celery(configuration, "rabbitdelay status --timeout 5")

    assert "plain@localhost: cannot answer: " in told.stdout
    assert "Traceback" not in told.stderr


def test_celery_inspect_knows_the_status_of_the_modules(
    served_configuration: dict[str, Any],
) -> None:
    listed = run_celery(served_configuration, "inspect --list")
    answer = run_celery(served_configuration, "inspect rabbitdelay_status --json --timeout 5")

    assert "Rates and backlog of the modules" in listed.stdout
    assert answer.returncode == 0, answer.stderr
    (modules,) = json.loads(answer.stdout.splitlines()[0]).values()
    assert set(modules) == {*MODULES, "tasks"}


def test_the_status_says_how_late_delayed_tasks_arrive(
    connection: Connection, served_shop: Any, served_configuration: dict[str, Any]
) -> None:
    queue = served_shop.conf.task_default_queue
    task_id = put_into(connection, served_shop, time.time() - 90_000, routing_key=queue)
    served_shop.AsyncResult(task_id).get(timeout=PATIENCE)

    told = run_celery(served_configuration, "rabbitdelay status --timeout 5")

    assert re.search(r"tasks .* received, at most 90,\d\d\d\.\d s late", told.stdout)


def test_the_status_of_an_application_without_levels_says_what_to_do(
    configuration: dict[str, Any],
) -> None:
    told = run_celery({**configuration, "broker_url": "memory://"}, "rabbitdelay status")

    assert told.returncode == 2
    assert "is not RabbitMQ" in told.stderr


def test_the_backlog_counts_every_shard(
    connection: Connection, make_topology: Callable[..., Any], queue: Queue
) -> None:
    topology = make_topology(shards=2)
    backlog = backlog_of(connection, topology)
    assert len(backlog.missing) == len(topology.queues)
    assert not any(backlog.levels.values())
    assert not backlog.others


def test_every_line_is_sent_once_and_runs_with_what_it_says(
    served_shop: Any, served_configuration: dict[str, Any], tmp_path: Path
) -> None:
    rows = [{"args": [1]}, {"args": [2], "delay": 0.3}, {"args": [3], "task_id": f"{os.getpid()}"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    second = f"{served_configuration['prefix']}.second"
    told = run_celery(served_configuration, f"rabbitdelay send look {path} -Q {second}")

    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("3 tasks confirmed in ")
    assert not told.stderr
    result = served_shop.AsyncResult(str(os.getpid())).get(timeout=30)
    assert result["given"] == [3]
    assert result["routing_key"] == second


def test_a_file_of_another_system_is_read_line_by_line(
    configuration: dict[str, Any], shop: Any, tmp_path: Path
) -> None:
    good = b'{"args": ["\xc3\xa9"], "delay": 3600}\r\n'
    not_utf8, too_deep = b'{"args": ["\xe9"]}\r\n', b"[" * 9000 + b"\n"
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + good + not_utf8 + good + too_deep + good.rstrip())

    told = run_celery(configuration, f"rabbitdelay send look {path} --json")

    assert told.returncode == 1
    report = checked("send", told.stdout)
    assert report["confirmed"] == 3, told.stderr
    assert set(report["not_confirmed"]) == {"2", "4"}
    assert "line 2 was not confirmed: row '{" in told.stderr


def test_wrong_lines_are_named_and_all_others_are_sent(
    configuration: dict[str, Any], shop: Any
) -> None:
    lines = '{"args": [1], "delay": 3600}\n{"args"\n{"args": [2], "delay": -1, "eta": 5}\n[]\n'

    told = run_celery(configuration, "rabbitdelay send look --json", lines)

    assert told.returncode == 1
    report = checked("send", told.stdout)
    assert report["confirmed"] == 1
    assert set(report["not_confirmed"]) == {"2", "3", "4"}
    assert report["may_have_arrived"] == []
    assert "line 2 was not confirmed: row '{\"args\"\\n'" in told.stderr
    with Connection(configuration["broker_url"]) as connection:
        backlog = backlog_of(connection, shop.rabbitdelay.topology)
    assert backlog.others["meditation"].messages == 1


def test_of_a_long_line_that_is_wrong_little_is_shown(configuration: dict[str, Any]) -> None:
    line = '{"argz": ["' + "x" * 100_000 + '"]}\n'

    told = run_celery(configuration, "rabbitdelay send look --json", line)

    for shown in (told.stderr, told.stdout):
        assert "row {'argz': ['xxx" in shown
        assert "has argz; takes args, kwargs" in shown
        assert len(shown) < 1000


def test_a_line_that_does_not_fit_the_task_s_signature_is_wrong(
    configuration: dict[str, Any], shop: Any
) -> None:
    lines = '{"args": [1], "delay": 3600}\n{"kwargs": {"key": "k"}, "delay": 3600}\n'

    told = run_celery(configuration, "rabbitdelay send note --json", lines)
    by_name = run_celery(configuration, "rabbitdelay send note --json --by-name", lines)

    assert told.returncode == 1
    assert set(checked("send", told.stdout)["not_confirmed"]) == {"1"}
    assert "missing 1 required keyword-only argument: 'key'" in told.stderr
    assert by_name.returncode == 0, by_name.stderr


def test_a_mistyped_task_is_not_sent_unless_it_is_meant(
    configuration: dict[str, Any], shop: Any
) -> None:
    told = run_celery(configuration, "rabbitdelay send lok", "{}\n")
    meant = run_celery(configuration, "rabbitdelay send lok --by-name", '{"delay": 3600}\n')

    assert told.returncode == 2
    assert "'lok' is not a task of" in told.stderr
    assert "is it 'look'? use --by-name to send it anyway" in told.stderr
    assert meant.returncode == 0, meant.stderr


def test_a_queue_that_does_not_exist_is_said_in_a_line(configuration: dict[str, Any]) -> None:
    strict = {**configuration, "task_create_missing_queues": False}

    told = run_celery(strict, "rabbitdelay send look -Q nowhere", "{}\n")

    assert told.returncode == 1
    assert told.stderr == "Error: Queue 'nowhere' missing from task_queues\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-Q nowhere", "Queue 'nowhere' missing from task_queues"),
        ("--envelopes", "an envelope cannot be delayed: "),
    ],
)
def test_a_failure_before_anything_is_sent_is_json_as_well(
    configuration: dict[str, Any], options: str, message: str
) -> None:
    strict = {
        **configuration,
        "task_create_missing_queues": False,
        "rabbitdelay_modules": ["check-in"],
    }

    told = run_celery(strict, f"rabbitdelay send look -j {options}", "{}\n")

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
    told = run_celery(configuration, f"rabbitdelay send look {options} --json", "{}\n")

    assert told.returncode == 2
    assert not told.stdout
    assert "Usage: " in told.stderr


def test_a_setting_that_is_wrong_exits_with_2(configuration: dict[str, Any]) -> None:
    wrong = {**configuration, "rabbitdelay_tick": "soon"}

    for command in ("send look", "status"):
        told = run_celery(wrong, f"rabbitdelay {command}", "{}\n")

        assert told.returncode == 2
        assert "rabbitdelay_tick" in told.stderr
        assert "Traceback" not in told.stderr


def test_ctrl_c_waits_for_the_confirms_and_says_what_is_confirmed(
    configuration: dict[str, Any], shop: Any
) -> None:
    pipe = subprocess.PIPE
    command = "rabbitdelay send look -j --no-envelopes"
    topology = shop.rabbitdelay.topology
    written = 0
    with (
        start_celery(configuration, command, stdin=pipe, stdout=pipe, stderr=pipe) as sending,
        Connection(configuration["broker_url"]) as connection,
    ):

        def waiting() -> int:
            meditation = backlog_of(connection, topology).others.get("meditation")
            return meditation.messages if meditation else 0

        def has_sent() -> bool:
            nonlocal written
            assert sending.stdin is not None
            # One by one: the last lines before a pause may wait for the next one.
            sending.stdin.write('{"delay": 3600}\n')
            sending.stdin.flush()
            written += 1
            return waiting() > 0

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


def test_a_broker_that_cannot_be_reached_is_said_in_a_line(configuration: dict[str, Any]) -> None:
    nowhere = {
        **configuration,
        "broker_url": "amqp://guest:guest@127.0.0.1:1//",
        "rabbitdelay_confirm_timeout": 3,
    }
    lines = '{"delay": 3600}\n{"delay": 4}\n{"delay": 5}\n'
    told = run_celery(nowhere, "rabbitdelay send look", lines)
    alone = run_celery(nowhere, "rabbitdelay send look --no-envelopes", lines)

    # All lines are read before the first envelope is sent.
    assert [line[:6] for line in told.stderr.splitlines()] == ["line 1", "line 2", "line 3"]
    first, rest = alone.stderr.splitlines()
    assert first.startswith("line 1 was not confirmed: ")
    assert rest == "lines from 2 on were not taken"
    for each in (told, alone):
        assert each.returncode == 1
        assert "Connection refused" in each.stderr
        assert "Traceback" not in each.stderr
