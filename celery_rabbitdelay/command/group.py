"""``celery rabbitdelay``, the group of commands that Celery loads by its entry point.

:data:`COMMANDS` names each command and where it is. A command's module is imported when the command
runs or its help is shown, so this module imports no addition, and the folder of one may be deleted.
The control command is imported, so that ``celery inspect`` knows it in this process.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Final

import click

from celery_rabbitdelay import __version__
from celery_rabbitdelay.command import shared
from celery_rabbitdelay.levels import delay
from celery_rabbitdelay.worker.status import rabbitdelay_status

__all__ = ["add_command", "rabbitdelay", "rabbitdelay_status"]

#: Where each command is: its module, and its name there.
COMMANDS: Final = {
    "adopt": "celery_rabbitdelay.operations.move_commands:adopt",
    "cancel": "celery_rabbitdelay.registry.commands:cancel",
    "declare": "celery_rabbitdelay.command.levels:declare",
    "delete": "celery_rabbitdelay.operations.delete:delete",
    "export": "celery_rabbitdelay.operations.export:export",
    "forecast": "celery_rabbitdelay.registry.commands:forecast",
    "job": "celery_rabbitdelay.registry.commands:job",
    "migrate": "celery_rabbitdelay.operations.move_commands:migrate",
    "pause": "celery_rabbitdelay.registry.commands:pause",
    "pending": "celery_rabbitdelay.registry.commands:pending",
    "permissions": "celery_rabbitdelay.operations.permissions:permissions",
    "postpone": "celery_rabbitdelay.registry.commands:postpone",
    "resume": "celery_rabbitdelay.registry.commands:resume",
    "route": "celery_rabbitdelay.command.levels:route",
    "run-now": "celery_rabbitdelay.registry.commands:run_now",
    "schedules": "celery_rabbitdelay.schedules.command:schedules",
    "show": "celery_rabbitdelay.registry.commands:show",
    "status": "celery_rabbitdelay.operations.status:status",
    "transfer": "celery_rabbitdelay.operations.move_commands:transfer",
    "undeliverable": "celery_rabbitdelay.operations.undeliverable_commands:undeliverable",
    "verify": "celery_rabbitdelay.operations.verify:verify",
    "web": "celery_rabbitdelay.web.command:web",
}


def add_command(name: str, where: str) -> None:
    """Add a command of your own to ``celery rabbitdelay``.

    Call it in the module that ``celery -A`` names. The command is imported when it runs, or when
    its help or that of the group is shown.

    Args:
        name: What users type.
        where: A :class:`click.Command` as ``"package.module:name"``.
    """
    COMMANDS[name] = where


class LazyCommands(shared.Commands):
    """The commands of :data:`COMMANDS`; those whose module was deleted are not listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands that are there."""
        return [name for name, where in sorted(COMMANDS.items()) if _exists(where)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None if the name is unknown."""
        where = COMMANDS.get(cmd_name)
        if where is None:
            return None
        module, _, name = where.partition(":")
        if not _exists(where):
            addition = module.rpartition(".")[0]
            ctx.fail(f"the command {cmd_name!r} needs {addition}, which is not installed")
        command: click.Command = getattr(import_module(module), name)
        return command


def _exists(where: str) -> bool:
    try:
        return find_spec(where.partition(":")[0]) is not None
    except ModuleNotFoundError:  # its package is missing as well
        return False


@click.group(
    cls=LazyCommands,
    epilog=f"A DELAY or DURATION {delay.TAKES}. An INSTANT is ISO 8601; without a time zone, it is "
    "in that of this machine.",
)
@click.version_option(__version__, prog_name="celery-rabbitdelay")
@shared.traceback_option
def rabbitdelay() -> None:
    """Delayed tasks that wait in RabbitMQ."""
