"""The commands of ``celery rabbitdelay`` about tasks that wait, run as users do."""

import re
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from click.testing import Result
from kombu import Connection, Producer

from celery_rabbitdelay.testing import wait_for
from tests import json_schemas
from tests.kernel.integration.arrivals import wait_until_waiting
from tests.kernel.integration.shop import PATIENCE
from tests.kernel.integration.worker import Worker


@pytest.fixture
def configuration(configuration: dict[str, Any], redis_url: str) -> dict[str, Any]:
    return {**configuration, "rabbitdelay_registry_url": redis_url}


def invoke(shop: Any, command: str, given: str = "") -> Result:
    """Run a command for an application, in this process, with that standard input."""
    return json_schemas.invoke(shop, command.split(), given)


def answer(shop: Any, command: str, schema: str, status: int = 0) -> dict[str, Any]:
    """Run a command with ``--json`` and return what it prints."""
    told = invoke(shop, f"{command} --json")
    assert told.exit_code == status, told.output
    return json_schemas.checked(schema, told.stdout)


def send(shop: Any, delay: float, **options: Any) -> str:
    return str(shop.tasks["look"].apply_async(delay=delay, track=True, **options).id)


def test_pending_lists_the_tasks_that_wait(shop: Any) -> None:
    key = f"order:{uuid4().hex}"
    second, first = send(shop, 6600), send(shop, 3000, key=key)
    between = (datetime.now(UTC) + timedelta(minutes=90)).isoformat()

    lines = invoke(shop, "pending").stdout.splitlines()
    assert lines[0].split() == ["due", "in", "state", "task", "id", "key", "job"]
    assert (first in lines[1], second in lines[2]) == (True, True)
    assert lines[3].startswith(
        "2 tracked tasks wait (untracked tasks are not listed: see status); the list is complete "
    )
    for options, shown in {
        "--limit 1": [first],
        f"key:{key}": [first],
        f"task:lo* key:{key[:20]}* state:waiting": [first],
        f"due:<{between}": [first],
        f"due:>{between}": [second],
        "state:held": [],
    }.items():
        tasks = answer(shop, f"pending {options}", "pending")["tasks"]
        assert [each["task_id"] for each in tasks] == shown, options
    wrong = invoke(shop, "pending state:lost")
    assert (wrong.exit_code, "cannot search for 'state:lost'" in wrong.stderr) == (2, True)


