"""``celery rabbitdelay``, the group of commands that Celery loads by its entry point."""

from __future__ import annotations

from typing import Any

import click

from celery_rabbitdelay.command.adopt import adopt
from celery_rabbitdelay.command.declare import declare, delete, export, permissions
from celery_rabbitdelay.command.migrate import migrate, transfer
from celery_rabbitdelay.command.route import route
from celery_rabbitdelay.command.send import send
from celery_rabbitdelay.command.status import status, verify
from celery_rabbitdelay.command.undeliverable import undeliverable
from celery_rabbitdelay.command.undeliverable_redrive import redrive
from celery_rabbitdelay.command.waiting import cancel, forecast, job, pending, postpone
from celery_rabbitdelay.levels.shown_url import without_passwords

# Registers the control command, so that `celery inspect` knows it in this process.
from celery_rabbitdelay.worker.status import rabbitdelay_status

__all__ = ["rabbitdelay", "rabbitdelay_status"]


class _WithoutPasswords(click.Group):
    """Hides passwords in errors: those of click repeat arguments that it cannot make sense of."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that is named."""
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            # By the dictionary: for type checkers, the attribute is final.
            vars(error)["message"] = without_passwords(error.message)
            raise


@click.group(cls=_WithoutPasswords)
def rabbitdelay() -> None:
    """Delayed tasks that wait in RabbitMQ."""


for command in (
    adopt,
    cancel,
    declare,
    delete,
    export,
    forecast,
    job,
    migrate,
    pending,
    permissions,
    postpone,
    route,
    send,
    status,
    transfer,
    undeliverable,
    verify,
):
    rabbitdelay.add_command(command)
undeliverable.add_command(redrive)
