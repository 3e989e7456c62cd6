"""``celery rabbitdelay verify``: find faults on a broker that break the levels' promises.

The file ``findings.toml`` is the table of all faults, with their texts.
:mod:`~celery_rabbitdelay.operations.inventory` reads the broker, and
:mod:`~celery_rabbitdelay.operations.checks` finds the faults. ``verify`` publishes nothing into the
levels, takes no message out of a queue and changes nothing.
"""

from __future__ import annotations

import shlex
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.resources import files
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

import click
from amqp.exceptions import ChannelError
from kombu import Connection, Queue

from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.app.seams import additions_of
from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.command import shared
from celery_rabbitdelay.operations import checks
from celery_rabbitdelay.operations.inventory import read_inventory
from celery_rabbitdelay.operations.management import (
    ManagementAPI,
    management_api,
    management_option,
)
from celery_rabbitdelay.operations.workers import status_of_workers
from celery_rabbitdelay.publishing.declaration import module_queues, queue_counts
from celery_rabbitdelay.publishing.destination import may_refuse
from celery_rabbitdelay.publishing.kombu_internals import Counts, connect
from celery_rabbitdelay.publishing.wire import Wire

_TABLES: Final = tomllib.loads(
    files(__package__).joinpath("findings.toml").read_text(encoding="utf-8")
)

#: The faults by code: severity, description, consequence and way out.
FAULTS: Final = _TABLES["faults"]

#: ``danger`` means that tasks are lost, early, late by minutes, run twice, or cannot be sent;
#: ``warning`` that this happens if something else fails, or that something is slower than
#: necessary; ``note`` that the fault is harmless until something changes.
Severity: TypeAlias = Literal["danger", "warning", "note"]


class Finding(NamedTuple):
    """A fault, and all exchanges, queues, levels or nodes that have it."""

    severity: Severity
    code: str
    subjects: tuple[str, ...]
    what: str
    consequence: str
    remedy: str


class Verification(NamedTuple):
    """The result of ``verify``: the broker's version, and the findings, the worst first."""

    version: str
    findings: tuple[Finding, ...]


def findings_of(rows: Iterable[checks.FoundRow], **common: object) -> tuple[Finding, ...]:
    """Merge rows that differ only in their subjects into findings, the worst first.

    Args:
        rows: The rows.
        **common: Values for all rows: ``prefix``, ``vhost`` and ``user``, quoted for a shell.
    """
    found: dict[Finding, dict[str, None]] = {}
    for code, subject, values in rows:
        fault, consequence = FAULTS[code], _TABLES["policies"].get(values.get("key"))
        given = {"consequence": consequence, **common, **values}
        severity, *texts = (text.format_map(given) for text in fault.values())
        found.setdefault(Finding(severity, code, (), *texts), {})[subject] = None
    together = [finding._replace(subjects=tuple(subjects)) for finding, subjects in found.items()]
    return tuple(sorted(together, key=lambda each: get_args(Severity).index(each.severity)))


def lines_of(finding: Finding) -> Iterator[str]:
    """Yield the lines that print a finding."""
    yield f"{finding.severity}  {finding.code}: {shared.first_of(finding.subjects, 3)}"
    yield f"  {finding.what}"
    yield f"  consequence: {finding.consequence}"
    yield f"  way out: {finding.remedy}"


def blocked() -> Finding:
    """Return the finding of a broker that blocks publishers, for callers other than ``verify``."""
    (finding,) = findings_of([("publishers-blocked", "RabbitMQ", {})])
    return finding


#: Seconds that an answer of the broker may take.
ANSWER_TIMEOUT: Final = 30.0

#: Seconds to wait for the workers' answers.
WORKERS_TIMEOUT: Final = 1.0


