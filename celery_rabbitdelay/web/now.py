"""The pages Now and Health: the present state of the broker, Redis and the workers."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from itertools import accumulate, pairwise, zip_longest
from typing import Final, NamedTuple, get_args

from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import instant_of, milliseconds_of
from celery_rabbitdelay.metrics.reading import Reading
from celery_rabbitdelay.operations.management import management_api
from celery_rabbitdelay.operations.status import due_at_least
from celery_rabbitdelay.operations.verify import Severity, Verification, blocked, verify_application
from celery_rabbitdelay.operations.workers import ARRIVALS
from celery_rabbitdelay.registry.durations import brief
from celery_rabbitdelay.registry.index import Kind, KindCounts
from celery_rabbitdelay.registry.states import Due, Holds
from celery_rabbitdelay.web.charts import DAY, HOUR, MINUTE, aligned
from celery_rabbitdelay.web.problems import awaited, problems
from celery_rabbitdelay.web.site import PATIENCE, WORKERS_PERIOD, Answer, Site, is_awaited
from celery_rabbitdelay.web.undeliverable import reasons
from celery_rabbitdelay.web.view_request import ViewRequest
from celery_rabbitdelay.web.workers import unserved

#: Seconds between two readings of the tracked tasks, of the management API's statistics, and of
#: the findings of ``verify``, which need several requests to that API per queue.
DUE_PERIOD, SENT_PERIOD, FINDINGS_PERIOD = 5.0, 20.0, 60.0

#: The time spans of the histogram, with the step of each span.
HORIZONS: Final = {
    "minute": (MINUTE, timedelta(seconds=2)),
    "hour": (HOUR, timedelta(minutes=2)),
    "day": (DAY, HOUR),
    "week": (7 * DAY, timedelta(hours=6)),
    "year": (365 * DAY, 7 * DAY),
}

#: The number of series in the histogram besides "others".
SERIES: Final = 5

#: The number of minutes in the charts of the last hour.
MINUTES: Final = 60

#: The span and the step of the rate at which messages enter the levels, in seconds.
SENT = 3_600, 60

#: The hint on the page Health while the management API does not answer.
NEEDS: Final = (
    "The findings need the management API: rabbitmq-plugins enable rabbitmq_management, and a user "
    "with the tag 'monitoring'. If the API has another host or another user, set its URL "
    "in the option 'management' of rabbitdelay_web, or with --management"
)


class Waits(NamedTuple):
    """Counts of the waiting tracked tasks.

    Attributes:
        edges: The start of every step of the histogram, beginning now, and the end of the last.
        kinds: Task counts per kind (task name and queue): total, due before each edge, and due
            within an hour.
        left_out: The number of tasks of all other kinds; beyond a limit, kinds are not listed.
        due: The counts of the tasks that are due and have not arrived.
    """

    edges: list[datetime]
    kinds: list[KindCounts]
    left_out: int
    due: Due

    def in_an_hour(self, kind: KindCounts) -> int:
        """Return how many tasks of a kind become due within an hour."""
        start_ms, end_ms = (milliseconds_of(self.edges[0] + each) for each in (0 * HOUR, HOUR))
        return kind.before[end_ms] - kind.before[start_ms]


#: The counts without a registry, or before Redis has answered.
NOTHING: Final = Waits([], [], 0, Due(Counter(), {}, {}, {}))


def now(request: ViewRequest) -> dict[str, object]:
    """Return the problems, the waiting tasks, and when they are due."""
    site, fields = request.site, request.fields
    by = fields.one_of("by", Kind._fields, "task")
    horizon = fields.one_of("horizon", HORIZONS, "hour")
    queues, reading, found = site.queues(PATIENCE), Reading[Waits](), findings_of(site)
    # Without the broker, the workers cannot be reached either.
    workers = Reading[dict[str, Answer]](error=queues.error) if queues.error else site.workers()
    if site.delays.has_registry:
        look = partial(_look, site, horizon)
        reading = site.latest(f"due in a {horizon}", look, DUE_PERIOD, PATIENCE)
    waits, alone = reading.value or NOTHING, {} if queues.error else unserved(site)
    answers = workers.value or {}
    late, total, least = late_by_task(answers.values()), None, None
    if queues.value is not None:
        backlog, (length, _) = queues.value.status.backlog, HORIZONS[horizon]
        total = sum(backlog.levels.values())
        least = due_at_least(site.delays.topology, backlog, length // timedelta(milliseconds=1))
    tasks, for_queues = _rows(waits, "task", late), _rows(waits, "queue", {})
    lost = Counter[str]() if queues.value is None else reasons(site, queues.value)
    notes = [
        *awaited("The workers are being asked", workers, WORKERS_PERIOD, "workers"),
        *awaited("The broker is being checked", found, FINDINGS_PERIOD, "health"),
    ]
    known = problems(queues, workers, reading.error, waits.due, found.value, alone, lost)
    return {
        "taken": min(filter(None, (queues.taken, reading.taken)), default=None),
        "broker_error": queues.error,
        "has_registry": site.delays.has_registry,
        "registry_error": reading.error,
        "problems": [*known, *notes],
        "is_awaited": bool(notes),
        "findings_taken": found.taken,
        "findings_error": found.error,
        "workers": None if workers.value is None else len(answers),
        "workers_taken": workers.taken,
        "unserved": alone,
        "by": by,
        "horizon": horizon,
        "total": total,
        "due_at_least": least,
        "waiting": sum(each.waiting for each in tasks) + waits.left_out,
        "in_an_hour": sum(each.in_an_hour for each in tasks),
        "next_due": min((each.next_due for each in tasks if each.next_due), default=None),
        "left_out": waits.left_out,
        "tasks": tasks,
        "queues": for_queues,
        "due": {**_due(waits, by), "step": HORIZONS[horizon][1]},
        "last_hour": _last_hour(site, workers.taken, [*answers.values()]),
    }


def _look(site: Site, horizon: str) -> Waits:
    """Count the waiting tracked tasks, and find which of the due tasks are held."""
    start, (length, step) = wall_clock.now(), HORIZONS[horizon]
    steps = aligned(start, start + length, step, site.app.timezone)
    edges = [start, *(each for each in steps if start < each < start + length), start + length]
    holds, instants = Holds.at(site.delays, start), [*edges, start + HOUR]
    at_ms = [*map(milliseconds_of, instants), holds.late_ms]
    kinds, left_out = site.delays.registry.index.summary(at_ms)
    return Waits(edges, kinds, left_out, holds.due(kinds))


class Row(NamedTuple):
    """Counts of the waiting tracked tasks with one name, or for one queue.

    Attributes:
        name: The name of the task or the queue; empty for tasks that an exchange routes.
        waiting: The waiting tasks, due or not.
        next_due: The next due time.
        in_an_hour: The tasks that are due within an hour.
        overdue: The due tasks that are not held and have not arrived.
        held: The due tasks that a pause or an open job holds.
        job_open: The due tasks that an open job holds.
        cancelled: The cancelled tasks whose messages still wait in the levels.
        late: The 99th percentile of the lateness, for display; empty if unknown.
    """

    name: str
    waiting: int
    next_due: datetime | None
    in_an_hour: int
    overdue: int
    held: int
    job_open: int
    cancelled: int
    late: str


def _rows(waits: Waits, by: str, late: Mapping[str, str]) -> list[Row]:
    """Return a row per task or queue, rows with overdue or held tasks first."""
    rows, due, job_open, held = list[Row](), waits.due, waits.due.job_open, waits.due.held
    for name, kinds in _groups(waits, by).items():
        nexts = [each.next_due_ms for each in kinds if each.next_due_ms is not None]
        rows.append(
            Row(
                name,
                sum(each.total for each in kinds),
                instant_of(min(nexts)) if nexts else None,
                sum(map(waits.in_an_hour, kinds)),
                sum(due.overdue[each.kind] for each in kinds),
                sum(held[each.kind] for each in kinds),
                sum(job_open[each.kind] for each in kinds),
                sum(each.cancelled for each in kinds),
                late.get(name, ""),
            )
        )
    return sorted(
        rows,
        key=lambda each: (not (each.overdue or each.held), -each.in_an_hour, -each.waiting),
    )


def _groups(waits: Waits, by: str) -> Mapping[str, list[KindCounts]]:
    groups = defaultdict[str, list[KindCounts]](list)
    for each in waits.kinds:
        groups[getattr(each.kind, by)].append(each)
    return groups


def _due(waits: Waits, by: str) -> dict[str, object]:
    """Return the histogram: a series per task or queue, the largest first."""
    found = list[tuple[str | None, list[int]]]()
    for name, kinds in _groups(waits, by).items():
        edges = map(milliseconds_of, waits.edges)
        sums = [sum(each.before[at_ms] for each in kinds) for at_ms in edges]
        found.append((name, [later - sooner for sooner, later in pairwise(sums)]))
    found.sort(key=lambda each: -sum(each[1]))
    if len(found) > SERIES + 1:
        others = [counts for _, counts in found[SERIES:]]
        found[SERIES:] = [(None, [sum(each) for each in zip(*others, strict=True)])]
    return {
        "edges": waits.edges,
        "series": [{"name": name, "counts": counts} for name, counts in found if any(counts)],
    }


def late_by_task(answers: Iterable[Answer]) -> dict[str, str]:
    """Return the 99th percentile of the lateness of each task, for display.

    Args:
        answers: The workers' answers; workers of earlier versions do not report lateness.
    """
    counts, bounds = dict[str, list[int]](), list[float]()
    for arrivals in (answer.get(ARRIVALS) or {} for answer in answers):
        for task, number in (arrivals.get("late_by_task") or {}).items():
            bounds = arrivals["late_bounds"]
            before = counts.get(task, [0] * len(number))
            counts[task] = [sum(each) for each in zip(before, number, strict=True)]
    found = {}
    for task, number in counts.items():
        place = bisect_left([*accumulate(number)], sum(number) * 0.99)
        found[task] = (
            f"≤ {_brief(bounds[place])}" if place < len(bounds) else f"> {_brief(bounds[-1])}"
        )
    return found


def _brief(seconds: float) -> str:
    return f"{seconds:g} s" if seconds < 60 else brief(seconds)


def _last_hour(site: Site, taken: datetime | None, answers: Sequence[Answer]) -> dict[str, object]:
    """Return the tasks sent and received per minute of the last hour, and the largest lateness."""
    end = (taken or wall_clock.now()).replace(second=0, microsecond=0) + MINUTE
    edges = [end - ago * MINUTE for ago in range(MINUTES, -1, -1)]
    sent = site.latest("sent", partial(_sent, site), SENT_PERIOD, patience=0)
    return {
        "edges": edges,
        "received": [sum(each) for each in _by_minute(answers, "received_by_minute")],
        "late": [round(max(each, default=0.0), 3) for each in _by_minute(answers, "by_minute")],
        "sent": sent.value or [],
        "sent_error": sent.error,
    }


def _by_minute(answers: Iterable[Answer], name: str) -> list[list[float]]:
    """Return the workers' figures of every minute, the oldest minute first."""
    figures = [((answer.get(ARRIVALS) or {}).get(name) or ())[:MINUTES] for answer in answers]
    minutes = [*zip_longest(*figures, [None] * MINUTES)]
    return [[each for each in minute if each is not None] for minute in reversed(minutes)]


