"""``celery rabbitdelay``, run as a user does."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kombu import Connection, Queue

from celery_rabbitdelay.publishing.backlog import backlog_of
from tests.integration.worker import run_celery, start_celery


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
    assert set(modules) == {"check-in", "distribution"}
    assert worker in told.stdout
    assert "received" in told.stdout


def test_the_status_of_levels_that_do_not_stand_names_their_queues(
    configuration: dict[str, Any],
) -> None:
    told = run_celery(configuration, "rabbitdelay status --timeout 0.1")

    assert told.returncode == 0, told.stderr
    assert "queues are missing: " in told.stdout


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


def test_a_terminal_shows_how_many_are_confirmed(
    served_configuration: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"args": [1]}\n' * 7)
    reader, writer = pty.openpty()

    told = run_celery(served_configuration, f"rabbitdelay send look {path}", errors=writer)

    os.close(writer)
    shown = os.read(reader, 10_000).decode()
    os.close(reader)
    assert told.returncode == 0, shown
    assert "look" in shown
    assert "7/7" in shown


def test_a_terminal_that_goes_away_does_not_end_the_sending(
    configuration: dict[str, Any], shop: Any
) -> None:
    reader, writer = pty.openpty()
    pipe = subprocess.PIPE
    sending = start_celery(
        configuration, "rabbitdelay send look --json", stdin=pipe, stdout=pipe, stderr=writer
    )
    os.close(writer)
    assert b"look" in os.read(reader, 100)
    os.close(reader)

    told, _ = sending.communicate('{"delay": 3600}\n' * 7)

    assert json.loads(told)["confirmed"] == 7
    assert sending.returncode == 0


def test_a_file_of_another_system_is_read_line_by_line(
    configuration: dict[str, Any], shop: Any, tmp_path: Path
) -> None:
    good = b'{"args": ["\xc3\xa9"], "delay": 3600}\r\n'
    not_utf8, too_deep = b'{"args": ["\xe9"]}\r\n', b"[" * 9000 + b"\n"
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + good + not_utf8 + good + too_deep + good.rstrip())

    told = run_celery(configuration, f"rabbitdelay send look {path} --json")

    assert told.returncode == 1
    report = json.loads(told.stdout)
    assert report["confirmed"] == 3, told.stderr
    assert set(report["not_confirmed"]) == {"2", "4"}
    assert "line 2 was not confirmed: row '{" in told.stderr


def test_wrong_lines_are_named_and_all_others_are_sent(
    configuration: dict[str, Any], shop: Any
) -> None:
    lines = '{"args": [1], "delay": 3600}\n{"args"\n{"args": [2], "delay": -1, "eta": 5}\n[]\n'

    told = run_celery(configuration, "rabbitdelay send look --json", lines)

    assert told.returncode == 1
    report = json.loads(told.stdout)
    assert report["confirmed"] == 1
    assert set(report["not_confirmed"]) == {"2", "3", "4"}
    assert "line 2 was not confirmed: row '{\"args\"\\n'" in told.stderr
    with Connection(configuration["broker_url"]) as connection:
        backlog = backlog_of(connection, shop.rabbitdelay.topology)
    assert backlog.others["meditation"].messages == 1


def test_of_a_long_line_that_is_wrong_little_is_shown(
    configuration: dict[str, Any],
) -> None:
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
    assert set(json.loads(told.stdout)["not_confirmed"]) == {"1"}
    assert "missing 1 required keyword-only argument: 'key'" in told.stderr
    assert by_name.returncode == 0, by_name.stderr


def test_a_mistyped_task_is_not_sent_unless_it_is_meant(
    configuration: dict[str, Any], shop: Any
) -> None:
    told = run_celery(configuration, "rabbitdelay send lok", "{}\n")
    meant = run_celery(configuration, "rabbitdelay send lok --by-name", '{"delay": 3600}\n')

    assert told.returncode == 2
    assert "'lok' is no task of" in told.stderr
    assert "is it 'look'? --by-name sends it all the same" in told.stderr
    assert meant.returncode == 0, meant.stderr


def test_a_queue_that_does_not_exist_is_said_in_a_line(configuration: dict[str, Any]) -> None:
    strict = {**configuration, "task_create_missing_queues": False}

    told = run_celery(strict, "rabbitdelay send look -Q nowhere", "{}\n")

    assert told.returncode == 1
    assert told.stderr == "Error: Queue 'nowhere' missing from task_queues\n"


def test_a_broker_that_cannot_be_reached_is_said_in_a_line(configuration: dict[str, Any]) -> None:
    nowhere = {**configuration, "broker_url": "amqp://guest:guest@127.0.0.1:1//"}

    lines = '{"delay": 3600}\n{"delay": 4}\n{"delay": 5}\n'
    told = run_celery(nowhere, "rabbitdelay send look", lines)

    assert told.returncode == 1
    named = [line[:6] for line in told.stderr.splitlines()]
    assert named == ["line 1", "line 2", "line 3", "lines "]
    assert "Connection refused" in told.stderr
    assert "Traceback" not in told.stderr
