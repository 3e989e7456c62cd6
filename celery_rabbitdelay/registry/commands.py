"""``celery rabbitdelay pending``, ``show``, ``cancel``, ``job``, ``pause``, ..."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from fractions import Fraction
from functools import partial
from itertools import chain, islice
from typing import Any, Final

import click
from celery.utils.time import LocalTimezone

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.command import shared
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import TAKES_INSTANT, duration_text, instant_of
from celery_rabbitdelay.registry.decision import Outcome
from celery_rabbitdelay.registry.known import KnownTask
from celery_rabbitdelay.registry.pauses import Paused
from celery_rabbitdelay.registry.query import matcher
from celery_rabbitdelay.registry.search import Search

#: The text that a command prints for each outcome.
WORDS: Final = {
    Outcome.DONE: "done",
    Outcome.NOTED: "noted; the id is unknown, and its task may have arrived at a worker already",
    Outcome.UNKNOWN: "unknown to the registry: nothing was changed",
    Outcome.RELEASED: "has arrived at a worker already",
    Outcome.CANCELLED: "was cancelled or superseded before",
}


def _instant(text: str, what: str) -> datetime:
    """Parse an ISO 8601 instant; the default time zone is this machine's."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except (OverflowError, ValueError) as wrong:  # also at the ends of the calendar
        raise exceptions.InvalidDelay(text, TAKES_INSTANT, what) from wrong


instant_type: Final = shared.ParameterType("instant", _instant)


@contextmanager
def with_registry() -> Iterator[RabbitDelay]:
    """Yield the application's ``app.rabbitdelay``, which must have a registry.

    Raises:
        click.UsageError: The application has no registry, or a setting is invalid.
    """
    found = shared.delays()
    with shared.usage_errors(exceptions.RegistryRequired):
        found.registry  # noqa: B018 - raises without a registry
    yield found


@shared.command()
@click.argument("search", nargs=-1)
@click.option(
    "-n", "--limit", type=click.IntRange(1), default=100, show_default=True, help="Maximum to list."
)
def pending(search: Sequence[str], limit: int) -> None:
    """List waiting tracked tasks by due time: all, or those that a SEARCH finds.

    A search has terms, quoted for the shell: 'task:store.* key:order:4711* state:overdue due:<2h'
    """
    with searched(search) as wanted:
        tasks, since = wanted.tasks(), wanted.delays.pending_since()
        shown, state = [*islice(tasks, limit)], wanted.context.holds.state
        # An index counts without reading all records, if it holds exactly the matching tasks.
        is_read = wanted.ids is not None or wanted.filter.needs_records
        count = len(shown) + sum(1 for _ in tasks) if is_read else wanted.count()
    more = f", of which {len(shown):,} are shown" if count > len(shown) else ""
    last = (
        f"{count:,} tracked tasks wait{more} (untracked tasks are not listed: see status); "
        f"the list is complete since {shared.local(since)}"
    )
    listed = [{**task._asdict(), "state": state(task)} for task in shown]
    table = [("due", "in", "state", "task", "id", "key", "job")]
    for each in shown:
        due = shared.local(each.due), _when(each.due).removeprefix("in "), state(each)
        table.append((*due, each.task, each.task_id, each.key or "", each.job or ""))
    found = {"count": count, "since": since, "tasks": listed}
    shared.answer(found, chain(shared.aligned(table), [last]))


@contextmanager
def searched(terms: Sequence[str]) -> Iterator[Search]:
    """Yield the search for waiting tasks with these terms.

    Raises:
        click.UsageError: The search is invalid, or the application has no registry.
    """
    with with_registry() as delays, shared.usage_errors(exceptions.InvalidSearch):
        yield Search.of(delays, " ".join(terms), LocalTimezone())


#: The arguments that choose a command's tasks; see :func:`_of_each`.
_meant: Final = shared.options(
    click.argument("tasks", nargs=-1),
    click.option("--key", help="The task with this key, instead of ids."),
)


