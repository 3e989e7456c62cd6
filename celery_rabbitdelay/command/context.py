"""What the commands share: the application's delays, ``--json``, and how a command fails."""

from __future__ import annotations

import json
from typing import Final, NoReturn

import amqp
import click
from celery.bin.base import CLIContext
from celery.exceptions import CeleryCommandException
from kombu.exceptions import OperationalError

from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.exceptions import InvalidSetting

__all__ = ["BROKER_ERRORS", "delays_of", "fail", "json_option"]

#: Raised where the broker cannot be reached, or refuses what it is asked.
BROKER_ERRORS: Final = (OperationalError, amqp.AMQPError, OSError)

#: Spelled as in Celery's own commands.
json_option: Final = click.option(
    "-j", "--json", "as_json", is_flag=True, help="Print one JSON object."
)


def delays_of(context: CLIContext) -> RabbitDelay:
    """Return the delays of the application that ``celery -A`` names.

    Raises:
        click.UsageError: Its delays do not wait in RabbitMQ, or a ``rabbitdelay_*`` setting is
            wrong.
    """
    delays = getattr(context.app, "rabbitdelay", None)
    if not isinstance(delays, RabbitDelay):
        raise click.UsageError(
            f"the delays of {context.app!r} are not in RabbitMQ: make it a "
            "celery_rabbitdelay.Celery, or call celery_rabbitdelay.install(app)"
        )
    if not delays.available:
        raise click.UsageError(f"the broker of {context.app!r} is not RabbitMQ")
    try:
        delays.settings  # noqa: B018 - read, and so checked
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from error
    return delays


def fail(error: Exception, message: str, exit_status: int, as_json: bool) -> NoReturn:
    """End the command with one line on the standard error, and with JSON where it is asked for.

    Args:
        error: The cause.
        message: What to say.
        exit_status: The command's exit status.
        as_json: Whether to print an object with the key ``error`` as well.
    """
    line = " ".join(message.split())
    if as_json:
        click.echo(json.dumps({"error": line}))
    raise CeleryCommandException(line, exit_status) from error