def _sent(site: Site) -> list[tuple[datetime, float]]:
    """Return how many messages entered the levels per minute, from the management API's statistics.

    Raises:
        ManagementUnavailable: The API does not answer.
    """
    connection = site.queues_broker.connection
    api = management_api(connection, site.options.management)
    # "publish_out" counts messages that clients published and the exchange routed, not messages
    # dead-lettered into it. The API keeps "publish_in" for ten minutes only.
    column, (age, step) = "publish_out_details", SENT
    found = api.get(
        "exchanges",
        connection.virtual_host,
        columns=f"name,message_stats.{column}",
        msg_rates_age=str(age),
        msg_rates_incr=str(step),
    )
    levels = {exchange.name for exchange in site.delays.topology.level_exchanges}
    sent = Counter[int]()
    for each in found:
        if each["name"] in levels:
            # Without statistics, the API has a list in place of an object.
            details = (each.get("message_stats") or {}).get(column) or {}
            samples = ((one["timestamp"], one["sample"]) for one in details.get("samples", ()))
            for (_, before), (at_ms, count) in pairwise(sorted(samples)):
                sent[at_ms] += max(count - before, 0)
    return [(instant_of(at_ms), count * 60 / step) for at_ms, count in sorted(sent.items())]


def findings_of(site: Site) -> Reading[Verification]:
    """Return the latest findings of ``verify`` without waiting for new ones."""

    def look() -> Verification:
        url = site.options.management
        return site.ask(lambda found: verify_application(site.delays, found, url))

    return site.latest("findings", look, FINDINGS_PERIOD, patience=0)


def health(request: ViewRequest) -> dict[str, object]:
    """Return the findings of ``verify``, the alarm about blocked publishers first."""
    reading, (glance, _, broker_error) = findings_of(request.site), request.site.queues()
    found = () if reading.value is None else reading.value.findings
    # The connection reports blocked publishers at once, and without the management API.
    alarms = [each for each in found if each.code == blocked().code]
    if glance is not None:
        alarms = (alarms or [blocked()]) if glance.status.is_blocked else []
    findings = [*alarms, *(each for each in found if each.code != blocked().code)]
    number = Counter(each.severity for each in findings)
    return {
        "taken": reading.taken,
        "is_awaited": is_awaited(reading, FINDINGS_PERIOD),
        "error": reading.error or broker_error,
        "needs": NEEDS,
        "version": reading.value and reading.value.version,
        "counts": reading.value and {each: number[each] for each in get_args(Severity)},
        "findings": findings,
    }
