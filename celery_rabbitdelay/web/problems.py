"""Whether all is well: what is wrong, the most severe first, each with its way out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Final, NamedTuple, get_args
from urllib.parse import urlencode

from celery_rabbitdelay.levels.topology import PROBE
from celery_rabbitdelay.metrics.reading import Reading
from celery_rabbitdelay.operations.verify import Severity, Verification, blocked
from celery_rabbitdelay.registry.index import Kind
from celery_rabbitdelay.web import shown
from celery_rabbitdelay.web.query import Term
from celery_rabbitdelay.web.site import Answer, Glance
from celery_rabbitdelay.web.states import Due

#: Seconds after its time until it is said that a probe is late.
LATE: Final = 10.0

#: The codes of findings that are known at once, and without the management API.
KNOWN_AT_ONCE: Final = ("publishers-blocked", "missing", "registry-unavailable")


class Problem(NamedTuple):
    """Something that is wrong, or that holds tasks back.

    Attributes:
        severity: How bad it is, as in ``verify``.
        words: What it is; or its beginning, if something follows.
        about: What is concerned, a text that anybody may have written; empty for nothing.
        rest: The rest of the sentence.
        page: The page where one sees to it.
        fields: The query of its address.
        shape: The shape that stands for it.
    """

    severity: Severity
    words: str
    about: str = ""
    rest: str = ""
    page: str = "health"
    fields: str = ""
    shape: str = "overdue"


def things(count: int, one: str, many: str = "") -> str:
    """Return how many there are of something: ``1 queue``, ``1,200 queues``."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def problems(
    queues: Reading[Glance],
    workers: Reading[dict[str, Answer]],
    registry_error: str | None,
    due: Due,
    found: Verification | None,
    unserved: Sequence[str],
    reasons: Counter[str],
) -> list[Problem]:
    """Return what is wrong, the most severe first.

    Args:
        queues: A look at the queues.
        workers: What each worker answers, by its name.
        registry_error: Why Redis cannot be asked.
        due: What is due and has not arrived.
        found: What ``verify`` has found; None if that is not known.
        unserved: The queues that tasks wait for, and nobody takes from.
        reasons: Why messages could not be delivered, as far as they were read.
    """
    named = {kind.queue for kind in due.overdue}
    all_of_them = [
        *_of_servers(queues, registry_error, reasons),
        *_of_workers(queues, workers, [each for each in unserved if each not in named]),
        *_of_tasks(due, unserved),
        *_of_findings(found),
    ]
    return sorted(all_of_them, key=lambda each: get_args(Severity).index(each.severity))


def _of_servers(
    queues: Reading[Glance], registry_error: str | None, reasons: Counter[str]
) -> Iterator[Problem]:
    if queues.error is not None:
        since = "" if queues.taken is None else f"; the figures are of {shown.left(queues.taken)}"
        yield Problem("danger", f"The broker cannot be asked{since}", queues.error)
    if registry_error is not None:
        yield Problem("danger", "Redis cannot be asked", registry_error)
    if queues.value is None:
        return
    status, backlog = queues.value.status, queues.value.status.backlog
    if status.is_blocked:
        yield Problem("danger", f"{blocked().what[0].upper()}{blocked().what[1:]}")
    if backlog.missing:
        words = things(len(backlog.missing), "queue is missing", "queues are missing")
        yield Problem("danger", words, backlog.missing[0])
    undeliverable = backlog.others.get("undeliverable")
    if undeliverable is not None and undeliverable.messages:
        words = things(undeliverable.messages, "message is", "messages are")
        words, about = f"{words} undeliverable{':' if reasons else ''}", _named(reasons)
        yield Problem("warning", words, about, page="undeliverable", shape="failed")


