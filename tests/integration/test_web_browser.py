"""The page in a real browser: what a person reads and clicks, and what it does on the servers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote, urlsplit
from uuid import uuid4

import pytest
from kombu import Connection, Exchange, Queue

from celery_rabbitdelay.levels.headers import EXCHANGE, QUEUE, REASON, ROUTING_KEY
from celery_rabbitdelay.testing import wait_for
from celery_rabbitdelay.web import pages
from tests.chromium import ELSEWHERE, PHONE, WIDE, Tab
from tests.integration.arrivals import count
from tests.integration.conftest import (
    delete_queue,
    delete_what_it_declared,
    small_configuration,
)
from tests.integration.notes import Notes
from tests.integration.page import (
    HOUR,
    OPERATOR,
    REFUSED,
    UNKNOWN,
    VIEWER,
    ServedPage,
    chromium,
    open_tab,
    sign_in,
    signed_in,
    with_users,
)
from tests.integration.shop import PATIENCE, make_app, named
from tests.integration.undeliverable_messages import message, put, straight
from tests.integration.worker import Worker

__all__ = ["chromium", "open_tab"]


@pytest.fixture(scope="module")
def served(module_broker_url: str, redis_url: str) -> Iterator[Any]:
    """An application, with its worker and its page, for the tests of this module."""
    configuration = {
        **small_configuration(module_broker_url, redis_url, f"test-{uuid4().hex[:8]}"),
        **with_users(redis_url, shows_arguments=True),
    }
    app: Any = make_app(configuration)
    with Worker(configuration), ServedPage(configuration) as page:
        app.page, app.configuration = page, configuration
        yield app
    delete_what_it_declared(app)
    app.close()


@pytest.fixture
def operator(served: Any, open_tab: Callable[..., Tab]) -> Iterator[Tab]:
    """An operator's tab, which has nothing to complain of at the end of a test."""
    tab = signed_in(open_tab, served.page)
    yield tab
    assert tab.complaints(UNKNOWN) == []


@pytest.fixture
def notes(served: Any) -> Iterator[Notes]:
    """The notes of a test's tasks."""
    notes = Notes(served)
    yield notes
    notes.forget()


@pytest.fixture
def job(served: Any) -> str:
    """The name of a test's own job."""
    return f"import-{uuid4().hex[:8]}"


def send(served: Any, number: int = 1, hours: float = 2, **options: Any) -> list[str]:
    """Send tasks that wait; return their ids."""
    return [
        str(served.tasks["look"].apply_async(delay=hours * HOUR, **options).id)
        for _ in range(number)
    ]


def send_job(served: Any, job: str, number: int, hours: float = 2, **options: Any) -> list[str]:
    """Send a job's tasks."""
    with served.rabbitdelay.job(job, expires=HOUR):
        return send(served, number, hours, job=job, **options)