@shared.command()
@_meant
def show(tasks: Sequence[str], key: str | None) -> None:
    """Show the state of tasks, given by ids or a key, and why they have not run."""
    found: dict[str, KnownTask | None] = _of_each(tasks, key, "show")
    answers = {name: each and _fields(each) for name, each in found.items()}
    lines = (_facts(each) if each else [f"{name}: unknown"] for name, each in found.items())
    shared.answer({"tasks": answers}, chain(*lines))
    if None in found.values():
        raise SystemExit(shared.FAILED)


def _of_each(
    tasks: Sequence[str], key: str | None, method: str, **options: object
) -> dict[str, Any]:
    """Call a method of ``app.rabbitdelay`` for every task; return the answers by id or key.

    Args:
        tasks: The ids.
        key: The key, instead of ids.
        method: The method.
        **options: The arguments of the method.
    """
    if bool(tasks) == (key is not None):
        raise click.UsageError("pass either task ids or --key, not both")
    with with_registry() as delays:
        call = partial(getattr(delays, method), **options)
        return {key: call(key=key)} if key is not None else {task: call(task) for task in tasks}


def _fields(found: KnownTask) -> dict[str, object]:
    """Return a task as an object for JSON."""
    pauses, why = [each._asdict() for each in found.pauses], [each.words for each in found.why]
    return {**vars(found), "pauses": pauses, "why": why}


def _facts(found: KnownTask) -> Iterator[str]:
    """Yield the lines that describe a task; leave out unknown facts."""
    due = found.due and f"{shared.local(found.due)}, {_when(found.due)}"
    may_be_in = ", ".join(f"{name} ({count:,})" for name, count in found.may_be_in.items())
    if found.due and found.due > wall_clock.now():
        may_be_in = f"{may_be_in or 'no level'}, judging by its due time"
    route = f"exchange {found.exchange!r}, routing key {found.routing_key!r}"
    facts = {
        "task": found.task,
        "sent": found.sent and shared.local(found.sent),
        "due": due,
        "postponed": found.postponed and f"until {shared.local(found.postponed)}",
        "arguments": found.args and f"{found.args} {found.kwargs}",
        "queue": found.queue,
        "route": found.exchange is not None and route,
        "priority": found.priority is not None and str(found.priority),
        "key": found.key,
        "job": found.job and f"{found.job}, {found.job_state or 'unknown'}",
        "may be in": may_be_in,
    }
    rows = [*facts.items(), *(("why", each.words) for each in found.why)]
    yield f"{found.task_id}: {found.state}"
    yield from shared.aligned([(f"  {name}", fact) for name, fact in rows if fact])


def _when(due: datetime) -> str:
    """Return the time until ``due``, or since then, in whole seconds."""
    late_ms = int((wall_clock.now() - due).total_seconds()) * 1000
    return f"{'overdue by' if late_ms > 0 else 'in'} {duration_text(abs(late_ms))}"


#: A hint that follows the outcome of an unknown id.
HINT: Final = "; for a task that is not tracked or will be sent later, add --also-future"

_also_future: Final = click.option(
    "--also-future",
    is_flag=True,
    help="Also for unknown ids: tasks that are not tracked, or will be sent later.",
)


def _decide(tasks: Sequence[str], key: str | None, method: str, **options: object) -> None:
    """Cancel or postpone tasks, and print the outcomes; see :func:`_of_each`."""
    outcomes: dict[str, Outcome] = _of_each(tasks, key, method, **options)
    hints = {Outcome.UNKNOWN: HINT if key is None else ""}
    shared.answer(
        {"outcomes": {name: found.value for name, found in outcomes.items()}},
        (f"{name}: {WORDS[found]}{hints.get(found, '')}" for name, found in outcomes.items()),
    )
    if not {Outcome.RELEASED, Outcome.UNKNOWN}.isdisjoint(outcomes.values()):
        raise SystemExit(shared.FAILED)


