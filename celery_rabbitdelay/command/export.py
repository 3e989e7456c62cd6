"""``celery rabbitdelay export``: the topology as Terraform, definitions or Mermaid."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import click
from celery.bin.base import CLIContext

from celery_rabbitdelay.command.context import (
    delay_type,
    json_option,
    topology_of,
    topology_options,
)
from celery_rabbitdelay.exceptions import DelayTooLong
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.export.definitions import as_definitions, as_setting, cut
from celery_rabbitdelay.operations.export.mermaid import as_mermaid
from celery_rabbitdelay.operations.export.terraform import as_terraform

#: What writes each format, given the topology and the name of the virtual host.
FORMATS: Final[dict[str, Callable[[Topology, str], str]]] = {
    "terraform": as_terraform,
    "definitions": as_definitions,
    "mermaid": lambda topology, vhost: as_mermaid(topology),
}


@click.command()
@click.option(
    "-f",
    "--format",
    "format_name",
    type=click.Choice(list(FORMATS)),
    required=True,
    help="A Terraform module, a definitions file for RabbitMQ, or a Mermaid flow chart.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a file instead of the standard output.",
)
@click.option("--vhost", help="The virtual host; that of the application's broker if omitted.")
@click.option(
    "--max-delay",
    type=delay_type,
    help="Only the levels that this delay needs: 86400, 30d. The applications then need another "
    "rabbitdelay_layout, which is told.",
)
@topology_options
@json_option
@click.pass_obj
def export(
    context: CLIContext,
    /,
    format_name: str,
    output: Path | None,
    vhost: str | None,
    max_delay: Fraction | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Write the topology in another format. No broker is asked, and nothing is declared."""
    topology = topology_of(context, options)
    whole = topology.layout
    if max_delay is not None:
        try:
            topology = replace(topology, layout=cut(whole, max_delay))
        except DelayTooLong as error:
            raise click.UsageError(f"--max-delay: {error}") from error
    host = context.app.connection_for_write().virtual_host or "/" if vhost is None else vhost
    text = FORMATS[format_name](topology, host)
    if output is not None:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise click.UsageError(f"--output: {error}") from error
    if as_json:
        found = {
            "format": format_name,
            "prefix": topology.prefix,
            "vhost": host,
            "fingerprint": topology.identity.fingerprint,
            "layout": as_setting(topology.layout),
            "capacity_ms": topology.layout.capacity_ms,
            "output": None if output is None else str(output),
            "text": text if output is None else None,
        }
        click.echo(json.dumps(found))
    elif output is None:
        click.echo(text, nl=False)
    if topology.layout != whole:
        setting = as_setting(topology.layout)
        click.echo(f"The applications need rabbitdelay_layout = {setting!r}", err=True)
