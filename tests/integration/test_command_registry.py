"""The commands of ``celery rabbitdelay`` about tasks that wait, run as users do."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_rabbitdelay.command.group import rabbitdelay
from celery_rabbitdelay.testing import wait_for
from tests.integration.shop import PATIENCE
from tests.integration.worker import Worker
from tests.json_schemas import checked


@pytest.fixture
def configuration(configuration: dict[str, Any], redis_url: str) -> dict[str, Any]:
    # Redis may take its time, as the machine may.
    patient = {"socket_timeout": PATIENCE}
    return {
        **configuration,
        "rabbitdelay_registry_url": redis_url,
        "rabbitdelay_registry_options": patient,
    }


def invoke(shop: Any, command: str) -> Result:
    """Run a command for an application, in this process."""
    context = CLIContext(app=shop, no_color=True, workdir=None, quiet=False)
    return CliRunner().invoke(rabbitdelay, command.split(), obj=context)


def answer(shop: Any, command: str, schema: str, status: int = 0) -> dict[str, Any]:
    """Run a command with ``--json`` and return what it prints."""
    told = invoke(shop, f"{command} --json")
    assert told.exit_code == status, told.output
    return checked(schema, told.stdout)


def send(shop: Any, delay: float, **options: Any) -> str:
    return str(shop.tasks["look"].apply_async(delay=delay, track=True, **options).id)


def test_pending_lists_the_tasks_that_wait_the_next_one_first(shop: Any) -> None:
    key = f"order:{uuid4().hex}"
    second, first = send(shop, 7200), send(shop, 3600, key=key)
    between = (datetime.now(UTC) + timedelta(minutes=90)).isoformat()

    lines = invoke(shop, "pending").stdout.splitlines()
    assert lines[0].split() == ["due", "in", "task", "id", "key", "job"]
    assert first in lines[1]
    assert second in lines[2]
    assert lines[3].startswith("2 tracked tasks wait; complete since ")
    for options, shown in {
        "--limit 1": [first],
        f"--key {key}": [first],
        f"--due-before {between}": [first],
        f"--due-after {between}": [second],
    }.items():
        tasks = answer(shop, f"pending {options}", "pending")["tasks"]
        assert [each["task_id"] for each in tasks] == shown, options


def test_show_tells_what_is_known_of_one_task(make_shop: Callable[..., Any]) -> None:
    # With these levels, a task meditates for 49 minutes, and not for 6 seconds.
    shop = make_shop(rabbitdelay_layout=[("minutes", 50, 60)])
    key, job = f"order:{uuid4().hex}", f"import-{uuid4().hex}"
    shop.rabbitdelay.open_job(job, expires=3600)
    task_id = send(shop, 3600, args=(7,), key=key, job=job)
    wait_for(lambda: shop.rabbitdelay.show(task_id).may_be_in, "the message", PATIENCE)

    first, *lines = invoke(shop, f"show {task_id}").stdout.splitlines()
    data = answer(shop, f"show --key {key}", "show")["task"]

    assert first == f"{task_id}: waiting"
    facts = dict(line.strip().split(maxsplit=1) for line in lines)
    assert (facts["task"], facts["arguments"], facts["key"]) == ("look", "(7,) {}", key)
    assert facts["job"] == f"{job}, open"
    assert facts["may"].endswith("meditation (1), by its due time, now and the layout")
    assert (data["task_id"], data["args"], data["job_state"]) == (task_id, "(7,)", "open")
    assert answer(shop, f"show {uuid4()}", "show", status=1) == {"task": None}


def test_the_forecast_says_how_many_tasks_are_due_when(shop: Any, tmp_path: Path) -> None:
    for delay in (3000, 3001, 6600):  # in the midst of a step
        send(shop, delay)
    picture = tmp_path / "forecast.png"

    told = invoke(shop, f"forecast --step 1800 --plot {picture}")
    data = answer(shop, "forecast --step 0.5h", "forecast")

    assert told.stdout.splitlines()[-1] == "3 tracked tasks wait"
    assert (data["tasks"], [each["tasks"] for each in data["steps"]]) == (3, [2, 1])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_tasks_are_cancelled_and_postponed_by_id_and_by_key(shop: Any) -> None:
    key = f"order:{uuid4().hex}"
    ids = [send(shop, 60), send(shop, 60)]
    later = send(shop, 60, key=key)
    in_an_hour = datetime.now(UTC) + timedelta(hours=1)

    told = invoke(shop, f"cancel {ids[0]} {ids[1]}")
    again = answer(shop, f"cancel {ids[0]} unheard-of --also-future", "outcomes")
    assert invoke(shop, f"postpone {later} --eta {in_an_hour.isoformat()}").exit_code == 0
    (postponed,) = shop.rabbitdelay.pending()
    by_key = answer(shop, f"postpone --key {key} --delay 1h60m", "outcomes")

    assert told.stdout.splitlines() == [f"{each}: done" for each in ids]
    assert again["outcomes"] == {ids[0]: "cancelled", "unheard-of": "noted"}
    assert abs(postponed.due - in_an_hour) < timedelta(seconds=1)
    assert by_key == {"outcomes": {key: "done"}}
    (found,) = shop.rabbitdelay.pending()
    assert found.due > in_an_hour + timedelta(minutes=50)
    assert answer(shop, f"cancel --key {key}", "outcomes") == {"outcomes": {key: "done"}}
    assert shop.rabbitdelay.count() == 0


@pytest.mark.parametrize("command", ["cancel", "postpone --delay 60"])
def test_what_nobody_knows_is_unknown_and_leaves_no_record_unless_asked(
    shop: Any, command: str
) -> None:
    name = f"unheard-of-{uuid4().hex}"
    registry = shop.rabbitdelay.registry

    def records() -> Any:
        (number,) = registry.store.commands(
            lambda pipe: pipe.exists(registry.names.of("task", name))
        )
        return number

    told = invoke(shop, f"{command} {name}")
    assert told.stdout.startswith(f"{name}: unknown: nothing waits under it; ")
    assert "--also-future" in told.stdout
    keyed = invoke(shop, f"{command} --key {name}")
    assert keyed.stdout == f"{name}: unknown: nothing waits under it\n"
    assert (told.exit_code, keyed.exit_code, records()) == (1, 1, 0)
    asked = invoke(shop, f"{command} {name} --also-future")
    assert asked.stdout.startswith(f"{name}: noted; ")
    assert (asked.exit_code, records()) == (0, 1)


def test_tracked_tasks_run_now(shop: Any, configuration: dict[str, Any]) -> None:
    key = f"order:{uuid4().hex}"
    by_id, by_key = send(shop, 3600), send(shop, 3600, key=key)
    untracked = shop.tasks["look"].apply_async(delay=3600, key=f"other:{key}").id

    with Worker(configuration):
        told = invoke(shop, f"run-now {by_id}")
        assert (told.stdout, told.exit_code) == (f"{by_id}: done\n", 0)
        keyed = answer(shop, f"run-now --key {key}", "outcomes")
        assert keyed == {"outcomes": {key: "done"}}
        refused = invoke(shop, f"run-now {untracked}")
        assert ("cannot run earlier" in refused.stderr, refused.exit_code) == (True, 1)
        for each in (by_id, by_key):
            assert shop.AsyncResult(each).get(timeout=PATIENCE)
        late = invoke(shop, f"run-now {by_id}")
    assert late.stdout == f"{by_id}: it has arrived at a worker already\n"
    assert late.exit_code == 1


def test_a_job_is_opened_committed_and_shown(shop: Any) -> None:
    job = f"import-{uuid4().hex}"
    unknown = invoke(shop, f"job show {job}")
    assert (unknown.stdout, unknown.exit_code) == (f"{job}: unknown\n", 1)
    assert invoke(shop, f"job open {job} --expires 1m30s").stdout == f"{job}: open\n"
    assert answer(shop, f"job commit {job}", "job") == {"job": job, "state": "committed"}
    aborted = invoke(shop, f"job abort {job}")
    assert aborted.exit_code == 1
    assert f"job '{job}' is committed" in aborted.stderr


def test_tasks_are_paused_by_name_and_by_queue_and_resumed(shop: Any) -> None:
    send(shop, 60)  # the levels exist, which is what the status is about
    began = datetime.now(UTC) - timedelta(milliseconds=1)  # Redis counts whole ones
    assert invoke(shop, "pause --task shop.remind").stdout.startswith("paused: task shop.remind, ")
    data = answer(shop, "pause --queue mails", "paused")
    assert (data["task"], data["queue"]) == (None, "mails")
    assert began <= datetime.fromisoformat(data["since"]) <= datetime.now(UTC)
    again = answer(shop, "pause --task shop.remind", "paused")
    assert answer(shop, "status -t 0.1", "status")["paused"] == [again, data]
    for told, status in (("resumed", 0), ("was not paused", 1)):
        resumed = invoke(shop, "resume --task shop.remind")
        assert (resumed.stdout, resumed.exit_code) == (f"task shop.remind: {told}\n", status)
    assert answer(shop, "resume --queue mails", "resumed")["was_paused"] is True
    assert shop.rabbitdelay.paused() == []


def test_a_time_without_a_time_zone_is_in_that_of_the_application(
    make_shop: Callable[..., Any],
) -> None:
    shop = make_shop(timezone="America/New_York")
    shop.rabbitdelay.schedules.put("noon", "shop.report", "0 12 * * *")
    for since, until, number in (
        ("2026-01-01T12:00", "2026-01-01T12:00", 1),
        ("2026-07-01T11:59", "2026-07-01T11:59:59", 0),
        ("2026-07-01", "2026-07-03", 2),
        ("2026-01-01T17:00+00:00", "2026-01-01T17:00+00:00", 1),
    ):
        command = f"schedules backfill noon --since {since} --until {until}"
        assert answer(shop, command, "schedule")["sent"] == number, since
    shop.rabbitdelay.schedules.delete("noon")


def test_what_beats_entries_would_become_is_shown_and_not_done(
    make_shop: Callable[..., Any],
) -> None:
    def version(**entries: float) -> Any:
        given = {name: {"task": "look", "schedule": each} for name, each in entries.items()}
        return make_shop(beat_schedule=given)

    def planned(shop: Any, options: str = "--dry-run") -> dict[str, str]:
        told = answer(shop, f"schedules put-beat {options}", "schedules_planned")["planned"]
        return {name.rpartition(":")[2]: word for name, word in told.items()}

    def names(shop: Any) -> list[str]:
        listed = answer(shop, "schedules list", "schedules")["schedules"]
        return [each["name"].rpartition(":")[2] for each in listed]

    before = version(kept=3600, edited=3600, gone=3600)
    assert planned(before) == {"kept": "put", "edited": "put", "gone": "put"}
    assert names(before) == []
    answer(before, "schedules put-beat", "schedules")
    assert planned(before) == {}
    after = version(kept=3600, edited=7200, more=3600)
    assert planned(after) == {"edited": "changed", "more": "put", "gone": "ended"}
    assert names(after) == ["edited", "gone", "kept"]
    told = invoke(after, "schedules put-beat --dry-run").stdout.splitlines()
    assert "beat:shop:gone: would be ended" in told
    answer(after, "schedules put-beat", "schedules")
    assert names(after) == ["edited", "kept", "more"]
    assert invoke(after, "schedules put-beat --dry-run").stdout == "nothing would change\n"
    answer(after, "schedules put-beat --end", "schedules")
    assert names(after) == []


def test_schedules_are_listed_paused_triggered_deleted_and_imported(
    make_shop: Callable[..., Any], tmp_path: Path
) -> None:
    shop, other = make_shop(), make_shop(accept_content=["json", "pickle"])
    put = other.rabbitdelay.schedules.put
    put("nightly", "shop.report", "@daily", ["x"], timezone="UTC")
    put("often", "shop.remind", timedelta(hours=1))
    put("pickled", "shop.report", "@daily", [{1, 2}], serializer="pickle")

    listed = answer(shop, "schedules list", "schedules")["schedules"]
    assert [each["name"] for each in listed] == ["nightly", "often", "pickled"]
    assert (listed[0]["args"], listed[2]["args"]) == (["x"], None)
    shown = invoke(shop, "schedules list").stdout.splitlines()
    assert shown[0].startswith("nightly: shop.report, next ")
    due = answer(shop, "schedules next nightly --number 3", "schedule")["next"]
    assert [each[10:] for each in due] == ["T00:00:00+00:00"] * 3

    assert invoke(shop, "schedules pause often").stdout == "often: paused\n"
    assert answer(shop, "schedules list", "schedules")["schedules"][1]["paused"]
    assert invoke(shop, "schedules resume often").stdout == "often: resumed\n"
    assert len(answer(shop, "schedules trigger often", "schedule")["task_id"]) == 36
    assert invoke(shop, "schedules delete often").stdout == "often: deleted\n"
    exported = invoke(shop, "schedules export")
    assert "pickled: not exported: its arguments cannot be read" in exported.stderr
    file = tmp_path / "schedules.json"
    file.write_text(exported.stdout)
    told = answer(shop, f"schedules import {file}", "schedules_import")["imported"]
    assert told == [{"name": "nightly", "error": ""}]
    gone = invoke(shop, "schedules delete often")
    assert (gone.exit_code, gone.stdout) == (1, "often: there is no such schedule\n")
    for name in ("nightly", "pickled"):
        shop.rabbitdelay.schedules.delete(name)
