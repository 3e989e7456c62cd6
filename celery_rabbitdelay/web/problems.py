"""The problems on the page Now, the most severe first, each with the page that shows a remedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, Final, NamedTuple, get_args
from urllib.parse import urlencode

from celery_rabbitdelay.levels.topology import PROBE
from celery_rabbitdelay.metrics.reading import Reading
from celery_rabbitdelay.operations.verify import Severity, Verification, blocked
from celery_rabbitdelay.publishing.declaration import unserved_modules
from celery_rabbitdelay.registry.durations import brief, left
from celery_rabbitdelay.registry.index import Kind
from celery_rabbitdelay.registry.known import are_returning
from celery_rabbitdelay.registry.query import Term
from celery_rabbitdelay.registry.states import Due
from celery_rabbitdelay.web.shown import MOST_IN_ADDRESS
from celery_rabbitdelay.web.site import Answer, Glance, is_awaited

#: A probe that is later than this, in seconds, is a problem.
LATE: Final = 10.0

#: The codes of findings that other readings report earlier, and without the management API.
KNOWN_AT_ONCE: Final = ("publishers-blocked", "missing", "registry-unavailable", "module-unserved")


class Problem(NamedTuple):
    """A fault, or a reason why tasks are held.

    Attributes:
        severity: The severity, as in ``verify``.
        words: The sentence, or its beginning.
        about: The name that follows the words, untrusted text; may be empty.
        rest: The rest of the sentence.
        page: The page that shows details or a remedy.
        fields: The query of that page's address.
        shape: The icon.
    """

    severity: Severity
    words: str
    about: str = ""
    rest: str = ""
    page: str = "health"
    fields: str = ""
    shape: str = "overdue"


def things(count: int, one: str, many: str = "") -> str:
    """Format a count with its noun: ``1 queue``, ``1,200 queues``."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def problems(
    queues: Reading[Glance],
    workers: Reading[dict[str, Answer]],
    registry_error: str | None,
    due: Due,
    found: Verification | None,
    unserved: Mapping[str, bool],
    reasons: Counter[str],
) -> list[Problem]:
    """Return the problems, the most severe first.

    Args:
        queues: The latest reading of the queues.
        workers: The workers' answers, by worker.
        registry_error: The error of Redis; None if it answers.
        due: The tasks that are due and have not arrived.
        found: The findings of ``verify``; None if unknown.
        unserved: The queues that tasks wait for and no worker consumes, and whether each exists.
        reasons: The reasons of the undeliverable messages that were read.
    """
    named = {kind.queue for kind in due.overdue}
    others = {} if queues.value is None else queues.value.status.backlog.others
    returning = "; held tasks are returning" if are_returning(due.paused, others) else ""
    all_of_them = [
        *_of_servers(queues, registry_error, reasons),
        *_of_workers(queues, workers, {each: unserved[each] for each in unserved.keys() - named}),
        *_of_tasks(due, unserved, returning),
        *_of_findings(found),
    ]
    return sorted(all_of_them, key=lambda each: get_args(Severity).index(each.severity))


def awaited(words: str, reading: Reading[Any], period: float, page: str) -> Iterator[Problem]:
    """Yield a note if a new reading is under way, with the age of the latest reading."""
    if is_awaited(reading, period):
        age = "" if reading.taken is None else f"; the last answer came {left(reading.taken)}"
        yield Problem("note", f"{words}{age}", page=page, shape="waiting")


def _of_servers(
    queues: Reading[Glance], registry_error: str | None, reasons: Counter[str]
) -> Iterator[Problem]:
    if queues.error is not None:
        since = "" if queues.taken is None else f"; the figures are from {left(queues.taken)}"
        yield Problem("danger", f"The broker cannot be reached{since}", queues.error)
    if registry_error is not None:
        yield Problem("danger", "Redis cannot be reached", registry_error)
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
        words, about = f"{words} undeliverable{':' if reasons else ''}", _named(reasons, "reason")
        yield Problem("warning", words, about, page="undeliverable", shape="failed")