@shared.command()
@_meant
@click.option("--search", help="All tracked tasks that `pending SEARCH` lists, instead of ids.")
@_also_future
@click.option("--dry-run", is_flag=True, help="Only count the tasks that the search finds.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
def cancel(
    tasks: tuple[str, ...],
    key: str | None,
    search: str | None,
    also_future: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Cancel waiting tasks: by ids, by key, or all tracked tasks that a search finds."""
    if search is None:
        if dry_run:
            raise click.UsageError("--dry-run needs --search")
        _decide(tasks, key, "cancel", also_future=also_future)
        return
    if tasks or key is not None or also_future:
        raise click.UsageError("--search cannot be combined with ids, --key or --also-future")
    if shared.as_json() and not (yes or dry_run):
        raise click.UsageError("--json cannot ask for confirmation: pass --yes or --dry-run")
    cancelled = 0
    with searched([search]) as wanted:
        if not wanted.query.terms:
            raise click.UsageError("--search needs a term: to cancel all tasks, search for task:*")
        registry, is_of = wanted.delays.registry, matcher(wanted.query, "job")
        jobs = [*filter(is_of, registry.jobs.open_ones(registry.now_ms()))]
        if jobs and wanted.query.named("job"):
            takes = f"abort all of it with job abort {jobs[0]}"
            raise click.UsageError(f"job {jobs[0]!r} is open: {takes}")
        end = instant_of(registry.now_ms() + 1)
        count = wanted.count()
        if count and not (yes or dry_run):
            click.confirm(f"Cancel {count:,} waiting tracked tasks?", abort=True)
        if count and not dry_run:
            cancelled = sum(wanted.sent_before(end).cancel())
    line = f"{count:,} would be cancelled" if dry_run else f"{cancelled:,} cancelled"
    shared.answer({"count": count, "cancelled": cancelled, "dry_run": dry_run}, [line])


@shared.command()
@_meant
@click.option("--delay", type=shared.delay_type, help="The new delay from now.")
@click.option("--eta", type=instant_type, help="The new due time, instead of a delay.")
@_also_future
def postpone(
    tasks: tuple[str, ...],
    key: str | None,
    delay: Fraction | None,
    eta: datetime | None,
    also_future: bool,
) -> None:
    """Change the due time of waiting tasks."""
    if (delay is None) == (eta is None):
        raise click.UsageError("pass exactly one of --delay and --eta")
    _decide(tasks, key, "postpone", delay=delay, eta=eta, also_future=also_future)


@shared.command()
@click.argument("action", type=click.Choice(["open", "commit", "abort", "show"]))
@click.argument("name")
@click.option(
    "--expires",
    type=shared.seconds_type,
    default=3600,
    show_default=True,
    help="Time after which an open job is aborted.",
)
def job(action: str, name: str, expires: float) -> None:
    """Open, commit, abort or show the job NAME."""
    with with_registry() as delays:
        change: dict[str, Callable[[str], object]] = {
            "open": partial(delays.open_job, expires=expires),
            "commit": delays.commit_job,
            "abort": delays.abort_job,
        }
        if action in change:
            change[action](name)
        state = delays.registry.jobs.state(name)
    shown = state.value if state is not None else "unknown"
    shared.answer({"job": name, "state": shown}, [f"{name}: {shown}"])
    if state is None:
        raise SystemExit(shared.FAILED)


_names: Final = shared.options(
    click.option("--task", help="Tasks with this name."),
    click.option("--queue", help="Tasks that arrive at this queue."),
)


@shared.command()
@_names
@click.option("--until", type=instant_type, help="The instant at which the pause ends.")
def pause(task: str | None, queue: str | None, until: datetime | None) -> None:
    """Hold the due tasks with a name, or for a queue, until you resume them."""
    _check(task, queue)
    with with_registry() as delays:
        paused = Paused(task, queue, delays.pause(task=task, queue=queue, until=until), until)
    shared.answer(paused._asdict(), [shared.paused_line(*paused)])


@shared.command()
@_names
def resume(task: str | None, queue: str | None) -> None:
    """End the pause of a task name or a queue."""
    _check(task, queue)
    with with_registry() as delays:
        was_paused = delays.resume(task=task, queue=queue)
    outcome = "resumed" if was_paused else "was not paused"
    answer = {"task": task, "queue": queue, "was_paused": was_paused}
    shared.answer(answer, [f"{shared.task_or_queue(task, queue)}: {outcome}"])
    if not was_paused:
        raise SystemExit(shared.FAILED)


def _check(task: str | None, queue: str | None) -> None:
    if bool(task) == bool(queue):
        raise click.UsageError("pass exactly one of --task and --queue")
