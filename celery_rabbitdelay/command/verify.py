"""``celery rabbitdelay verify``: what on the broker breaks a promise of the levels."""

from __future__ import annotations

import json
from collections import Counter
from typing import get_args

import click
from celery.bin.base import CLIContext

from celery_rabbitdelay.command.context import broker_of, delays_of, first_of, json_option
from celery_rabbitdelay.exceptions import InvalidManagementURL
from celery_rabbitdelay.operations.verify.checks import verify as verify_broker
from celery_rabbitdelay.operations.verify.findings import Severity
from celery_rabbitdelay.operations.verify.management import (
    ManagementAPI,
    management_api_of,
    tls_files_of,
)
from celery_rabbitdelay.publishing.declaration import connect


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
    settings = delays_of(context).settings
    try:
        with broker_of(context, as_json) as connection:
            tls = tls_files_of(connection)
            given = None if management is None else ManagementAPI(management, tls)
            connect(connection)
            api = given or management_api_of(connection)  # at the host that was reached
            report = verify_broker(connection, settings, context.app.amqp.queues.values(), api)
    except InvalidManagementURL as error:
        raise click.UsageError(str(error)) from error
    number = Counter(finding.severity for finding in report.findings)
    counts = {severity: number[severity] for severity in get_args(Severity)}
    if as_json:
        findings = [finding._asdict() for finding in report.findings]
        told = {"version": report.version, "prefix": settings.prefix, **counts}
        click.echo(json.dumps({**told, "findings": findings}))
    else:
        for finding in report.findings:
            click.echo(f"{finding.severity}  {finding.code}: {first_of(finding.subjects, 3)}")
            click.echo(f"  {finding.what}")
            click.echo(f"  consequence: {finding.consequence}")
            click.echo(f"  way out: {finding.remedy}")
        all_counts = ", ".join(f"{count} {severity}" for severity, count in counts.items())
        click.echo(f"RabbitMQ {report.version}, {settings.prefix}: {all_counts}")
    if counts["danger"] or (strict and counts["warning"]):
        raise SystemExit(1)
