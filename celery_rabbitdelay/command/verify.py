"""``celery rabbitdelay verify``: what on the broker breaks a promise of the levels."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click
from celery.bin.base import CLIContext
from celery.platforms import EX_UNAVAILABLE

from celery_rabbitdelay.command.context import BROKER_ERRORS, delays_of, fail, json_option
from celery_rabbitdelay.exceptions import InvalidManagementURL
from celery_rabbitdelay.operations.verify.application import Application
from celery_rabbitdelay.operations.verify.finding import Report, named
from celery_rabbitdelay.operations.verify.management_api import (
    ManagementAPI,
    management_api_of,
    tls_files_of,
)
from celery_rabbitdelay.operations.verify.verification import verify as verify_broker
from celery_rabbitdelay.publishing.declaration import connect
from celery_rabbitdelay.publishing.shown_url import shown_broker


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

    Changes nothing. Exits with 1 if something is a danger, or if --management is given and
    something could not be looked at.
    """
    delays = delays_of(context)
    # The levels are where tasks are sent, which may be another broker than the consumers'.
    connection = context.app.connection_for_write()
    try:
        given = None
        if management is not None:
            given = ManagementAPI(management, tls_files_of(connection))
        with connection:
            connect(connection)
            report = verify_broker(
                connection, Application.of(delays), given or management_api_of(connection)
            )
    except InvalidManagementURL as error:
        raise click.UsageError(str(error)) from error
    except BROKER_ERRORS as error:
        message = f"cannot ask the broker {shown_broker(connection)}: {error}"
        fail(error, message, EX_UNAVAILABLE, as_json)
    click.echo(json.dumps(report.as_dict()) if as_json else "\n".join(_lines(report)))
    is_bad = report.count("danger") or (strict and report.count("warning"))
    if is_bad or (management is not None and report.not_seen):
        raise SystemExit(1)


def _lines(report: Report) -> Iterator[str]:
    for finding in report.findings:
        yield f"{finding.severity}  {finding.code}: {named(finding.subjects)}"
        yield f"  {finding.what}"
        yield f"  consequence: {finding.consequence}"
        yield f"  way out: {finding.remedy}"
    unseen: dict[str, list[str]] = {}
    for each in report.not_seen:
        what, _, why = each.partition(": ")
        unseen.setdefault(why, []).append(what)
    for why, names in unseen.items():
        yield f"not seen: {', '.join(names)}"
        yield f"  {why}"
    counts = ", ".join(f"{report.count(each)} {each}" for each in ("danger", "warning", "note"))
    yield f"RabbitMQ {report.version}, {report.prefix}: {counts}"