def verify_application(
    delays: RabbitDelay, connection: Connection, management: str | None = None
) -> Verification:
    """Check an application's broker, workers and schedules, without changing anything.

    Args:
        delays: The application's delays.
        connection: The broker that tasks are sent to.
        management: The URL of the management API; None for the API at the broker's host.

    Raises:
        InvalidManagementURL: The URL is invalid.
        ManagementUnavailable: The management API does not answer, or the user's permissions do not
            suffice.
        OSError: The broker cannot be reached, or does not answer.
    """
    if management is None:
        connect(connection)  # chooses a reachable host of several
    api = management_api(connection, management)
    rows: list[checks.FoundRow] = [row for each in additions_of(delays) for row in each.problems()]
    is_blocked = delays.is_blocked()
    if not is_blocked:  # a blocked broker accepts no questions to the workers
        workers = dict[str, Mapping[str, object]]()
        # The user may not be allowed to use remote control, or to declare one more queue.
        with suppress(ChannelError):
            workers = status_of_workers(delays.app, connection, WORKERS_TIMEOUT)
        rows += checks.check_probes(delays.settings, workers)
    queues = delays.app.amqp.queues.values()
    return verify_broker(connection, delays.settings, queues, api, is_blocked, rows)


def verify_broker(
    connection: Connection,
    settings: Settings,
    queues: Iterable[Queue],
    management: ManagementAPI,
    is_blocked: bool = False,
    others: Iterable[checks.FoundRow] = (),
) -> Verification:
    """Check a broker, without changing anything.

    Args:
        connection: A kombu connection to RabbitMQ.
        settings: The application's settings.
        queues: The application's task queues, with their arguments.
        management: The management API of that broker.
        is_blocked: Whether the broker blocks publishers.
        others: Other faults to include in the result.

    Raises:
        ManagementUnavailable: The management API does not answer, or the user's permissions do not
            suffice.
        OSError: The broker cannot be reached, or does not answer.
    """
    connect(connection)
    virtual_host = connection.virtual_host or "/"
    inventory, topology = read_inventory(management, virtual_host), settings.topology
    # Other queues are deleted with their connection or consumer.
    lasting = [queue for queue in queues if not (queue.exclusive or queue.auto_delete)]
    names = checks.destinations_of(topology, lasting, inventory)
    known = {queue.name: queue for queue in lasting}
    modules = (queue.name for queue in module_queues(topology).values())
    counted = [*modules, *checks.orphans_of(topology, inventory)]

    def refuses(name: str) -> bool:
        return may_refuse(known.get(name, Queue(name)), settings.may_refuse, connection)

    with Wire(connection).answers_within(ANSWER_TIMEOUT):
        counts: Mapping[str, Counts | None] = {}
        with suppress(ChannelError):  # the user may not be allowed to count
            counts = queue_counts(connection, map(Queue, counted))
        rows = [
            *checks.check_broker(settings, inventory, is_blocked),
            *checks.check_entities(settings, inventory),
            *checks.check_strangers(topology, inventory),
            *checks.check_policies(topology, inventory, names, refuses),
            *checks.check_destinations(settings, lasting, inventory),
            *checks.check_replicas(inventory, [*(each.name for each in topology.queues), *names]),
            *checks.check_modules(topology, counts),
            *checks.check_orphans(topology, inventory, counts),
            *others,
        ]
    user = connection.userid or "guest"
    common = {"prefix": settings.prefix, "vhost": virtual_host, "user": user}
    quoted = {name: shlex.quote(value) for name, value in common.items()}
    return Verification(inventory.version, findings_of(rows, **quoted))


@shared.command()
@management_option
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings too.")
def verify(management: str | None, strict: bool) -> None:
    """Find faults on the broker that lose tasks, or make them early or late.

    Needs the management API, and a user with the tag "monitoring". Changes nothing. Exits with 1
    if a fault is a danger.
    """
    delays = shared.delays()
    prefix = delays.settings.prefix
    with shared.broker() as connection:
        report = verify_application(delays, connection, management)
    number = Counter(finding.severity for finding in report.findings)
    counts = {severity: number[severity] for severity in get_args(Severity)}
    as_dicts = [finding._asdict() for finding in report.findings]
    found = {"version": report.version, "prefix": prefix, **counts, "findings": as_dicts}
    shared.answer(found, _report_lines(report, prefix, counts))
    if counts["danger"] or (strict and counts["warning"]):
        raise SystemExit(shared.FAILED)


def _report_lines(report: Verification, prefix: str, counts: Mapping[str, int]) -> Iterator[str]:
    for finding in report.findings:
        yield from lines_of(finding)
    all_counts = ", ".join(f"{count} {severity}" for severity, count in counts.items())
    yield f"RabbitMQ {report.version}, {prefix}: {all_counts}"
