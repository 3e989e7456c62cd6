"""Options that describe another topology than the application's, and delays as text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, TypeVar

import click
from celery.bin.base import CLIContext

from celery_rabbitdelay.command.context import delays_of
from celery_rabbitdelay.command.parameter_type import ParameterType
from celery_rabbitdelay.exceptions import InvalidSetting
from celery_rabbitdelay.levels.delay import parse_delay
from celery_rabbitdelay.levels.topology import Topology

_Command = TypeVar("_Command", bound=Callable[..., Any])

#: The options by the setting that each replaces.
_SETTINGS: Final = ("prefix", "layout", "tick", "queue_type", "shards")


def _layout(text: str, what: str) -> Any:
    """Read the name of a layout, or as JSON what ``rabbitdelay_layout`` takes."""
    if not text.lstrip().startswith(("[", "{", '"')):
        return text
    try:
        return json.loads(text)
    except ValueError as wrong:
        raise ValueError(f"{text!r} is not JSON: {wrong}") from wrong


delay_type: Final = ParameterType("delay", parse_delay)

layout_type: Final = ParameterType("layout", _layout)


def topology_options(command: _Command) -> _Command:
    """Add the options that describe another topology, such as ``--prefix``, to a command.

    The command hands them to :func:`topology_of`.
    """
    for option in (
        click.option("--shards", type=int, help="How many queues each digit has."),
        click.option("--queue-type", help="quorum or classic."),
        click.option("--tick", type=float, help="The resolution in seconds."),
        click.option(
            "--layout",
            type=layout_type,
            help="clock, binary, geometric, or as JSON what rabbitdelay_layout takes.",
        ),
        click.option("--prefix", help="The first part of all names."),
    ):
        command = option(command)
    return command


def topology_of(context: CLIContext, options: dict[str, Any]) -> Topology:
    """Return the application's topology, with what the options replace.

    Args:
        context: Celery's.
        options: What :func:`topology_options` has added; None where the application's value counts.

    Raises:
        click.UsageError: The application's delays do not wait in RabbitMQ, or a value is wrong.
    """
    settings = delays_of(context).settings
    given = {name: options[name] for name in _SETTINGS if options.get(name) is not None}
    if not given:
        return settings.topology
    try:
        return replace(settings, **given).topology
    except InvalidSetting as wrong:
        raise click.UsageError(str(wrong)) from wrong