def test_one_signs_in_reads_and_signs_out(served: Any, open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(served.page, "nobody")
    tab.go("/waiting?job=none")
    assert "Waiting" not in tab.text
    sign_in(tab, password="wrong")
    tab.see("Name or password is wrong.")
    assert tab.value("Name") == ""
    sign_in(tab)
    tab.see("No tracked task matches")
    assert tab.path == "/waiting?job=none", "where one wanted to go"
    tab.follow("Now")
    tab.see("The clock of what waits", OPERATOR, "operator")
    tab.press("Sign out")
    tab.see("Password")
    tab.go("/waiting")
    tab.see("Password")
    assert tab.complaints(UNKNOWN) == []


def digit(tab: Tab, level: str, count: int) -> int:
    """Return how many messages a digit of a level has, as one reads it."""
    for each in tab.texts("section.level"):
        if each.startswith(f"{level} "):
            _, _, rest = each.partition(f" {count} {level.partition('.')[0]}: ")
            return int(rest.split()[0].replace(",", ""))
    raise AssertionError(f"no level {level}: {tab.text}")


def rows(tab: Tab) -> list[str]:
    """Return the rows of the table."""
    return tab.texts("tbody tr")


def search(tab: Tab, **fields: str) -> None:
    """Fill in the form of the page Waiting, by its labels, and search."""
    tab.go("/waiting")
    for label, text in fields.items():
        tab.fill(LABELS.get(label, label.capitalize()), text)
    tab.press("Search")
    tab.see(" match", "The list is complete since")


LABELS = {"task": "Task's name", "due_after": "Due from", "due_before": "Due before"}


def test_a_digit_fills_and_empties_under_an_open_page(
    served: Any, operator: Tab, module_broker_url: str
) -> None:
    tab = operator
    tab.run("window.isTheSamePage = true")
    wait_for(lambda: digit(tab, "hours.x1", 3) == 0, "an empty digit", PATIENCE)
    send(served, 7, hours=3)
    wait_for(lambda: digit(tab, "hours.x1", 3) == 7, "the digit to fill", PATIENCE)
    with Connection(module_broker_url) as connection:
        channel: Any = connection.default_channel
        channel.queue_purge(f"{served.conf.rabbitdelay_prefix}.hours.3")
    wait_for(lambda: digit(tab, "hours.x1", 3) == 0, "the digit to empty", PATIENCE)
    assert tab.run("return window.isTheSamePage"), "nobody has opened it again"


def test_the_histogram_counts_what_falls_due(served: Any, operator: Tab, job: str) -> None:
    tab = operator
    tab.go("/now?horizon=year")
    before = served.rabbitdelay.count()
    send_job(served, job, 5, hours=2.5)

    def counted() -> list[int]:
        return [int(each.split()[-1].replace(",", "")) for each in tab.texts(".bars.due li")]

    wait_for(lambda: sum(counted()) == before + 5, "the bars", PATIENCE)
    assert len(counted()) == 12
    for horizon, bars in (("minute", 12), ("hour", 12), ("day", 24), ("week", 7)):
        tab.follow(horizon)
        tab.see(f"due in the next {horizon}")
        assert len(counted()) == bars
    assert tab.path == "/now?horizon=week", "the address has what one looks at"


def test_one_finds_tasks_by_what_one_knows_of_them(served: Any, operator: Tab, job: str) -> None:
    tab = operator
    (keyed,) = send(served, key=f"order:{job}")
    of_job = send_job(served, job, 3)
    note = str(served.tasks["note"].apply_async(kwargs={"key": "x"}, delay=HOUR, key=f"n:{job}").id)

    def found(number: int, **fields: str) -> str:
        search(tab, **fields)
        assert len(rows(tab)) == number, (fields, tab.text)
        return tab.text

    assert keyed in found(1, id=keyed)
    assert keyed in found(1, key=f"order:{job}")
    listed = found(3, job=job)
    assert all(each in listed for each in of_job)
    assert note in found(1, key=f"n:{job}", task="note")
    found(0, key=f"n:{job}", task="look")
    soon = (datetime.now(UTC) + timedelta(hours=1.5)).replace(tzinfo=None).isoformat()
    found(0, job=job, due_before=soon)
    found(3, job=job, due_after=soon)
    assert f"job={job}" in tab.path, "the address has what one searched for"
    assert tab.value("Job") == job
    assert tab.value("Due from") == soon
    tab.fill("Due from", "tomorrow")
    tab.press("Search")
    tab.see("takes an instant such as 2030-01-31T09:00")
    tab.driver.back()
    tab.see(" match", "The list is complete since")
    assert tab.complaints("responded with a status of 400") == []


def test_the_list_is_read_page_by_page(served: Any, operator: Tab, job: str) -> None:
    tab = operator
    sent = send_job(served, job, 70)
    search(tab, job=job)
    first = rows(tab)
    # The rest of a row says how long it still waits, which changes.
    (begin,) = [each for each in sent if each in first[0]]
    tab.follow("Next tasks")
    wait_for(lambda: rows(tab) and begin not in rows(tab)[0], "the second page", PATIENCE)
    second = rows(tab)
    assert (len(first), len(second)) == (50, 20)
    assert all(any(each in row for row in [*first, *second]) for each in sent)
    tab.follow("First")
    wait_for(lambda: rows(tab) and begin in rows(tab)[0], "the first page", PATIENCE)


def test_one_reads_the_story_of_a_task_and_cancels_it(served: Any, operator: Tab, job: str) -> None:
    tab = operator
    (task_id,) = send(served, key=f"order:{job}", args=("Köln", 4711))
    search(tab, key=f"order:{job}")
    tab.follow(task_id)
    tab.see("State waiting", f"order:{job}", "('Köln', 4711)", "may be in")
    tab.press("Cancel")
    tab.see("1 of 1 cancelled")
    assert served.rabbitdelay.show(task_id).state == "cancelled"
    tab.follow(task_id)
    tab.see("State cancelled")
    assert not tab.offers("Cancel")


def in_time(
    tab: Tab, notes: Notes, delay: float, act: Callable[[str, str], None]
) -> tuple[list[str], float]:
    """Act on tasks before they are due, on later ones if the machine was too slow for that.

    Returns:
        The ids of the tasks, and when they are due.
    """
    while True:
        due = time.monotonic() + delay
        names = [f"cancelled-{delay}", f"postponed-{delay}", f"other-{delay}"]
        ids = [str(notes.send(name, delay=delay).id) for name in names]
        act(ids[0], ids[1])
        if time.monotonic() < due - delay / 4:
            return names, due
        delay *= 2


def test_what_one_cancels_does_not_run_in_a_worker_and_what_one_postpones_runs_later(
    operator: Tab, notes: Notes
) -> None:
    tab = operator

    def act(cancelled: str, postponed: str) -> None:
        tab.go(f"/waiting/task?id={cancelled}")
        tab.press("Cancel")
        tab.see("of 1 cancelled")
        tab.go(f"/waiting/task?id={postponed}")
        tab.fill("Postpone by", "2h")
        tab.press("Postpone")
        tab.see("of 1 postponed")

    (cancelled, postponed, other), due = in_time(tab, notes, 10, act)
    ran = notes.until(due - time.monotonic())
    assert other in ran
    assert cancelled not in ran
    assert postponed not in ran
    tab.follow("Waiting")
    tab.fill("Task's name", "note")
    tab.press("Search")
    tab.see("tasks match")


def test_what_one_runs_now_runs_in_a_worker_and_only_once(
    served: Any, operator: Tab, notes: Notes
) -> None:
    tab = operator
    task_id = str(notes.send("now", delay=2 * HOUR).id)
    tab.go(f"/waiting/task?id={task_id}")
    tab.press("Run now")
    tab.see("1 of 1 run now")
    wait_for(lambda: notes() == ["now"], "the task to run", PATIENCE)
    wait_for(lambda: served.rabbitdelay.show(task_id).state == "arrived", "the note", PATIENCE)
    tab.follow(task_id)
    tab.see("State arrived")
    later = str(notes.send("later", delay=2 * HOUR).id)
    tab.go(f"/waiting/task?id={later}")
    tab.fill("or until", (datetime.now(UTC) + timedelta(seconds=1)).isoformat())
    tab.press("Postpone")
    tab.see("1 of 1 postponed")
    wait_for(lambda: notes() == ["now", "later"], "the task to run sooner", PATIENCE)


def test_enter_in_the_field_for_a_delay_postpones_and_never_cancels(
    served: Any, operator: Tab
) -> None:
    tab = operator
    (task_id,) = send(served)
    tab.go(f"/waiting/task?id={task_id}")
    tab.fill("Postpone by", "3h\n")
    tab.see("1 of 1 postponed")
    shown = served.rabbitdelay.show(task_id)
    assert shown.state == "waiting"
    assert shown.due > datetime.now(UTC) + timedelta(hours=4.5), "2 h, and 3 h more"


def test_only_the_selected_tasks_are_cancelled(served: Any, operator: Tab, job: str) -> None:
    tab = operator
    first, second, third = send_job(served, job, 3)
    search(tab, job=job)
    tab.press("Cancel")
    tab.see("select at least one task")
    tab.driver.back()
    for each in (first, third):
        tab.tick(f"Select {each}")
    tab.press("Cancel")
    tab.see("2 of 2 cancelled")
    states = [served.rabbitdelay.show(each).state for each in (first, second, third)]
    assert states == ["cancelled", "waiting", "cancelled"]
    assert tab.complaints("responded with a status of 400") == []


def test_all_that_match_are_cancelled_once_one_has_read_how_many(
    served: Any, operator: Tab, job: str
) -> None:
    tab = operator
    kept = send(served, 2, key=None)
    send_job(served, job, 130)
    search(tab, job=job)
    tab.follow("Decide about all 130 that match")
    tab.see("130 tracked tasks match", job)
    assert served.rabbitdelay.count(job=job) == 130, "nothing happens by looking"
    tab.press("Cancel 130")
    tab.see("130 of 130", "done", f"cancelled all with job='{job}'")
    assert served.rabbitdelay.count(job=job) == 0
    assert all(served.rabbitdelay.show(each).state == "waiting" for each in kept)
    tab.follow("What goes on")
    tab.see(f"cancelled all with job='{job}'", OPERATOR)


def test_all_that_match_are_postponed_each_by_as_much_and_then_to_one_instant(
    served: Any, operator: Tab, job: str
) -> None:
    tab = operator
    send_job(served, job, 60)
    before = {each.task_id: each.due for each in served.rabbitdelay.pending(job=job)}
    search(tab, job=job)
    tab.follow("Decide about all 60 that match")
    tab.fill("Postpone each by", "1d")
    tab.press("Postpone 60")
    tab.see("60 of 60", "done")
    after = {each.task_id: each.due for each in served.rabbitdelay.pending(job=job)}
    assert after == {task_id: due + timedelta(days=1) for task_id, due in before.items()}
    tab.go(f"/waiting/all?job={job}")
    instant = datetime.now(UTC).replace(microsecond=0) + timedelta(days=3)
    tab.fill("or until", instant.isoformat())
    tab.press("Postpone 60")
    tab.see("60 of 60", "done")
    dues = {each.due for each in served.rabbitdelay.pending(job=job)}
    assert dues == {instant}


def test_a_viewer_reads_beside_an_operator_and_may_not_act(
    served: Any, operator: Tab, open_tab: Callable[..., Tab]
) -> None:
    viewer = signed_in(open_tab, served.page, VIEWER)
    viewer.see(f"{VIEWER}", "viewer")
    operator.see(f"{OPERATOR}", "operator")
    (task_id,) = send(served)
    for each in (viewer, operator):
        each.go(f"/waiting/task?id={task_id}")
        each.see("State waiting")
    assert not viewer.offers("Cancel")
    assert operator.offers("Cancel")
    forged = viewer.driver.execute_async_script(
        "const done = arguments[1]; (async () => {"
        "  const session = await (await fetch('/api/session')).json();"
        "  const body = new URLSearchParams({id: arguments[0], token: session.token});"
        "  const answer = await fetch('/waiting/cancel', {method: 'POST', body});"
        "  done([answer.status, await answer.text()]); })();",
        task_id,
    )
    assert forged[0] == 403
    assert "viewer" in forged[1]
    assert served.rabbitdelay.show(task_id).state == "waiting"
    operator.press("Cancel")
    operator.see("1 of 1 cancelled")
    viewer.see("State cancelled")  # by itself
    viewer.go("/waiting")
    assert not viewer.offers("Cancel")
    assert viewer.complaints(REFUSED) == []


def test_what_one_types_and_where_one_is_outlast_a_refresh(served: Any, operator: Tab) -> None:
    tab = operator
    (task_id,) = send(served)
    tab.go(f"/waiting/task?id={task_id}")
    tab.fill("Postpone by", "1h3")
    tab.run("window.before = document.querySelector('dl').innerText")
    tab.run(COUNT_REFRESHES)
    wait_for(lambda: tab.run("return window.refreshes") > 0, "a refresh", PATIENCE)
    assert tab.value("Postpone by") == "1h3"
    assert tab.run("return document.activeElement.id") == "by"
    tab.go("/now?horizon=day")
    tab.run("document.querySelector('a[href$=\"horizon=week\"]').focus()")
    tab.run("window.scrollTo(0, 200)")
    tab.run(COUNT_REFRESHES)
    wait_for(lambda: tab.run("return window.refreshes") > 1, "refreshes", PATIENCE)
    assert tab.run("return document.activeElement.innerText") == "week"
    assert tab.run("return window.scrollY") == 200


#: Counts how often the content was replaced.
COUNT_REFRESHES = """
window.refreshes = 0;
document.addEventListener("htmx:after:swap", () => { window.refreshes += 1; });
"""


def test_a_refresh_can_be_stopped(operator: Tab) -> None:
    tab = operator
    tab.go("/now?horizon=day")
    tab.follow("Stop refreshing")
    tab.see("Refresh by itself")
    assert "horizon=day" in tab.path
    assert tab.run("return document.querySelector('[hx-get]')") is None
    tab.follow("Refresh by itself")
    tab.see("Stop refreshing")


def test_by_keyboard_one_skips_to_the_content(operator: Tab) -> None:
    tab = operator
    tab.go("/now?refresh=off")
    body = tab.driver.switch_to.active_element
    body.send_keys("\ue004")  # the tabulator
    assert tab.run("return document.activeElement.innerText") == "Skip to the content"
    box = tab.run("return document.activeElement.getBoundingClientRect().left")
    assert box >= 0, "it is seen"
    tab.driver.switch_to.active_element.send_keys("\ue007")  # enter
    assert tab.run("return document.activeElement.id") == "main"


def test_without_scripts_one_reads_and_acts(
    served: Any, open_tab: Callable[..., Tab], job: str
) -> None:
    tab = open_tab(served.page, "plain")
    (task_id,) = send(served, key=f"order:{job}")
    with tab.without_scripts():
        tab.go("/now")
        sign_in(tab)
        tab.see("The clock of what waits")
        wait_for(lambda: reloaded(tab, "2 hours:"), "the digit", PATIENCE)
        search(tab, key=f"order:{job}")
        tab.follow(task_id)
        tab.see("State waiting")
        tab.press("Cancel")
        tab.see("1 of 1 cancelled")
        for path in PAGES:
            tab.go(path)
            assert tab.texts("h1"), path
    assert served.rabbitdelay.show(task_id).state == "cancelled"
    assert tab.complaints(UNKNOWN) == []


def reloaded(tab: Tab, text: str) -> bool:
    tab.driver.refresh()
    return text in tab.text


#: The pages that are neither actions nor files, and the addresses of those that need no field.
READ = [each for each in pages.PAGES if not each.is_action and not each.file]
PAGES = [f"/{each.path}" for each in READ if not any(field.is_needed for field in each.parameters)]


def test_under_a_name_of_plain_http_one_acts_as_well(
    served: Any, open_tab: Callable[..., Tab], job: str
) -> None:
    tab = open_tab(served.page, ELSEWHERE)
    (task_id,) = send(served, key=f"order:{job}")
    tab.go(f"/waiting/task?id={task_id}")
    sign_in(tab)
    tab.see("State waiting")
    tab.press("Cancel")
    tab.see("1 of 1 cancelled")
    assert served.rabbitdelay.show(task_id).state == "cancelled"
    assert tab.complaints(UNKNOWN) == []


def test_a_job_is_committed_and_another_one_aborted(
    served: Any, operator: Tab, notes: Notes, job: str
) -> None:
    tab = operator
    for name in (f"{job}-a", f"{job}-b"):
        served.rabbitdelay.open_job(name, expires=HOUR)
        notes.send(name, delay=1, job=name)
    for name, button, state in (
        (f"{job}-b", "Abort: let none run", "aborted"),
        (f"{job}-a", "Commit: let its tasks run", "committed"),
    ):
        tab.go("/jobs")
        if state == "aborted":
            tab.fill("Name of the job", name)
            tab.press("Show")
        else:
            tab.follow(name)
        tab.see("State open")
        tab.press(button)
        tab.see(f"State {state}")
    wait_for(lambda: f"{job}-a" in notes(), "the job's task", PATIENCE)
    assert notes.until(1) == [f"{job}-a"]


def test_a_schedule_is_paused_triggered_and_ended(
    served: Any, operator: Tab, notes: Notes, job: str
) -> None:
    tab = operator
    served.rabbitdelay.schedules.put(job, "note", timedelta(hours=2), ("ran",), {"key": notes.key})
    tab.go("/schedules")
    tab.see(job, "runs")
    tab.follow(job)
    tab.see("Due next", "State runs")
    tab.press("Pause")
    tab.see("State paused")
    assert served.rabbitdelay.schedules.get(job).is_paused
    tab.press("Resume")
    tab.see("State runs")
    tab.press("Run its task now")
    wait_for(lambda: notes() == ["ran"], "the task of the schedule", PATIENCE)
    tab.press("End it")
    wait_for(lambda: served.rabbitdelay.schedules.get(job) is None, "the end", PATIENCE)
    tab.see("There are no schedules")


def lose(served: Any, notes: Notes, number: int, reason: str, **headers: Any) -> list[str]:
    """Put tasks into undeliverable; return their ids."""
    queue, ids = named(served, "default"), [uuid4().hex for _ in range(number)]
    body = json.dumps([["redriven"], {"key": notes.key}, {}])
    kind = {"content_type": "application/json", "content_encoding": "utf-8"}
    own = {"task": "note", "lang": "py", "argsrepr": "('redriven',)", REASON: reason, **headers}
    lost = [message(body, straight(queue, **{"id": each, **own}), **kind) for each in ids]
    with Connection(served.conf.broker_url) as connection:
        put(connection, served.rabbitdelay.topology, *lost)
    return ids


def test_undeliverable_messages_are_read_redriven_and_deleted(
    served: Any, operator: Tab, notes: Notes
) -> None:
    tab = operator
    redriven, *_ = lose(served, notes, 3, "its queue was gone")
    deleted, *_ = lose(served, notes, 2, "too old")

    def listed(text: str) -> bool:
        tab.go("/undeliverable")
        return text in tab.text

    wait_for(lambda: listed("of the 5 oldest"), "the messages", PATIENCE)
    tab.see("its queue was gone", "too old")
    tab.follow(redriven)
    tab.see("Reason", "its queue was gone", "('redriven',)")
    tab.go("/undeliverable")
    tab.fill("Text in the reason", "queue was gone")
    tab.press("Search")
    tab.see("3 of the 5 oldest")
    tab.follow("Redrive all that match")
    tab.see("3 undeliverable messages match", "3 would be redriven")
    tab.press("Redrive")
    tab.see("3 of 3", "done")
    wait_for(lambda: notes() == ["redriven"] * 3, "the redriven tasks to run", PATIENCE)
    tab.go("/undeliverable/all?action=purge")
    tab.see("2 would be deleted")
    tab.press("Delete for good")
    tab.see("2 of 2", "done")
    assert deleted
    with Connection(served.conf.broker_url) as connection:
        assert count(connection, f"{served.conf.rabbitdelay_prefix}.undeliverable") == 0
    assert notes() == ["redriven"] * 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_any_page_and_nothing_scrolls_sideways(
    served: Any, open_tab: Callable[..., Tab], job: str, notes: Notes, scheme: str
) -> None:
    waiting, *_ = send_job(served, job, 3, key=None)
    (keyed,) = send(served, key="order:4711 " + "with a name that has no end " * 5)
    (lost,) = lose(served, notes, 1, "the queue 'orders' is gone")
    served.rabbitdelay.schedules.put(f"each-{job}", "look", timedelta(hours=1))
    served.rabbitdelay.open_job(f"{job}-open", expires=HOUR)
    tab, found, seen = open_tab(served.page), list[str](), set[str]()

    def look() -> None:
        tab.see("rabbitdelay")
        found.extend(obstacles(tab))
        seen.add(urlsplit(tab.path).path.strip("/"))

    tab.prefer(scheme)
    tab.go("/now")
    look()
    sign_in(tab, password="wrong")
    tab.see("Name or password is wrong.")
    look()
    sign_in(tab)
    tab.see("What falls due")

    def has_read_them() -> bool:
        tab.go("/undeliverable")
        return lost in tab.text

    wait_for(has_read_them, "the undeliverable message", PATIENCE)
    for path in (
        *PAGES,
        "/waiting?key=nobody",
        f"/waiting?job={job}",
        f"/waiting/task?id={waiting}",
        f"/waiting/task?id={keyed}",
        "/waiting/task?id=nobody",
        f"/waiting/all?job={job}",
        f"/undeliverable/message?id={lost}",
        "/undeliverable?id=nobody",
        "/undeliverable/all?action=redrive",
        "/undeliverable/all?action=purge",
        f"/jobs?name={job}",
        f"/jobs?name={job}-open",
        f"/jobs?name={job}-unknown",
        "/schedules?horizon=week",
        f"/schedules/one?name=each-{job}",
        "/nowhere",
        "/waiting?limit=none",
    ):
        tab.go(path)
        look()
    tab.go(f"/waiting/task?id={waiting}")
    tab.run("document.querySelector('main [name=token]').value = 'old'")
    tab.press("Cancel")
    tab.see("The form is too old")
    look()
    tab.go(f"/waiting/task?id={waiting}")
    tab.press("Cancel")
    tab.see("1 of 1 cancelled")
    look()
    tab.go(f"/waiting/all?job={job}")
    tab.press("Run 2 now")
    tab.see("2 of 2")
    look()
    purge(served)
    served.rabbitdelay.schedules.delete(f"each-{job}")
    assert found == []
    assert {each.path for each in READ} <= seen
    templates = {each.template for each in pages.PAGES if each.path in seen}
    assert {each.template for each in pages.PAGES if each.template} == templates
    assert tab.complaints(UNKNOWN, REFUSED, "status of 404", "status of 400") == []


def obstacles(tab: Tab) -> list[str]:
    """Return what is in the way on a page, on a phone and in a wide window."""
    found: list[str] = []
    for size in (PHONE, WIDE):
        tab.resize(size)
        found += [f"{tab.path}: {each}" for each in tab.too_wide()]
    return found + tab.barriers()


def purge(served: Any) -> None:
    """Delete all undeliverable messages."""
    with Connection(served.conf.broker_url) as connection:
        channel: Any = connection.default_channel
        channel.queue_purge(f"{served.conf.rabbitdelay_prefix}.undeliverable")


#: What anybody may have written. What runs of it changes ``window.hacked``.
HOSTILE = {
    "markup": "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>",
    "attribute": "\" autofocus onfocus='window.hacked = 3' x=\"",
    "end": "</td></tr></table></main></bdi><style>* { display: none }</style><h1>",
    "control": "a\x00\x1b[2J\r\nX-Injected: yes\x85\u2028b",
    "bidi": "abc\u202egpj.exe\u2066\u2067\u200f\u061c",
    "arabic": "مرحبا بالعالم " * 20,
    "combining": "Z" + "\u0351\u0363\u0489" * 500,
    "address": "javascript:window.hacked = 4//../../etc/passwd?id=1&x=y#z",
    "long": "m" * 20_000,
    "emoji": "👩‍👩‍👧‍👦" * 200,
}


#: The headers that say where a message goes.
WHERE = (EXCHANGE, ROUTING_KEY, QUEUE)

#: A worker's name; no argument of a program has NUL, and no name of Celery's more than one ``@``.
HOSTILE_WORKER = (
    "<img src=x onerror='window.hacked = 5'>\"></td>@\u202e\x1b<script>window.hacked = 6</script>"
)


def test_hostile_texts_run_nowhere_and_break_no_page(
    served: Any, operator: Tab, notes: Notes
) -> None:
    tab, found = operator, list[str]()
    reason = "the reason: " + "".join(HOSTILE.values())[:50_000]
    for name, text in HOSTILE.items():
        where: dict[str, Any] = {"exchange": text[:50], "routing_key": f"{name} {text}"[:100]}
        send_job(served, text, 1, key=text, args=(text,), task_id=text[:50], **where)
        send(served, task_id=f"{name}: {text[:50]}", queue=hostile_queue(text))
        served.rabbitdelay.schedules.put(text[:50], text, timedelta(hours=1), (text,))
        own = {"task": text, "argsrepr": text, text[:50]: 1, **dict.fromkeys(WHERE, text)}
        lose(served, notes, 1, text, **own, id=f"lost: {text[:50]}")
    send_job(served, "megabyte", 1, args=("m" * 1_000_000,), task_id="megabyte")
    lose(served, notes, 1, reason, id="lost-long")

    def is_listed() -> bool:
        tab.go("/undeliverable")
        return "lost-long" in tab.text

    def look_at(path: str) -> None:
        tab.go(path)
        look()

    def look() -> None:
        found.extend(obstacles(tab))
        assert tab.run("return window.hacked") is None, tab.path
        assert tab.texts("header p") == ["rabbitdelay"], tab.path
        assert tab.texts("footer"), tab.path

    try:
        wait_for(is_listed, "the undeliverable messages", PATIENCE)
        with Worker(served.configuration, None, "-n", HOSTILE_WORKER):
            tab.go("/workers")
            tab.see("onerror='window.hacked = 5'")
            look()
            look_at("/now")
        look_at("/waiting")
        look_at("/undeliverable")
        look_at("/undeliverable/all?action=redrive")
        look_at("/schedules")
        look_at("/waiting/task?id=megabyte")
        look_at("/undeliverable/message?id=lost-long")
        for name, text in HOSTILE.items():
            asked, task_id = quote(text[:5000], safe=""), quote(text[:50], safe="")
            look_at(f"/undeliverable/message?id=lost%3A%20{task_id}")
            look_at(f"/undeliverable/all?action=purge&id=lost%3A%20{task_id}")
            tab.press("Delete for good")
            tab.see("1 of 1", "done")
            look_at(f"/waiting?id={name}%3A%20{task_id}")
            tab.run("document.querySelector('[type=checkbox]').click()")
            tab.press("Run now")
            tab.see("1 of 1 run now")
            look()
            look_at(f"/waiting/task?id={name}%3A%20{task_id}")
            look_at(f"/waiting?id={task_id}")
            shown = served.rabbitdelay.show(text[:50])
            assert (shown.state, shown.exchange) == ("waiting", text[:50])
            tab.run("document.querySelector('tbody th a').click()")
            tab.see("State waiting", "This task")
            look()
            tab.fill("Postpone by", "3h")
            tab.press("Postpone")
            tab.see("1 of 1 postponed")
            if name == "long":
                continue  # no address has the whole of it
            look_at(f"/waiting?key={asked}")
            tab.see("1 tracked task matches")
            look_at(f"/waiting/all?job={asked}")
            tab.see("1 tracked task matches")
            tab.press("Cancel 1")
            tab.see("1 of 1", "done")
            look()
            assert served.rabbitdelay.show(text[:50]).state == "cancelled", name
            look_at(f"/jobs?name={asked}")
            tab.see("State committed")
            look_at(f"/schedules/one?name={task_id}")
            tab.press("Pause")
            tab.see("State paused")
        look_at("/work")
    finally:
        for name, text in HOSTILE.items():
            served.rabbitdelay.cancel(text[:50])
            served.rabbitdelay.cancel(f"{name}: {text[:50]}")
            served.rabbitdelay.schedules.delete(text[:50])
            with Connection(served.conf.broker_url) as connection:
                delete_queue(connection, hostile_queue(text))
        served.rabbitdelay.cancel("megabyte")
        purge(served)
    assert "\n".join(found) == ""


def hostile_queue(text: str) -> Queue:
    """Return a queue whose name and exchange are such a text."""
    return Queue(text[:50], Exchange(text[:50]), text[:50])


def test_a_name_with_control_characters_reaches_the_server_as_it_is(
    served: Any, operator: Tab, job: str
) -> None:
    name = f"{job}\x00\r\n"
    (task_id,) = send_job(served, name, 1)
    operator.go(f"/waiting/all?job={quote(name)}")
    operator.see("1 tracked task matches")
    operator.press("Cancel 1")
    operator.see("of 1", "done")
    assert served.rabbitdelay.show(task_id).state == "cancelled"
    operator.go(f"/jobs?name={quote(f'{name} opened')}")
    operator.fill("Aborted unless it is committed within", "1h")
    operator.press("Open")
    operator.see("State open")
    operator.press("Commit: let its tasks run")
    operator.see("State committed")
    state = served.rabbitdelay.registry.jobs.state(f"{name} opened")
    assert state is not None
    assert state.value == "committed"


def test_the_interval_of_a_schedule_is_shown_in_units_of_time(
    served: Any, operator: Tab, job: str
) -> None:
    served.rabbitdelay.schedules.put(job, "look", timedelta(hours=2))
    try:
        for path in ("/schedules", f"/schedules/one?name={job}"):
            operator.go(path)
            operator.see(job, "every 2h")
            assert "7200000" not in operator.text
    finally:
        served.rabbitdelay.schedules.delete(job)


def test_what_is_not_known_of_an_undeliverable_message_is_left_out(
    served: Any, operator: Tab, notes: Notes
) -> None:
    lost, *_ = lose(served, notes, 1, "its queue was gone")

    def is_listed() -> bool:
        operator.go("/undeliverable")
        return lost in operator.text

    try:
        wait_for(is_listed, "the message", PATIENCE)
        assert "None" not in operator.text
        operator.see("; read ")
        assert "; read in" not in operator.text, "that was in the past"
    finally:
        purge(served)


def test_what_was_sent_after_the_count_is_not_cancelled(
    served: Any, operator: Tab, job: str
) -> None:
    tab = operator
    served.rabbitdelay.open_job(job, expires=HOUR)
    counted = send(served, 3, job=job)
    tab.go(f"/waiting/all?job={job}")
    tab.see("3 tracked tasks match", "were sent before")
    (earlier,) = send(served, hours=1, job=job)
    tab.press("Cancel 3")
    tab.see("3 of", "done")
    states = [served.rabbitdelay.show(each).state for each in (earlier, *counted)]
    assert states == ["waiting", *["cancelled"] * 3]


def test_enter_in_the_list_postpones_the_selected_and_never_cancels(
    served: Any, operator: Tab, job: str
) -> None:
    tab = operator
    first, second = send_job(served, job, 2)
    search(tab, job=job)
    tab.tick(f"Select {first}")
    tab.fill("Postpone by", "3h\n")
    tab.see("1 of 1 postponed")
    assert served.rabbitdelay.show(first).postponed is not None
    assert served.rabbitdelay.show(second).postponed is None


def test_a_form_that_was_open_while_one_signed_out_does_nothing(
    served: Any, operator: Tab, open_tab: Callable[..., Tab]
) -> None:
    (task_id,) = send(served)
    operator.go(f"/waiting/task?id={task_id}")
    other = open_tab(served.page, OPERATOR)  # the same person's second tab, whose cookies are gone
    other.go("/now")
    operator.press("Cancel")
    operator.see("Password")
    assert served.rabbitdelay.show(task_id).state == "waiting"
    sign_in(operator)
    operator.see(f"{OPERATOR}, operator")
    assert not operator.texts(".away"), operator.text
