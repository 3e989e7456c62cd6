"""What Now makes of the answers of the registry, the workers and the broker."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any

from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import milliseconds_of
from celery_rabbitdelay.levels.topology import PROBE
from celery_rabbitdelay.metrics.reading import Reading
from celery_rabbitdelay.operations.status import Status
from celery_rabbitdelay.operations.verify import Finding, Verification
from celery_rabbitdelay.operations.workers import ARRIVALS
from celery_rabbitdelay.publishing.declaration import Backlog
from celery_rabbitdelay.publishing.kombu_internals import Counts
from celery_rabbitdelay.registry.index import Kind, KindCounts, Pending
from celery_rabbitdelay.registry.pauses import Paused
from celery_rabbitdelay.registry.states import Due, Holds
from celery_rabbitdelay.web import now
from celery_rabbitdelay.web.now import Waits
from celery_rabbitdelay.web.problems import Problem, problems
from celery_rabbitdelay.web.site import Glance

START = datetime(2030, 1, 31, 9, tzinfo=UTC)
EDGES = [START + timedelta(minutes=each) for each in range(3)]

MAIL, EXPORT = Kind("mail.send", "mail"), Kind("export", "")

NOTHING_DUE = Due(Counter(), {}, {}, {})


def counts(
    kind: Kind, total: int, next_due_ms: int | None, cancelled: int, before: Sequence[int]
) -> KindCounts:
    """Return the counts of a kind: due before each edge, and before an hour is over."""
    instants = map(milliseconds_of, (*EDGES, START + timedelta(hours=1)))
    of_instants = dict(zip(instants, before, strict=True))
    return KindCounts(kind, total, next_due_ms, next_due_ms, cancelled, of_instants)


def waits(*kinds: KindCounts, **more: Any) -> Waits:
    return Waits(EDGES, [*kinds], 0, NOTHING_DUE._replace(**more))


def test_a_row_adds_up_the_kinds_of_its_name() -> None:
    found = waits(
        counts(MAIL, 10, 7_000, 2, [3, 4, 5, 7]),
        counts(MAIL._replace(queue="bulk"), 5, 5_000, 1, [0, 0, 1, 1]),
        counts(EXPORT, 20, None, 0, [20, 20, 20, 20]),
        paused={Paused("mail.send", None, START): Counter({MAIL: 1})},
        jobs={"import": Counter({MAIL: 3})},
        overdue=Counter({MAIL: 2}),
    )
    mail, export = now._rows(found, "task", {"export": "≤ 1 s"})
    assert (export.name, export.waiting, export.next_due, export.late) == (
        "export",
        20,
        None,
        "≤ 1 s",
    )
    assert mail == ("mail.send", 15, datetime.fromtimestamp(5, UTC), 5, 2, 4, 3, 3, "")
    assert [each.name for each in now._rows(found, "queue", {})] == ["mail", "bulk", ""]


def test_a_task_of_an_open_job_is_held_by_a_pause_first_and_never_overdue() -> None:
    many, early = START - timedelta(hours=1), START - timedelta(hours=2)
    paused = Paused(None, "bulk", many)
    bulk = MAIL._replace(queue="bulk")
    of_jobs = [
        (Pending("a", "mail.send", many, None, "import", queue="mail"), 2.5),
        (Pending("b", "mail.send", many, None, "import", queue="mail"), 1.5),
        (Pending("c", "mail.send", many, None, "import", queue="bulk"), 1),
    ]
    holds = Holds(START, [paused], of_jobs)

    def late(kind: Kind, number: int, first: datetime) -> KindCounts:
        first_ms = milliseconds_of(first)
        return KindCounts(kind, number, first_ms, None, 0, {holds.late_ms: number})

    told = holds.due([late(MAIL, 6, early), late(bulk, 3, early), late(EXPORT, 1, many)])
    assert told == Due(
        Counter({MAIL: 2, EXPORT: 1}),
        {EXPORT: many},
        {paused: Counter({bulk: 3})},
        {"import": Counter({MAIL: 4})},
    )
    assert (told.held, told.job_open) == ({MAIL: 4, bulk: 3}, {MAIL: 4})
    assert [holds.state(each) for each, _ in of_jobs] == ["job-open", "job-open", "held"]
    assert holds.due([late(EXPORT, 0, many)]).overdue == {}


def test_a_histogram_has_the_largest_series_and_one_of_all_others() -> None:
    kinds = [
        counts(Kind(f"task {each}"), 99, None, 0, [1, 1 + each, 1 + 2 * each, 90])
        for each in range(10)
    ]
    found = now._due(waits(*kinds), "task")
    assert found["edges"] == EDGES
    series: Any = found["series"]
    *largest, others = series
    assert [each["name"] for each in largest] == [f"task {each}" for each in (9, 8, 7, 6, 5)]
    assert largest[0]["counts"] == [9, 9]
    assert others == {"name": None, "counts": [0 + 1 + 2 + 3 + 4] * 2}


def test_how_late_tasks_come_is_added_up_over_the_workers() -> None:
    bounds = [0.5, 1, 60, 300]

    def answer(**late: list[int]) -> dict[str, Any]:
        return {ARRIVALS: {"late_by_task": late, "late_bounds": bounds}}

    answers: list[dict[str, Any]] = [
        answer(mail=[50, 0, 0, 0, 0], export=[0, 0, 0, 0, 1], slow=[0, 0, 0, 9, 0]),
        answer(mail=[48, 2, 0, 0, 0]),
        {ARRIVALS: {"received": 1}},
        {"error": "unknown command"},
    ]
    expected = {"mail": "≤ 1 s", "export": "> 5 min", "slow": "≤ 5 min"}
    assert now.late_by_task(answers) == expected
    assert now.late_by_task([]) == {}


def test_the_minutes_of_workers_are_put_in_order_and_missing_ones_are_empty() -> None:
    answers: list[dict[str, Any]] = [
        {ARRIVALS: {"received_by_minute": [1, 2, 3], "by_minute": [None, 0.5, 1]}},
        {ARRIVALS: {"received_by_minute": [10], "by_minute": [7]}},
        {"error": "unknown command"},
    ]
    received = [sum(each) for each in now._by_minute(answers, "received_by_minute")]
    assert (len(received), received[-4:]) == (now.MINUTES, [0, 3, 2, 11])
    assert now._by_minute(answers, "by_minute")[-3:] == [[1], [0.5], [7]]


#: A worker that answers.
ONE_WORKER = Reading[dict[str, Any]]({"shop@a": {}})


def look(**more: Any) -> Reading[Glance]:
    """Return a look at the queues: all is well unless it says otherwise."""
    others = {"distribution": Counts(0, 2), "undeliverable": Counts(0, 0)}
    status = Status(0.0, Backlog({}, {}, others, ()), {})
    return Reading(Glance(status._replace(**more), {}), wall_clock.now())


def words(
    queues: Reading[Glance] | None = None,
    workers: Reading[dict[str, Any]] | None = None,
    due: Due = NOTHING_DUE,
    registry_error: str | None = None,
    found: Verification | None = None,
    unserved: Mapping[str, bool] = MappingProxyType({}),
    reasons: Sequence[str] = (),
) -> list[tuple[str, str, str]]:
    """Return the severity, the words and what is concerned."""
    told = problems(
        queues or look(),
        workers or ONE_WORKER,
        registry_error,
        due,
        found,
        unserved,
        Counter(reasons),
    )
    assert all(isinstance(each, Problem) for each in told)
    return [(each.severity, each.words, each.about) for each in told]


def test_nothing_is_wrong_if_all_answer_and_nothing_is_due() -> None:
    assert words() == []


def test_what_servers_and_workers_say_is_known_without_the_management_api() -> None:
    lost = Backlog(
        {},
        {},
        others={"distribution": Counts(4, 0), "undeliverable": Counts(1, 0)},
        missing=("q.1", "q.2"),
    )
    (unreachable, *_) = words(Reading(error="refused"), Reading(error="refused"))
    assert unreachable == ("danger", "The broker cannot be reached", "refused")
    assert words(look(backlog=lost)) == [
        ("danger", "2 queues are missing", "q.1"),
        ("danger", "No worker serves distribution: 4 messages wait for it", ""),
        ("warning", "1 message is undeliverable", ""),
    ]
    (_, _, undeliverable) = words(look(backlog=lost), reasons=("full", "lost", "lost"))
    assert undeliverable[1:] == ("1 message is undeliverable:", "lost and 1 more reason")
    ((_, blocked, _),) = words(look(is_blocked=True))
    assert blocked.startswith("RabbitMQ blocks publishers")
    assert words(registry_error="away") == [("danger", "Redis cannot be reached", "away")]
    nobody = [("danger", "No worker answers", "")]
    assert words(workers=Reading({}), unserved={"mail": True}) == nobody
    assert words(unserved={"bulk": True, "gone": False, "mail": True}) == [
        ("danger", "There is no queue", "gone"),
        ("danger", "No worker consumes queue", "bulk and 1 more queue"),
    ]
    assert words(workers=Reading(error="no reply")) == [
        ("danger", "The workers cannot be reached", "no reply")
    ]
    probes = {"late": {"hours": 75.0, "days": 0.2}, "missing": {}}
    troubled = Reading[dict[str, Any]]({"a": {PROBE: probes}, "b": {"error": "?"}})
    assert words(workers=troubled) == [
        ("danger", "A probe is missing or late by 1 min 15 s in level", "hours"),
        ("warning", "A worker cannot report its state:", "b"),
    ]
    found = problems(look(), troubled, None, NOTHING_DUE, None, {}, Counter())
    assert [(each.page, each.rest) for each in found] == [("levels", ""), ("workers", "")]


def test_tasks_that_are_due_are_named_with_what_holds_them() -> None:
    since = wall_clock.now() - timedelta(minutes=3)
    pauses = {
        Paused("mail.send", None, since): Counter({MAIL: 1}),
        Paused(None, "bulk", since, since + timedelta(hours=1)): Counter[Kind](),
    }
    firsts = {EXPORT: since, MAIL: since - timedelta(minutes=1)}
    due = Due(Counter({EXPORT: 2, MAIL: 1}), firsts, pauses, {"import 1": Counter({EXPORT: 4})})
    found = problems(look(), ONE_WORKER, None, due, None, {"mail": True}, Counter())
    assert [f"{each.words} {each.about}{each.rest}" for each in found] == [
        "1 task overdue: mail.send; no worker consumes queue mail; the first was due 4 min ago",
        "2 tasks overdue: export; the first was due 3 min ago",
        "Paused, 1 task held: task mail.send (since 3 min ago)",
        "Paused, 0 tasks held: queue bulk (since 3 min ago, resumes in 57 min)",
        "4 tasks held until commit of job import 1",
    ]
    assert [each.severity for each in found] == ["danger", "danger", "warning", "note", "note"]
    assert [each.page for each in found] == ["waiting", "waiting", "pauses", "pauses", "jobs/one"]
    assert [each.fields for each in found] == [
        "q=state%3Aoverdue+task%3Amail.send",
        "q=state%3Aoverdue+task%3Aexport",
        *("", "", "name=import+1"),
    ]
    (gone, *_) = problems(look(), ONE_WORKER, None, due, None, {"mail": False}, Counter())
    assert gone.about == "mail.send; there is no queue mail"
    due = due._replace(
        overdue=Counter({EXPORT: 1}), jobs={"a": Counter({MAIL: 2}), "b": Counter({MAIL: 1})}
    )
    unserved, overdue, *_, of_jobs = problems(
        look(), ONE_WORKER, None, due, None, {"mail": True}, Counter()
    )
    assert [unserved.about, overdue.about] == ["mail", "export"]
    assert (of_jobs.page, of_jobs.about) == ("jobs", "a and 1 more job")


def test_overdue_tasks_that_return_from_the_queue_of_paused_tasks_are_said_to_return() -> None:
    due = Due(Counter({EXPORT: 2, MAIL: 1}), {}, {}, {})

    def returning(held: int, due: Due) -> bool:
        backlog = Backlog({}, {}, {"paused": Counts(held, 0)}, ())
        found = problems(look(backlog=backlog), ONE_WORKER, None, due, None, {}, Counter())
        return "held tasks are returning" in found[0].about

    assert returning(2, due)
    assert not returning(0, due)
    paused = {Paused("ship", None, START): Counter[Kind]()}
    assert not returning(2, due._replace(paused=paused)), "the pause may hold them"
    (overdue,) = problems(look(), ONE_WORKER, None, due, None, {}, Counter())
    assert overdue.about.endswith(" and 1 more task name")


def test_findings_are_told_unless_they_are_notes_or_known_at_once() -> None:
    def finding(severity: str, code: str) -> Finding:
        return Finding(severity, code, ("a", "b"), "it is wrong", "so", "mend it")  # type: ignore[arg-type]

    found = Verification(
        "4.0",
        (
            *(finding("danger", code) for code in ("missing", "module-unserved")),
            *(finding("warning", "policy"), finding("note", "x")),
        ),
    )
    assert words(found=found) == [("warning", "It is wrong", "a, b")]
