"""The pages Now, Workers and Health: what the broker, Redis and the workers say at the moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any, Final, NamedTuple, TypeAlias, get_args

from celery_rabbitdelay.app.control import ABOUT, ARRIVALS
from celery_rabbitdelay.exceptions import ManagementUnavailable
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import milliseconds_of
from celery_rabbitdelay.levels.topology import PROBE
from celery_rabbitdelay.metrics.reading import Reading
from celery_rabbitdelay.operations.management import management_api
from celery_rabbitdelay.operations.status import due_at_least
from celery_rabbitdelay.operations.verify import Severity, Verification, blocked, verify_application
from celery_rabbitdelay.registry.index import Filter
from celery_rabbitdelay.web.asked import Asked
from celery_rabbitdelay.web.site import Glance, Site

#: Seconds from one reading to the next: of the tracked tasks, of what the management API has
#: counted, which it does every five seconds, and of faults, which takes some requests to that API
#: for each queue.
DUE_PERIOD, ENTERING_PERIOD, FINDINGS_PERIOD = 5.0, 5.0, 60.0

#: How far a histogram looks ahead, and how many bars it has.
HORIZONS: Final = {
    "minute": (timedelta(minutes=1), 12),
    "hour": (timedelta(hours=1), 12),
    "day": (timedelta(days=1), 24),
    "week": (timedelta(days=7), 7),
    "year": (timedelta(days=365), 12),
}

#: For how many minutes it is shown how late tasks came.
MINUTES: Final = 10

#: For how long a rate counts as that of now.
RECENT: Final = timedelta(seconds=30)

#: What the findings need.
NEEDS: Final = (
    "The findings need the management API: rabbitmq-plugins enable rabbitmq_management, and a user "
    "with the tag 'monitoring'. If it is not on the broker's host or has another user, name it in "
    "the option 'management', or with --management"
)

#: The answer of a worker.
Answer: TypeAlias = Mapping[str, Any]


def now(asked: Asked) -> dict[str, object]:
    """Return how many messages wait in each digit, when they are due, and how late tasks arrive."""
    topology, reading = asked.site.delays.topology, asked.site.queues()
    horizon = asked.fields.one_of("horizon", HORIZONS, "hour")
    told: dict[str, object] = {
        "prefix": topology.prefix,
        "layout": topology.layout.name,
        "taken": reading.taken,
        "broker_error": reading.error,
        "horizon": horizon,
        "entering": _entering(asked.site),
        "due": _due(asked.site, horizon, reading.value),
        **_arrivals(asked.site, reading.error),
    }
    if reading.value is None:
        return {**told, "levels": [], "others": [], "total": None}
    status, rates = reading.value
    return {
        **told,
        "levels": list(_levels(asked.site, reading.value)),
        "total": sum(status.backlog.levels.values()),
        "others": [
            {"name": name, **counts._asdict(), "rate": rates.get(name)}
            for name, counts in status.backlog.others.items()
        ],
        "missing": status.backlog.missing,
        "blocked": blocked() if status.is_blocked else None,
        "next_due": status.next_due,
        "due_within": None if status.due_within_ms is None else status.due_within_ms / 1000,
        "paused": status.paused,
        "registry_error": status.registry_error,
    }


def _levels(site: Site, glance: Glance) -> Iterator[dict[str, object]]:
    """Yield each level with its digits, the highest first."""
    backlog = glance.status.backlog
    for level in site.delays.topology.layout.levels:
        digits = backlog.digits[level.name].items()
        yield {
            "name": level.name,
            "unit": level.unit,
            "messages": backlog.levels[level.name],
            "rate": glance.rates.get(level.name),
            "digits": [
                {
                    "queue": level.queue_name(digit),
                    "count": digit * level.multiple,
                    "messages": each,
                }
                for digit, each in digits
            ],
        }


def _entering(site: Site) -> dict[str, object]:
    """Return how many messages a second enter the levels; nobody waits for it."""
    reading = site.latest("entering", partial(_enter, site), ENTERING_PERIOD, patience=0)
    rate, taken, error = reading
    is_new = error is None and taken is not None and wall_clock.now() - taken < RECENT
    return {"rate": rate if is_new else None, "error": error}


def _enter(site: Site) -> float:
    connection = site.queues_broker.connection
    api = management_api(connection, site.options.management)
    about = api.get("overview", columns="rates_mode,disable_stats")
    if about.get("rates_mode") == "none" or about.get("disable_stats"):
        raise ManagementUnavailable(api.url, "it keeps no statistics (management.rates_mode)")
    columns = "name,message_stats.publish_in_details.rate"
    found = api.get("exchanges", connection.virtual_host, columns=columns)
    # An exchange counts what is published to it, and not what is dead-lettered into it.
    levels = {exchange.name for exchange in site.delays.topology.level_exchanges}
    counted = [each.get("message_stats", {}) for each in found if each["name"] in levels]
    return float(sum(each.get("publish_in_details", {}).get("rate", 0) for each in counted))


class DueSoon(NamedTuple):
    """How many tracked tasks are due when; None and empty if that is not known.

    Attributes:
        overdue: How many should have arrived by now.
        steps: The start of each step of a horizon, and how many are due in it (``tracked``).
        later: How many are due after the last of :data:`HORIZONS`.
        totals: How many are due within each of these, without the overdue ones.
    """

    overdue: int | None
    steps: list[dict[str, object]]
    later: int | None
    totals: list[int] | list[None]


def _count(site: Site, horizon: str) -> DueSoon:
    start, (length, number) = wall_clock.now(), HORIZONS[horizon]
    steps = [start + length * step / number for step in range(number + 1)]
    ends = [start + length for length, _ in HORIZONS.values()]
    before = [Filter(due_before_ms=milliseconds_of(each)) for each in (*steps, *ends)]
    *counts, all_of_them = site.delays.registry.index.counts([*before, Filter()])
    overdue, of_steps = counts[0], pairwise(counts[: number + 1])
    # A task that leaves meanwhile is counted in some of them only.
    in_steps = [
        {"start": step, "tracked": max(until - before, 0)}
        for step, (before, until) in zip(steps, of_steps, strict=False)
    ]
    totals = [max(count - overdue, 0) for count in counts[number + 1 :]]
    return DueSoon(overdue, in_steps, max(all_of_them - counts[-1], 0), totals)


def _due(site: Site, horizon: str, glance: Glance | None) -> dict[str, object]:
    """Return what falls due within each horizon: of the tracked tasks, and of all at least."""
    delays, reading = site.delays, Reading[DueSoon]()
    if delays.has_registry:
        reading = site.latest(f"due in a {horizon}", partial(_count, site, horizon), DUE_PERIOD)
    soon = reading.value or DueSoon(None, [], None, [None] * len(HORIZONS))
    horizons = []
    for tracked, (name, (length, _)) in zip(soon.totals, HORIZONS.items(), strict=True):
        least = tracked
        if glance is not None:
            within_ms = length // timedelta(milliseconds=1)
            of_all = due_at_least(delays.topology, glance.status.backlog, within_ms)
            least = max(of_all, tracked or 0)
        horizons.append({"name": name, "tracked": tracked, "all_at_least": least})
    length, number = HORIZONS[horizon]
    return {
        "has_registry": delays.has_registry,
        "error": reading.error,
        "overdue": soon.overdue,
        "later": soon.later,
        "horizons": horizons,
        "steps": soon.steps,
        "step": length / number,
    }


def _arrivals(site: Site, broker_error: str | None) -> dict[str, object]:
    """Return the lateness and the rate of arrivals, as the workers count them."""
    # They are asked through the broker.
    reading = site.workers() if broker_error is None else Reading[Glance](error=broker_error)
    answers = {} if reading.value is None else reading.value.status.workers
    return {
        "workers_taken": reading.taken,
        "workers_error": reading.error,
        "arrivals": None if reading.value is None else reading.value.rates.get(ARRIVALS),
        "late_by_minute": latest_by_minute(answers.values()),
        "workers": [_worker(name, answer) for name, answer in sorted(answers.items())],
    }


def latest_by_minute(answers: Iterable[Answer]) -> list[float | None]:
    """Return how late the latest task of each of the last minutes was, this minute's first.

    Args:
        answers: What the workers answer; those of earlier versions do not say it.
    """
    told = [(answer.get(ARRIVALS) or {}).get("by_minute") or () for answer in answers]
    minutes = zip_longest(*(each[:MINUTES] for each in told))
    return [max((late for late in each if late is not None), default=None) for each in minutes]


def _worker(name: str, answer: Answer) -> dict[str, object]:
    """Return what a worker answers: its error, or its modules, lateness, probes and versions."""
    arrivals, probe = answer.get(ARRIVALS) or {}, answer.get(PROBE) or {}
    late, missing = (probe.get("late") or {}).values(), (probe.get("missing") or {}).values()
    probes = None
    if late:
        bounds = {"least": min(late), "most": max(late)}
        probes = {"routes": len(late), **bounds, "missing": sum(missing)}
    return {
        "name": name,
        "error": answer.get("error"),
        "modules": sorted(answer.keys() - {ABOUT, ARRIVALS, "error"}),
        "received": arrivals.get("received"),
        "latest": arrivals.get("latest"),
        "probes": probes,
        "versions": _texts(answer, "versions"),
        "settings": _texts(answer, "settings"),
    }


def workers(asked: Asked) -> dict[str, object]:
    """Return the modules and versions of each worker, and the settings that differ."""
    reading = asked.site.workers()
    answers = {} if reading.value is None else dict(sorted(reading.value.status.workers.items()))
    return {
        "taken": reading.taken,
        "error": reading.error,
        "workers": [_worker(name, answer) for name, answer in answers.items()],
        "differences": [
            each
            for kind in ("versions", "settings")
            for each in differences({name: _texts(answers[name], kind) for name in answers}, kind)
        ],
    }


def _texts(answer: Answer, kind: str) -> dict[str, str]:
    """Return the versions or the settings of a worker; of later versions, only what is a text."""
    about = answer.get(ABOUT)
    told = about.get(kind) if isinstance(about, Mapping) else None
    if not isinstance(told, Mapping):
        return {}
    return {str(name): value for name, value in told.items() if isinstance(value, str)}


def differences(told: Mapping[str, Mapping[str, str]], kind: str) -> Iterator[dict[str, object]]:
    """Yield each version or setting that is not the same in all workers, with who has which.

    Args:
        told: What each worker says, by its name; workers that say nothing are left out.
        kind: What it is: ``versions`` or ``settings``.
    """
    for name in sorted({name for each in told.values() for name in each}):
        by_value: dict[str | None, list[str]] = {}
        for worker, said in told.items():
            if said:
                by_value.setdefault(said.get(name), []).append(worker)
        if len(by_value) > 1:
            values = [{"value": value, "workers": names} for value, names in by_value.items()]
            yield {"kind": kind, "name": name, "values": values}


def health(asked: Asked) -> dict[str, object]:
    """Return what on the broker loses tasks, or makes them early or late."""
    site, glance = asked.site, asked.site.queues().value

    def look() -> Verification:
        url = site.options.management
        return site.ask(lambda found: verify_application(site.delays, found, url))

    reading = site.latest("findings", look, FINDINGS_PERIOD)
    found = () if reading.value is None else reading.value.findings
    # That publishers are blocked is known at once, and without the management API.
    alarms = [each for each in found if each.code == blocked().code]
    if glance is not None:
        alarms = (alarms or [blocked()]) if glance.status.is_blocked else []
    findings = [*alarms, *(each for each in found if each.code != blocked().code)]
    number = Counter(each.severity for each in findings)
    return {
        "taken": reading.taken,
        "error": reading.error,
        "needs": NEEDS,
        "version": None if reading.value is None else reading.value.version,
        "counts": {severity: number[severity] for severity in get_args(Severity)},
        "findings": findings,
    }
