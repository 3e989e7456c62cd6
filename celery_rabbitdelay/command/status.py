"""``celery rabbitdelay status`` and ``verify``: what waits, and what breaks a promise."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from itertools import chain
from threading import Event
from typing import Any, Final, get_args

import click

from celery_rabbitdelay.app.control import ARRIVALS
from celery_rabbitdelay.command import shared
from celery_rabbitdelay.command.pausing import paused_line
from celery_rabbitdelay.command.shared import rabbitdelay
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import duration_text
from celery_rabbitdelay.levels.topology import PROBE, Topology
from celery_rabbitdelay.operations.status import Status, rates_between, status_of
from celery_rabbitdelay.operations.verify.application import verify_application
from celery_rabbitdelay.operations.verify.findings import Finding, Severity, Verification, blocked


@rabbitdelay.command()
@shared.management_option
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings too.")
def verify(management: str | None, strict: bool) -> None:
    """Find what on the broker loses tasks, or makes them early or late.

    Needs the management API, and a user with the tag "monitoring". Changes nothing. Exits with 1
    if something is a danger.
    """
    delays = shared.delays()
    prefix = delays.settings.prefix
    with shared.broker() as connection:
        report = verify_application(delays, connection, management)
    number = Counter(finding.severity for finding in report.findings)
    counts = {severity: number[severity] for severity in get_args(Severity)}
    findings = [finding._asdict() for finding in report.findings]
    told = {"version": report.version, "prefix": prefix, **counts, "findings": findings}
    shared.answer(told, _report_lines(report, prefix, counts))
    if counts["danger"] or (strict and counts["warning"]):
        raise SystemExit(shared.FAILED)


def _report_lines(report: Verification, prefix: str, counts: Mapping[str, int]) -> Iterator[str]:
    for finding in report.findings:
        yield from _finding_lines(finding)
    all_counts = ", ".join(f"{count} {severity}" for severity, count in counts.items())
    yield f"RabbitMQ {report.version}, {prefix}: {all_counts}"


def _finding_lines(finding: Finding) -> Iterator[str]:
    yield f"{finding.severity}  {finding.code}: {shared.first_of(finding.subjects, 3)}"
    yield f"  {finding.what}"
    yield f"  consequence: {finding.consequence}"
    yield f"  way out: {finding.remedy}"


#: Seconds from one look to the next, and the messages that are read, unless the option says it.
WATCH, REASONS = 2.0, 1000

#: How many reasons the text names; ``--json`` names all of them.
MAX_REASONS_NAMED: Final = 20


@rabbitdelay.command()
@click.option(
    "-t",
    "--timeout",
    default=1.0,
    show_default=True,
    type=shared.seconds_type,
    help="How long to wait for the workers' answers.",
)
@click.option("--digits", "with_digits", is_flag=True, help="List each digit that is not empty.")
@click.option(
    "--reasons",
    "most_reasons",
    is_flag=False,
    flag_value=REASONS,
    default=0,
    type=click.IntRange(0),
    metavar="[NUMBER]",
    help="Count why messages are undeliverable; reads this many of them, 1,000 without a number.",
)
@click.option(
    "--watch",
    is_flag=False,
    flag_value=WATCH,
    type=shared.seconds_type,
    metavar="[DURATION]",
    help="Look again and again until Ctrl-C, with rates; every two seconds without a duration.",
)
def status(timeout: float, with_digits: bool, most_reasons: int, watch: float | None) -> None:
    """Show how many messages wait in each level, and what the workers' modules do."""
    if shared.as_json() and watch is not None:
        raise click.UsageError("--json prints one object: it cannot be used with --watch")
    delays = shared.delays()
    last: Status | None = None
    stopping = Event()
    watching = nullcontext() if watch is None else shared.set_by_ctrl_c(stopping)
    with shared.broker() as connection, watching:
        while True:
            before, last = last, status_of(delays, connection, timeout, most_reasons)
            rates = None if before is None else rates_between(before, last)
            lines = status_lines(delays.topology, last, with_digits, rates)
            if watch is not None:
                click.clear()  # on a terminal only
                lines = chain([time.strftime("%Y-%m-%d %H:%M:%S")], lines, [""])
            shared.answer(_as_json(last), lines)
            if watch is None or stopping.wait(watch):
                break
    if last.backlog.missing or last.is_blocked:
        raise SystemExit(shared.FAILED)


