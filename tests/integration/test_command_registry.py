"""The commands of ``celery rabbitdelay`` about tasks that wait, run as users do."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from celery_rabbitdelay.testing import wait_for
from tests.integration.shop import PATIENCE, make_app
from tests.integration.worker import Worker, answer, run_command
from tests.json_schemas import checked


@pytest.fixture
def settings(configuration: dict[str, Any], redis_url: str) -> dict[str, Any]:
    # Redis may take its time, as the machine may.
    patient = {"socket_timeout": PATIENCE}
    return {
        **configuration,
        "rabbitdelay_registry_url": redis_url,
        "rabbitdelay_registry_options": patient,
    }


@pytest.fixture
def shop(settings: dict[str, Any], make_shop: Callable[..., Any]) -> Any:
    return make_shop(**settings)


def send(shop: Any, delay: float, **options: Any) -> str:
    return str(shop.tasks["look"].apply_async(delay=delay, track=True, **options).id)


def test_pending_lists_the_tasks_that_wait_the_next_one_first(
    settings: dict[str, Any], shop: Any
) -> None:
    key = f"order:{uuid4().hex}"
    second, first = send(shop, 7200), send(shop, 3600, key=key)

    told = run_command(settings, "pending")
    data = answer(settings, "pending --limit 1", "pending")
    keyed = answer(settings, f"pending --key {key}", "pending")

    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()
    assert lines[0].split() == ["due", "in", "task", "id", "key", "job"]
    assert first in lines[1]
    assert second in lines[2]
    assert lines[3].startswith("2 tracked tasks wait; complete since ")
    assert data["count"] == 2
    assert [each["task_id"] for each in data["tasks"]] == [first]
    assert datetime.fromisoformat(data["tasks"][0]["due"]) > datetime.now(UTC)
    assert [each["key"] for each in keyed["tasks"]] == [key]


def test_pending_takes_due_times(settings: dict[str, Any], shop: Any) -> None:
    sent = [send(shop, hours * 3600) for hours in (1, 2, 3)]
    in_90_minutes = (datetime.now(UTC) + timedelta(minutes=90)).isoformat()

    before = answer(settings, f"pending --due-before {in_90_minutes}", "pending")
    after = answer(settings, f"pending --due-after {in_90_minutes}", "pending")

    assert [each["task_id"] for each in before["tasks"]] == sent[:1]
    assert [each["task_id"] for each in after["tasks"]] == sent[1:]


def test_show_tells_what_is_known_of_one_task(
    settings: dict[str, Any], make_shop: Callable[..., Any]
) -> None:
    # With these levels, a task meditates for 49 minutes, and not for 6 seconds.
    settings = {**settings, "rabbitdelay_layout": [("minutes", 50, 60)]}
    shop = make_shop(**settings)
    key, job = f"order:{uuid4().hex}", f"import-{uuid4().hex}"
    shop.rabbitdelay.open_job(job, expires=3600)
    task_id = send(shop, 3600, args=(7,), key=key, job=job)
    wait_for(lambda: shop.rabbitdelay.show(task_id).may_be_in, "the message", PATIENCE)

    told = run_command(settings, f"show {task_id}")
    data = answer(settings, f"show --key {key}", "show")["task"]
    unknown = answer(settings, f"show {uuid4()}", "show", status=1)

    assert told.returncode == 0, told.stderr
    first, *lines = told.stdout.splitlines()
    facts = dict(line.strip().split(maxsplit=1) for line in lines)
    assert first == f"{task_id}: waiting"
    assert facts["task"] == "look"
    assert facts["arguments"] == "(7,) {}"
    assert facts["job"] == f"{job}, open"
    assert facts["key"] == key
    assert ", in 0:5" in facts["due"]
    assert facts["may"].endswith("meditation (1), by its due time, now and the layout")
    assert (data["task_id"], data["args"], data["job_state"]) == (task_id, "(7,)", "open")
    assert datetime.fromisoformat(data["due"]) > datetime.now(UTC)
    assert unknown == {"task": None}


def test_the_forecast_says_how_many_tasks_are_due_when(
    settings: dict[str, Any], shop: Any, tmp_path: Path
) -> None:
    for delay in (3000, 3001, 6600):  # in the midst of a step
        send(shop, delay)
    picture = tmp_path / "forecast.png"

    told = run_command(settings, f"forecast --step 1800 --plot {picture}")
    data = answer(settings, "forecast --step 0.5h", "forecast")

    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[-1] == "3 tracked tasks wait"
    assert "#" in told.stdout
    assert data["tasks"] == 3
    assert [each["tasks"] for each in data["steps"]] == [2, 1]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_tasks_are_cancelled_by_id_and_by_key(settings: dict[str, Any], shop: Any) -> None:
    key = f"order:{uuid4().hex}"
    ids = [send(shop, 60), send(shop, 60)]
    send(shop, 60, key=key)

    told = run_command(settings, f"cancel {ids[0]} {ids[1]}")
    again = run_command(settings, f"cancel {ids[0]} unheard-of --also-future --json")
    keyed = run_command(settings, f"cancel --key {key} -j")

    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines() == [f"{each}: done" for each in ids]
    assert checked("outcomes", again.stdout)["outcomes"] == {
        ids[0]: "cancelled",
        "unheard-of": "noted",
    }
    assert again.returncode == 0
    assert checked("outcomes", keyed.stdout) == {"outcomes": {key: "done"}}
    assert shop.rabbitdelay.count() == 0


@pytest.mark.parametrize("command", ["cancel", "postpone --delay 60"])
def test_what_nobody_knows_is_unknown_and_leaves_no_record_unless_asked(
    settings: dict[str, Any], shop: Any, command: str
) -> None:
    name = f"unheard-of-{uuid4().hex}"
    registry = shop.rabbitdelay.registry

    told = run_command(settings, f"{command} {name}")
    keyed = run_command(settings, f"{command} --key {name}")
    (left,) = registry.store.commands(lambda pipe: pipe.exists(registry.names.of("task", name)))
    asked = run_command(settings, f"{command} {name} --also-future")
    (noted,) = registry.store.commands(lambda pipe: pipe.exists(registry.names.of("task", name)))

    assert told.stdout.startswith(f"{name}: unknown: nothing waits under it; ")
    assert "--also-future" in told.stdout
    assert keyed.stdout == f"{name}: unknown: nothing waits under it\n"
    assert asked.stdout.startswith(f"{name}: noted; ")
    assert [each.returncode for each in (told, keyed, asked)] == [1, 1, 0]
    assert (left, noted) == (0, 1)


def test_a_task_is_postponed(settings: dict[str, Any], shop: Any) -> None:
    task_id = send(shop, 60)
    later = datetime.now(UTC) + timedelta(hours=1)

    told = run_command(settings, f"postpone {task_id} --eta {later.isoformat()}")
    by_delay = run_command(settings, f"postpone {task_id} --delay 1h60m --json")

    assert told.stdout == f"{task_id}: done\n"
    assert checked("outcomes", by_delay.stdout) == {"outcomes": {task_id: "done"}}
    (found,) = shop.rabbitdelay.pending()
    assert found.due > datetime.now(UTC) + timedelta(hours=1, minutes=50)


def test_tracked_tasks_run_now(settings: dict[str, Any], shop: Any) -> None:
    key, unknown = f"order:{uuid4().hex}", f"unheard-of-{uuid4().hex}"
    by_id, by_key = send(shop, 3600), send(shop, 3600, key=key)
    untracked = shop.tasks["look"].apply_async(delay=3600, key=f"other:{key}").id

    with Worker(settings):
        told = run_command(settings, f"run-now {by_id}")
        keyed = run_command(settings, f"run-now --key {key} --json")
        nothing = run_command(settings, f"run-now {unknown}")
        refused = run_command(settings, f"run-now {untracked}")
        for each in (by_id, by_key):
            assert shop.AsyncResult(each).get(timeout=PATIENCE)
        late = run_command(settings, f"run-now {by_id}")

    assert (told.stdout, told.returncode) == (f"{by_id}: done\n", 0)
    assert checked("outcomes", keyed.stdout) == {"outcomes": {key: "done"}}
    assert nothing.stdout == f"{unknown}: unknown: nothing waits under it\n"
    assert "cannot run earlier" in refused.stderr
    assert late.stdout == f"{by_id}: it has arrived at a worker already\n"
    assert [each.returncode for each in (nothing, refused, late)] == [1, 1, 1]
    assert shop.rabbitdelay.show(unknown) is None


def test_a_job_is_opened_committed_and_shown(settings: dict[str, Any], shop: Any) -> None:
    job = f"import-{uuid4().hex}"

    unknown = run_command(settings, f"job show {job}")
    opened = run_command(settings, f"job open {job} --expires 1m30s")
    committed = answer(settings, f"job commit {job}", "job")
    aborted = run_command(settings, f"job abort {job}")

    assert (unknown.stdout, unknown.returncode) == (f"{job}: unknown\n", 1)
    assert opened.stdout == f"{job}: open\n"
    assert committed == {"job": job, "state": "committed"}
    assert aborted.returncode == 1
    assert f"job '{job}' is committed" in aborted.stderr


def test_tasks_are_paused_by_name_and_by_queue_and_resumed(
    settings: dict[str, Any], shop: Any
) -> None:
    send(shop, 60)  # the levels exist, which is what the status is about
    began = datetime.now(UTC) - timedelta(milliseconds=1)  # Redis counts whole ones
    paused = run_command(settings, "pause --task shop.remind")
    data = answer(settings, "pause --queue mails", "paused")
    again = answer(settings, "pause --task shop.remind", "paused")
    status, shown = answer(settings, "status", "status"), run_command(settings, "status")
    resumed = run_command(settings, "resume --task shop.remind")
    twice = run_command(settings, "resume --task shop.remind")
    told = answer(settings, "resume --queue mails", "resumed")
    unknown = answer(settings, "resume --queue mails", "resumed", status=1)

    assert paused.stdout.startswith("paused: task shop.remind, since "), paused.stderr
    assert (data["task"], data["queue"]) == (None, "mails")
    assert began <= datetime.fromisoformat(data["since"]) <= datetime.now(UTC)
    assert again in status["paused"]
    assert data in status["paused"]
    lines = [line for line in shown.stdout.splitlines() if line.startswith("paused: ")]
    assert [line.partition(",")[0] for line in lines] == [
        "paused: task shop.remind",
        "paused: queue mails",
    ]
    assert (resumed.stdout, resumed.returncode) == ("task shop.remind: resumed\n", 0)
    assert (twice.stdout, twice.returncode) == ("task shop.remind: was not paused\n", 1)
    assert (told["was_paused"], unknown["was_paused"]) == (True, False)
    assert shop.rabbitdelay.paused() == []


def test_a_time_without_a_time_zone_is_in_that_of_the_application(
    settings: dict[str, Any],
) -> None:
    settings["timezone"] = "America/New_York"
    app = make_app(settings)
    app.rabbitdelay.schedules.put("noon", "shop.report", "0 12 * * *")
    command = "schedules backfill noon --since"

    def sent(since: str, until: str) -> int:
        return int(answer(settings, f"{command} {since} --until {until}", "schedule")["sent"])

    assert sent("2026-01-01T12:00", "2026-01-01T12:00") == 1
    assert sent("2026-07-01T11:59", "2026-07-01T11:59:59") == 0
    assert sent("2026-07-01", "2026-07-03") == 2
    assert sent("2026-01-01T17:00+00:00", "2026-01-01T17:00+00:00") == 1
    shown = run_command(settings, "schedules backfill --help").stdout
    assert "without a time zone is in that of the application" in " ".join(shown.split())
    app.rabbitdelay.schedules.delete("noon")
    app.close()


def test_what_beats_entries_would_become_is_shown_and_not_done(settings: dict[str, Any]) -> None:
    def version(**entries: float) -> dict[str, Any]:
        given = {name: {"task": "look", "schedule": each} for name, each in entries.items()}
        return {**settings, "beat_schedule": given}

    def planned(settings: dict[str, Any], options: str = "--dry-run") -> dict[str, str]:
        told = answer(settings, f"schedules put-beat {options}", "schedules_planned")["planned"]
        return {name.rpartition(":")[2]: word for name, word in told.items()}

    def names() -> list[str]:
        listed = answer(settings, "schedules list", "schedules")["schedules"]
        return [each["name"].rpartition(":")[2] for each in listed]

    before = version(kept=3600, edited=3600, gone=3600)
    assert planned(before) == {"kept": "put", "edited": "put", "gone": "put"}
    assert names() == []
    answer(before, "schedules put-beat", "schedules")
    assert planned(before) == {}
    after = version(kept=3600, edited=7200, more=3600)
    for _ in range(2):
        assert planned(after) == {"edited": "changed", "more": "put", "gone": "ended"}
        assert names() == ["edited", "gone", "kept"]
    told = run_command(after, "schedules put-beat --dry-run").stdout.splitlines()
    assert "beat:shop:gone: would be ended" in told
    assert set(planned(after, "--end --dry-run").values()) == {"ended"}
    answer(after, "schedules put-beat", "schedules")
    assert names() == ["edited", "kept", "more"]
    assert run_command(after, "schedules put-beat --dry-run").stdout == "nothing would change\n"
    answer(after, "schedules put-beat --end", "schedules")
    assert names() == []


def test_schedules_are_listed_paused_triggered_deleted_and_imported(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    app = make_app(settings)
    app.rabbitdelay.schedules.put("nightly", "shop.report", "@daily", ["x"], timezone="UTC")
    app.rabbitdelay.schedules.put("often", "shop.remind", timedelta(hours=1))

    listed = answer(settings, "schedules list", "schedules")
    assert [each["name"] for each in listed["schedules"]] == ["nightly", "often"]
    assert listed["schedules"][0]["args"] == ["x"]
    shown = run_command(settings, "schedules list").stdout.splitlines()
    assert shown[0].startswith("nightly: shop.report, next ")
    due = answer(settings, "schedules next nightly --number 3", "schedule")["next"]
    assert [each[10:] for each in due] == ["T00:00:00+00:00"] * 3

    assert run_command(settings, "schedules pause often").stdout == "often: paused\n"
    assert answer(settings, "schedules list", "schedules")["schedules"][1]["paused"]
    assert run_command(settings, "schedules resume often").stdout == "often: resumed\n"
    sent = answer(settings, "schedules trigger often", "schedule")
    assert len(sent["task_id"]) == 36
    assert run_command(settings, "schedules delete often").stdout == "often: deleted\n"
    exported = tmp_path / "schedules.json"
    exported.write_text(run_command(settings, "schedules export").stdout)
    told = answer(settings, f"schedules import {exported}", "schedules_import")["imported"]
    assert told == [{"name": "nightly", "error": ""}]
    gone = run_command(settings, "schedules delete often")
    assert (gone.returncode, gone.stdout) == (1, "often: there is no such schedule\n")
    app.rabbitdelay.schedules.delete("nightly")
    app.close()


def test_of_a_schedule_whose_arguments_cannot_be_read_all_else_is_shown(
    settings: dict[str, Any],
) -> None:
    app = make_app({**settings, "accept_content": ["json", "pickle"]})
    put = app.rabbitdelay.schedules.put
    put("pickled", "shop.report", "@daily", [{1, 2}], serializer="pickle")
    put("readable", "shop.remind", "@daily")

    shown = answer(settings, "schedules show pickled", "schedule")["schedule"]
    exported = run_command(settings, "schedules export")

    assert (shown["task"], shown["args"], shown["kwargs"]) == ("shop.report", None, None)
    assert [each["name"] for each in json.loads(exported.stdout)["schedules"]] == ["readable"]
    assert "pickled: not exported: its arguments cannot be read" in exported.stderr
    for name in ("pickled", "readable"):
        app.rabbitdelay.schedules.delete(name)
    app.close()
