"""``celery rabbitdelay``, the group of commands that Celery loads by its entry point.

A command's module is imported when the command runs or its help is shown; :mod:`.app.additions`
lists the modules.
"""

from __future__ import annotations

from importlib.util import find_spec

import click

from celery_rabbitdelay import __version__
from celery_rabbitdelay.app import additions
from celery_rabbitdelay.command import shared
from celery_rabbitdelay.levels import delay


class LazyCommands(shared.Commands):
    """The commands of the kernel and of the installed additions."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the installed commands."""
        return sorted(name for name in additions.commands if _is_there(name))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None if the name is unknown."""
        if cmd_name not in additions.commands:
            return None
        command: click.Command = additions.load(additions.commands[cmd_name])
        return command


def _is_there(name: str) -> bool:
    try:
        return find_spec(additions.commands[name].partition(":")[0]) is not None
    except ModuleNotFoundError:  # its whole package is missing
        return False


@click.group(
    cls=LazyCommands,
    epilog=f"A DELAY or DURATION {delay.TAKES}. An INSTANT is ISO 8601, by default in the time "
    "zone of this machine.",
)
@click.version_option(__version__, prog_name="celery-rabbitdelay")
@shared.traceback_option
def rabbitdelay() -> None:
    """Delayed tasks that wait in RabbitMQ."""