def _as_json(found: Status) -> dict[str, Any]:
    backlog, reasons = found.backlog, found.reasons
    read = None if reasons is None else {"read": sum(reasons.values()), "counts": reasons}
    return {
        **backlog._asdict(),
        "others": {name: counts._asdict() for name, counts in backlog.others.items()},
        "next_due": {
            "tracked": found.next_due,
            "within_ms": found.due_within_ms,
            "registry_error": found.registry_error,
        },
        "paused": [each._asdict() for each in found.paused],
        "undeliverable": read,
        "publishers_blocked": found.is_blocked,
        "workers": found.workers,
    }


def status_lines(
    topology: Topology,
    status: Status,
    with_digits: bool = False,
    rates: Mapping[str, float] | None = None,
) -> Iterator[str]:
    """Yield the lines of a status.

    Args:
        topology: The topology.
        status: The status.
        with_digits: Whether to list each digit that is not empty.
        rates: What :func:`.rates_between` returns; None if there is only one look.
    """

    def rate(name: str) -> str:
        return "" if rates is None else f" {rates.get(name, 0.0):+10,.1f}/s"

    if status.is_blocked:
        yield from _finding_lines(blocked())
    backlog = status.backlog
    digit_queues = f"{len(topology.digit_queues)} digit queues"
    yield f"{topology.prefix}: {topology.layout.name}, {digit_queues}"
    for level in topology.layout.levels:
        yield f"  {level.name:16} {backlog.levels[level.name]:10,} waiting{rate(level.name)}"
        for digit, messages in backlog.digits[level.name].items():
            if with_digits and messages:
                yield f"    {level.queue_name(digit):14} {messages:10,}"
    for name, counts in backlog.others.items():
        consumers = f", {counts.consumers} consumers" if counts.consumers else ""
        yield f"  {name:16} {counts.messages:10,} waiting{consumers}{rate(name)}"
    if backlog.missing:
        yield f"  {len(backlog.missing)} queues are missing: {shared.first_of(backlog.missing)}"
    if status.registry_error is not None:
        yield f"next due: the registry cannot be asked: {status.registry_error}"
    yield from map(paused_line, status.paused)
    if status.next_due is not None:
        left_ms = max(round((status.next_due - wall_clock.now()).total_seconds()), 0) * 1000
        local = shared.local(status.next_due)
        yield f"next due: {local}, in {duration_text(left_ms)}, of the tracked tasks"
    if status.due_within_ms is not None:
        yield f"next due: within {duration_text(status.due_within_ms)}, by what waits in the levels"
    if rates is not None:
        yield f"delayed tasks that workers received: {rates[ARRIVALS]:,.1f}/s"
    if status.reasons is not None:
        yield f"undeliverable, {sum(status.reasons.values()):,} messages read:"
        for reason, messages in list(status.reasons.items())[:MAX_REASONS_NAMED]:
            yield f"  {messages:10,} {reason}"
        if len(status.reasons) > MAX_REASONS_NAMED:
            yield f"  and {len(status.reasons) - MAX_REASONS_NAMED:,} other reasons; see --json"
    if not status.workers and not status.is_blocked:
        yield "no worker has answered"
    for worker, modules in sorted(status.workers.items()):
        yield from _worker_lines(worker, modules)


def _worker_lines(worker: str, modules: Mapping[str, Any]) -> Iterator[str]:
    if "error" in modules:
        yield f"{worker}: cannot answer: {modules['error']}"
        return
    yield worker if modules.keys() - {ARRIVALS} else f"{worker}: serves no module"
    for name, counts in modules.items():
        if name == PROBE:
            if late := counts["late"].values():  # other workers send no probes
                yield (
                    f"  {name:16} {len(late):10,} levels and routes, {min(late):+,.1f} to "
                    f"{max(late):+,.1f} s late; {sum(counts['missing'].values()):,} missing"
                )
        elif name == ARRIVALS:
            yield (
                f"  {name:16} {counts['received']:10,} delayed ones received, at most "
                f"{counts['latest']:,.1f} s late in the last ten minutes"
            )
        else:
            yield (
                f"  {name:16} {counts['received']:10,} received "
                f"({counts['received_per_second']:,}/s), {counts['published']:,} published "
                f"({counts['published_per_second']:,}/s), {counts['redelivered']:,} put back, "
                f"{counts['undeliverable']:,} undeliverable"
            )
