"""``celery rabbitdelay permissions``: what a user of the broker needs. Asks no broker."""

from __future__ import annotations

import json
from typing import Any, get_args

import click
from celery.bin.base import CLIContext

from celery_rabbitdelay.command.context import delays_of, json_option, topology_of, topology_options
from celery_rabbitdelay.operations import permissions as needed


@click.command()
@click.argument("role", type=click.Choice(get_args(needed.Role)))
@click.option("--user", required=True, help="The user of the broker.")
@click.option("--vhost", help="The virtual host; that of the application if omitted.")
@click.option(
    "--declare",
    "mode",
    type=click.Choice(("auto", "never")),
    help="Its rabbitdelay_declare; that of the application if omitted.",
)
@click.option(
    "--topics",
    is_flag=True,
    help="For a producer: also the topic permissions that let it reach only the application's "
    "queues.",
)
@topology_options
@json_option
@click.pass_obj
def permissions(
    context: CLIContext,
    /,
    role: needed.Role,
    user: str,
    vhost: str | None,
    mode: str | None,
    topics: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Print the rabbitmqctl commands that give a user what its ROLE needs, and no more.

    The tasks' queues are those of task_queues, or Celery's default queue. No broker is asked.
    """
    if topics and role != "producer":
        raise click.UsageError("--topics is for the role producer")
    settings, app = delays_of(context).settings, context.app
    topology = topology_of(context, options)
    queues = list(app.amqp.Queues(app.conf.task_queues).values())
    may_declare = (mode or settings.declare) == "auto"
    rights = list(
        needed.rights(
            role, topology, queues, app.conf, may_declare=may_declare, modules=settings.modules
        )
    )
    keys = list(needed.topic_rights(topology, queues)) if topics else []
    host = vhost or app.connection_for_write().virtual_host or "/"
    if as_json:
        configure, write, read = needed.patterns(rights)
        told = {"user": user, "vhost": host, "configure": configure, "write": write, "read": read}
        click.echo(json.dumps({**told, "topics": [each._asdict() for each in keys]}))
    else:
        click.echo("\n".join(needed.commands(user, host, rights, keys)))
