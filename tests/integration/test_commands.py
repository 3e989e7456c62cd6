"""What all commands have in common: help without a broker, and one line if it is down."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
import pytest
from celery.platforms import EX_UNAVAILABLE

from celery_rabbitdelay.command.group import rabbitdelay
from tests.integration.worker import run_celery
from tests.json_schemas import checked

#: Nothing listens there.
AWAY = "amqp://guest:secret@127.0.0.1:1//"

#: Each command with the least that it takes to reach for the broker or for Redis; None if it needs
#: neither. ``send`` prints a report of its own, with the lines that were not confirmed.
LEAST: dict[str, str | None] = {
    "adopt eta": "some-queue",
    "adopt native": "",
    "adopt nservicebus": "",
    "cancel": "some-id",
    "declare": "",
    "delete": "--yes",
    "export": None,
    "forecast": "",
    "job": "show some-job",
    "migrate": "--from-prefix other --ignore-registry",
    "pending": "",
    "permissions": None,
    "postpone": "some-id --delay 5",
    "route": None,
    "send": None,
    "status": "",
    "transfer": "--from amqp://guest:secret@127.0.0.1:2//",
    "undeliverable export": "never-written.jsonl",
    "undeliverable list": "",
    "undeliverable purge": "--yes",
    "undeliverable redrive": "",
    "verify": "",
}


def commands(group: click.Group, before: str = "") -> Iterator[str]:
    """Yield the names of all commands, those of groups behind the group's."""
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}"


def configuration(**more: Any) -> dict[str, Any]:
    return {
        "prefix": "test-commands",
        "broker_url": AWAY,
        "rabbitdelay_registry_url": "redis://127.0.0.1:1/0",
        "rabbitdelay_confirm_timeout": 1,
        **more,
    }


def test_the_table_has_all_commands() -> None:
    assert list(commands(rabbitdelay)) == sorted(LEAST)


@pytest.mark.parametrize("command", sorted({each.split()[0] for each in LEAST}))
def test_the_help_needs_no_broker(command: str) -> None:
    told = run_celery(configuration(), f"rabbitdelay {command} --help")
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("Usage: ")
    assert not told.stderr


@pytest.mark.parametrize("command", [name for name, least in LEAST.items() if least is not None])
def test_without_a_broker_a_command_ends_with_one_line(command: str) -> None:
    told = run_celery(configuration(), f"rabbitdelay {command} {LEAST[command]} --json")
    assert told.returncode == EX_UNAVAILABLE, told.stderr
    assert len(told.stderr.strip().splitlines()) == 1, told.stderr
    assert "secret" not in told.stderr + told.stdout
    checked("error", told.stdout)