def _of_workers(
    queues: Reading[Glance], workers: Reading[dict[str, Answer]], unserved: Mapping[str, bool]
) -> Iterator[Problem]:
    if workers.error is not None and queues.error is None:
        yield Problem("danger", "The workers cannot be reached", workers.error)
    if workers.value is None or queues.error is not None:
        return
    answers = workers.value
    others = {} if queues.value is None else queues.value.status.backlog.others
    if not answers:
        yield Problem("danger", "No worker answers", page="workers")
    elif modules := unserved_modules(others):
        for module, count in modules.items():
            waits = things(count, "message waits", "messages wait")
            yield Problem("danger", f"No worker serves {module}: {waits} for it", page="workers")
    else:
        for exists, words in ((False, "There is no queue"), (True, "No worker consumes queue")):
            if names := [name for name in sorted(unserved) if unserved[name] is exists]:
                yield Problem("danger", words, _named(Counter(names), "queue"), page="workers")
    for name, answer in sorted(answers.items()):
        if "error" in answer:
            yield Problem("warning", "A worker cannot report its state:", name, page="workers")
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
        words = f"A probe is missing or late by {brief(seconds)} in level"
        yield Problem("danger", words, level, page="levels")


def _of_tasks(due: Due, unserved: Mapping[str, bool], returning: str) -> Iterator[Problem]:
    causes = {False: "; there is no queue ", True: "; no worker consumes queue ", None: ""}
    for exists, cause in causes.items():
        if kinds := {kind for kind in due.overdue if unserved.get(kind.queue) is exists}:
            queue = _named(Counter(each.queue for each in kinds), "queue")
            yield _overdue(due, kinds, f"{cause}{queue}" if cause else returning)
    for each, counts in due.paused.items():
        what = f"task {each.task}" if each.task is not None else f"queue {each.queue}"
        ends = "" if each.until is None else f", resumes {left(each.until)}"
        words = f"Paused, {things(counts.total(), 'task')} held:"
        rest = f" (since {left(each.since)}{ends})"
        severity: Severity = "warning" if counts.total() else "note"
        yield Problem(severity, words, what, rest, "pauses", shape="held")
    if due.jobs:
        jobs = Counter({job: kinds.total() for job, kinds in due.jobs.items()})
        words = f"{things(jobs.total(), 'task')} held until commit of job"
        about, page, fields = _named(jobs, "job"), "jobs", ""
        if len(jobs) == 1 and len(about) <= MOST_IN_ADDRESS:
            page, fields = "jobs/one", urlencode({"name": about}, errors="surrogatepass")
        yield Problem("note", words, about, "", page, fields, "job-open")


def _overdue(due: Due, kinds: Set[Kind], cause: str) -> Problem:
    """Return the problem of overdue tasks."""
    names, firsts = Counter[str](), [due.firsts[each] for each in kinds if each in due.firsts]
    for each in kinds:
        names[each.task] += due.overdue[each]
    since = f"; the first was due {left(min(firsts))}" if firsts else ""
    terms = " ".join(["state:overdue", *(str(Term.of("task", each)) for each in names)])
    fields = urlencode({"q": terms}, errors="surrogatepass")
    fields = fields if len(fields) <= MOST_IN_ADDRESS else "q=state:overdue"
    words = things(names.total(), "task overdue:", "tasks overdue:")
    about = f"{_named(names, 'task name')}{cause}"
    return Problem("danger", words, about, since, "waiting", fields)


def _named(counts: Counter[str], noun: str) -> str:
    """Return the most frequent name and the number of others: ``a and 2 more queues``."""
    first, others = "".join(name for name, _ in counts.most_common(1)), len(counts) - 1
    return f"{first} and {things(others, f'more {noun}')}" if others > 0 else first


def _of_findings(found: Verification | None) -> Iterator[Problem]:
    for each in () if found is None else found.findings:
        if each.severity != "note" and each.code not in KNOWN_AT_ONCE:
            subjects = ", ".join(each.subjects[:3])
            yield Problem(each.severity, f"{each.what[0].upper()}{each.what[1:]}", subjects)
