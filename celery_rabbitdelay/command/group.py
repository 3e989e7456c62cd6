"""``celery rabbitdelay``, the group of commands that Celery loads by its entry point."""

from __future__ import annotations

import click

from celery_rabbitdelay.command.pending import forecast, pending
from celery_rabbitdelay.command.send import send
from celery_rabbitdelay.command.status import status
from celery_rabbitdelay.command.undeliverable import undeliverable
from celery_rabbitdelay.command.waiting import cancel, job, postpone

# Registers the control command, so that `celery inspect` knows it in this process.
from celery_rabbitdelay.worker.status import rabbitdelay_status

__all__ = ["rabbitdelay", "rabbitdelay_status"]


@click.group()
def rabbitdelay() -> None:
    """Delayed tasks that wait in RabbitMQ."""


for command in (cancel, forecast, job, pending, postpone, send, status, undeliverable):
    rabbitdelay.add_command(command)
