"""``celery rabbitdelay verify``: what on a broker breaks the levels' promises.

:mod:`~celery_rabbitdelay.operations.findings` lists all faults,
:mod:`~celery_rabbitdelay.operations.inventory` reads the broker, and
:mod:`~celery_rabbitdelay.operations.checks` has a function for each kind of fault. ``verify``
publishes nothing into the levels, takes no message out of a queue and changes nothing.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Final, get_args

import click
from amqp.exceptions import ChannelError
from kombu import Connection, Queue

from celery_rabbitdelay.app.control import status_of_workers
from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.app.seams import additions_of
from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.command import shared
from celery_rabbitdelay.operations import checks
from celery_rabbitdelay.operations.findings import (
    FoundRow,
    Severity,
    Verification,
    findings_of,
    lines_of,
)
from celery_rabbitdelay.operations.inventory import read_inventory
from celery_rabbitdelay.operations.management import (
    Json,
    ManagementAPI,
    management_api,
    management_option,
)
from celery_rabbitdelay.operations.permissions import check_permissions
from celery_rabbitdelay.publishing.destination import may_refuse
from celery_rabbitdelay.publishing.kombu_internals import connect
from celery_rabbitdelay.publishing.wire import Wire

#: Seconds that an answer of the broker may take.
ANSWER_TIMEOUT: Final = 30.0

#: Seconds to wait for the workers' answers.
WORKERS_TIMEOUT: Final = 1.0


def verify_application(
    delays: RabbitDelay, connection: Connection, management: str | None = None
) -> Verification:
    """Look at the broker, the workers and the schedules of an application, and change nothing.

    Args:
        delays: The application's delays.
        connection: The broker that tasks are sent to.
        management: The URL of its management API; None: at the broker's host.

    Raises:
        InvalidManagementURL: It is not such a URL.
        ManagementUnavailable: The management API does not answer, or the user may not read all.
        OSError: The broker cannot be reached, or does not answer.
    """
    api = management_api(connection, management)
    rows: list[FoundRow] = [row for each in additions_of(delays) for row in each.problems()]
    is_blocked = delays.is_blocked()
    if not is_blocked:  # the workers are asked by messages
        workers: Mapping[str, Json] = {}
        # The user may lack the rights for remote control, or a queue for the answers be too many.
        with suppress(ChannelError):
            workers = status_of_workers(delays.app, connection, WORKERS_TIMEOUT)
        rows += checks.check_probes(delays.settings, workers)
    queues = delays.app.amqp.queues.values()
    has_registry = delays.uses("registry_url")
    return verify_broker(connection, delays.settings, queues, api, is_blocked, rows, has_registry)


def verify_broker(
    connection: Connection,
    settings: Settings,
    queues: Iterable[Queue],
    management: ManagementAPI,
    is_blocked: bool = False,
    others: Iterable[FoundRow] = (),
    has_registry: bool = False,
) -> Verification:
    """Look at a broker, and change nothing.

    Args:
        connection: A kombu connection to RabbitMQ, as the application's own user.
        settings: The application's settings.
        queues: The queues that its tasks are sent to, with their arguments.
        management: The management API of that broker.
        is_blocked: Whether the broker blocks publishers.
        others: What was found elsewhere, which is told with the rest.
        has_registry: Whether workers need the permission to return paused tasks.

    Raises:
        ManagementUnavailable: The management API does not answer, or the user may not read all.
        OSError: The broker cannot be reached, or does not answer.
    """
    connect(connection)
    virtual_host = connection.virtual_host or "/"
    inventory, topology = read_inventory(management, virtual_host), settings.topology
    # The others go with a connection or consumer.
    lasting = [queue for queue in queues if not (queue.exclusive or queue.auto_delete)]
    names = checks.destinations_of(topology, lasting, inventory)
    known = {queue.name: queue for queue in lasting}

    def refuses(name: str) -> bool:
        return may_refuse(known.get(name, Queue(name)), settings.may_refuse, connection)

    with Wire(connection).answers_within(ANSWER_TIMEOUT):
        rows = [
            *checks.check_broker(settings, inventory),
            *checks.check_alarms(inventory, is_blocked),
            *checks.check_limit(topology, lasting, inventory, virtual_host),
            *checks.check_entities(settings, inventory),
            *checks.check_bindings(topology, inventory),
            *checks.check_consumers(topology, inventory),
            *checks.check_policies(topology, inventory, names, virtual_host),
            *checks.check_destinations(settings, lasting, inventory),
            *checks.check_bounds(inventory, names, refuses),
            *checks.check_replicas(inventory, [*(each.name for each in topology.queues), *names]),
            *checks.check_orphans(topology, inventory),
            *check_permissions(connection, settings, lasting, inventory, has_registry),
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
        yield from lines_of(finding)
    all_counts = ", ".join(f"{count} {severity}" for severity, count in counts.items())
    yield f"RabbitMQ {report.version}, {prefix}: {all_counts}"