def test_dates_in_a_search_are_in_this_machines_time_zone(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task_id = send(shop, 3600)
    monkeypatch.setenv("TZ", "Etc/GMT-14")
    time.tzset()
    try:
        due = shop.rabbitdelay.show(task_id).due.astimezone().replace(tzinfo=None)
        for sign, count in (("<", 1), (">", 0)):
            term = f"due:{sign}{due + timedelta(hours=2):%Y-%m-%dT%H:%M}"
            assert answer(shop, f"pending {term}", "pending")["count"] == count
    finally:
        monkeypatch.undo()
        time.tzset()


def test_show_tells_what_is_known_of_one_task(shop: Any) -> None:
    key = f"order:{uuid4().hex}"
    task_id = send(shop, 3600, args=(7,), key=key)
    first, *lines = invoke(shop, f"show {task_id}").stdout.splitlines()
    data = answer(shop, f"show --key {key}", "show")["tasks"][key]
    assert first == f"{task_id}: waiting"
    facts = dict(line.strip().split(maxsplit=1) for line in lines)
    assert (facts["task"], facts["arguments"], facts["key"]) == ("look", "(7,) {}", key)
    assert facts["why"] == "No worker consumes its queue now."
    assert (data["task_id"], data["args"]) == (task_id, "(7,)")
    due, unserved = data.pop("why")
    assert (due[:7], unserved) == ("Due in ", facts["why"])
    both = answer(shop, f"show {task_id} unheard-of", "show", status=1)["tasks"]
    assert both.pop("unheard-of") is None
    assert both[task_id].pop("why")[1] == unserved
    assert both == {task_id: data}
    told = invoke(shop, f"show unheard-of {task_id}").stdout.splitlines()
    assert told[:2] == ["unheard-of: unknown", first]


def test_show_tells_how_late_a_task_is_and_that_it_may_be_undeliverable(
    shop: Any, connection: Connection
) -> None:
    task_id = send(shop, 0.1)
    undeliverable = shop.rabbitdelay.topology.module_queues.undeliverable.name
    Producer(connection).publish("", routing_key=undeliverable)
    wait_until_waiting(connection, undeliverable, 1)

    def overdue() -> bool:
        return ", overdue by 0:0" in invoke(shop, f"show {task_id}").stdout

    wait_for(overdue, "the task to be overdue", PATIENCE)
    assert "  overdue by 0:0" in invoke(shop, "pending").stdout
    facts = shown(shop, task_id)
    assert facts["may be in"] == "undeliverable (1)"
    assert facts["queue"] == shop.conf.task_default_queue
    why = (
        "The task is due, but no worker consumes its queue. Messages in the queue: 1. "
        "The option -Q of celery worker names a worker's queues."
    )
    wait_for(lambda: shown(shop, task_id)["why"] == why, "the task in its queue", PATIENCE)


def test_show_tells_that_the_queue_of_an_overdue_task_does_not_exist(
    shop: Any, connection: Connection
) -> None:
    task_id = send(shop, 2)
    channel: Any = connection.default_channel
    channel.queue_delete(shop.conf.task_default_queue)

    def is_gone() -> bool:
        return "due, but its queue does not exist" in shown(shop, task_id)["why"]

    wait_for(is_gone, "the task to be overdue", PATIENCE)
    assert answer(shop, f"show {task_id}", "show")["tasks"][task_id]["in_queue"] == {}


def test_show_says_how_long_a_task_is_paused_and_that_held_tasks_return(
    shop: Any, connection: Connection
) -> None:
    task_id = send(shop, 0.1)
    paused = shop.rabbitdelay.topology.module_queues.paused.name
    Producer(connection).publish("", routing_key=paused)
    wait_until_waiting(connection, paused, 1)
    wait_for(lambda: "overdue by" in shown(shop, task_id)["due"], "the task", PATIENCE)
    returning = "Held tasks are returning to their queues"
    wait_for(lambda: returning in shown(shop, task_id)["why"], "the reason", PATIENCE)
    facts = shown(shop, task_id)
    assert facts["may be in"] == "paused (1)"
    shop.rabbitdelay.pause(task="note")
    facts = shown(shop, task_id)
    assert "returning" not in facts["why"]
    assert facts.get("may be in") is None
    shop.rabbitdelay.pause(task="look")
    facts = shown(shop, task_id)
    assert facts["why"].startswith("All tasks with this name have been paused for ")
    assert facts["may be in"] == "paused (1)"
    (pause,) = answer(shop, f"show {task_id}", "show")["tasks"][task_id]["pauses"]
    assert (pause["task"], pause["queue"]) == ("look", None)
    for name in ("look", "note"):
        shop.rabbitdelay.resume(task=name)


def shown(shop: Any, task_id: str) -> dict[str, str]:
    """Return the facts that ``show`` prints about a task, with the last of its reasons."""
    lines = invoke(shop, f"show {task_id}").stdout.splitlines()[1:]
    return dict(re.split(r"  +", line.strip(), maxsplit=1) for line in lines)


def test_tasks_are_cancelled_and_postponed_by_id_and_by_key(shop: Any) -> None:
    key = f"order:{uuid4().hex}"
    ids, later = [send(shop, 60), send(shop, 60)], send(shop, 60, key=key)
    in_an_hour = datetime.now(UTC) + timedelta(hours=1)

    told = invoke(shop, f"cancel {ids[0]} {ids[1]}").stdout.splitlines()
    assert told == [f"{each}: done" for each in ids]
    again = answer(shop, f"cancel {ids[0]} unheard-of --also-future", "outcomes")
    assert again["outcomes"] == {ids[0]: "cancelled", "unheard-of": "noted"}
    assert invoke(shop, f"postpone {later} --eta {in_an_hour.isoformat()}").exit_code == 0
    (postponed,) = shop.rabbitdelay.pending()
    assert abs(postponed.due - in_an_hour) < timedelta(seconds=1)
    done = {"outcomes": {key: "done"}}
    assert answer(shop, f"postpone --key {key} --delay 1h60m", "outcomes") == done
    (postponed,) = shop.rabbitdelay.pending()
    assert postponed.due > in_an_hour + timedelta(minutes=50)
    assert answer(shop, f"cancel --key {key}", "outcomes") == done
    assert shop.rabbitdelay.count() == 0


def test_the_command_asks_before_it_cancels_what_a_search_finds(shop: Any) -> None:
    for job in ("imports", "", "", "others"):
        if job:
            shop.rabbitdelay.open_job(job, expires=60)
        send(shop, 3600, **({"job": job} if job else {}))
    shop.rabbitdelay.commit_job("imports")
    refused = invoke(shop, "cancel --search job:imports", "n\n")
    assert "Cancel 1 waiting tracked tasks?" in refused.stdout
    assert (refused.exit_code, shop.rabbitdelay.count()) == (1, 4)
    done = invoke(shop, "cancel --search job:imports", "y\n").stdout
    assert done.endswith("1 cancelled\n")
    told = answer(shop, "cancel --search task:look --dry-run", "cancel")
    assert told == {"count": 3, "cancelled": 0, "dry_run": True}
    told = answer(shop, "cancel --search sent:>1h --yes", "cancel")
    assert told == {"count": 0, "cancelled": 0, "dry_run": False}
    for options, why in (
        ("--dry-run", "--dry-run needs --search"),
        ("x --search task:look", "--search cannot be combined with ids, --key or --also-future"),
        ("--search job:oth* -y", "job 'others' is open: abort all of it with job abort others"),
        ("--search * -y", "--search needs a term: to cancel all tasks, search for task:*"),
        ("--search task:look --json", "--json cannot ask for confirmation: pass --yes or"),
        ("--yes", "pass either task ids or --key, not both"),
    ):
        wrong = invoke(shop, f"cancel {options}")
        assert wrong.exit_code == 2
        assert why in " ".join(wrong.stderr.split())
    assert shop.rabbitdelay.count() == 3
    keyed = send(shop, 3600, key="order:7")
    assert invoke(shop, "cancel --search order:7 -y").stdout == "1 cancelled\n"
    assert shop.rabbitdelay.show(keyed).state == "cancelled"


@pytest.mark.parametrize("command", ["cancel", "postpone --delay 60"])
def test_what_nobody_knows_is_unknown_and_leaves_no_record_unless_asked(
    shop: Any, command: str
) -> None:
    name = f"unheard-of-{uuid4().hex}"
    told, keyed = invoke(shop, f"{command} {name}"), invoke(shop, f"{command} --key {name}")
    assert told.stdout.startswith(f"{name}: unknown to the registry: nothing was changed; ")
    assert keyed.stdout == f"{name}: unknown to the registry: nothing was changed\n"
    assert (told.exit_code, keyed.exit_code, shop.rabbitdelay.show(name)) == (1, 1, None)
    asked = invoke(shop, f"{command} {name} --also-future")
    assert asked.stdout.startswith(f"{name}: noted; ")
    assert (asked.exit_code, shop.rabbitdelay.show(name) is None) == (0, False)


def test_tracked_tasks_are_postponed_to_now(shop: Any, configuration: dict[str, Any]) -> None:
    key = f"order:{uuid4().hex}"
    by_id, by_key = send(shop, 3600), send(shop, 3600, key=key)
    untracked = shop.tasks["look"].apply_async(delay=3600, key=f"other:{key}").id
    assert invoke(shop, f"postpone --delay 0 {by_id}").stdout == f"{by_id}: done\n"
    assert answer(shop, f"postpone --delay 0 --key {key}", "outcomes") == {
        "outcomes": {key: "done"}
    }
    refused = invoke(shop, f"postpone --delay 0 {untracked}")
    assert ("cannot run earlier" in refused.stderr, refused.exit_code) == (True, 1)
    with Worker(configuration):
        for each in (by_id, by_key):
            assert shop.AsyncResult(each).get(timeout=PATIENCE)
        late = invoke(shop, f"postpone --delay 0 {by_id}")
    assert late.stdout == f"{by_id}: has arrived at a worker already\n"
    assert late.exit_code == 1


def test_a_job_is_opened_committed_and_shown(shop: Any) -> None:
    job = f"import-{uuid4().hex}"
    unknown = invoke(shop, f"job show {job}")
    assert (unknown.stdout, unknown.exit_code) == (f"{job}: unknown\n", 1)
    assert invoke(shop, f"job open {job} --expires 1m30s").stdout == f"{job}: open\n"
    send(shop, 3600)  # the levels exist
    assert job in answer(shop, "status -t 0.1", "status")["open_jobs"]
    assert "open jobs: " in invoke(shop, "status -t 0.1").stdout
    assert answer(shop, f"job commit {job}", "job") == {"job": job, "state": "committed"}
    assert job not in answer(shop, "status -t 0.1", "status")["open_jobs"]
    aborted = invoke(shop, f"job abort {job}")
    assert aborted.exit_code == 1
    assert f"job '{job}' is committed" in aborted.stderr


def test_tasks_are_paused_by_name_and_by_queue_and_resumed(shop: Any) -> None:
    send(shop, 60)  # the levels exist, which is what the status is about
    assert invoke(shop, "pause --task shop.remind").stdout.startswith("paused: task shop.remind, ")
    data = answer(shop, "pause --queue mails", "paused")
    assert (data["task"], data["queue"]) == (None, "mails")
    again = answer(shop, "pause --task shop.remind", "paused")
    assert answer(shop, "status -t 0.1", "status")["paused"] == [again, data]
    for told, status in (("resumed", 0), ("was not paused", 1)):
        resumed = invoke(shop, "resume --task shop.remind")
        assert (resumed.stdout, resumed.exit_code) == (f"task shop.remind: {told}\n", status)
    assert answer(shop, "resume --queue mails", "resumed")["was_paused"] is True
    assert shop.rabbitdelay.paused() == []


def test_beats_entries_are_put_and_ended(make_shop: Callable[..., Any]) -> None:
    def version(**entries: float) -> Any:
        given = {name: {"task": "look", "schedule": each} for name, each in entries.items()}
        return make_shop(beat_schedule=given)

    def names(shop: Any, command: str) -> list[str]:
        listed = answer(shop, f"schedules {command}", "schedules")["schedules"]
        return [each["name"].rpartition(":")[2] for each in listed]

    before, after = version(kept=3600, gone=3600), version(kept=3600, more=3600)
    assert names(before, "put-beat") == ["gone", "kept"]
    assert names(after, "list") == ["gone", "kept"]
    assert names(after, "put-beat") == ["kept", "more"]
    assert names(after, "put-beat --end") == []


def test_schedules_are_listed_paused_triggered_and_deleted(make_shop: Callable[..., Any]) -> None:
    shop, other = make_shop(), make_shop(accept_content=["json", "pickle"])
    put = other.rabbitdelay.schedules.put
    put("nightly", "shop.report", "@daily", ["x"], timezone="UTC")
    put("often", "shop.remind", timedelta(hours=1))
    put("pickled", "shop.report", "@daily", [{1, 2}], serializer="pickle")

    def listed() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = answer(shop, "schedules list", "schedules")["schedules"]
        return found

    shown = [(each["name"], each["args"]) for each in listed()]
    assert shown == [("nightly", ["x"]), ("often", []), ("pickled", None)]
    assert invoke(shop, "schedules list").stdout.startswith("nightly: shop.report, next ")
    due = answer(shop, "schedules next nightly --number 3", "schedule")["next"]
    assert [each[10:] for each in due] == ["T00:00:00+00:00"] * 3

    assert invoke(shop, "schedules pause often").stdout == "often: paused\n"
    assert listed()[1]["paused"]
    assert invoke(shop, "schedules resume often").stdout == "often: resumed\n"
    assert len(answer(shop, "schedules trigger often", "schedule")["task_id"]) == 36
    assert invoke(shop, "schedules delete often").stdout == "often: deleted\n"
    gone = invoke(shop, "schedules delete often")
    assert (gone.exit_code, gone.stdout) == (1, "often: there is no such schedule\n")
    for name in ("nightly", "pickled"):
        shop.rabbitdelay.schedules.delete(name)