def _of_workers(
    queues: Reading[Glance], workers: Reading[dict[str, Answer]], unserved: Sequence[str]
) -> Iterator[Problem]:
    if workers.error is not None and queues.error is None:
        yield Problem("danger", "The workers cannot be asked", workers.error)
    if workers.value is None or queues.error is not None:
        return
    answers = workers.value
    backlog = None if queues.value is None else queues.value.status.backlog
    distribution = None if backlog is None else backlog.others.get("distribution")
    if not answers:
        yield Problem("danger", "No worker answers", page="workers")
    elif distribution is not None and not distribution.consumers:
        words = "No worker serves distribution: tasks that are due stand still"
        yield Problem("danger", words, page="workers")
    elif unserved:
        about = _named(Counter(unserved))
        yield Problem("danger", "No worker takes from queue", about, page="workers")
    for name, answer in sorted(answers.items()):
        if "error" in answer:
            yield Problem("warning", "A worker cannot tell how it is", name, "workers")
    yield from _of_probes(answers.values())


def _of_probes(answers: Iterable[Mapping[str, Any]]) -> Iterator[Problem]:
    late = {
        level: seconds
        for answer in answers
        for level, seconds in ((answer.get(PROBE) or {}).get("late") or {}).items()
        if seconds > LATE
    }
    if late:
        level, seconds = max(late.items(), key=lambda each: each[1])
        words = f"A probe is missing or late by {shown.brief(seconds)}"
        yield Problem("danger", words, level, "levels")


def _of_tasks(due: Due, unserved: Sequence[str]) -> Iterator[Problem]:
    alone = {kind for kind in due.overdue if kind.queue in unserved}
    for kinds in (alone, due.overdue.keys() - alone):
        if kinds:
            yield _overdue(due, kinds, Counter(each.queue for each in kinds & alone))
    for each, counts in due.paused.items():
        what = f"task {each.task}" if each.task is not None else f"queue {each.queue}"
        ends = "" if each.until is None else f", resumes {shown.left(each.until)}"
        words = f"Paused, {things(counts.total(), 'task')} held:"
        rest = f" (since {shown.left(each.since)}{ends})"
        yield Problem("warning", words, what, rest, "pauses", shape="held")
    if due.jobs:
        jobs = Counter({job: kinds.total() for job, kinds in due.jobs.items()})
        words = things(jobs.total(), "task held until job", "tasks held until job")
        about, page, fields = _named(jobs), "jobs", ""
        if len(jobs) == 1 and len(about) <= shown.MOST_IN_ADDRESS:
            page, fields = "jobs/one", urlencode({"name": about}, errors="surrogatepass")
        yield Problem("note", words, about, " is committed", page, fields, "job-open")


def _overdue(due: Due, kinds: Set[Kind], unserved: Counter[str]) -> Problem:
    """Return what is said of the overdue tasks of some kinds, and of queues without a worker."""
    names, firsts = Counter[str](), [due.firsts[each] for each in kinds if each in due.firsts]
    for each in kinds:
        names[each.task] += due.overdue[each]
    cause = f"; no worker takes from queue {_named(unserved)}" if unserved else ""
    since = f"; the first was due {shown.left(min(firsts))}" if firsts else ""
    terms = " ".join(["state:overdue", *(str(Term.of("task", each)) for each in names)])
    fields = urlencode({"q": terms}, errors="surrogatepass")
    fields = fields if len(fields) <= shown.MOST_IN_ADDRESS else "q=state:overdue"
    words, about = things(names.total(), "task overdue:", "tasks overdue:"), _named(names)
    return Problem("danger", words, f"{about}{cause}", since, "waiting", fields)


def _named(counts: Counter[str]) -> str:
    """Return the name that has the most, and how many others there are; empty for none."""
    if not counts:
        return ""
    others = len(counts) - 1
    return f"{counts.most_common(1)[0][0]}{f' and {others:,} more' if others else ''}"


def _of_findings(found: Verification | None) -> Iterator[Problem]:
    for each in () if found is None else found.findings:
        if each.severity != "note" and each.code not in KNOWN_AT_ONCE:
            subjects = ", ".join(each.subjects[:3])
            yield Problem(each.severity, f"{each.what[0].upper()}{each.what[1:]}", subjects)
