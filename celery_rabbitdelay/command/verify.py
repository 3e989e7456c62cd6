"""``celery rabbitdelay verify``: what on the broker breaks a promise of the levels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

import click
from celery.bin.base import CLIContext
from celery.platforms import EX_UNAVAILABLE

from celery_rabbitdelay.command.context import BROKER_ERRORS, delays_of, fail, json_option
from celery_rabbitdelay.exceptions import InvalidManagementURL, ManagementUnavailable
from celery_rabbitdelay.operations.verify.checks import verify as verify_broker
from celery_rabbitdelay.operations.verify.management import (
    ManagementAPI,
    management_api_of,
    tls_files_of,
)
from celery_rabbitdelay.publishing.declaration import connect
from celery_rabbitdelay.publishing.shown_url import shown_broker

#: How many subjects of a finding the text names; ``--json`` names all of them.
MAX_NAMED: Final = 3


@click.command()
@json_option
@click.option(
    "--management",
    metavar="URL",
    envvar="RABBITDELAY_MANAGEMENT_URL",
    help="The management API, http://user:password@host:15672. By default, the broker's host and "
    "user with port 15672, or 15671 for TLS.",
)
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings too.")
@click.pass_obj
def verify(context: CLIContext, /, as_json: bool, management: str | None, strict: bool) -> None:
    """Find what on the broker loses tasks, or makes them early or late.

    Needs the management API, and a user with the tag "monitoring". Changes nothing. Exits with 1
    if something is a danger.
    """
    delays = delays_of(context)
    # The levels are where tasks are sent, which may be another broker than the consumers'.
    connection = context.app.connection_for_write()
    try:
        api = management and ManagementAPI(management, tls_files_of(connection))
        with connection:
            connect(connection)
            queues = context.app.amqp.queues.values()
            api = api or management_api_of(connection)
            report = verify_broker(connection, delays.settings, queues, api)
    except InvalidManagementURL as error:
        raise click.UsageError(str(error)) from error
    except ManagementUnavailable as error:
        fail(error, str(error), EX_UNAVAILABLE, as_json)
    except BROKER_ERRORS as error:
        message = f"cannot ask the broker {shown_broker(connection)}: {error}"
        fail(error, message, EX_UNAVAILABLE, as_json)
    counts = {each: report.count(each) for each in ("danger", "warning", "note")}
    if as_json:
        findings = [finding._asdict() for finding in report.findings]
        click.echo(json.dumps({**report._asdict(), **counts, "findings": findings}))
    else:
        for finding in report.findings:
            click.echo(f"{finding.severity}  {finding.code}: {shown_subjects(finding.subjects)}")
            click.echo(f"  {finding.what}\n  consequence: {finding.consequence}")
            click.echo(f"  way out: {finding.remedy}")
        told = ", ".join(f"{number} {severity}" for severity, number in counts.items())
        click.echo(f"RabbitMQ {report.version}, {report.prefix}: {told}")
    if counts["danger"] or (strict and counts["warning"]):
        raise SystemExit(1)


def shown_subjects(subjects: Sequence[str]) -> str:
    """Return the first subjects as text, and how many others there are."""
    more = len(subjects) - MAX_NAMED
    return ", ".join(subjects[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
